"""Who came from whom: the blocks of a step, and what all rows that were drawn in them say of the rows that remain.

The law that survivors follow, q, is not the one that tokens were drawn from. A policy comes closer to it by climbing
E_q[log π_u], and every block has an estimate of that gradient: the scores of its rows, weighted with the share of the
final weight that descends from each. Rows that died out count as well, with what they lack: given their past, scores
have mean zero, so each row is measured against the mean of the others that were drawn beside it.
"""

from dataclasses import dataclass

import torch

from misvo.credit import leave_one_out
from misvo.head import Head
from misvo.rollouts import Rollouts


@dataclass(frozen=True)
class _Block:
    start: int
    tokens: torch.Tensor  # (K, b)
    score_rows: torch.Tensor  # (K, b, d)
    drawn: torch.Tensor  # (K, b) bool, tokens that this block drew
    ancestors: torch.Tensor  # (K,) the rows of this block that the next one goes on from


class Genealogy:
    """The blocks of one step under a policy whose scores were kept."""

    def __init__(self):
        self._blocks: list[_Block] = []
        self._start = 0

    def add(self, rollouts: Rollouts, ancestors: torch.Tensor) -> None:
        """A block has ended: all rows so far, and which of them go on."""
        end = int(rollouts.lengths.max())
        block = slice(self._start, end)
        assert rollouts.score_rows is not None
        rows = (rollouts.tokens[:, block], rollouts.score_rows[:, block], rollouts.alive[:, block])
        self._blocks.append(_Block(self._start, *(kept.clone() for kept in rows), ancestors))
        self._start = end

    def gradient(self, head: Head, weights: torch.Tensor, positions: int, temperature: float) -> torch.Tensor:
        """∇ of E_q[log π_u] at every position, (T, d), where the last rows have these weights (K,)."""
        total = torch.zeros(positions, head.hidden_size, dtype=head.dtype, device=head.device)
        share = weights.double()
        for block in reversed(self._blocks):
            share = torch.zeros_like(share).index_add_(0, block.ancestors, share)  # of each row's descendants
            alive = block.drawn.any(1).cpu()
            worth = torch.zeros_like(share)
            worth[alive] = leave_one_out(share[alive])
            weighted = worth.to(head.device, head.dtype)[:, None] * block.drawn / temperature  # (K, b)
            scores = head.rows(block.tokens) - block.score_rows
            end = block.start + block.tokens.shape[1]
            total[block.start : end] += torch.einsum("kt,ktd->td", weighted, scores)
        return total
