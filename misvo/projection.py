"""Token distributions on their way to becoming expected head rows m = Wᵀp.

A product with the few rows of one token spends its time on reading W; the rows of two or three tokens cost little more.
So laws are written into one buffer, and multiplied when it is full or when a request ends.
"""

import torch

from misvo.head import Head

BYTES = 8 * 2**20  # of the buffer, or as much as the rows of one token take


class Projection:
    """One buffer of laws (n, V), and the places where their expected rows belong."""

    def __init__(self, head: Head):
        self.head, self.used, self.pending = head, 0, []
        self.buffer = torch.empty(0, head.vocab_size, dtype=head.dtype, device=head.device)

    def space(self, rows: int) -> torch.Tensor:
        """Where the next laws go, (rows, V)."""
        if self.used + rows > len(self.buffer):
            self.flush()
        if rows > len(self.buffer):
            room = max(rows, BYTES // (self.head.vocab_size * self.head.dtype.itemsize))
            self.buffer = torch.empty(room, self.head.vocab_size, dtype=self.head.dtype, device=self.head.device)
        return self.buffer[self.used : self.used + rows]

    def keep(self, wanted: list[tuple[slice, torch.Tensor, tuple]], rows: int) -> None:
        """Have Wᵀp of slices of the last space written to places (target, index) when their time comes."""
        for block, target, index in wanted:
            self.pending.append((slice(self.used + block.start, self.used + block.stop), target, index))
        self.used += rows if wanted else 0

    def flush(self) -> None:
        if self.pending:
            expected = self.head.project(self.buffer[: self.used])
            for block, target, index in self.pending:
                target[index] = expected[block]
        self.used, self.pending = 0, []
