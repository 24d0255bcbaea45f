"""The LM head and its geometry: everything that the paper does with W happens in this file.

A head is `logits(h) = scale · (W h + b)`; a scalar that a model puts on its logits (Granite, Cohere) folds into
W. Steering never touches h: `W(h+u) = Wh + Wu`, and the shift `Wu` is made once per step, in fp32, because adding
a small u to a bf16 state would erase it. No array here grows with rollouts × positions × vocabulary.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import embedding_bag

from misvo.linear import linear
from misvo.race import Entries
from misvo.tie import Tie

BLOCK_BYTES = 16 * 2**20  # working memory of one block of a chunked product
GATHER_SHARE = 16  # gathering rows of W is quicker than multiplying where fewer than one in so many is wanted


class Head:
    """A frozen linear head: `weight` (V, d), `bias` (V,) or None, and the scalar that multiplies the logits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0):
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.scale = float(scale)
        self.vocab_size, self.hidden_size = weight.shape
        self.device = weight.device
        # All steering arithmetic is at least fp32, whatever the weights are stored in.
        self.dtype = torch.promote_types(weight.dtype, torch.float32)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own logits, (B, d) -> (B, V): multiplied in the model's precision, kept in fp32."""
        product = linear(hidden.to(self.device, self.weight.dtype), self.weight, self.bias)
        return self._scaled(product.to(self.dtype))

    def shift(self, u: torch.Tensor) -> torch.Tensor:
        """Wu for many vectors at once, (n, d) -> (n, V)."""
        u = u.to(self.device, self.dtype)
        if self.weight.dtype == self.dtype:
            return self._scaled(linear(u, self.weight))
        out = torch.empty(len(u), self.vocab_size, dtype=self.dtype, device=self.device)
        for start, block in self._blocks():
            torch.matmul(u, block.T, out=out[:, start : start + len(block)])
        return self._scaled(out)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Wᵀx, (n, V) -> (n, d); of a token distribution p it is the expected head row m = Wᵀp."""
        if self.weight.dtype == self.dtype:
            return self._scaled(linear(x, self.weight.T))
        out = torch.zeros(len(x), self.hidden_size, dtype=self.dtype, device=self.device)
        for start, block in self._blocks():
            out.addmm_(x[:, start : start + len(block)], block)
        return self._scaled(out)

    def project_entries(self, x: Entries) -> torch.Tensor:
        """Wᵀx as `project`, for an x that is mostly zeros: rows of W are gathered, or multiplied where they are many.

        Which of the two is decided for each row by itself, so that its last digits do not depend on its batch mates.
        """
        if self.weight.dtype != self.dtype:
            return self.project(x.dense())
        counts = torch.bincount(x.rows, minlength=x.shape[0])
        wide = counts > x.shape[1] // GATHER_SHARE
        if wide.all():
            return self.project(x.dense())
        narrow, counts = ~wide[x.rows], counts.masked_fill(wide, 0)
        product = embedding_bag(
            x.tokens[narrow], self.weight, counts.cumsum(0) - counts, mode="sum", per_sample_weights=x.mass[narrow]
        )
        if wide.any():
            product[wide] = linear(x.dense()[wide], self.weight.T)
        return self._scaled(product)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """W[y], (...) -> (..., d)."""
        return self._scaled(self.weight[tokens].to(self.dtype))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the head that is the same for every precision the model may be loaded in.

        1024 evenly spaced rows, rounded to bf16: any checkpoint that is bf16 or finer agrees with itself.
        """
        picks = torch.linspace(0, self.vocab_size - 1, min(1024, self.vocab_size)).long().to(self.device)
        sample = self.weight[picks].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
        shape = f"{self.vocab_size}x{self.hidden_size}x{self.scale:g}".encode()
        return hashlib.blake2b(shape + sample, digest_size=16).hexdigest()

    def _scaled(self, x):
        return x if self.scale == 1.0 else x.mul_(self.scale)

    def _blocks(self):
        """W in pieces of bounded size, raised to the steering precision one at a time."""
        size = max(1, BLOCK_BYTES // (self.hidden_size * self.dtype.itemsize))
        for start in range(0, self.vocab_size, size):
            yield start, self.weight[start : start + size].to(self.dtype)


class Shift:
    """Wu of every position, a sequence of rows (V,) that are made as decoding comes to them.

    All of them at once would be T×V numbers. Untied, a few positions are multiplied together; tied, W c of the free
    vectors (r, V) serves all positions.
    """

    POSITIONS = 8  # made together: fewer would read W too often, more would take memory

    def __init__(self, head: Head, c: torch.Tensor, tie: Tie | None = None):
        self.head, self.free, self.tie = head, c, tie or Tie(len(c))
        self.knots = None if self.tie.basis is None else head.shift(c)  # Wc (r, V)
        self._made = {}  # block of positions -> (positions, V); two blocks, for rows that stand at two places

    def __len__(self):
        return self.tie.positions

    def __getitem__(self, position: int) -> torch.Tensor:
        if self.knots is not None:
            return self.knots[0] if len(self.knots) == 1 else self.tie.basis[position].to(self.knots) @ self.knots
        block, offset = divmod(position, self.POSITIONS)
        if block not in self._made:
            if len(self._made) > 1 or block - 1 in self._made:  # rows moved on; who stands behind makes it again
                self._made.pop(next(iter(self._made)))
            start = block * self.POSITIONS
            self._made[block] = self.head.shift(self.free[start : start + self.POSITIONS])
        return self._made[block][offset]


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
    mean_probs: torch.Tensor  # p̄ (T, V), or pooled (P, V)
    expected_rows: torch.Tensor  # m (K, T, d)
    temperature: float = 1.0
    tie: Tie | None = None

    def product(self, c: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """The product with free vectors c, (r, d) -> (r, d). `shift` is Wc (r, V) where the caller has it already."""
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
        logits = self.head.shift(u[block]).sub_(along[block]) if shift is None else shift[block] - along[block]
        weighted = logits.mul_(self.mean_probs[block])  # p̄_v (w_v − m̄)·u, (b, V)
        # Their sum is zero but for the rounding of p̄; taking it off keeps the matrix symmetric.
        return self.head.project(weighted) - weighted.sum(-1, keepdim=True) * self._centre[block]

    @cached_property
    def _alive(self):
        """The share of rows that have a law at each position, (T, 1)."""
        count = len(self.expected_rows)
        return self.mean_probs.sum(-1, keepdim=True, dtype=self.head.dtype).mul_(count).round_() / count

    @cached_property
    def _centre(self):
        """m̄ = Wᵀp̄ of the rows that have a law, (T, d)."""
        return self.expected_rows.mean(0) / self._alive.clamp(min=1 / len(self.expected_rows))

    def _tied_spread(self, c, shift, pairs):
        """Wᵀ Σ_k P_jk ⊙ Wc_k for every knot j, where P_jk is the law pooled for the pair."""
        shift = self.head.shift(c) if shift is None else shift
        weighted = torch.zeros_like(shift)
        for law, (j, k) in zip(self.mean_probs, pairs, strict=True):
            weighted[j].addcmul_(law, shift[k])
            if j != k:
                weighted[k].addcmul_(law, shift[j])
        return self.head.project(weighted)

    def formed(self) -> "ExplicitFisher":
        """The same estimate as T matrices of d×d: T·V·d² to form, and from then on free of the vocabulary."""
        m, W = self.expected_rows, self.head.weight.to(self.head.dtype) * self.head.scale
        matrices = torch.einsum("ktd,kte->tde", m, m).div_(-len(m))
        for matrix, probs in zip(matrices, self.mean_probs, strict=True):
            matrix.addmm_(W.T, probs[:, None].to(W) * W)
        return ExplicitFisher(matrices.div_(self.temperature**2))


@dataclass(frozen=True)
class ExplicitFisher:
    """Averaged Fisher matrices that were formed (T, d, d), for a small d and many steps."""

    matrices: torch.Tensor

    def product(self, u: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        return torch.einsum("tde,te->td", self.matrices, u)


def position_blocks(positions: int, head: Head) -> list[slice]:
    """Slices of positions so small that a vocabulary-sized vector for each stays within BLOCK_BYTES."""
    size = max(1, BLOCK_BYTES // (head.vocab_size * head.dtype.itemsize))
    return [slice(start, min(start + size, positions)) for start in range(0, positions, size)]


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Logits with the largest moved to 0, in place: the same law, with rounding that is small where it matters."""
    return logits.sub_(logits.amax(-1, keepdim=True))


def softmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (n, V) and log-partition values A (n,) of logits (n, V).

    A = z − log p at any token; at the most probable one neither is small, and in fp64 the difference of two A keeps
    its small digits.
    """
    probs = torch.softmax(logits, -1, out=out)
    return probs, logits.amax(-1).double() - probs.amax(-1).double().log()


def log_partition(logits: torch.Tensor) -> torch.Tensor:
    """A alone, for where the law itself is not wanted."""
    return softmax(logits)[1]


def token_kl(ref_partition, partition, probs, shift) -> torch.Tensor:
    """KL(π_u ‖ π_ref) = A(z) − A(z+δ) + ⟨π_u, δ⟩ of each row (eq:per-token-kl-exact), (n,) in fp64.

    δ is (n, V) or (V,). Clamped, because rounding may leave a zero slightly negative.
    """
    mean_shift = probs @ shift if shift.ndim == 1 else torch.linalg.vecdot(probs, shift)
    return (ref_partition - partition + mean_shift).clamp_(min=0)
