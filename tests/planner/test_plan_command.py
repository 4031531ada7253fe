"""`jprefill plan` on made-up measurements: table, JSON, picture, refusals."""

import json

import pytest

from jprefill.cli import main
from jprefill.planner import command

BASE = ["plan", "--model", "llama-3.1-8b", "--gpu", "l4", "--max-model-len", "131072"]
KEYS = {"model", "gpu", "layout", "weights_bytes", "peak_bytes", "max_input_tokens", "prefix_pool_tokens"}


@pytest.fixture(autouse=True)
def _no_compiling(monkeypatch, measure):
    monkeypatch.setattr(command, "Measurements", lambda target: measure)


def test_the_table_has_a_column_for_each_layout(capsys):
    assert main(BASE) == 0
    title, _, head, lengths, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("llama-3.1-8b in bf16 on l4: 21.98 GiB, 95% of it usable")
    assert head.split() == ["stream", "hybrid", "full", "whole-kv"]
    assert lengths.split()[-4] == "131,072"
    assert [line.split()[0] for line in lines if line][:3] == ["weights", "x", "keys"]
    assert "memory is not what limits it" in lines[-1]


def test_json_is_one_object_with_the_promised_keys(capsys):
    assert main([*BASE, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record.keys() >= KEYS
    assert (record["layout"], record["max_model_len"]) == ("stream", 131_072)
    assert [other["layout"] for other in record["compared_with"]] == ["hybrid", "full", "whole-kv"]


def test_one_layout_alone(capsys):
    assert main([*BASE, "--json", "--layout", "whole-kv", "--max-model-len", "4096"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["layout"], record["compared_with"]) == ("whole-kv", [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (["--gpu", "t4"], "gpu='t4': known are"),
        (["--model", "gpt"], "model='gpt': no such path; known names are"),
        (["--max-model-len", "9000000"], "does not fit: llama-3.1-8b in bf16 on l4"),
        (["--max-model-len", "-1"], "max_model_len=-1: must be 1 to"),
        (["--attention", "flash"], "attention='flash': known are"),
    ],
)
def test_bad_input_is_one_line(capsys, change, text):
    assert main([*BASE, *change]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err.splitlines()[-1]


def test_a_picture_is_refused_before_the_work_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main([*BASE, "--plot", "x.png"]) == 2
    assert "--plot x.png: needs matplotlib: pip install 'jprefill[plot]'" in capsys.readouterr().err


def test_a_picture_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main([*BASE, "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
