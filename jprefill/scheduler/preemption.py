"""How long others may hold a running pass up. Between two layers a pass can wait: its activations stay on the device.

    layers of a long pass  | 0 | 1 | 2 |            | 3 | 4 |      | 5 | ...
    shorter passes                     | B | C |          | D |

This is shortest *remaining* processing time: what counts is what is left of the long pass, not what it was. Where
several ride in it, nobody goes first who makes them wait longer, together, than it is spared.

**Not at once.** A pass of its own costs what its requests would not take in a fuller one: fixed cost and padding. All
others pay for that. So shorter ones go first when they have waited for the running pass, together, as long as that is:
who rents until the rent has reached the price never pays more than twice the least (Karlin et al. 1988).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jprefill.scheduler.pieces import Piece
from jprefill.scheduler.queue import PendingRequest

MIN_S = 0.05  # a pass that is shorter than this is not worth a look between its layers
MAX_SHARE = 0.5  # of what is left of the pass: one that goes before it takes at most so long
MAX_DELAY = 1.0  # of the pass's own time: all that go before it together
_TOLERANCE_S = 1e-9  # so that who looks again at the time that was said finds it so


@dataclass(slots=True)
class RunningPass:
    """A pass whose layers are under way.

    Attributes:
      predicted_s: that it takes by itself.
      started_s: by the clock of the decisions.
      delayed_s: that others have held it up.
      look_again_s: when those who wait will have waited long enough to go first, though nobody else comes.
    """

    pieces: Sequence[Piece]
    predicted_s: float
    started_s: float
    delayed_s: float = 0.0
    look_again_s: float = math.inf

    def allowance_s(self, share_left: float) -> float:
        """Seconds that one pass may take that goes first now.

        Args:
          share_left: of its layers that have not run.
        """
        return min(MAX_SHARE * share_left * self.predicted_s, MAX_DELAY * self.predicted_s - self.delayed_s)

    def most_s(self, share_left: float) -> float:
        """Seconds that a request may take which goes first now: who rides waits no longer for it than it is spared."""
        return min(self.allowance_s(share_left), share_left * self.predicted_s / max(1, len(self.pieces)))

    def is_worth(self, riders: Sequence[PendingRequest], cost_s: float, now_s: float) -> bool:
        """Whether requests have waited for this pass, together, as long as the others would for them.

        If not, `look_again_s` says when they will have.

        Args:
          cost_s: seconds that they cost the others, together.
        """
        missing_s = cost_s - sum(now_s - max(pending.submitted_s, self.started_s) for pending in riders)
        is_worth = bool(riders) and missing_s <= _TOLERANCE_S
        self.look_again_s = now_s + missing_s / len(riders) if riders and not is_worth else math.inf
        return is_worth

    def is_wanted(self, now_s: float) -> bool:
        """Whether anybody still waits for an answer of it."""
        return any(
            not piece.pending.future.cancelled()
            and (piece.pending.request.deadline_s is None or now_s <= piece.pending.request.deadline_s)
            for piece in self.pieces
        )
