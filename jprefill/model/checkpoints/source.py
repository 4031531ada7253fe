"""`WeightSource`: what every checkpoint format offers, and the checks that hold for all of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import ml_dtypes
import numpy as np

from jprefill.config import DType, Quantization
from jprefill.errors import CheckpointError, ConfigError, UnsupportedModelError
from jprefill.model.config import ModelConfig
from jprefill.model.quantized import QUANTIZED_DTYPES, Quantized, dequantize, quantize
from jprefill.model.weights import LM_HEAD, is_projection, scale_name, weight_shapes

Kind = Literal["hf", "gguf", "orbax"]

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
}


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors of one model, read one at a time. Names and `[out, in]` layout are Hugging Face's.

    Scales belong to their tensor, as GGUF has it: they have no name of their own here.

    Invariant: opening reads headers only and checks that the files hold every byte the headers promise;
    `read` may be called from any thread.

    Attributes:
      quantization: of the projections as they are stored, where they are read as `Quantized`; None elsewhere.
    """

    name: str
    kind: Kind
    quantization: Quantization | None
    config: ModelConfig
    hf_config: dict[str, Any]
    tokenizer_path: Path

    def names(self) -> set[str]:
        """Every stored tensor; those that the model has no place for keep the name they have in the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in the Hugging Face layout."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Of what `read` returns: of the 8-bit values of a `Quantized`; float32 for GGUF's quantised types.

        Raises:
          CheckpointError: the stored type is not implemented, or values and scales do not go together.
        """
        ...

    def file_name(self, name: str) -> str:
        """The file (no folder) that holds the tensor, for messages."""
        ...

    def read(self, name: str) -> np.ndarray | Quantized:
        """The tensor as new arrays in host memory.

        Raises:
          CheckpointError: the file ends early or the bytes cannot be read.
        """
        ...

    def fingerprint(self, dtype: DType, quantization: Quantization | None) -> str:
        """Hex identity of the model as it will run; equal only for equal weights, config and way of running."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor's bytes lie. `format` is the file's own name for the element type."""

    file: Path
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    format: str

    def read_bytes(self, name: str) -> np.ndarray:
        """The raw bytes, copied: a later change of the file cannot reach a loaded model.

        Raises:
          CheckpointError: the file cannot be read, or is shorter than it was when it was opened.
        """
        try:
            data = np.fromfile(self.file, np.uint8, self.num_bytes, offset=self.offset)
        except OSError as error:
            raise CheckpointError(f"{self.file.name}: cannot read tensor {name!r}: {error.strerror}") from None
        if data.size != self.num_bytes:
            raise CheckpointError(
                f"{self.file.name}: tensor {name!r} has {data.size} of its {self.num_bytes} bytes; "
                "the file is truncated"
            )
        return data


def find(tensors: dict[str, StoredTensor], name: str, where: str) -> StoredTensor:
    """The entry called `name`, or `CheckpointError` naming it and `where`."""
    try:
        return tensors[name]
    except KeyError:
        raise CheckpointError(f"{where}: tensor {name!r} is missing") from None


def check_dtype(dtype: str) -> None:
    """Raises `ConfigError` unless `dtype` is one that a model can run in."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: allowed are {', '.join(map(repr, get_args(DType)))}")


def check_quantization(source: WeightSource, asked: str | None) -> Quantization | None:
    """What the model will run in: as asked, else as it is stored.

    Raises:
      ConfigError: not a quantisation, or the weights are quantised in another way already.
    """
    if asked is None:
        return source.quantization
    kind: Quantization | None = next((kind for kind in get_args(Quantization) if kind == asked), None)
    if kind is None:
        raise ConfigError(f"quantization={asked!r}: allowed are {', '.join(map(repr, get_args(Quantization)))}")
    if source.quantization not in (None, asked):
        raise ConfigError(
            f"quantization={asked!r}: {source.name} is {source.quantization} already; start from the original weights"
        )
    return kind


def check_tensors(source: WeightSource, asked: Quantization | None = None) -> dict[str, tuple[int, ...]]:
    """Checks the complete set of names, shapes and types before any data is read.

    Args:
      asked: a quantisation that plain projections will get; None: they must be as the source says they are.

    Returns:
      The names and shapes to read, in the model's order.

    Raises:
      CheckpointError: a tensor is missing, has another shape or an unsupported type, or has no place in the
        model (a feature that is not implemented is an error, never ignored).
      UnsupportedModelError: some projections are quantised and others are not, and `asked` is None.
    """
    present = source.names()
    if source.config.num_layers > len(present):  # before a damaged count fills memory with names
        raise CheckpointError(
            f"{source.name}: {len(present)} tensors cannot be the config's {source.config.num_layers} layers"
        )
    wanted = weight_shapes(source.config)
    if missing := [name for name in wanted if name not in present]:
        raise CheckpointError(f"{source.name}: {_listed('tensor', missing)} missing")
    extra = sorted(present - wanted.keys())
    if extra := [name for name in extra if not _is_ignored(name, source.config)]:
        raise CheckpointError(
            f"{source.name}: {_listed('tensor', extra)} not part of {source.config.architecture} "
            f"(in {source.file_name(extra[0])})"
        )
    for name, shape in wanted.items():
        if source.shape(name) != shape:
            raise CheckpointError(
                f"{source.file_name(name)}: tensor {name!r} has shape {source.shape(name)}, the config asks for {shape}"
            )
        _check_dtype_of(source, name, asked)
    return wanted


def _check_dtype_of(source: WeightSource, name: str, asked: Quantization | None) -> None:
    dtype = source.dtype(name)
    stored = source.quantization
    if stored is None or asked is not None or not is_projection(name) or dtype == QUANTIZED_DTYPES[stored]:
        return
    raise UnsupportedModelError(  # one program serves all layers
        f"{source.file_name(name)}: tensor {name!r} has dtype {dtype.name} in a model that is {stored}: projections "
        f"of both kinds are not implemented; quantization={stored!r} quantises the others too"
    )


def _listed(noun: str, names: list[str]) -> str:
    """`tensor 'a' is` or `3 tensors ('a', 'b', ...) are`, the first three by name."""
    if len(names) == 1:
        return f"{noun} {names[0]!r} is"
    shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {noun}s ({shown}) are"


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Rope frequencies follow from the config; a stored head of a tied model is the embedding again."""
    return name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and config.is_tied)


def leaves_of(
    name: str, tensor: np.ndarray | Quantized, dtype: DType, quantization: Quantization | None
) -> dict[str, np.ndarray]:
    """What the device gets of one stored tensor: itself in `dtype`, or 8-bit values and their scales.

    Raises:
      CheckpointError: the values do not fit `dtype` or the quantisation.
    """
    if quantization is None or not is_projection(name):
        # Others quantise their LM head too; here it stays in the working dtype.
        plain = dequantize(tensor) if isinstance(tensor, Quantized) else tensor
        return {name: cast(plain, dtype, name)}
    held = tensor if isinstance(tensor, Quantized) else quantize(tensor, quantization, name)
    return {name: held.values, scale_name(name): held.scale}


def cast(array: np.ndarray, dtype: DType, name: str) -> np.ndarray:
    """`array` in `dtype`, rounded to nearest even, on the host: a device cast would compile per shape.

    Raises:
      CheckpointError: a finite value became infinite (float16 ends at 65504).
    """
    target = DTYPES[dtype]
    if array.dtype == target:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(target)
    if dtype == "float16" and not np.isfinite(result).all():
        raise CheckpointError(f"tensor {name!r} holds values that float16 cannot; bfloat16 and float32 can")
    return result
