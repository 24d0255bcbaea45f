"""A step that is decoded in blocks: what its rows have said so far, and which of them go on.

Methods that look at rows while they are being written (`misvo.methods.particles`, `misvo.methods.blockwise`) name the
positions at which decoding pauses. At each of them they say which row every row goes on from, and the step continues.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from misvo.rollouts import Request, Rollouts


class Round:
    def __init__(self, request: Request, pauses: tuple[int, ...] = (), scores_pauses: bool = False):
        self.request, self.scores_pauses = request, scores_pauses  # of the whole step
        self.pauses = [*(pause for pause in pauses if pause < request.max_new_tokens), request.max_new_tokens]
        self.over = False  # whether what was gathered is all of the step
        self.seconds = {"reward": 0.0, "update": 0.0}  # what the pauses took
        self._rows: Rollouts | None = None  # from their first token on, None before the first block
        self._start = 0  # where the next block begins
        self._going_on: torch.Tensor | None = None  # rows that the next block continues; None: all, from the prompt on

    def ask(self) -> Request:
        """The next block of the rows that go on; of no row, where all of them have ended."""
        rollouts: Sequence[int] = self.request.rollouts
        beginnings: tuple[tuple[int, ...], ...] = ()
        if self._rows is not None and self._going_on is not None:
            rollouts = [rollouts[row] for row in self._going_on.tolist()]
            tokens = self._rows.tokens[self._going_on.to(self._rows.tokens.device), : self._start]
            beginnings = tuple(tuple(row) for row in tokens.tolist())
        changes = {"rollouts": rollouts, "max_new_tokens": self.pauses[0], "beginnings": beginnings}
        return replace(self.request, **changes, resumable=len(self.pauses) > 1)

    def gather(self, block: Rollouts | None) -> Rollouts:
        """All rows from their first token on, now that a block was decoded; None where there was no row to decode."""
        if self._rows is None:
            assert block is not None
            self._rows = block if len(self.pauses) == 1 else block.widened(self.request.max_new_tokens)
        elif block is not None and self._going_on is not None:
            self._rows = self._rows.continued(block, self._going_on, self._start)
        self._start = self.pauses.pop(0)
        self.over = self._start == self.request.max_new_tokens or not len(self._alive(self._rows))
        return self._rows

    def go_on(self, ancestors: torch.Tensor) -> None:
        """Row k goes on from row `ancestors[k]`, with random numbers of its own."""
        assert self._rows is not None
        self._rows = self._rows.chosen(ancestors)
        self._going_on = self._alive(self._rows)

    def _alive(self, rows: Rollouts) -> torch.Tensor:
        assert rows.ended is not None
        return torch.nonzero(~rows.ended.cpu())[:, 0]
