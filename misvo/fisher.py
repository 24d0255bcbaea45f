"""Averaged Fisher matrices of the head, by products that never form them (eq:fisher-u, eq:fisher-effort)."""

from dataclasses import dataclass
from functools import cached_property

import torch

from misvo.errors import MisvoError
from misvo.far import Far
from misvo.head import BLOCK_BYTES, Head
from misvo.tie import Tie


@dataclass(frozen=True)
class Fisher:
    """The averaged Fisher matrices of all positions, never formed: F̂_t = (1/K) Σ_i Wᵀ C_{p_i} W (eq:fisher-u).

    With p̄_t = (1/K) Σ_i p_i and m_i = Wᵀp_i the average of K matrices costs one product with W:
    `F̂_t u = Wᵀ(p̄_t ⊙ Wu) − (1/K) Σ_i m_i (m_i·u)`, divided by τ² at temperature τ. Rows that had ended are zero
    in both, and the average still divides by K, as the paper's estimator does. For tied vectors u = B c the product is
    BᵀF̂B c, and `mean_probs` holds the laws pooled as `tie.pool` says.

    p̄ may be stored in bf16, at half the memory. Each entry is then off by a factor within 1 ± ε, ε = 2⁻⁸ for every time
    that it was rounded. Untied, rows of W are taken relative to their mean m̄ under p̄, so the matrix that is multiplied
    with is G̃ − B, where G = Σ_v p̄_v (w_v − m̄)(w_v − m̄)ᵀ is all variance, B that between rollouts, and F̂ = G − B. The
    error of a quadratic form is Σ_v δ_v ((w_v − m̄)·u)² with |δ_v| ≤ ε p̄_v, so |uᵀ(F̃ − F̂)u| ≤ ε uᵀGu: a part of the
    variance along u, whatever the size of u, of W or of the vocabulary.
    """

    head: Head
    mean_probs: torch.Tensor  # p̄ (T, V), or pooled (P, V); of a head that is split, the columns `head.part`
    expected_rows: torch.Tensor  # m (K, T, d)
    temperature: float = 1.0
    tie: Tie | None = None

    def product(self, c: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """The product with free vectors c, (r, d) -> (r, d). `shift` is `head.part_shift(c)`, if it is there."""
        tie = self.tie or Tie(len(c))
        m, u = self.expected_rows, tie.spread(c)
        if tie.basis is None:
            return self._untied(u, shift) / self.temperature**2
        cross = torch.einsum("ktd,kt->td", m, torch.einsum("ktd,td->kt", m, u)) / len(m)
        return (self._tied_spread(c, shift, tie.pairs) - tie.gather(cross)) / self.temperature**2

    def _untied(self, u, shift):
        """G̃u − Bu for every position, a few positions at a time."""
        m, alive, centre = self.expected_rows, self._alive, self._centre
        along = (centre * u).sum(-1, keepdim=True)  # m̄·u (T, 1)
        between = torch.einsum("ktd,kt->td", m, torch.einsum("ktd,td->kt", m, u)) / len(m) - alive * along * centre
        product = torch.empty_like(u)
        for block in position_blocks(len(u), self.head):
            product[block] = self._variance(block, u, along, shift)
        return product - between

    def _variance(self, block, u, along, shift):
        """G̃u of a block of positions; at most one array of its size is alive at a time."""
        head = self.head
        logits = head.part_shift(u[block]).sub_(along[block]) if shift is None else shift[block] - along[block]
        weighted = logits.mul_(self.mean_probs[block])  # p̄_v (w_v − m̄)·u, (b, V)
        # Their sum is zero but for the rounding of p̄; taking it off keeps the matrix symmetric.
        return head.part_project(weighted) - head.part_sums(weighted) * self._centre[block]

    @cached_property
    def _alive(self):
        """The share of rows that have a law at each position, (T, 1)."""
        count = len(self.expected_rows)
        return self.head.part_sums(self.mean_probs).mul_(count).round_() / count

    @cached_property
    def _centre(self):
        """m̄ = Wᵀp̄ of the rows that have a law, (T, d)."""
        return self.expected_rows.mean(0) / self._alive.clamp(min=1 / len(self.expected_rows))

    def _tied_spread(self, c, shift, pairs):
        """Wᵀ Σ_k P_jk ⊙ Wc_k for every knot j, where P_jk is the law pooled for the pair."""
        shift = self.head.part_shift(c) if shift is None else shift
        weighted = torch.zeros_like(shift)
        for law, (j, k) in zip(self.mean_probs, pairs, strict=True):
            weighted[j].addcmul_(law, shift[k])
            if j != k:
                weighted[k].addcmul_(law, shift[j])
        return self.head.part_project(weighted)

    def formed(self) -> "ExplicitFisher":
        """The same estimate as matrices of d×d, one for each position or one for the vector that all positions share.

        Each takes V·d² multiplications. From then on products are free of the vocabulary, where each read W twice.
        """
        m = self.expected_rows
        rows = m if self.tie is None or self.tie.basis is None else m.flatten(0, 1)[:, None]  # (K·T, 1, d): u_t = c
        matrices = torch.einsum("ktd,kte->tde", rows, rows).div_(-len(m))
        for matrix, law in zip(matrices, self.mean_probs, strict=True):
            matrix += self.head.part_moment(law.to(matrix.dtype))
        return ExplicitFisher(matrices.div_(self.temperature**2))


@dataclass(frozen=True)
class FarFisher:
    """The same products, made where the mean laws are: vectors (r, d) go there and come back."""

    laws: Far
    temperature: float = 1.0
    tie: Tie | None = None

    def product(self, c: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        return self.laws.run(_product, c, self.temperature, self.tie)

    def formed(self) -> "ExplicitFisher":
        if self.tie is None or self.tie.basis is None:
            raise MisvoError(
                "explicit_fisher makes a matrix for each position, too many to be sent: leave it out here."
            )
        return ExplicitFisher(self.laws.run(_matrices, self.temperature, self.tie))


def _product(head, rollouts, c, temperature, tie):
    return Fisher(head, rollouts.mean_probs, rollouts.fisher_rows, temperature, tie).product(c.to(head.device))


def _matrices(head, rollouts, temperature, tie):
    return Fisher(head, rollouts.mean_probs, rollouts.fisher_rows, temperature, tie).formed().matrices


@dataclass(frozen=True)
class ExplicitFisher:
    """Averaged Fisher matrices that were formed, (T, d, d), or (1, d, d) of a shared vector."""

    matrices: torch.Tensor

    def product(self, u: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        return torch.einsum("tde,te->td", self.matrices, u)


def position_blocks(positions: int, head: Head) -> list[slice]:
    """Slices of positions so small that a vocabulary-sized vector for each stays within BLOCK_BYTES."""
    size = max(1, BLOCK_BYTES // (head.vocab_size * head.dtype.itemsize))
    return [slice(start, min(start + size, positions)) for start in range(0, positions, size)]
