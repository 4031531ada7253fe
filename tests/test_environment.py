"""What a command's process tells JAX before it starts."""

import pytest

from jprefill import environment


@pytest.mark.parametrize("has_gpu", [True, False])
def test_without_a_driver_jax_uses_the_cpu(monkeypatch, tmp_path, has_gpu):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(environment, "GPU_FILES", (str(tmp_path / ("nvidiactl" if has_gpu else "none")),))
    environ = {}
    environment.prepare(environ)
    assert environ.get("JAX_PLATFORMS") == (None if has_gpu else "cpu")
    assert environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"


def test_what_the_caller_set_stays():
    environ = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    environment.prepare(environ)
    assert environ == {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}


def test_the_engine_takes_what_the_plan_counts_on():
    from jprefill.planner.targets import USABLE_FRACTION

    assert float(environment.MEMORY_FRACTION) == USABLE_FRACTION
