"""The child process that runs the peer. Needs PyTorch and NumPy, and nothing of jprefill.

`python -m bench.gpu.torch_worker`, with the repository's root on PYTHONPATH.
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.parity_weights import llama_shapes, parity_tokens, parity_weights
from bench.gpu.timing import measure
from bench.gpu.torch_llama import TorchLlama, causal_attention
from bench.gpu.worker import serve

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait(_: object = None) -> None:
    """Blocks until the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Worker:
    """The commands, by name of the method. State: the model that was loaded last."""

    def __init__(self) -> None:
        self._model: TorchLlama | None = None

    def describe(self) -> dict[str, Any]:
        """The device and what runs on it."""
        return {
            "platform": DEVICE.type,
            "versions": {
                "torch": torch.__version__,
                "torch_cuda": torch.version.cuda,
                "torch_cudnn": torch.backends.cudnn.version(),
            },
        }

    def load(self, model: dict[str, Any], backend: str | None) -> dict[str, Any]:
        """Random bfloat16 weights on the device, spread as the other side's."""
        started = time.perf_counter()
        self._model = None
        weights = {name: _spread(shape) for name, shape in llama_shapes(model).items()}
        self._model = TorchLlama(model, weights, backend)
        wait()
        return {"backend": backend or "default", "load_s": time.perf_counter() - started}

    def compile(self) -> dict[str, Any]:
        """From now on passes run layers made by `torch.compile`."""
        self._loaded().compile()
        return {}

    def run_pass(self, count: int, length: int, vocab_size: int) -> dict[str, Any]:
        """One pass over `count` prompts of `length` tokens, until the log-probabilities are on the host."""
        model = self._loaded()
        token_ids = torch.randint(0, vocab_size, (count, length))
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait()
        started = time.perf_counter()
        logprobs = model.logprobs(token_ids.to(DEVICE))[:, :2].cpu()
        seconds = time.perf_counter() - started
        if not logprobs.isfinite().all():
            raise ArithmeticError("the pass gave a log-probability that is not finite")
        peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None
        return {"seconds": seconds, "peak_bytes": peak}

    def _loaded(self) -> TorchLlama:
        if self._model is None:
            raise LookupError("no model is loaded")
        return self._model


def attention(
    backend: str, num_heads: int, num_kv_heads: int, head_dim: int, num_keys: int, repeats: int, target_s: float
) -> dict[str, Any]:
    """Time of causal attention over `num_keys` tokens."""
    q = _normal(1, num_heads, num_keys, head_dim)
    k, v = (_normal(1, num_kv_heads, num_keys, head_dim) for _ in range(2))
    with torch.inference_mode():
        return measure(lambda: causal_attention(q, k, v, backend), wait, repeats, target_s)


def matmul(num_rows: int, num_in: int, num_out: int, repeats: int, target_s: float) -> dict[str, Any]:
    """Time of the bfloat16 product that a projection is."""
    x, weight = _normal(num_rows, num_in), _normal(num_out, num_in)
    with torch.inference_mode():
        return measure(lambda: functional.linear(x, weight), wait, repeats, target_s)


def parity(model: dict[str, Any], lengths: list[int], label_ids: list[int]) -> dict[str, Any]:
    """Log-probabilities after prompts that the other side reads too, in bfloat16 and in float32."""
    weights = {name: torch.from_numpy(values) for name, values in parity_weights(llama_shapes(model)).items()}
    answers = {}
    for dtype in (torch.bfloat16, torch.float32):
        # Both dtypes start from the weights' bfloat16 values: only the arithmetic differs.
        here = {name: values.to(DEVICE, torch.bfloat16).to(dtype) for name, values in weights.items()}
        llama = TorchLlama(model, here, None)
        answers[str(dtype).removeprefix("torch.")] = [
            llama.logprobs(torch.from_numpy(parity_tokens(length, model["vocab_size"])).long()[None].to(DEVICE))[
                0, label_ids
            ].tolist()
            for length in lengths
        ]
    return answers


def _spread(shape: tuple[int, ...]) -> Tensor:
    values = _normal(*shape)
    return 1 + 0.1 * values if len(shape) == 1 else values.mul_(shape[-1] ** -0.5)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def _is_healthy() -> bool:
    """Whether the device still computes."""
    try:
        return float(torch.ones(8, device=DEVICE).sum()) == 8.0
    except RuntimeError:
        return False


def main() -> int:
    """Answers until stdin ends."""
    worker = Worker()
    commands = {
        "describe": worker.describe,
        "attention": attention,
        "matmul": matmul,
        "parity": parity,
        "load": worker.load,
        "compile": worker.compile,
        "run_pass": worker.run_pass,
    }
    return serve(commands, _is_healthy)


if __name__ == "__main__":
    sys.exit(main())
