"""How long others may hold a running pass up. Between two layers a pass can wait: its activations stay on the device.

    layers of a long pass  | 0 | 1 | 2 |            | 3 | 4 |      | 5 | ...
    shorter passes                     | B | C |          | D |

This is shortest *remaining* processing time: what counts is what is left of the long pass, not what it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jprefill.scheduler.pieces import Piece

MIN_S = 0.05  # a pass that is shorter than this is not worth a look between its layers
MAX_SHARE = 0.5  # of what is left of the pass: one that goes before it takes at most so long
MAX_DELAY = 1.0  # of the pass's own time: all that go before it together


@dataclass(slots=True)
class RunningPass:
    """A pass whose layers are under way.

    Attributes:
      predicted_s: that it takes by itself.
      delayed_s: that others have held it up.
    """

    pieces: Sequence[Piece]
    predicted_s: float
    delayed_s: float = 0.0

    def allowance_s(self, share_left: float) -> float:
        """Seconds that one pass may take that goes first now.

        Args:
          share_left: of its layers that have not run.
        """
        return min(MAX_SHARE * share_left * self.predicted_s, MAX_DELAY * self.predicted_s - self.delayed_s)

    def is_wanted(self, now_s: float) -> bool:
        """Whether anybody still waits for an answer of it."""
        return any(
            not piece.pending.future.cancelled()
            and (piece.pending.request.deadline_s is None or now_s <= piece.pending.request.deadline_s)
            for piece in self.pieces
        )
