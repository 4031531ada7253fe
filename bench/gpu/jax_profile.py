"""Where a pass spends the device's time: busy and idle shares, and the kernels that take longest."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

NUM_KERNELS = 15


def profile(run: Callable[[], object]) -> dict[str, Any]:
    """Runs once under the profiler.

    Returns:
      `span_s` from the first kernel to the end of the last; `busy_s`, the time in which at least one ran;
      `longest_gap_s`; `num_kernels`; `kernels`: the slowest by name, with total seconds and count. Empty of kernels
      where the profiler saw no device, as on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    kernels = [event for plane in data.planes if plane.name.startswith("/device:GPU") for event in _kernels(plane)]
    return summary(kernels)


def _kernels(plane: Any) -> Iterable[tuple[str, int, int]]:
    """(name, start, end) in nanoseconds of everything on the device's streams; other lines are summaries of these."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                yield event.name, int(event.start_ns), int(event.start_ns + event.duration_ns)


def summary(kernels: list[tuple[str, int, int]]) -> dict[str, Any]:
    """What `profile` returns, from (name, start, end) in nanoseconds."""
    seconds, counts = Counter(), Counter()
    busy = longest_gap = 0
    start = end = min((start for _, start, _ in kernels), default=0)
    for name, kernel_start, kernel_end in sorted(kernels, key=lambda kernel: kernel[1]):
        seconds[name] += kernel_end - kernel_start
        counts[name] += 1
        longest_gap = max(longest_gap, kernel_start - end)
        busy += max(0, kernel_end - max(end, kernel_start))
        end = max(end, kernel_end)
    return {
        "span_s": (end - start) / 1e9,
        "busy_s": busy / 1e9,
        "longest_gap_s": longest_gap / 1e9,
        "num_kernels": len(kernels),
        "kernels": [
            {"name": name[:80], "seconds": total / 1e9, "count": counts[name]}
            for name, total in seconds.most_common(NUM_KERNELS)
        ],
    }
