"""What a caller says about the prefix store: salts, marked prefixes, cache breakpoints, and no store at all."""

from pathlib import Path

import pytest
from fakes import BOS_ID, ByteTokenizer, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.errors import InvalidRequestError
from jprefill.scorer import Scorer
from jprefill.tasks.classify import classify_job
from jprefill.tasks.decide import decide_job
from jprefill.tasks.loglikelihood import loglikelihood_job
from jprefill.tasks.questions import Choice, Predicate
from jprefill.tasks.score import score_job
from jprefill.tokenization.chat import ChatTemplate
from jprefill.tokenization.load import load_tokenizer
from jprefill.types import ClassHead, ScoreRequest

TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate.from_tokenizer(TOKENIZER)
STATE = "Order 1042 is five days late."
CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"


def decide(input, *questions: str, **options) -> ScoreRequest:
    return decide_job(TOKENIZER, TEMPLATE, input, [Predicate(q) for q in questions], **options).requests[0]


def score(query, items, **options) -> ScoreRequest:
    return score_job(TOKENIZER, query, items, label_ids=[1, 2], **options).requests[0]


def prompts_of(request: ScoreRequest) -> list[list[int]]:
    return [[*request.prefix.tolist(), *item.token_ids.tolist()] for item in request.items]


def marked_text(request: ScoreRequest) -> str:
    return TOKENIZER.decode(prompts_of(request)[0][: request.num_marked_tokens])


def message(*parts: tuple[str, bool]) -> dict:
    hint = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    content = [{"type": "input_text", "text": text, **(hint if is_marked else {})} for text, is_marked in parts]
    return {"role": "user", "content": content}


# ---- the prefix of a single item or question


def test_the_query_before_a_single_item_is_its_prefix_up_to_the_last_word():
    one, other = score("Is it hot food? ", ["soup"]), score("Is it hot food? ", ["hat"])
    assert TOKENIZER.decode(one.prefix.tolist()) == "<s>Is it hot"
    assert one.prefix.tolist() == other.prefix.tolist()
    assert prompts_of(one) == [[BOS_ID, *b"Is it hot food? soup"]]


def test_token_ids_of_a_query_are_the_prefix_as_they_are():
    assert score([1, 2, 3], [[4, 5]]).prefix.tolist() == [1, 2, 3]
    assert score([1, 2, 3], [[]]).prefix.tolist() == [1, 2]  # the last token is read, so it is the item's
    assert score([1, 2, 3], [[4]], item_first=True).prefix.tolist() == []


def test_an_item_that_comes_first_leaves_no_prefix_and_no_mark():
    request = score("is it hot food?", ["soup is "], item_first=True, mark_prefix=True)
    assert (len(request.prefix), request.num_marked_tokens) == (0, 0)


def test_the_state_before_a_single_question_is_its_prefix():
    assert TOKENIZER.decode(decide(STATE, "Is it urgent?").prefix.tolist()) == f"<s><|user|>{STATE}\n\n"


@settings(max_examples=40, deadline=None)
@given(st.text("ab \n.é", min_size=1, max_size=30), st.lists(st.text("ab \n1", min_size=1, max_size=8), min_size=1))
def test_the_split_changes_no_token_and_no_answer(query, items):
    tokenizer = ByteTokenizer(merges=["a b", "b\n", "b a"])
    job = score_job(tokenizer, query, items, label_ids=[1, 2], mark_prefix=True)
    assert prompts_of(job.requests[0]) == [tokenizer.encode(query + item, add_bos=True) for item in items]
    with FakeEngine(vocab_size=tokenizer.vocab_size) as engine:
        scorer = Scorer(engine, tokenizer)
        together = scorer.score(query, items, label_ids=[1, 2])
        alone = [scorer.score(query, [item], label_ids=[1, 2]).items[0] for item in items]
    assert list(together.items) == alone


# ---- marks


def test_nothing_is_marked_unless_asked():
    head = ClassHead(("a", "b"), is_exclusive=True)
    for request in (
        score("Is it hot food? ", ["soup"]),
        decide(STATE, "Is it urgent?"),
        loglikelihood_job(TOKENIZER, "The sky is", [" blue"]).requests[0],
        classify_job(TOKENIZER, head, ["good", "bad"]).requests[0],
    ):
        assert (request.num_marked_tokens, request.uses_store, request.salt) == (0, True, "")


@pytest.mark.parametrize("items", [["soup"], ["soup", "tyre"], ["soup", "soup"]])
def test_a_marked_query_is_marked_alike_whatever_the_items_are(items):
    assert marked_text(score("Is it hot food? ", items, mark_prefix=True)) == "<s>Is it hot"
    assert score([1, 2, 3], [[int(item[0] == "t")] for item in items], mark_prefix=True).num_marked_tokens == 3


@pytest.mark.parametrize("questions", [["Late?"], ["Late?", "Urgent?"], ["Late?", "Late?"]])
def test_a_marked_state_is_marked_alike_whatever_the_questions_are(questions):
    assert marked_text(decide(STATE, *questions, mark_prefix=True)) == f"<s><|user|>{STATE}\n\n"


def test_a_marked_context_is_marked_up_to_the_token_that_is_read():
    request = loglikelihood_job(TOKENIZER, "The sky is", [" blue", " red"], mark_prefix=True).requests[0]
    assert marked_text(request) == "<s>The sky i"


def test_a_template_that_trims_and_writes_around_the_message_is_respected():
    tokenizer = ByteTokenizer(chat_template="System: be brief\n[{{ messages[0]['content'] | trim }}]\nAnswer:")
    template = ChatTemplate.from_tokenizer(tokenizer)
    request = decide_job(tokenizer, template, f"\n {STATE} ", [Predicate("Late?")], mark_prefix=True).requests[0]
    marked = tokenizer.decode(prompts_of(request)[0][: request.num_marked_tokens])
    assert marked == f"System: be brief\n[{STATE} \n\n"


# ---- breakpoints


def test_a_breakpoint_marks_the_prompt_up_to_there():
    rules, order = "Follow the rules of the shop", "Order 7 is late"
    request = decide([message((rules, True), (order, False))], "Late?")
    assert marked_text(request) == "<s><|user|>Follow the rules of the"
    assert TOKENIZER.decode(request.prefix.tolist()) == f"<s><|user|>{rules}\n{order}\n\n"
    with_key = decide([message((rules, True), (order, False))], "Late?", mark_prefix=True)
    assert with_key.num_marked_tokens == request.num_marked_tokens


def test_the_last_breakpoint_counts_and_covers_the_ones_before():
    parts = (("Rules of the shop", True), ("Order 7 is late", True), ("Hello", False))
    assert marked_text(decide([message(*parts)], "Late?")) == "<s><|user|>Rules of the shop\nOrder 7 is"
    first, second = message(("Rules of the shop", True)), message(("Order 7 is late", True))
    assert marked_text(decide([first, second], "Late?")) == "<s><|user|>Rules of the shop\n\nOrder 7 is"


def test_breakpoints_change_no_prompt():
    plain, hinted = [message(("a b", False), ("c d", False))], [message(("a b", True), ("c d", True))]
    assert prompts_of(decide(plain, "Late?", "Bad?")) == prompts_of(decide(hinted, "Late?", "Bad?"))


@pytest.mark.parametrize("sent", [{}, {"mode": "implicit"}, {"mode": "explicit", "ttl": "1h"}, "explicit", 1, []])
def test_a_malformed_breakpoint_is_named(sent):
    part = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": sent}
    with pytest.raises(InvalidRequestError) as caught:
        decide([{"role": "user", "content": [part]}], "Late?")
    assert caught.value.param == "input[0].content[0].prompt_cache_breakpoint"
    assert caught.value.message.endswith('must be {"mode": "explicit"}')


def test_a_breakpoint_of_null_is_none():
    part = {"type": "input_text", "text": "x y", "prompt_cache_breakpoint": None}
    assert decide([{"role": "user", "content": [part]}], "Late?").num_marked_tokens == 0


def test_the_explicit_mode_uses_the_store_only_with_a_breakpoint():
    assert not decide(STATE, "Late?", cache_mode="explicit").uses_store
    assert not decide([message((STATE, False))], "Late?", cache_mode="explicit").uses_store
    assert decide([message((STATE, True))], "Late?", cache_mode="explicit").uses_store
    with pytest.raises(InvalidRequestError, match="allowed are 'implicit', 'explicit'"):
        decide(STATE, "Late?", cache_mode="never")


# ---- salts


def test_the_salt_reaches_the_engine_from_every_question():
    head = ClassHead(("a", "b"), is_exclusive=True)
    with FakeEngine() as engine, FakeEngine(class_head=head) as classifier:
        scorer = Scorer(engine, TOKENIZER, TEMPLATE)
        scorer.score("Q ", ["a"], label_ids=[1], salt="s1", mark_prefix=True)
        scorer.decide(STATE, [Choice("Who?", ["a", "b"])], salt="s2", mark_prefix=True, cache_mode="implicit")
        scorer.loglikelihood("The sky", [" is"], salt="s3", mark_prefix=True)
        Scorer(classifier, TOKENIZER).classify(["a"], salt="s4")
    assert [request.salt for request in engine.requests + classifier.requests] == ["s1", "s2", "s3", "s4"]


@pytest.mark.parametrize("salt", [5, None, b"x", "\ud800"])
def test_a_salt_that_is_no_text_is_refused(salt):
    with pytest.raises(InvalidRequestError, match="salt") as caught:
        score("Q", ["a"], salt=salt)
    assert caught.value.param == "salt"
    with pytest.raises(InvalidRequestError):
        decide(STATE, "Late?", salt=salt)


# ---- a real vocabulary


STATES = [
    "The customer ordered a kettle in March; it leaks. She wants 2 things: a refund, and an apology.",
    "Bestellung 1042 ist fünf Tage zu spät, sagt Frau Groß",
    "注文番号1042は五日遅れています。お客様は怒っています",
    '{"user": 17, "items": ["a", "b"], "note": "don\'t"}  \n',
    '{"user":17,"items":["a","b"],"note":"none"}',
    "x",
]
QUESTIONS = ["Is it urgent?", "7 days?", "?", "\nLate", " late", "怒っていますか", "'s it"]


@pytest.fixture(scope="module")
def real():
    if not (CHECKPOINT / "tokenizer.json").exists():
        pytest.skip("needs the demo model")
    tokenizer = load_tokenizer(CHECKPOINT)
    return tokenizer, ChatTemplate.from_tokenizer(tokenizer)


@pytest.mark.model
@pytest.mark.parametrize("state", STATES)
def test_marked_tokens_of_a_state_start_the_prompt_of_every_other_question(real, state):
    jobs = [decide_job(*real, state, [Predicate(q)], mark_prefix=True).requests[0] for q in QUESTIONS]
    first = prompts_of(jobs[0])[0]
    count = jobs[0].num_marked_tokens
    assert {job.num_marked_tokens for job in jobs} == {count}
    assert all(prompts_of(job)[0][:count] == first[:count] for job in jobs)
    assert state.strip() in real[0].decode(first[:count])  # the whole state, not a part


@pytest.mark.model
@pytest.mark.parametrize("query", [*STATES, "Is this food? Answer yes or no: ", "Price: 12", "Review:\n\n"])
def test_marked_tokens_of_a_query_start_the_prompt_of_every_other_item(real, query):
    jobs = [score_job(real[0], query, [i], label_ids=[1, 2], mark_prefix=True).requests[0] for i in QUESTIONS]
    first = prompts_of(jobs[0])[0]
    count = jobs[0].num_marked_tokens
    assert all(job.num_marked_tokens == count == len(job.prefix) for job in jobs)
    assert all(prompts_of(job)[0][:count] == first[:count] for job in jobs)
    assert count >= 0.6 * len(real[0].encode(query, add_bos=False)) - 4
