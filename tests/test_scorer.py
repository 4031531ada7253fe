"""The Python face: it waits, passes limits on, cancels what nobody waits for, and loads nothing early."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from fakes import BOS_ID, ByteTokenizer, FakeEngine

import jprefill
from jprefill.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    UnsupportedFeatureError,
)
from jprefill.scorer import MAX_IN_FLIGHT, Scorer
from jprefill.tasks.questions import Choice, Predicate
from jprefill.tokenization.chat import ChatTemplate


def make(engine: FakeEngine, tokenizer: ByteTokenizer | None = None) -> Scorer:
    tokenizer = tokenizer or ByteTokenizer()
    return Scorer(engine, tokenizer, ChatTemplate.from_tokenizer(tokenizer))


@pytest.fixture
def scorer(engine) -> Scorer:
    return make(engine)


def test_the_three_questions_are_answered(scorer):
    scores = scorer.score("Review: ", ["great", "awful"], labels=["+", "-"])
    assert [sum(item.probabilities) for item in scores.items] == pytest.approx([1.0, 1.0])
    assert scores.timings.total_s >= scores.timings.queue_s >= 0
    decisions = scorer.decide("The parcel is late.", [Choice("Who?", ["billing", "delivery"], name="team")])
    assert decisions["team"].choice in ("billing", "delivery")
    result = scorer.loglikelihood("The sky is", [" blue", " green"])
    assert [item.num_tokens for item in result.items] == [5, 6]


def test_items_alone_and_together_agree(scorer):
    together = scorer.score("Q: ", ["a", "b", "c"], labels=["Y", "N"])
    alone = [scorer.score("Q: ", [text], labels=["Y", "N"]).items[0] for text in "abc"]
    assert list(together.items) == alone


def test_many_threads_may_ask_at_once(scorer):
    expected = {i: scorer.score([i], [[1]], label_ids=[2, 3]).items for i in range(8)}
    seen = {}
    threads = [
        threading.Thread(target=lambda i=i: seen.update({i: scorer.score([i], [[1]], label_ids=[2, 3]).items}))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == expected


def test_many_inputs_come_back_in_order_without_reading_ahead_for_ever(scorer, engine):
    read = []

    def inputs():
        for i in range(3 * MAX_IN_FLIGHT):
            read.append(i)
            yield f"text {i}"

    answers = scorer.decide_many(inputs(), [Predicate("It is fine.")])
    first = next(answers)
    assert len(read) == MAX_IN_FLIGHT
    rest = list(answers)
    assert len(rest) == 3 * MAX_IN_FLIGHT - 1
    assert first.answers == scorer.decide("text 0", [Predicate("It is fine.")]).answers
    assert rest[-1].answers == scorer.decide(f"text {read[-1]}", [Predicate("It is fine.")]).answers


def test_the_engine_limits_name_the_callers_field():
    with FakeEngine(max_model_len=4, vocab_size=300) as engine:
        scorer = make(engine)
        with pytest.raises(ContextLengthError) as caught:
            scorer.score("Q: ", ["a", "bcdef"], labels=["Y"])
        assert caught.value.param == "items[0]"
        with pytest.raises(ContextLengthError):
            scorer.decide("x", [Predicate("y")])
        # ids up to the LM head's width are allowed, also where the tokenizer has fewer
        assert len(scorer.score([1], [[2]], label_ids=[299]).items) == 1
        with pytest.raises(InvalidRequestError):
            scorer.score([1], [[2]], label_ids=[300])
        assert len(engine.requests) == 1


@pytest.mark.parametrize("error", [QueueFullError("full", retry_after_s=1.0), NotReadyError("starting")])
def test_a_refusal_reaches_the_caller(error):
    with FakeEngine(submit_error=error) as engine, pytest.raises(type(error)):
        make(engine).score([1], [[2]], label_ids=[3])


def test_an_engine_failure_reaches_the_caller():
    with (
        FakeEngine(raise_error=EngineError("device lost")) as engine,
        pytest.raises(EngineError, match="lost"),
    ):
        make(engine).decide("x", [Predicate("y")])


def test_what_nobody_waits_for_is_cancelled():
    with FakeEngine(delay_s=0.02) as engine:
        scorer = make(engine)
        answers = scorer.decide_many(["a", "b", 3], [Predicate("y")])
        with pytest.raises(InvalidRequestError):
            next(answers)
        engine.close(1.0)
        assert engine.num_finished <= 1  # the first may have started; the second was cancelled


def test_bad_calls_never_reach_the_engine(scorer, engine):
    for ask in (
        lambda: scorer.score("", [""], labels=["Y"]),
        lambda: scorer.score("Q", [], labels=["Y"]),
        lambda: scorer.score("Q", ["a"], labels=["Yes"]),
        lambda: scorer.score("Q", ["a"], label_ids=[True]),
        lambda: scorer.decide("x", []),
        lambda: scorer.decide("", [Predicate("y")]),
        lambda: scorer.loglikelihood("x", [""]),
        lambda: scorer.loglikelihood("\ud800", ["y"]),
    ):
        with pytest.raises(InvalidRequestError):
            ask()
    assert engine.requests == []


def test_without_a_chat_template_only_decide_is_refused(engine):
    scorer = make(engine, ByteTokenizer(chat_template=None))
    scorer.score("Q", ["a"], labels=["Y"])
    with pytest.raises(UnsupportedFeatureError, match="no chat template"):
        scorer.decide("x", [Predicate("y")])


def test_closing_is_final_and_may_be_repeated(engine):
    with make(engine) as scorer:
        assert repr(scorer) == "Scorer(model='fake', max_model_len=100000, alive)"
        assert scorer.stats().num_finished == 0
    scorer.close()
    assert repr(scorer).endswith("closed)")
    with pytest.raises(NotReadyError):
        scorer.score([1], [[2]], label_ids=[3])


def test_an_unknown_setting_is_refused_before_anything_loads():
    with pytest.raises(ConfigError, match="unknown setting 'max_len': known are dtype, quantization, layout, "):
        Scorer.load("nowhere", max_len=3)


@pytest.fixture
def loaded_with(monkeypatch, engine):
    """Loads a scorer around the fake engine, with these settings."""

    def load(tokenizer: ByteTokenizer, **settings) -> Scorer:
        checkpoint = SimpleNamespace(tokenizer_path="here")
        monkeypatch.setattr("jprefill.model.checkpoints.load", lambda *_, **__: checkpoint)
        monkeypatch.setattr("jprefill.tokenization.load.load_tokenizer", lambda _: tokenizer)
        monkeypatch.setattr("jprefill.engine.Engine.from_checkpoint", lambda *_, **__: engine)
        return Scorer.load("here", **settings)

    return load


@pytest.mark.parametrize(("adds_bos", "start"), [(True, [BOS_ID]), (False, [])])
def test_the_shared_prompt_reaches_the_engine_as_prompts_start(loaded_with, engine, adds_bos, start):
    scorer = loaded_with(ByteTokenizer(adds_bos=adds_bos), shared_prompt="Be brief. ")
    assert engine.shared_tokens.tolist() == [*start, *b"Be brief. "]
    scorer.score("Be brief. Is it food? ", ["a", "b"], label_ids=[1])
    prompt = [*engine.requests[0].prefix.tolist(), *engine.requests[0].items[0].token_ids.tolist()]
    assert prompt[: len(engine.shared_tokens)] == engine.shared_tokens.tolist()


@pytest.mark.parametrize("text", [None, ""])
def test_without_a_shared_prompt_the_engine_is_told_nothing(loaded_with, engine, text):
    loaded_with(ByteTokenizer(), shared_prompt=text)
    assert engine.shared_tokens is None


def test_a_shared_prompt_that_cannot_be_tokenised_is_a_config_error(loaded_with):
    with pytest.raises(ConfigError, match=r"shared_prompt: .*surrogate"):
        loaded_with(ByteTokenizer(), shared_prompt="\ud800")


# ---- the package


def test_importing_jprefill_and_its_questions_loads_no_jax():
    code = (
        "import sys, jprefill; from jprefill import Predicate, Choice, EngineConfig, LabelError, Scorer;"
        "import jprefill.cli; print('jax' in sys.modules, 'pandas' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_every_public_name_is_there():
    for name in jprefill.__all__:
        assert getattr(jprefill, name) is not None
    assert set(dir(jprefill)) == set(jprefill.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = jprefill.Nothing
