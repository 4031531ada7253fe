"""Tables of what `jprefill bench ablate` measured: every variant against the one with everything on.

    | variant | requests/s | mean s | p99 s | ... | mean / jct | p99 / jct |
    | fcfs    |  median (lowest to highest of the seeds)  | of the ratios within a seed |

Ratios are of runs of one seed, which were made one after the other: the machine changes less between them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jprefill.errors import ConfigError

BASE = "jct"
Row = Mapping[str, float | int | str]

_VALUES = {
    "requests/s": "requests_per_s",
    "mean s": "mean_s",
    "p99 s": "p99_s",
    "short p99 s": "short_p99_s",
    "long mean s": "long_mean_s",
    "from the store": "hit_rate",
}
_ONLY_MIXED = ("short p99 s", "long mean s")
_RATIOS = {"mean / jct": "mean_s", "p99 / jct": "p99_s"}
_KEYS = {"policy", "workload", "seed", "load", *_VALUES.values()}


def read_records(paths: Sequence[Path]) -> list[Row]:
    """The records of files that `--json` wrote.

    Raises:
      ConfigError: a file cannot be read or holds something else.
    """
    records: list[Row] = []
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--read {path}: {error}") from None
        if not isinstance(found, list) or not all(isinstance(one, dict) and one.keys() >= _KEYS for one in found):
            raise ConfigError(f"--read {path}: not written by `jprefill bench ablate --json`")
        records += found
    return records


def markdown(records: Sequence[Row]) -> str:
    """A table for each workload and load, in the order of the records."""
    places = list(dict.fromkeys((one["workload"], one["load"]) for one in records))
    parts = []
    for workload, load in places:
        group = [one for one in records if (one["workload"], one["load"]) == (workload, load)]
        num_seeds = len({one["seed"] for one in group})
        parts.append(f"### {workload}, load {load:g}, {num_seeds} seeds\n\n" + "\n".join(_table(str(workload), group)))
    return "\n\n".join(parts)


def _table(workload: str, group: Sequence[Row]) -> Iterator[str]:
    values = {head: name for head, name in _VALUES.items() if workload == "mixed" or head not in _ONLY_MIXED}
    variants = list(dict.fromkeys(str(one["policy"]) for one in group))
    ratios = _RATIOS if BASE in variants else {}
    yield "| variant | " + " | ".join([*values, *ratios]) + " |"
    yield "|---|" + "---:|" * (len(values) + len(ratios))
    by_variant = {name: {one["seed"]: one for one in group if one["policy"] == name} for name in variants}
    for variant, by_seed in by_variant.items():
        cells = [_spread([float(one[name]) for one in by_seed.values()], name) for name in values.values()]
        cells += [_ratio(by_seed, by_variant[BASE], name) for name in ratios.values()]
        yield f"| {variant} | " + " | ".join(cells) + " |"


def _ratio(by_seed: Mapping, base: Mapping, name: str) -> str:
    shared = [seed for seed in by_seed if seed in base]
    return _spread([by_seed[seed][name] / base[seed][name] for seed in shared], "ratio") if shared else ""


def _spread(values: Sequence[float], name: str) -> str:
    spell = "{:.0%}" if name == "hit_rate" else "{:.2f}x" if name == "ratio" else "{:.2f}"
    low, middle, high = (spell.format(value) for value in (min(values), np.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
