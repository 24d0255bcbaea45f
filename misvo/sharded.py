"""A head whose rows of W are split over processes: what tensor parallel steering needs.

Each of n ranks holds `width` rows of W, in order; the last ones may hold fewer. All ranks are called alike. Once slices
of logits are gathered they are the same bits on all ranks, even if hidden states differ in the last one; so with the
same random numbers all draw the same token, and nobody has to be told. Three things cross between ranks: slices of Wh
and of Wu are gathered (B, V/n), and partial sums of Wᵀp (B, d) are added. Mean laws stay split.

`Gather` and `Reduce` are the two collectives, so that vLLM's and torch's serve alike.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch.nn.functional import pad

from misvo.head import Head
from misvo.race import Entries

Gather = Callable[[torch.Tensor], torch.Tensor]  # (B, c) of each rank -> (B, n·c) on every rank, in the order of ranks
Reduce = Callable[[torch.Tensor], torch.Tensor]  # the sum over ranks, on every rank


class ShardedHead(Head):
    """The head of one rank: rows from `rank · width` on, as many as `own` has of them."""

    split = True

    def __init__(self, own: Head, rank: int, width: int, vocabulary: int, gather: Gather, reduce: Reduce):
        super().__init__(own.weight, own.bias, own.scale)
        self.own, self.width, self.vocab_size, self._gather, self._reduce = own, width, vocabulary, gather, reduce
        self.part = slice(rank * width, rank * width + own.vocab_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._whole(self.own.logits(hidden))

    def shift(self, u: torch.Tensor) -> torch.Tensor:
        return self._whole(self.own.shift(u))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.part_project(x[:, self.part].contiguous())

    def project_entries(self, x: Entries) -> torch.Tensor:
        mine = x.only(self._has(x.tokens))
        here = Entries((x.shape[0], self.own.vocab_size), mine.rows, mine.tokens - self.part.start, mine.mass)
        return self._sum(self.own.project_entries(here))

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """W[y]: the rank that has a row gives it, the others give zeros."""
        mine = self._has(tokens)
        return self._sum(self.own.rows(torch.where(mine, tokens - self.part.start, 0)) * mine[..., None])

    def part_shift(self, u: torch.Tensor) -> torch.Tensor:
        return self.own.shift(u)

    def part_project(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(self.own.project(x))

    def part_moment(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(self.own.part_moment(x))

    def part_sums(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(self.own.part_sums(x))

    @cached_property
    def longest_row(self) -> float:
        longest = torch.full((1, 1), self.own.longest_row, dtype=self.dtype, device=self.device)
        return self._gather(longest).max().item()

    def _has(self, tokens):
        return (tokens >= self.part.start) & (tokens < self.part.stop)

    # Of no rows nothing is exchanged: vLLM's ranks divide by the size of what they gather in shared memory, and die.

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduce(x) if x.numel() else x

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        if not len(part):  # a rank without rows of W sends zeros, as the others send theirs
            return part.new_zeros(0, self.vocab_size)
        return self._gather(pad(part, (0, self.width - part.shape[-1])))[:, : self.vocab_size]
