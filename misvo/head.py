"""The LM head and its geometry: everything that the paper does with W happens in this file.

A head is `logits(h) = scale · (W h + b)`; a scalar that a model puts on its logits (Granite, Cohere) folds into
W. Steering never touches h: `W(h+u) = Wh + Wu`, and the shift `Wu` is made once per step, in fp32, because adding
a small u to a bf16 state would erase it. No array here grows with rollouts × positions × vocabulary.
"""

import hashlib
from functools import cached_property

import torch
from torch.nn.functional import embedding_bag

from misvo.linear import linear
from misvo.race import Entries
from misvo.tie import Tie

BLOCK_BYTES = 16 * 2**20  # working memory of one block of a chunked product
GATHER_SHARE = 16  # gathering rows of W is quicker than multiplying where fewer than one in so many is wanted


class Head:
    """A frozen linear head: `weight` (V, d), `bias` (V,) or None, and the scalar that multiplies the logits.

    Mean laws are kept of the columns `part` of the vocabulary: of all, unless the head is split over processes
    (`misvo.sharded`). Methods whose names begin with `part` are for laws that are kept so.
    """

    split = False  # whether other processes have the other rows of W

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0):
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.scale = float(scale)
        self.vocab_size, self.hidden_size = weight.shape
        self.part = slice(0, self.vocab_size)
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

    def part_shift(self, u: torch.Tensor) -> torch.Tensor:
        """The columns `part` of Wu, (n, d) -> (n, P)."""
        return self.shift(u)

    def part_project(self, x: torch.Tensor) -> torch.Tensor:
        """Wᵀx of an x of which the columns `part` are here, (n, P) -> (n, d)."""
        return self.project(x)

    def part_moment(self, x: torch.Tensor) -> torch.Tensor:
        """Σ_v x_v w_v w_vᵀ of an x (P,) of which the columns `part` are here, (d, d)."""
        out = torch.zeros(self.hidden_size, self.hidden_size, dtype=self.dtype, device=self.device)
        few = BLOCK_BYTES // 8 // (self.hidden_size * self.dtype.itemsize)  # that stay in a cache
        size = max(few, self.hidden_size // 2, 1)  # each block writes d×d numbers once more
        for start in range(0, len(x), size):
            rows = self.weight[start : start + size].to(self.dtype)
            out += linear((rows * x[start : start + size, None]).T, rows.T)
        return out.mul_(self.scale**2)

    def part_sums(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the vocabulary of an x of which the columns `part` are here, (n, P) -> (n, 1)."""
        return x.sum(-1, keepdim=True, dtype=self.dtype)

    @cached_property
    def longest_row(self) -> float:
        """The largest norm of a row of W: |Wu| is nowhere more than this times ‖u‖."""
        return abs(self.scale) * torch.linalg.vector_norm(self.weight, dim=1, dtype=self.dtype).max().item()

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
        """W in pieces of bounded size, raised to the steering precision one by one, each in the place of the last."""
        size = min(self.vocab_size, max(1, BLOCK_BYTES // (self.hidden_size * self.dtype.itemsize)))
        raised = torch.empty(size, self.hidden_size, dtype=self.dtype, device=self.device)
        for start in range(0, self.vocab_size, size):
            piece = self.weight[start : start + size]
            yield start, raised[: len(piece)].copy_(piece)


class Shift:
    """Wu of every position, a sequence of rows (V,) that are made as decoding comes to them.

    All of them at once would be T×V numbers. Untied, a few positions are multiplied together; tied, W c of the free
    vectors (r, V) serves all positions.
    """

    POSITIONS = 8  # made together: fewer would read W too often, more would take memory

    def __init__(self, head: Head, c: torch.Tensor, tie: Tie | None = None):
        self.head, self.free, self.tie = head, c, tie or Tie(len(c))
        self.knots = None if self.tie.basis is None else head.shift(c)  # Wc (r, V)
        self._made = {}  # position -> (V,)

    def __len__(self):
        return self.tie.positions

    def __getitem__(self, position: int) -> torch.Tensor:
        if self.knots is not None:
            return self.knots[0] if len(self.knots) == 1 else self.tie.basis[position].to(self.knots) @ self.knots
        if position not in self._made:
            self.make([(self, position)])
        return self._made[position]

    @staticmethod
    def make(asked: list[tuple["Shift", int]]) -> None:
        """Make what several will be asked of at these positions, and the positions that come next: one product, which
        reads W once."""
        places: dict[Shift, set[int]] = {}
        for shift, position in asked:
            if shift.knots is None and position < len(shift):
                places.setdefault(shift, set()).add(position)
        missing = {shift: shift._make_room(at) for shift, at in places.items() if not at <= shift._made.keys()}
        if missing:
            head = next(iter(missing)).head
            free = [shift.free[positions].to(head.device, head.dtype) for shift, positions in missing.items()]
            rows = iter(head.shift(torch.cat(free)))
            for shift, positions in missing.items():
                shift._made |= {position: next(rows) for position in positions}

    def _make_room(self, places: set[int]) -> list[int]:
        """Drop what rows at these places will not want soon; gives what is missing of what they will."""
        ahead = max(1, self.POSITIONS // len(places))  # where rows stand at many places, it is not held for all of them
        soon = {position for place in places for position in range(place, min(place + ahead, len(self)))}
        self._made = {position: row for position, row in self._made.items() if position in soon}
        return sorted(soon - self._made.keys())


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

    δ is (n, V) or (V,). Clamped, because rounding may leave a zero slightly negative. A product of matrix and vector
    by MKL rounds a row otherwise where others stand beside it.
    """
    mean_shift = linear(probs, shift[None])[:, 0] if shift.ndim == 1 else torch.linalg.vecdot(probs, shift)
    return (ref_partition - partition + mean_shift).clamp_(min=0)
