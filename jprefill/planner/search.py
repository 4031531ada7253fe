"""The longest input that fits, from a few measurements. Shared by `jprefill plan` and the engine's start-up."""

from collections.abc import Callable

MAX_PROBES = 16


def longest_input(measure: Callable[[int], int], budget_bytes: int, *, step: int, at_most: int, probe: int) -> int:
    """The largest multiple of `step` whose measured memory fits.

    Args:
      measure: bytes at a length. It grows with the length, and is nearly linear: a compiler rounds and may change
        its mind, so a line only says where to measure next.
      budget_bytes: what the length must fit into.
      step: lengths are multiples of it.
      at_most: no length above it is tried; at least `step`.
      probe: a length that is measured early, whether it fits or not: far from `step`, to give the line its slope.

    Returns:
      Tokens; 0 where not even `step` fits. The length was itself measured. One step more was measured and does not
      fit, or three measured lengths lie on a line that says so.
    """
    top = at_most // step
    fits, fits_bytes = 1, measure(step)
    if fits_bytes > budget_bytes:
        return 0
    too_long, too_long_bytes = top + 1, None  # in steps: the shortest length known not to fit
    probe, is_predicted = min(top, max(2, probe // step)), False
    for _ in range(MAX_PROBES):
        if not fits < probe < too_long:
            break
        probe_bytes = measure(probe * step)
        last, last_bytes = fits, fits_bytes
        if probe_bytes <= budget_bytes:
            fits, fits_bytes = probe, probe_bytes
            if too_long_bytes is not None:  # between a length that fits and one that does not
                last, last_bytes = too_long, too_long_bytes
        else:
            too_long, too_long_bytes = probe, probe_bytes
        slope = max(1.0, (probe_bytes - last_bytes) / (probe - last))
        wanted = fits + int((budget_bytes - fits_bytes) // slope)
        if wanted == fits == probe and is_predicted:
            break
        probe, is_predicted = min(max(wanted, fits + 1), too_long - 1), wanted > fits
    return fits * step
