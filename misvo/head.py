"""The LM head and its geometry: everything that the paper does with W happens in this file.

A head is `logits(h) = scale · (W h + b)`; a scalar that a model puts on its logits (Granite, Cohere) folds into
W. Steering never touches h: `W(h+u) = Wh + Wu`, and the shift `Wu` is made once per step, in fp32, because adding
a small u to a bf16 state would erase it. No array here grows with rollouts × positions × vocabulary.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import embedding_bag, linear

from misvo.tie import Tie

BLOCK_BYTES = 16 * 2**20  # working memory of one block of a chunked product


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
            return self._scaled(u @ self.weight.T)
        out = torch.empty(len(u), self.vocab_size, dtype=self.dtype, device=self.device)
        for start, block in self._blocks():
            torch.matmul(u, block.T, out=out[:, start : start + len(block)])
        return self._scaled(out)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Wᵀx, (n, V) -> (n, d); of a token distribution p it is the expected head row m = Wᵀp."""
        if self.weight.dtype == self.dtype:
            return self._scaled(x @ self.weight)
        out = torch.zeros(len(x), self.hidden_size, dtype=self.dtype, device=self.device)
        for start, block in self._blocks():
            out.addmm_(x[:, start : start + len(block)], block)
        return self._scaled(out)

    def project_sparse(self, law) -> torch.Tensor:
        """Wᵀp for a p that is `law.weights` (n, s) on `law.tokens` (n, s) and zero elsewhere; no tokens mean all."""
        tokens, weights = law.tokens, law.weights
        if tokens is None:
            return self.project(weights)
        if self.weight.dtype == self.dtype:
            return self._scaled(embedding_bag(tokens, self.weight, mode="sum", per_sample_weights=weights))
        rows = [w @ self.weight[t].to(self.dtype) for t, w in zip(tokens, weights, strict=True)]
        return self._scaled(torch.stack(rows))

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


@dataclass(frozen=True)
class Fisher:
    """The averaged Fisher matrices of all positions, never formed: F̂_t = (1/K) Σ_i Wᵀ C_{p_i} W (eq:fisher-u).

    With p̄_t = (1/K) Σ_i p_i and m_i = Wᵀp_i the average of K matrices costs one product with W:
    `F̂_t u = Wᵀ(p̄_t ⊙ Wu) − (1/K) Σ_i m_i (m_i·u)`, divided by τ² at temperature τ. Rows that had ended are zero
    in both, and the average still divides by K, as the paper's estimator does. For tied vectors u = B c the product is
    BᵀF̂B c, and `mean_probs` holds the laws pooled as `tie.pool` says.
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
        cross = torch.einsum("ktd,kt->td", m, torch.einsum("ktd,td->kt", m, u)) / len(m)
        spread = self._spread(c, shift) if tie.basis is None else self._tied_spread(c, shift, tie.pairs)
        return (spread - tie.gather(cross)) / self.temperature**2

    def _spread(self, u, shift):
        """Wᵀ(p̄_t ⊙ Wu_t) for every position, a few positions at a time."""
        spread = torch.empty_like(u)
        for block in position_blocks(len(u), self.head):
            logits = self.head.shift(u[block]) if shift is None else shift[block]
            spread[block] = self.head.project(self.mean_probs[block] * logits)
        return spread

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
            matrix.addmm_(W.T, probs[:, None] * W)
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


def softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (n, V) and log-partition values A (n,) of logits (n, V).

    The latter in fp64, so that the difference of two of them keeps its small digits.
    """
    weights, total, partition = _exponentials(logits)
    return weights.div_(total), partition


def log_partition(logits: torch.Tensor) -> torch.Tensor:
    """A alone, for where the law itself is not wanted."""
    return _exponentials(logits)[2]


def _exponentials(logits):
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights, total, (top.double() + total.double().log()).squeeze(-1)


def token_kl(ref_partition, partition, probs, shift) -> torch.Tensor:
    """KL(π_u ‖ π_ref) = A(z) − A(z+δ) + ⟨π_u, δ⟩ of each row (eq:per-token-kl-exact), (n,) in fp64.

    Clamped, because rounding may leave a zero slightly negative.
    """
    return (ref_partition - partition + torch.linalg.vecdot(probs, shift)).clamp_(min=0)
