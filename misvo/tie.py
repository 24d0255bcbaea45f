"""Tying vectors across positions: u = B c with a fixed basis B (T, r) and r free vectors c (r, d).

`position` is the paper: one vector for each position, B = I. `shared` is one vector for all of them. `smooth` lies
between: knots at positions 0, 1, 2, 4, 8, … with straight lines in between, so that early positions can differ and late
ones share. A tied gradient sees the samples of many positions, where a per-position one sees K of them.

The Fisher matrix of c is BᵀF̂B. It needs the laws of positions only as the sums Σ_t B_tj B_tk p̄_t of pairs of knots that
overlap, so decoding pools them as it goes: one vocabulary-sized vector for `shared`, instead of T.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Tie:
    positions: int
    basis: torch.Tensor | None = None  # B (T, r); None is the identity

    @property
    def size(self) -> int:
        """r, the number of free vectors."""
        return self.positions if self.basis is None else self.basis.shape[1]

    def spread(self, c: torch.Tensor) -> torch.Tensor:
        """B c: anything per knot (r, ·) to the positions (T, ·)."""
        if self.basis is None:
            return c
        if self.size == 1:
            return c.expand(self.positions, -1)  # no copy: a shared shift costs one row of memory
        return self.basis.to(c) @ c

    def gather(self, g: torch.Tensor) -> torch.Tensor:
        """Bᵀ g: a gradient per position (T, ·) to the knots (r, ·)."""
        return g if self.basis is None else self.basis.to(g).T @ g

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Knots j ≤ k that some position depends on at once."""
        overlap = self.basis.T @ self.basis
        return [(j, k) for j in range(self.size) for k in range(j, self.size) if overlap[j, k] > 0]

    @cached_property
    def pool(self) -> torch.Tensor | None:
        """B_tj B_tk for every pair, (T, pairs); None where each position keeps a law of its own."""
        if self.basis is None:
            return None
        return torch.stack([self.basis[:, j] * self.basis[:, k] for j, k in self.pairs], dim=1)


def position(length: int) -> Tie:
    return Tie(length)


def shared(length: int) -> Tie:
    return Tie(length, torch.ones(length, 1))


def smooth(length: int) -> Tie:
    """Hats over knots that double: 0, 1, 2, 4, …, the last position. Rows of B sum to 1."""
    knots = [0]
    while knots[-1] < length - 1:
        knots.append(min(max(1, 2 * knots[-1]), length - 1))
    basis = torch.zeros(length, len(knots))
    basis[torch.tensor(knots), torch.arange(len(knots))] = 1.0
    for j, (left, right) in enumerate(pairwise(knots)):
        inside = torch.arange(left, right + 1)
        share = (inside - left) / (right - left)
        basis[inside, j], basis[inside, j + 1] = 1 - share, share
    return Tie(length, basis)


TIES = {"position": position, "shared": shared, "smooth": smooth}
