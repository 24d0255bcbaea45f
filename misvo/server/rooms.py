"""How many rows may decode at once: as many as memory holds of the prompts that are open now.

Reckoned for the longest prompt that a server takes, a handful of rows would be left for everybody. So it is reckoned
anew whenever a prompt comes or goes, as `steer_many` reckons for the prompts that it has: by the longest of them, and
by the settings that leave the least room.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from misvo import footprint
from misvo.draw import Draw
from misvo.model import free_memory
from misvo.policy import Policy
from misvo.run import Run
from misvo.settings import Settings


class Rooms:
    def __init__(self, policy: Policy, most: int | None):
        """`most`: the operator's own limit, in the place of what fits memory."""
        self.most = policy.engine(most or footprint.MOST_ROWS).max_rows  # vLLM has a limit of its own
        self.memory = free_memory(policy.head.device) // 2  # before any request: what they take is theirs
        self._shape = footprint.Shape.of(policy) if most is None and isinstance(policy, Policy) else None

    def rows(self, open_runs: Iterable[Run | Draw]) -> int:
        """For these runs together."""
        runs = list(open_runs)
        if self._shape is None or not runs:
            return self.most
        shape, longest = self._shape, max(len(run.tokens) for run in runs)
        kinds = {_kind(run.settings) for run in runs}
        fit = [footprint.rows_that_fit(shape, kind, longest, len(runs), self.memory) for kind in kinds]
        return min(self.most, *fit)

    def ran_out(self, rows: int) -> None:
        """Memory was not enough for more rows than these, whatever was reckoned."""
        self.most = min(self.most, rows)


@lru_cache(maxsize=1024)
def _kind(settings: Settings) -> Settings:
    """What decides the memory of a run: two that differ by their seed alone are of one kind."""
    return replace(settings, seed=0, stop=(), chat_template_kwargs=None)
