"""`jprefill compare`: our log-probabilities against a reference file, or one way of running against another.

jprefill compare reference/smollm2.json                                against PyTorch's numbers
jprefill compare reference/smollm2.json --between stream,hybrid,full   our layouts against each other
jprefill compare reference/smollm2.json --pack                         packed against alone
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from jprefill.bench.local import load_checkpoint, load_tokenizer, positive, running_engine
from jprefill.bench.parity import (
    PromptDifference,
    PromptScores,
    Summary,
    compare_prompt,
    reference_scores,
    score_prompts,
)
from jprefill.bench.reference_format import Reference, ReferencePrompt, load_reference
from jprefill.bench.variants import Variant, parse_variants
from jprefill.config import DType, EngineConfig, Layout, Quantization
from jprefill.errors import ConfigError
from jprefill.tokenization.api import Tokenizer
from jprefill.types import Head

if TYPE_CHECKING:
    from jprefill.model.checkpoints import Checkpoint

REFERENCE_TOLERANCE = 1e-4
VARIANT_TOLERANCE = 5e-5
NUM_WORST = 10


@dataclass(frozen=True, slots=True)
class Section:
    """One pair of sides, compared on every prompt."""

    title: str
    differences: tuple[PromptDifference, ...]

    @property
    def summary(self) -> Summary:
        """Of all prompts."""
        return Summary.of(self.differences)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jprefill compare`."""
    parser.add_argument("reference", type=Path, metavar="REFERENCE.json", help="file of prompts and their scores")
    parser.add_argument("--model", type=Path, help="weights (default: the path in the reference file)")
    parser.add_argument("--dtype", choices=get_args(DType), default="float32", help="default: float32")
    parser.add_argument("--quantization", choices=get_args(Quantization), help="of the layers' matrices, while loading")
    parser.add_argument("--layout", choices=get_args(Layout), default=EngineConfig.layout)
    parser.add_argument("--chunk-size", type=positive, default=EngineConfig.chunk_size, metavar="N")
    parser.add_argument("--attention", metavar="NAME", help="attention implementation (default: by platform)")
    parser.add_argument("--between", metavar="VARIANTS", help="compare with each other: LAYOUT[:CHUNK][+pack],...")
    parser.add_argument("--pack", action="store_true", help="compare prompts submitted together with each alone")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="NATS",
        help=f"default: {REFERENCE_TOLERANCE}, with --between or --pack {VARIANT_TOLERANCE}",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=2e-4,
        metavar="NATS",
        help="another top label counts as wrong where the reference is surer than this (default: 2e-4)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N prompts only")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="prompts of at most N tokens only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--verbose", action="store_true", help="a line for every prompt, not the worst ten only")


def run(args: argparse.Namespace) -> int:
    """Compares and prints; 0 when everything is within the tolerance, else 1.

    Raises:
      ConfigError: the reference file or a flag cannot be used.
      CheckpointError: the model cannot be used.
    """
    reference = load_reference(args.reference)
    prompts = select_prompts(reference, args.limit, args.max_tokens)
    model = args.model or reference.model_path(args.reference)
    variants = _variants(args, prompts)
    is_between = len(variants) > 1
    checkpoint = load_checkpoint(model, args.dtype, args.quantization)
    mismatches = [] if is_between else check_tokenizer(checkpoint, prompts)
    scores = _score(checkpoint, variants, prompts, reference.head)
    if is_between:
        sections = _between(variants, scores, prompts, args.margin)
    else:
        sections = [_against_reference(reference, variants[0], scores[0], prompts, args.margin)]
    default = VARIANT_TOLERANCE if is_between else REFERENCE_TOLERANCE
    tolerance = default if args.tolerance is None else args.tolerance
    return _report(args, sections, mismatches, tolerance)


def select_prompts(reference: Reference, limit: int | None, max_tokens: int | None) -> tuple[ReferencePrompt, ...]:
    """The first `limit` prompts of at most `max_tokens` tokens; None: no such bound.

    Raises:
      ConfigError: none is left.
    """
    short = [p for p in reference.prompts if max_tokens is None or p.num_tokens <= max_tokens]
    if not short:
        shortest = min(p.num_tokens for p in reference.prompts)
        raise ConfigError(f"--max-tokens {max_tokens}: the shortest prompt has {shortest}")
    return tuple(short[:limit])


def _variants(args: argparse.Namespace, prompts: Sequence[ReferencePrompt]) -> Sequence[Variant]:
    """The ways of running that are asked for; a single one is compared with the reference."""
    base = EngineConfig(
        dtype=args.dtype,
        quantization=args.quantization,
        layout=args.layout,
        chunk_size=args.chunk_size,
        attention=args.attention,
        max_model_len=max(prompt.num_tokens for prompt in prompts),
        max_queued_requests=len(prompts),
    )
    variants = parse_variants(args.between, base) if args.between else (Variant(base),)
    if args.pack:
        first = variants[0]
        variants += (Variant(first.config, is_packed=not first.is_packed),)
    return variants


def check_tokenizer(checkpoint: "Checkpoint", prompts: Sequence[ReferencePrompt]) -> list[str]:
    """Texts that our tokenizer cuts in another way than the reference's: one line about each."""
    texts = [prompt for prompt in prompts if prompt.text is not None]
    if not texts:
        return []
    tokenizer = load_tokenizer(checkpoint)
    lines = (token_mismatch(tokenizer, prompt) for prompt in texts)
    return [line for line in lines if line]


def token_mismatch(tokenizer: Tokenizer, prompt: ReferencePrompt) -> str:
    """Where our token ids leave the reference's, in words; empty where they do not."""
    ours, theirs = tuple(tokenizer.encode(prompt.text or "", add_bos=False)), prompt.token_ids
    if ours == theirs:
        return ""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    pieces = [[tokenizer.token_text(i) for i in ids[at : at + 3]] for ids in (ours, theirs)]
    return f"{prompt.name}: token {at} of {len(theirs)}: ours {pieces[0]}, reference {pieces[1]}"


def _score(
    checkpoint: "Checkpoint", variants: Sequence[Variant], prompts: Sequence[ReferencePrompt], head: Head
) -> list[list[PromptScores]]:
    """All prompts through one engine after another; the weights are read once."""
    scores = []
    for variant in variants:
        with running_engine(checkpoint, variant.config) as engine:
            title = str(variant)
            scores.append(score_prompts(engine, prompts, is_packed=variant.is_packed, title=title, head=head))
    return scores


def _against_reference(
    reference: Reference,
    variant: Variant,
    scores: Sequence[PromptScores],
    prompts: Sequence[ReferencePrompt],
    margin: float,
) -> Section:
    versions = ", ".join(f"{name} {version}" for name, version in reference.versions.items())
    task = ", classes" if reference.head == "classes" else ""
    title = f"{variant} {variant.config.dtype} against {reference.name}{task} ({versions or reference.dtype})"
    expected = [reference_scores(prompt) for prompt in prompts]
    return Section(title, _differences(prompts, expected, scores, margin))


def _between(
    variants: Sequence[Variant],
    scores: Sequence[Sequence[PromptScores]],
    prompts: Sequence[ReferencePrompt],
    margin: float,
) -> list[Section]:
    """Every pair of variants: two on opposite sides of a third differ by more than either from it."""
    pairs = [(a, b) for b in range(len(variants)) for a in range(b)]
    return [
        Section(f"{variants[b]} against {variants[a]}", _differences(prompts, scores[a], scores[b], margin))
        for a, b in pairs
    ]


def _differences(
    prompts: Sequence[ReferencePrompt],
    expected: Sequence[PromptScores],
    actual: Sequence[PromptScores],
    margin: float,
) -> tuple[PromptDifference, ...]:
    triples = zip(prompts, expected, actual, strict=True)
    return tuple(compare_prompt(prompt, one, other, margin) for prompt, one, other in triples)


def _report(args: argparse.Namespace, sections: Sequence[Section], mismatches: Sequence[str], tolerance: float) -> int:
    """Prints the outcome, writes it as JSON where asked, and gives the exit status."""
    for line in outcome(sections, is_verbose=args.verbose):
        print(line)
    for line in mismatches:
        print(f"tokenizer differs: {line}")
    is_passed = not mismatches and all(section.summary.is_within(tolerance) for section in sections)
    verdict = "PASSED" if is_passed else "FAILED"
    print(f"{verdict}: tolerance {tolerance:g}, margin {args.margin:g}, tokenizer mismatches {len(mismatches)}")
    if args.json:
        _write_json(args.json, sections, mismatches, tolerance, is_passed)
    return 0 if is_passed else 1


def outcome(sections: Sequence[Section], *, is_verbose: bool) -> list[str]:
    """One line per section, after the table of the one that is furthest apart (of all with `is_verbose`)."""
    worst = max(sections, key=lambda section: section.summary.severity)
    lines = []
    for section in sections:
        if is_verbose or section is worst:
            lines += table(section, is_verbose=is_verbose)
    return [*lines, *(f"{section.title}: {_total(section)}" for section in sections)]


def table(section: Section, *, is_verbose: bool) -> list[str]:
    """The worst prompts of a section, or all of them in the file's order."""
    rows = section.differences
    if not is_verbose:
        rows = sorted(rows, key=lambda row: row.severity, reverse=True)[:NUM_WORST]
    width = max(len(row.name) for row in section.differences)
    lines = [section.title, f"  {'prompt':<{width}}  tokens  max|Δ label|  max|Δ contin.|  top"]
    for row in rows:
        top = "FLIP" if row.is_flip else "same" if row.is_same_top else "tie"
        deltas = f"{row.label_delta:12.2e}  {row.continuation_delta:14.2e}"
        lines.append(f"  {row.name:<{width}} {row.num_tokens:7,d}  {deltas}  {top}")
    if len(rows) < len(section.differences):
        lines.append(f"  ... {len(section.differences) - len(rows)} more, all closer (--verbose shows them)")
    return lines


def _total(section: Section) -> str:
    summary = section.summary
    num_tokens = sum(row.num_tokens for row in section.differences)
    return (
        f"{summary.num_prompts} prompts, {num_tokens:,d} tokens, worst {summary.max_label_delta:.2e}, "
        f"continuations {summary.max_continuation_delta:.2e}, "
        f"flips {summary.num_flips}, ties {summary.num_different_tops - summary.num_flips}"
    )


def _write_json(
    path: Path, sections: Sequence[Section], mismatches: Sequence[str], tolerance: float, is_passed: bool
) -> None:
    record: dict[str, Any] = {
        "command": ["jprefill", *sys.argv[1:]],
        "is_passed": is_passed,
        "tolerance": tolerance,
        "tokenizer_mismatches": list(mismatches),
        "sections": [
            {
                "title": section.title,
                "summary": _finite(asdict(section.summary)),
                "prompts": [_finite(asdict(difference)) for difference in section.differences],
            }
            for section in sections
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a comparison that met a NaN becomes null."""
    return {key: None if value == math.inf else value for key, value in record.items()}
