"""Choosing an attention implementation: by the device's description, then by its own results. Fakes stand for GPUs."""

import re

import jax.numpy as jnp
import pytest

from jprefill.pallas.attention.reference import attend_reference
from jprefill.pallas.attention.selection import Choice, Heads, check, choose, select
from jprefill.pallas.attention.xla import attend_xla

HEADS = Heads(4, 2, 64, "bfloat16")
HOPPER = ("gpu", "NVIDIA H100 80GB HBM3", "9.0")


def off_by_one_key(q, k, v, ranges):
    """Every row also sees the key after its own: the error of a wrong `<=`."""
    return attend_reference(q, jnp.nan_to_num(k), jnp.nan_to_num(v), ranges._replace(self_pos=ranges.self_pos + 1))


def contaminated(q, k, v, ranges):
    """Multiplies a weight of zero with NaN."""
    return attend_reference(q, k, v, ranges) + (0 * v[-1, 0]).astype(q.dtype)[None, None, :]


def shows_padding(q, k, v, ranges):
    return attend_reference(q, k, v, ranges) + jnp.asarray(1e-3, q.dtype)


def broken(q, k, v, ranges):
    raise NotImplementedError("wgmma\nand a long story")


@pytest.mark.parametrize(
    ("device", "candidates"),
    [
        (("cpu", "cpu", None), ("xla",)),
        (("tpu", "TPU v5e", None), ("xla",)),
        (("gpu", "NVIDIA L4", "8.9"), ("triton", "xla")),
        (("gpu", "NVIDIA A100-SXM4-40GB", "8.0"), ("triton", "xla")),
        (("cuda", "NVIDIA H200", "9.0"), ("mosaic", "triton", "xla")),
        (("gpu", "NVIDIA B200", "10.0"), ("triton", "xla")),
        (("gpu", "Tesla T4", "7.5"), ("xla",)),
        (("gpu", "AMD Instinct MI300X", "gfx942"), ("xla",)),
    ],
)
def test_the_device_decides_what_may_be_tried(device, candidates):
    assert choose(*device).candidates == candidates


def test_a_refusal_says_what_is_missing():
    refused = choose("gpu", "NVIDIA L4", "8.9").refused
    assert refused == {"mosaic": "needs compute capability 9.x for wgmma, the device has 8.9 (NVIDIA L4)"}
    assert "platform is 'cpu'" in choose("cpu", "cpu").refused["triton"]


@pytest.mark.parametrize(
    ("heads", "reason"),
    [(Heads(32, 8, 80, "bfloat16"), "head_dim 80"), (Heads(32, 8, 128, "float32"), "dtype float32")],
)
def test_heads_without_a_kernel_go_to_the_next_candidate(heads, reason):
    choice = choose(*HOPPER, heads)
    assert choice.candidates == ("triton", "xla")
    assert reason in choice.refused["mosaic"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_implementation_passes(dtype):
    assert check(attend_xla, HEADS._replace(dtype=dtype)) is None


@pytest.mark.parametrize(
    ("implementation", "fault"),
    [
        (off_by_one_key, "error against the float32 reference"),
        (contaminated, "not finite"),
        (shows_padding, "rows that see nothing are not zero"),
        (broken, "NotImplementedError: wgmma$"),
    ],
)
def test_a_wrong_implementation_is_found(implementation, fault):
    found = check(implementation, HEADS)
    assert found
    assert re.search(fault, found)


def test_what_fails_is_dropped_with_one_warning(caplog):
    fakes = {"mosaic": broken, "triton": attend_xla}
    assert select(Choice(("mosaic", "triton", "xla"), {}), fakes, HEADS) == "triton"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'mosaic' is not used: NotImplementedError: wgmma" in caplog.text


def test_plain_jax_needs_no_proof():
    assert select(Choice(("mosaic", "xla"), {}), {"mosaic": off_by_one_key}, HEADS) == "xla"
    assert select(Choice(("xla",), {}), {}, HEADS) == "xla"
