"""A minimal PyTorch Llama for prefill: SDPA, bfloat16, no KV cache kept, the LM head on the last token alone.

The fused operations of PyTorch are used where it has them (`rms_norm`, `silu`, `scaled_dot_product_attention`).
Hugging Face's order of rounding: norms and angles in float32, rotation in the working dtype.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def causal_attention(q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
    """Causal attention of q[B,N,T,H] over k and v[B,K,T,H].

    Args:
      q: queries.
      k: keys.
      v: values.
      backend: of `BACKENDS`, with `_expanded` behind it for one that wants as many KV heads as query heads; None
        leaves the choice to PyTorch.
    """
    backend, _, expanded = (backend or "").partition("_")
    if expanded:
        num_groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(num_groups, 1) for x in (k, v))
    with sdpa_kernel(BACKENDS[backend]) if backend else nullcontext():
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not expanded)


class TorchLlama:
    """Weights by Hugging Face name, and the forward pass."""

    def __init__(self, model: dict[str, Any], weights: dict[str, Tensor], backend: str | None):
        self._model, self._weights, self._backend = model, weights, backend
        self._layer: Callable[..., Tensor] = self._plain_layer

    def compile(self) -> None:
        """Compiles the layer with `torch.compile`; all layers share it, and each input shape compiles once more."""
        self._layer = torch.compile(self._plain_layer, dynamic=False)

    @torch.inference_mode()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Float32 log-probabilities [B, V] of what follows the last token of each row of token_ids[B, T]."""
        x = functional.embedding(token_ids, self._weights["model.embed_tokens.weight"])
        cos, sin = self._angles(token_ids.shape[1], x)
        for index in range(self._model["num_layers"]):
            names = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
            names += ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            x = self._layer(x, cos, sin, *(self._weights[f"model.layers.{index}.{name}.weight"] for name in names))
        last = self._norm(x[:, -1], self._weights["model.norm.weight"])
        return functional.linear(last, self._weights["lm_head.weight"]).float().log_softmax(-1)

    def _plain_layer(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        mlp_norm: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        normal = self._norm(x, norm)
        queries, keys = _rotate(self._heads(normal, q), cos, sin), _rotate(self._heads(normal, k), cos, sin)
        attended = causal_attention(queries, keys, self._heads(normal, v), self._backend)
        x = x + functional.linear(attended.transpose(1, 2).flatten(2), o)
        normal = self._norm(x, mlp_norm)
        gated = functional.silu(functional.linear(normal, gate)) * functional.linear(normal, up)
        return x + functional.linear(gated, down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._model["norm_eps"])

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Projects x[B,T,D] to [B, heads, T, H]."""
        return functional.linear(x, weight).unflatten(-1, (-1, self._model["head_dim"])).transpose(1, 2)

    def _angles(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = llama3_frequencies(self._model["rope_theta"], self._model["head_dim"]).to(x.device)
        angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequencies[None, :]
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def llama3_frequencies(theta: float, head_dim: int) -> Tensor:
    """Radians per position, stretched as Llama 3.1 does: factor 8 from 8,192 tokens, low 1, high 4."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    blend = ((8192 / wavelengths - 1.0) / 3.0).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / 8.0 + blend * frequencies


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
