"""What is measured: the full run for an H100-class GPU, and a tiny twin of it that any CPU finishes in a minute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A Llama's shape in the words of `ModelConfig`; plain numbers, so that the peer needs nothing of jprefill."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0

    @property
    def gemm_flops_per_token(self) -> int:
        """Of one layer: Q, K, V and output projections, gate, up and down."""
        projections = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return 2 * self.embed_dim * (projections + 3 * self.mlp_dim)

    @property
    def kv_flops_per_token(self) -> int:
        """Of one layer: K and V projections alone."""
        return 2 * self.embed_dim * 2 * self.num_kv_heads * self.head_dim

    def attention_flops(self, num_visible: int) -> int:
        """Of one layer that sees `num_visible` (query, key) pairs: two products of 2 x head_dim each."""
        return 4 * self.num_heads * self.head_dim * num_visible

    def head_flops(self, num_rows: int) -> int:
        """The LM head on the rows that are read."""
        return 2 * num_rows * self.embed_dim * self.vocab_size


@dataclass(frozen=True)
class Prompts:
    """`count` prompts of `length` tokens in one pass.

    Attributes:
      bucket: the buffer that ours runs them in.
      max_repeats: timed passes of each side at most; a pass of 64k tokens takes seconds.
    """

    count: int
    length: int
    bucket: int
    max_repeats: int = 100

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.count}x{self.length}"

    @property
    def num_tokens(self) -> int:
        """Of the whole pass."""
        return self.count * self.length

    def model_flops(self, model: ModelShape) -> int:
        """Every layer for every token, and the LM head on the last token of each prompt. Nothing is estimated."""
        gemm = self.num_tokens * model.gemm_flops_per_token
        return model.num_layers * (gemm + self._attention_flops(model)) + model.head_flops(self.count)

    def done_flops(self, model: ModelShape) -> int:
        """What jprefill computes of that: the last layer makes K and V for all tokens and the rest for read rows."""
        read_rows = self.count * (model.gemm_flops_per_token - model.kv_flops_per_token)
        last = self.num_tokens * model.kv_flops_per_token + read_rows
        last += model.attention_flops(self.count * self.length)
        gemm = self.num_tokens * model.gemm_flops_per_token
        return (model.num_layers - 1) * (gemm + self._attention_flops(model)) + last + model.head_flops(self.count)

    def _attention_flops(self, model: ModelShape) -> int:
        return model.attention_flops(self.count * self.length * (self.length + 1) // 2)


@dataclass(frozen=True)
class Sizes:
    """One run.

    Attributes:
      prompts: passes, shortest first: the device's peak memory only grows.
      chunk_sizes: of layer programs that are timed beside the default, `chunk_size`.
      numeric_rows: (query rows, keys) of the comparison with the reference.
      max_tiles: candidates of each kernel that are tried.
      parity: a small model whose weights both sides can make from one seed.
      target_s: device time that one timing repeat fills.
    """

    model: ModelShape
    parity: ModelShape
    prompts: tuple[Prompts, ...]
    chunk_size: int
    chunk_sizes: tuple[int, ...]
    numeric_rows: tuple[int, int]
    head_dims: tuple[int, ...]
    attention_lengths: tuple[int, ...]
    matmul_rows: tuple[int, ...]
    copy_bytes: int
    max_tiles: int
    repeats: int
    target_s: float

    @property
    def main_prompt(self) -> Prompts:
        """The single prompt that layer programs, tiles and the profile are measured on: the second longest."""
        single = [prompts for prompts in self.prompts if prompts.count == 1]
        return single[-2]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Of all passes, ascending."""
        return tuple(sorted({prompts.bucket for prompts in self.prompts}))


LLAMA_8B = ModelShape(
    vocab_size=128_256,
    num_layers=32,
    embed_dim=4096,
    mlp_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)

FULL = Sizes(
    model=LLAMA_8B,
    parity=ModelShape(
        vocab_size=1024, num_layers=2, embed_dim=512, mlp_dim=1024, num_heads=8, num_kv_heads=2, head_dim=128
    ),
    # Work follows the real length, so one bucket serves 2k to 16k; 64 short prompts fill it too.
    prompts=(
        Prompts(1, 2048, 16_384),
        Prompts(1, 8192, 16_384),
        Prompts(64, 256, 16_384),
        Prompts(1, 16_384, 16_384),
        Prompts(1, 65_536, 65_536, max_repeats=2),
    ),
    chunk_size=2048,
    chunk_sizes=(1024, 4096, 8192),
    numeric_rows=(1024, 4096),
    head_dims=(64, 128),
    attention_lengths=(2048, 8192, 16_384),
    matmul_rows=(2048, 8192),
    copy_bytes=256 * 2**20,
    max_tiles=6,
    repeats=5,
    target_s=0.05,
)

TINY = Sizes(
    model=ModelShape(vocab_size=128, num_layers=2, embed_dim=64, mlp_dim=96, num_heads=4, num_kv_heads=2, head_dim=16),
    parity=ModelShape(vocab_size=128, num_layers=2, embed_dim=64, mlp_dim=96, num_heads=4, num_kv_heads=2, head_dim=16),
    prompts=(Prompts(1, 32, 128), Prompts(4, 24, 128), Prompts(1, 64, 128), Prompts(1, 128, 128)),
    chunk_size=64,
    chunk_sizes=(32,),
    numeric_rows=(64, 64),
    head_dims=(64,),
    attention_lengths=(64,),
    matmul_rows=(64,),
    copy_bytes=2**16,
    max_tiles=1,
    repeats=1,
    target_s=0.0,
)
