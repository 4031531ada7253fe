"""The command line, run in this process with a fake engine behind it."""

import io
import json
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest
from fakes import ByteTokenizer, FakeEngine

from jprefill.cli import COMMANDS, main
from jprefill.config import EngineConfig, ServerConfig
from jprefill.scorer import Scorer
from jprefill.tokenization.chat import ChatTemplate


@dataclass
class Manifest:
    """What `convert` returns, as far as the command reads it."""

    name: str
    dtype: str
    source_kind: str
    quantization: str | None = None


@pytest.fixture(autouse=True)
def loaded(monkeypatch) -> list[tuple[str, EngineConfig]]:
    """What `Scorer.from_config` was asked for; it answers with a fake engine."""
    calls = []

    def from_config(path, config):
        calls.append((path, config))
        tokenizer = ByteTokenizer()
        return Scorer(FakeEngine(), tokenizer, ChatTemplate.from_tokenizer(tokenizer))

    monkeypatch.setattr(Scorer, "from_config", from_config)
    return calls


def fake_module(monkeypatch, name: str, **functions) -> None:
    """Puts a module of another part in place, so that only this part is tested."""
    module = types.ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def run_json(capsys, *argv) -> dict:
    assert main([*argv, "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    return json.loads(output)


def run_error(capsys, *argv) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jprefill: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


# ---- score


def test_score_prints_a_table(capsys):
    argv = [
        "score",
        "--model",
        "m",
        "--query",
        "Q: ",
        "--item",
        "a",
        "--item",
        "b\nc",
        "--label",
        "Y",
        "--label",
        "N",
    ]
    assert main(argv) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["item", "'Y'", "'N'", "label", "mass"]
    assert first.startswith("a ")
    assert second.startswith("b c ")
    assert sum(map(float, first.split()[1:3])) == pytest.approx(1.0, abs=2e-4)


def test_score_prints_one_json_object(capsys, loaded):
    record = run_json(
        capsys,
        "score",
        "--model",
        "m",
        "--query",
        "Q",
        "--label",
        "Y",
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
    )
    assert record["model"] == "m"
    assert record["items"][0]["probabilities"] == [1.0]
    assert record["usage"]["num_prompt_tokens"] == 2
    assert set(record["timings"]) == {"queue_s", "device_s", "total_s"}
    assert loaded == [("m", EngineConfig(dtype="float32", max_model_len=64))]


def test_score_reads_files_and_stdin(capsys, tmp_path, monkeypatch):
    (tmp_path / "items.txt").write_text("a\nb\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Q: \n"))
    argv = ["--model", "m", "--label", "Y", "--label", "N"]
    from_files = run_json(capsys, "score", *argv, "--query-file", "-", "--items-file", str(tmp_path / "items.txt"))
    given = run_json(capsys, "score", *argv, "--query", "Q: ", "--item", "a", "--item", "b")
    assert from_files["items"] == given["items"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--query", "", "--label", "Y"], "query and items[0] are both empty"),
        (["--query", "Q", "--label", ""], "labels[0] must not be empty"),
        (["--query", "Q", "--label", "Yes"], "Yes"),
        (["--query", "Q", "--label", "Y", "--temperature", "0"], "temperature=0.0: must be a finite number"),
        (["--query", "Q\udce9", "--label", "Y"], "query holds a lone surrogate"),  # argv that is no UTF-8
        (
            ["--query-file", "/nowhere/x", "--label", "Y"],
            "--query-file /nowhere/x: No such file or directory",
        ),
        (["--query", "Q", "--label", "Y", "--chunk-size", "17"], "chunk_size=17: must be a power of two"),
        (
            ["--query", "Q", "--label", "Y", "--dtype", "int4"],
            "--dtype='int4': allowed are bfloat16, float32",
        ),
    ],
)
def test_score_refuses_bad_input_in_one_line(capsys, argv, text):
    assert text in run_error(capsys, "score", "--model", "m", *argv)


def test_a_file_that_is_no_utf8_is_refused(capsys, tmp_path):
    (tmp_path / "q").write_bytes(b"a\xff")
    error = run_error(capsys, "score", "--model", "m", "--label", "Y", "--query-file", str(tmp_path / "q"))
    assert "not UTF-8 at byte 1" in error


def test_a_bad_variable_is_an_error_too(capsys, monkeypatch):
    monkeypatch.setenv("JPREFILL_MAX_MODEL_LEN", "many")
    error = run_error(capsys, "score", "--model", "m", "--query", "Q", "--label", "Y")
    assert "JPREFILL_MAX_MODEL_LEN='many': must be a whole number" in error


# ---- decide


def test_decide_answers_predicates(capsys):
    record = run_json(capsys, "decide", "--model", "m", "--input", "x", "--predicate", "a", "--predicate", "b")
    assert [answer["type"] for answer in record["answers"]] == ["predicate", "predicate"]
    assert record["prompt_format_version"] == 1


def test_decide_answers_a_choice_and_a_rating(capsys):
    base = ["decide", "--model", "m", "--input", "x"]
    choice = run_json(capsys, *base, "--choice", "Who?", "--option", "billing", "--option", "delivery")
    assert choice["answers"][0]["choice"] in ("billing", "delivery")
    rating = run_json(capsys, *base, "--rating", "How?", "--level", "low", "--level", "high")
    assert 0 <= rating["answers"][0]["score"] <= 1


@pytest.mark.parametrize("wrap", [lambda questions: questions, lambda questions: {"questions": questions}])
def test_decide_reads_questions_from_a_file(capsys, tmp_path, wrap):
    questions = [
        {"type": "predicate", "name": "urgent", "instructions": "It is urgent."},
        {"type": "choice", "instructions": "Who?", "choices": [{"value": "a"}, {"value": True}]},
        {"type": "score", "name": "tone", "instructions": "How?", "levels": [{"label": "x"}, {"label": "y"}]},
    ]
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(wrap(questions)))
    assert main(["decide", "--model", "m", "--input", "x", "--questions-file", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["question", "answer", "probability", "label", "mass"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["urgent", "true"],
        ["Who?", "a"],
        ["Who?", "True"],
        ["tone", "0"],
        ["tone", "1"],
        ["tone", "expected"],
    ]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--choice", "Who?"], "--option goes with --choice"),
        (["--predicate", "x", "--level", "a"], "--level goes with --rating"),
        (["--choice", "Who?", "--option", "a"], "questions[0].choices has 1 entries: allowed are 2 to 255"),
        (["--predicate", ""], "questions[0].instructions must not be empty"),
        (["--questions-file", "/nowhere/q"], "--questions-file /nowhere/q: No such file"),
    ],
)
def test_decide_refuses_bad_input_in_one_line(capsys, argv, text):
    assert text in run_error(capsys, "decide", "--model", "m", "--input", "x", *argv)


@pytest.mark.parametrize(("content", "text"), [("{", "not JSON"), ("3", "a list"), ('{"a": 1}', "a list")])
def test_a_questions_file_that_holds_none_is_refused(capsys, tmp_path, content, text):
    path = tmp_path / "q.json"
    path.write_text(content)
    error = run_error(capsys, "decide", "--model", "m", "--input", "x", "--questions-file", str(path))
    assert text in error


# ---- the other commands


def test_serve_gets_both_configs(monkeypatch):
    seen = []
    fake_module(monkeypatch, "jprefill.server.run", serve=lambda *args: seen.append(args) or 0)
    monkeypatch.setenv("JPREFILL_API_KEY", "secret")
    assert main(["serve", "m", "--port", "0", "--max-model-len", "128"]) == 0
    assert seen == [("m", EngineConfig(max_model_len=128), ServerConfig(port=0, api_keys=("secret",)))]


def test_convert_passes_its_flags_on(monkeypatch, capsys):
    seen = []

    def convert(*args, **kwargs):
        seen.append((args, kwargs))
        return Manifest("tiny", "float32", "gguf", kwargs.get("quantization"))

    import jprefill.model

    fake_module(monkeypatch, "jprefill.model.checkpoints", convert=convert)
    # `from package import module` looks at the package first
    module = sys.modules["jprefill.model.checkpoints"]
    monkeypatch.setattr(jprefill.model, "checkpoints", module, raising=False)
    assert main(["convert", "src", "dst", "--dtype", "float32", "--overwrite"]) == 0
    assert capsys.readouterr().out == "wrote dst: tiny, float32, from gguf\n"
    assert main(["convert", "src", "dst", "--quantization", "int8"]) == 0
    assert capsys.readouterr().out == "wrote dst: tiny, int8 and float32, from gguf\n"
    record = run_json(capsys, "convert", "src", "dst")
    assert record == {
        "target": "dst",
        "name": "tiny",
        "dtype": "float32",
        "source_kind": "gguf",
        "quantization": None,
    }
    assert seen == [
        (("src", "dst"), {"dtype": "float32", "overwrite": True}),
        (("src", "dst"), {"quantization": "int8", "overwrite": False}),
        (("src", "dst"), {"overwrite": False}),
    ]


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("jprefill.bench.compare", ["compare"]),
        ("jprefill.bench.offline", ["bench", "offline"]),
        ("jprefill.bench.prefix", ["bench", "prefix"]),
        ("jprefill.bench.serve.command", ["bench", "serve"]),
        ("jprefill.bench.store", ["bench", "store"]),
        ("jprefill.kvstore.command", ["kv"]),
    ],
)
def test_commands_of_other_modules_bring_their_own_arguments(monkeypatch, module, argv):
    fake_module(
        monkeypatch,
        module,
        add_arguments=lambda parser: parser.add_argument("--depth", type=int),
        run=lambda args: args.depth,
    )
    assert main([*argv, "--depth", "1"]) == 1


def test_interrupting_is_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    fake_module(monkeypatch, "jprefill.server.run", serve=interrupted)
    assert main(["serve", "m"]) == 130


@pytest.mark.parametrize("argv", [[], ["nothing"], ["score"], ["score", "--model", "m"], ["serve"]])
def test_a_wrong_command_line_shows_the_usage(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: jprefill" in capsys.readouterr().err


def test_version_and_help_need_no_jax():
    code = (
        "import sys\nfrom jprefill.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: print('jax' in sys.modules)"
    )
    for argv in (
        ["--version"],
        ["--help"],
        *[[name, "--help"] for name in ("score", "serve", "kv", "bench")],
        ["bench", "prefix", "--help"],
        ["bench", "serve", "--help"],
    ):
        result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
        assert result.stdout.endswith("False\n")
        assert result.stdout.startswith(("jprefill ", "usage: jprefill"))


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in COMMANDS)
