"""Who may join a pass that has its first request. Pure Python.

    rows of a pass, in chunks | first | joins up to the budget ... | padding of the last chunk |
                                                                   └ whoever fits here costs nothing

Up to the budget every token makes the pass more efficient. Beyond it only padding is won: two prompts of 257 tokens
walk four chunks of 256 one by one, and three together. A request joins for that if it makes those inside wait no longer
than it and those behind it are spared.
"""

from collections.abc import Callable
from dataclasses import dataclass

MAX_PADDING = 0.125  # of a pass's rows: with less, nobody joins beyond the budget


@dataclass(frozen=True, slots=True)
class Filling:
    """The limits of one pass.

    Attributes:
      budget: tokens up to which others join; 0: nobody does.
      max_tokens: nobody joins beyond it.
      num_waiting: requests, those that ride included.
      num_rows: what so many tokens walk, padding included.
    """

    budget: int
    max_tokens: int
    num_waiting: int = 0
    num_rows: Callable[[int], int] = lambda num_tokens: num_tokens

    def may_join(self, num_new: int, num_tokens: int, num_inside: int) -> bool:
        """Whether one more request may ride.

        Args:
          num_new: tokens that it brings.
          num_tokens: in the pass so far, of `num_inside` requests.
        """
        if not self.budget or num_tokens + num_new > self.max_tokens:
            return False
        return num_tokens + num_new <= self.budget or self._pays(num_new, num_tokens, num_inside)

    def _pays(self, num_new: int, num_tokens: int, num_inside: int) -> bool:
        rows = self.num_rows(num_tokens)
        if rows - num_tokens <= MAX_PADDING * rows:
            return False
        longer = self.num_rows(num_tokens + num_new) - rows
        spared = self.num_rows(num_new) - longer
        return num_inside * longer <= (self.num_waiting - num_inside) * spared
