"""The products of a head whose rows of W are split over processes: what tensor parallel steering needs.

Each of n ranks holds some rows of W, in order. Hidden states are the same on all of them, so that all make the same
logits once these are gathered, and with the same random numbers draw the same token; nobody has to be told. Only three
things cross between ranks: slices of Wh and Wu are gathered (all-gather of (B, V/n)), and partial sums of Wᵀp are added
(all-reduce of (B, d)). Mean laws stay split: `fisher_spread` multiplies each rank's own part.

`Gather` and `Reduce` are the two collectives, so that vLLM's, torch's and a test's serve alike.
"""

from collections.abc import Callable

import torch

from misvo.head import Head

Gather = Callable[[torch.Tensor], list[torch.Tensor]]  # a slice of each rank, on every rank, in the order of ranks
Reduce = Callable[[torch.Tensor], torch.Tensor]  # the sum over ranks, on every rank


class ShardedHead:
    """The head of one rank: rows `start` to `start + len(own.weight)` of W."""

    def __init__(self, own: Head, start: int, vocabulary: int, gather: Gather, reduce: Reduce):
        self.own, self.start, self.vocab_size, self._gather, self._reduce = own, start, vocabulary, gather, reduce
        self.part = slice(start, start + own.vocab_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own logits, (B, d) -> (B, V), the same bits on every rank."""
        return self._whole(self.own.logits(hidden))

    def shift(self, u: torch.Tensor) -> torch.Tensor:
        """Wu, (n, d) -> (n, V), the same bits on every rank."""
        return self._whole(self.own.shift(u))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Wᵀx, (n, V) -> (n, d); of x each rank reads the part that its rows belong to."""
        return self._reduce(self.own.project(x[:, self.part].contiguous()))

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """W[y], (...) -> (..., d): the rank that has a row gives it, the others give zeros."""
        inside = (tokens >= self.part.start) & (tokens < self.part.stop)
        local = torch.where(inside, tokens - self.start, 0)
        return self._reduce(self.own.rows(local) * inside[..., None])

    def fisher_spread(self, mean_probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Wᵀ(p̄ ⊙ Wu), (T, d), of a mean law of which each rank has its own part (T, V/n): neither is gathered."""
        return self._reduce(self.own.project(self.own.shift(u).mul_(mean_probs)))

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(part), -1)[:, : self.vocab_size]
