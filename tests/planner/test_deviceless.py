"""What comes back from the compiling process, whatever becomes of it. Nothing is compiled here."""

import json
from dataclasses import replace

import pytest

from jprefill.cli import main
from jprefill.model.memory import ProgramMemory
from jprefill.planner import deviceless, measured
from jprefill.planner.deviceless import CompileError, compile_for
from jprefill.planner.jobs import CompileJob, KernelReport, ProgramReport
from jprefill.planner.measured import Measurements
from jprefill.planner.models import find_model
from jprefill.planner.ptxas import parse_reports
from jprefill.planner.targets import find_target

L4 = find_target("l4")
JOB = CompileJob(find_model("llama-3.1-8b"), "stream", "triton", 1024, 8192)
REPORT = ProgramReport("layer", ProgramMemory(1, 2, 3, 4, 5, 6, 7), 0.5, "hlo", (KernelReport("k", 128, 0, 8),))
FIGURES = {"layer": REPORT.memory}


@pytest.fixture
def worker(monkeypatch):
    """Stands in for the child process: writes the given lines, then ends as told."""

    def install(*records, problem="exit status 0: no message"):
        def run_worker(request, results):
            assert json.loads(request.read_text())["target"] == L4.text
            results.write_text("".join(json.dumps(record) + "\n" for record in records))
            return problem

        monkeypatch.setattr(deviceless, "_run_worker", run_worker)
        monkeypatch.setattr(deviceless, "missing_packages", list)

    return install


def test_records_survive_the_way_there_and_back():
    assert CompileJob.from_dict(json.loads(json.dumps(JOB.to_dict()))) == JOB
    assert ProgramReport.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


def test_results_are_sorted_by_job(worker):
    worker({"job": 1, **REPORT.to_dict()}, {"job": 0, **REPORT.to_dict()}, {"done": True})
    assert compile_for(L4, [JOB, JOB]) == [{"layer": REPORT}, {"layer": REPORT}]


def test_a_crash_after_the_last_result_is_forgiven(worker):
    worker({"job": 0, **REPORT.to_dict()}, {"done": True}, problem="exit status -11: no message")
    assert compile_for(L4, [JOB]) == [{"layer": REPORT}]


def test_a_crash_before_it_is_an_error_with_its_last_words(worker):
    worker({"job": 0, **REPORT.to_dict()}, problem="exit status -6: CHECK failed")
    with pytest.raises(CompileError, match="compiling process for l4 ended early: exit status -6: CHECK failed"):
        compile_for(L4, [JOB])


def test_a_refused_program_is_named(worker):
    worker({"job": 0, "name": "layer", "error": "ValueError: too much shared memory"}, {"done": True})
    text = r"layer \(stream, triton, bucket 8192\) does not compile for l4: ValueError: too much shared memory"
    with pytest.raises(CompileError, match=text):
        compile_for(L4, [JOB])


def test_missing_packages_are_one_clear_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(deviceless, "missing_packages", lambda: ["jax-cuda12-pjrt"])
    assert main(["plan", "--model", "llama-3.1-8b", "--gpu", "l4", "--layout", "stream"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "compiling for a GPU needs jax-cuda12-pjrt" in error
    assert "scripts/setup plan" in error
    assert "pip install 'jprefill[plan]'" in error


def test_a_second_measurement_compiles_nothing(monkeypatch, tmp_path):
    calls = []

    def compile_once(target, jobs):
        calls.append(jobs)
        return [{"layer": REPORT} for _ in jobs]

    monkeypatch.setattr(measured, "compile_for", compile_once)
    other = replace(JOB, bucket=4096)
    assert Measurements(L4, tmp_path)([JOB]) == [FIGURES]
    assert Measurements(L4, tmp_path)([other, JOB, other]) == [FIGURES] * 3
    assert calls == [[JOB], [other, other]]
    assert Measurements(find_target("h100"), tmp_path)([JOB])
    assert len(calls) == 3


def test_a_damaged_measurement_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "compile_for", lambda target, jobs: [{"layer": REPORT}])
    Measurements(L4, tmp_path)([JOB])
    [file] = tmp_path.iterdir()
    file.write_text('{"layer": {"temp')
    assert Measurements(L4, tmp_path)([JOB]) == [FIGURES]


PTXAS_OUTPUT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'loop_fusion' for 'sm_89'
ptxas info    : Function properties for loop_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'attend' for 'sm_89'
ptxas info    : Function properties for attend
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size
"""


def test_ptxas_is_read():
    assert parse_reports(PTXAS_OUTPUT) == (KernelReport("loop_fusion", 32, 0, 0), KernelReport("attend", 255, 24, 40))
