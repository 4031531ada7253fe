"""`jprefill bench offline`: windows of prose, the peer's protocol, and the arithmetic, with a fake engine."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import ByteTokenizer, FakeEngine

from jprefill.bench import offline
from jprefill.bench.peer import Peer, hf_command
from jprefill.bench.prose import prose_windows
from jprefill.errors import ConfigError, EngineError

PEER = """
import json, sys
print(json.dumps({"versions": {"torch": "9"}, "threads": 1}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    logprobs = [-1.0] * len(question["label_ids"])
    print(json.dumps({"seconds": len(question["token_ids"]) / 50, "label_logprobs": logprobs}), flush=True)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# ---- prose -------------------------------------------------------------------------------------------------


def test_windows_are_english_of_the_asked_length_and_share_no_prefix():
    windows = prose_windows(ByteTokenizer(), (64, 1000), 6)
    assert {length: {len(window) for window in group} for length, group in windows.items()} == {
        64: {64},
        1000: {1000},
    }
    assert len({tuple(window[:16]) for window in windows[1000]}) == 6
    assert " the " in ByteTokenizer().decode(windows[1000][0])


def test_a_length_beyond_the_prose_is_refused():
    with pytest.raises(ConfigError, match=r"--lengths 9999999: the prose at hand has \d+ tokens"):
        prose_windows(ByteTokenizer(), (64, 9_999_999), 2)


# ---- peer --------------------------------------------------------------------------------------------------


def test_a_peer_describes_itself_and_answers():
    with Peer(python(PEER)) as peer:
        assert peer.description["versions"] == {"torch": "9"}
        answer = peer.ask([1] * 100, [5, 6])
        assert answer.seconds == 2.0
        assert answer.label_logprobs == (-1.0, -1.0)
        assert peer.ask([1], [5]).label_logprobs == (-1.0,)


def test_a_peer_that_dies_leaves_its_last_words():
    with pytest.raises(EngineError, match=r"the peer ended \(exit 1\): .*No module named 'no_such_module'"):
        Peer(python("import no_such_module"))


def test_a_peer_that_dies_at_a_question_is_an_error():
    code = PEER.replace("question = ", "sys.exit('out of memory') #")
    with Peer(python(code)) as peer, pytest.raises(EngineError, match=r"out of memory"):
        peer.ask([1], [2])


@pytest.mark.parametrize("said", ["hello", "[1]", '{"seconds": "soon"}'])
def test_a_peer_that_talks_nonsense_is_an_error(said: str):
    code = f"import sys; print('{{}}', flush=True); sys.stdin.readline(); print({said!r}, flush=True)"
    with Peer(python(code)) as peer, pytest.raises(EngineError, match=r"the peer (said|answered)"):
        peer.ask([1], [2])


def test_what_is_missing_for_the_peer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--peer-python .*nowhere: no such file; scripts/peer_env makes"):
        hf_command(tmp_path / "nowhere", tmp_path, "bfloat16", 2)
    with pytest.raises(ConfigError, match=r"--peer-model .*nothing\.gguf: no such file"):
        hf_command(Path(sys.executable), tmp_path / "nothing.gguf", "bfloat16", 2)


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs the command with a fake engine, and a peer that needs a fiftieth of a second a token."""

    @contextmanager
    def running_engine(*_: Any) -> Iterator[FakeEngine]:
        with FakeEngine(delay_s=0.01) as engine:
            yield engine

    monkeypatch.setattr(offline, "load_checkpoint", lambda *_: SimpleNamespace())
    monkeypatch.setattr(offline, "load_tokenizer", lambda _: ByteTokenizer())
    monkeypatch.setattr(offline, "running_engine", running_engine)
    monkeypatch.setattr(offline, "hf_command", lambda *_: python(PEER))
    monkeypatch.setattr(offline, "_PAUSE_S", 0.0)

    def run_command(*argv: Any) -> int:
        parser = argparse.ArgumentParser()
        offline.add_arguments(parser)
        return offline.run(parser.parse_args([str(arg) for arg in argv]))

    return run_command


def test_both_sides_are_measured_and_compared(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "new" / "bench.json"
    assert run("--peer", "hf", "--lengths", "20,100", "--repeat", 3, "--json", out, "--min-ratio", 1.2) == 0
    records = json.loads(out.read_text())
    assert [record["tokens"] for record in records] == [20, 100]
    for record in records:
        assert record["peer_tokens_per_s"] == pytest.approx(50)
        assert record["ratio"] == pytest.approx(record["jprefill_tokens_per_s"] / 50)
        assert len(record["jprefill_s"]) == len(record["peer_s"]) == 3
        assert record["max_label_delta"] > 0
        assert record["peer"]["versions"] == {"torch": "9"}
    output = capsys.readouterr().out
    assert "max|Δ label|" in output
    assert "100" in output


def test_without_a_peer_only_ours_is_measured(run: Callable[..., int], tmp_path: Path):
    assert run("--lengths", "20", "--repeat", 2, "--json", tmp_path / "bench.json") == 0
    (record,) = json.loads((tmp_path / "bench.json").read_text())
    assert record["peer_tokens_per_s"] is None
    assert record["jprefill_tokens_per_s"] < 20 / 0.01


def test_a_ratio_that_is_missed_fails(run: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    assert run("--peer", "hf", "--lengths", "20", "--repeat", 1, "--min-ratio", 1e6) == 1
    assert "20 tokens: ratio" in capsys.readouterr().out


def test_a_ratio_without_a_peer_is_refused(run: Callable[..., int]):
    with pytest.raises(ConfigError, match="--min-ratio needs --peer"):
        run("--min-ratio", 1.2)


def test_a_checkpoint_of_ours_needs_a_model_for_the_peer(run: Callable[..., int], tmp_path: Path):
    with pytest.raises(ConfigError, match="--peer-model"):
        run("--peer", "hf", "--model", tmp_path)


@pytest.mark.parametrize("lengths", ["", "0", "512,", "1.5", "-3"])
def test_a_bad_length_is_refused(run: Callable[..., int], lengths: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run(f"--lengths={lengths}")
    assert "must be a whole number, at least 1" in capsys.readouterr().err
