"""`jprefill compare` with an engine that answers from a hash: arithmetic, tables, exit codes."""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import ByteTokenizer, FakeEngine, next_token_logprobs

from jprefill.bench import compare
from jprefill.bench.parity import PromptScores, compare_prompt, reference_scores, score_prompts, score_request
from jprefill.bench.reference_format import Continuation, ReferencePrompt, load_reference
from jprefill.bench.variants import parse_variants
from jprefill.config import EngineConfig
from jprefill.errors import ConfigError

VOCAB_SIZE = 264
LABEL_IDS = (89, 78)
CONTINUATION = (7, 8, 9)


def reference_prompt(text: str, *, has_continuation: bool = False, shift: float = 0.0) -> dict[str, Any]:
    """What the fake engine thinks about `text`, moved by `shift` nats."""
    token_ids = list(text.encode())
    row = next_token_logprobs(token_ids, VOCAB_SIZE)
    ranked = np.sort(row)[::-1]
    record = {
        "name": text,
        "text": text,
        "token_ids": token_ids,
        "label_ids": LABEL_IDS,
        "label_logprobs": [row[i] + shift for i in LABEL_IDS],
        "top_id": int(row.argmax()),
        "top_logprob": ranked[0],
        "second_logprob": ranked[1],
    }
    if has_continuation:
        seen = [[*token_ids, *CONTINUATION[:i]] for i in range(len(CONTINUATION))]
        logprobs = [next_token_logprobs(s, VOCAB_SIZE)[i] for s, i in zip(seen, CONTINUATION, strict=True)]
        record["continuation"] = {"token_ids": CONTINUATION, "logprobs": logprobs}
    return record


def write_reference(folder: Path, prompts: list[dict[str, Any]]) -> Path:
    head = {
        "format": 1,
        "name": "fake",
        "model": "fake",
        "dtype": "float32",
        "max_model_len": 128,
        "versions": {},
    }
    path = folder / "fake.json"
    path.write_text(json.dumps(head | {"prompts": prompts}))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with the fake engine in place of the real one; keeps the configs it was given."""
    configs: list[EngineConfig] = []

    @contextmanager
    def running_engine(checkpoint: Any, config: EngineConfig) -> Iterator[FakeEngine]:
        configs.append(config)
        with FakeEngine(vocab_size=VOCAB_SIZE) as engine:
            yield engine

    monkeypatch.setattr(compare, "load_checkpoint", lambda path, dtype, _: SimpleNamespace(path=path, dtype=dtype))
    monkeypatch.setattr(compare, "load_tokenizer", lambda checkpoint: ByteTokenizer())
    monkeypatch.setattr(compare, "running_engine", running_engine)

    def run_command(*argv: Any) -> int:
        parser = argparse.ArgumentParser()
        compare.add_arguments(parser)
        return compare.run(parser.parse_args([str(arg) for arg in argv]))

    run_command.configs = configs  # type: ignore[attr-defined]
    return run_command


def the_prompt(**changes: Any) -> ReferencePrompt:
    prompt = ReferencePrompt("p", None, (1, 2, 3), (10, 11), (-0.5, -1.5), 10, -0.5, -1.5)
    return replace(prompt, **changes)


# ---- arithmetic --------------------------------------------------------------------------------------------


def test_equal_scores_differ_by_nothing():
    prompt = the_prompt()
    difference = compare_prompt(prompt, reference_scores(prompt), reference_scores(prompt), margin=2e-4)
    assert difference.label_delta == 0.0
    assert difference.is_same_top
    assert not difference.is_flip


def test_the_largest_difference_counts_for_labels_top_and_continuation():
    prompt = the_prompt(continuation=Continuation((4, 5), (-1.0, -2.0)))
    ours = PromptScores((-0.5, -1.75), 10, -0.5, (-1.0, -2.5))
    difference = compare_prompt(prompt, reference_scores(prompt), ours, margin=2e-4)
    assert difference.label_delta == 0.25
    assert difference.continuation_delta == 0.5
    top_moved = compare_prompt(the_prompt(), reference_scores(the_prompt()), replace(ours, top_logprob=-1.5,
                               continuation_logprobs=()), margin=2e-4)  # fmt: skip
    assert top_moved.label_delta == 1.0


def test_a_nan_is_infinitely_far():
    prompt = the_prompt()
    ours = PromptScores((math.nan, -1.5), 10, -0.5)
    assert compare_prompt(prompt, reference_scores(prompt), ours, margin=2e-4).label_delta == math.inf


@pytest.mark.parametrize(("second", "is_flip"), [(-0.6, True), (-0.5001, False)])
def test_another_top_label_is_a_flip_only_beyond_the_margin(second: float, is_flip: bool):
    prompt = the_prompt(label_logprobs=(-0.5, second))
    ours = PromptScores((second, -0.5), 10, -0.5)
    difference = compare_prompt(prompt, reference_scores(prompt), ours, margin=2e-4)
    assert difference.is_flip is is_flip
    assert not difference.is_same_top


def test_another_top_token_is_a_flip_even_when_the_labels_agree():
    prompt = the_prompt()
    ours = replace(reference_scores(prompt), top_id=99)
    assert compare_prompt(prompt, reference_scores(prompt), ours, margin=2e-4).is_flip


# ---- requests ----------------------------------------------------------------------------------------------


def test_a_prompt_without_continuation_is_one_item_read_at_its_last_token():
    request = score_request(the_prompt())
    (item,) = request.items
    assert len(request.prefix) == 0
    assert item.token_ids.tolist() == [1, 2, 3]
    assert item.rows.tolist() == [2]
    assert item.targets.tolist() == [[10, 11]]


def test_a_continuation_is_a_second_item_over_a_shared_prefix():
    request = score_request(the_prompt(continuation=Continuation((4, 5, 6), (-1.0, -2.0, -3.0))))
    labels, continuation = request.items
    assert request.prefix.tolist() == [1, 2]
    assert labels.token_ids.tolist() == [3]
    assert continuation.token_ids.tolist() == [3, 4, 5]
    assert continuation.rows.tolist() == [0, 1, 2]
    assert continuation.targets.tolist() == [[4], [5], [6]]


def test_a_prompt_of_one_token_has_an_empty_prefix():
    request = score_request(the_prompt(token_ids=(1,), continuation=Continuation((4,), (-1.0,))))
    assert len(request.prefix) == 0
    assert [item.token_ids.tolist() for item in request.items] == [[1], [1]]


def test_classes_are_asked_of_the_class_head():
    assert score_request(the_prompt(), "classes").head == "classes"


@pytest.mark.parametrize("is_packed", [False, True])
def test_scores_come_back_in_the_order_of_the_prompts(tmp_path: Path, is_packed: bool):
    path = write_reference(tmp_path, [reference_prompt(t, has_continuation=t == "b") for t in ("a", "b", "c")])
    prompts = load_reference(path).prompts
    with FakeEngine(vocab_size=VOCAB_SIZE) as engine:
        scores = score_prompts(engine, prompts, is_packed=is_packed, title="")
    for prompt, score in zip(prompts, scores, strict=True):
        assert compare_prompt(prompt, reference_scores(prompt), score, margin=0.0).severity < (True, 1e-6)


# ---- the command -------------------------------------------------------------------------------------------


def test_agreement_passes_and_says_so(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_reference(tmp_path, [reference_prompt("good"), reference_prompt("bad", has_continuation=True)])
    assert run(path) == 0
    output = capsys.readouterr().out
    assert "PASSED: tolerance 0.0001" in output
    assert "2 prompts, 9 tokens" in output


@pytest.mark.parametrize(("shift", "status"), [(-0.9e-4, 0), (-1.2e-4, 1)])
def test_the_tolerance_decides(run: Callable[..., int], tmp_path: Path, shift: float, status: int):
    assert run(write_reference(tmp_path, [reference_prompt("good", shift=shift)])) == status


def test_a_flip_fails_whatever_the_tolerance(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompt = reference_prompt("good")
    prompt["label_logprobs"] = prompt["label_logprobs"][::-1]
    assert run(write_reference(tmp_path, [prompt]), "--tolerance", 100) == 1
    assert "FLIP" in capsys.readouterr().out


def test_other_token_ids_fail_and_are_shown(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompt = reference_prompt("good") | {"text": "gold"}
    assert run(write_reference(tmp_path, [prompt])) == 1
    assert "tokenizer differs: good: token 2 of 4: ours ['l', 'd'], reference ['o', 'd']" in capsys.readouterr().out


def test_long_tables_are_cut_to_the_ten_worst(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompts = [reference_prompt(f"prompt-{i:02d}", shift=-i * 1e-6) for i in range(25)]
    path = write_reference(tmp_path, prompts)
    run(path)
    short = capsys.readouterr().out
    run(path, "--verbose")
    assert "prompt-24" in short
    assert "prompt-03" not in short
    assert "15 more, all closer" in short
    assert "prompt-03" in capsys.readouterr().out


def test_layouts_are_compared_pair_by_pair(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_reference(tmp_path, [reference_prompt("good", shift=-1.0)])  # the reference does not matter here
    assert run(path, "--between", "stream,hybrid,full:64") == 0
    output = capsys.readouterr().out
    assert all(title in output for title in ("hybrid against stream", "full:64 against hybrid"))
    assert "PASSED: tolerance 5e-05" in output
    assert [config.layout for config in run.configs] == ["stream", "hybrid", "full"]  # type: ignore[attr-defined]


def test_pack_compares_together_with_alone(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_reference(tmp_path, [reference_prompt("one"), reference_prompt("two")])
    assert run(path, "--pack") == 0
    assert "stream+pack against stream" in capsys.readouterr().out


def test_the_json_file_holds_every_prompt(run: Callable[..., int], tmp_path: Path):
    path = write_reference(tmp_path, [reference_prompt("one"), reference_prompt("two")])
    run(path, "--json", tmp_path / "new" / "out.json")
    record = json.loads((tmp_path / "new" / "out.json").read_text())
    assert record["is_passed"] is True
    assert [row["name"] for row in record["sections"][0]["prompts"]] == ["one", "two"]
    assert record["sections"][0]["summary"]["num_flips"] == 0


def test_limits_choose_prompts(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_reference(tmp_path, [reference_prompt(text) for text in ("long one", "short", "tiny", "mini")])
    run(path, "--max-tokens", 5, "--limit", 2, "--verbose")
    output = capsys.readouterr().out
    assert "long one" not in output
    assert "2 prompts, 9 tokens" in output
    with pytest.raises(ConfigError, match=r"--max-tokens 3: the shortest prompt has 4"):
        run(path, "--max-tokens", 3)


@pytest.mark.parametrize("text", ["stream", "stream,stream", "stream,dense", "stream:x,full", "", "stream,full+packed"])
def test_a_bad_variant_is_named_with_what_is_allowed(text: str):
    with pytest.raises(ConfigError, match=r"--between"):
        parse_variants(text, EngineConfig())


def test_variants_take_what_they_do_not_name_from_the_base():
    base = EngineConfig(dtype="float32", chunk_size=128)
    plain, other = parse_variants("hybrid, full:64+pack", base)
    assert (plain.config.chunk_size, plain.is_packed) == (128, False)
    assert (other.config.chunk_size, other.config.dtype, other.is_packed) == (64, "float32", True)
    assert str(other) == "full:64+pack"
