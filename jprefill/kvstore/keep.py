"""What is worth keeping: the policy behind `EngineConfig.keep`. No JAX.

    prompt     | prefix that items share | a marked part | what others share | single use        |
    prefix     | kept ---------------------------------------------------> | discarded         |

Suffix discarding (PrefillOnly, arXiv 2505.07203): KV that nobody will ask for never leaves the pass that made it.
"""

from jprefill.config import Keep
from jprefill.kvstore.ghosts import Ghosts
from jprefill.kvstore.hashing import BlockKeys
from jprefill.types import ScoreRequest


class KeepPolicy:
    """Decides how many leading blocks of a prompt to keep. Only the engine thread may call it.

    A block that two requests had, waiting or answered, is shared; which they were is remembered for `max_keys` blocks.
    """

    def __init__(self, keep: Keep, max_keys: int):
        self._keep = keep
        self._seen = Ghosts(max_keys)
        self._repeated = Ghosts(max_keys)

    def arrive(self, keys: BlockKeys) -> None:
        """Counts a request that waits from now on."""
        if self._keep == "prefix":
            self._repeated.add(keys.head(self._seen.seen_before(keys)))
            self._seen.add(keys)

    def num_repeated(self, keys: BlockKeys) -> int:
        """Leading blocks that at least two requests had."""
        return self._repeated.seen_before(keys)

    def num_kept(self, request: ScoreRequest, keys: BlockKeys, block_size: int) -> int:
        """Leading blocks worth keeping, whole ones only."""
        if self._keep == "none" or not request.uses_store:
            return 0
        return len(keys) if self._keep == "all" else self.num_shared(request, keys, block_size)

    def num_shared(self, request: ScoreRequest, keys: BlockKeys, block_size: int) -> int:
        """Leading whole blocks that others have too: as the request says, or as was seen."""
        num_declared = max(len(request.prefix), request.num_marked_tokens) // block_size
        return min(len(keys), max(num_declared, self.num_repeated(keys)))
