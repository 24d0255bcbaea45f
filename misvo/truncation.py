"""What samplers leave of a law: top-k, top-p and min-p, each a least probability that a token must have.

They are applied in the order of transformers: the k most probable tokens; of what these hold together, the most
probable that reach `top_p`; of those, the ones with at least `min_p` of the largest probability. Tokens of equal
probability stand or fall together. What is left is renormalised.
"""

from dataclasses import dataclass

import numpy as np
import torch

from misvo.race import FLOOR, Entries


@dataclass(frozen=True)
class Truncation:
    """Which tokens of a law may be drawn."""

    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def keeps_all(self) -> bool:
        return self == Truncation()

    def law(self, probs: torch.Tensor) -> torch.Tensor:
        """The law that is left, (B, V) -> (B, V)."""
        kept = torch.where(probs >= self._least(probs)[:, None], probs, 0.0)
        return kept.div_(kept.sum(-1, keepdim=True))

    def entries(self, probs: torch.Tensor) -> Entries:
        """The same law on a CPU, without its zeros. Few tokens are likely, and mostly all that is kept are of these."""
        likely = self.top_p < 1 and not self.top_k
        return (self._of_likely(probs) if likely else _at_least(probs, self._least(probs))).normalised()

    def _of_likely(self, probs):
        """What is kept under top-p; only laws so flat that less likely tokens stay too are sorted as a whole."""
        likely = Entries.where(probs.numpy() > np.float32(FLOOR), probs)
        least = _least_likely(likely, self.top_p)
        flat = least == 0
        least = torch.maximum(least, self._floor(probs)) if self.min_p else least
        if not flat.any():
            return likely.only(likely.mass >= least[likely.rows])
        del likely  # of flat laws it takes more than the laws
        least[flat] = self._least(probs[flat])
        return _at_least(probs, least)

    def _least(self, probs):
        """The least probability that is kept, (B,)."""
        least = self._floor(probs)
        if self.top_k and self.top_k < probs.shape[-1]:
            falling = probs.topk(self.top_k, dim=-1).values
            held = falling.sum(-1, keepdim=True, dtype=torch.float64)
            return torch.maximum(least, _least_kept(falling, self.top_p * held))
        return torch.maximum(least, _threshold(probs, self.top_p)) if self.top_p < 1 else least

    def _floor(self, probs):
        return probs.amax(-1) * self.min_p


def _at_least(probs, least):
    """The entries of probabilities (B, V) that reach the least (B,) of their row."""
    return Entries.where(probs.numpy() >= least[:, None].numpy(), probs)


def _least_likely(likely, top_p):
    """The least probability that is kept, (B,); 0 where the likely tokens of a row hold less than `top_p`."""
    rows = likely.rows.numpy()
    counts = np.bincount(rows, minlength=likely.shape[0])
    starts = counts.cumsum() - counts
    falling = np.concatenate([_falling(row) for row in np.split(likely.mass.numpy(), starts[1:])]).astype(np.float64)
    ends = np.concatenate([[0.0], falling.cumsum()])
    before = ends[:-1] - ends[starts][rows]  # what the more probable tokens of the same row hold
    kept = np.bincount(rows, weights=before < top_p, minlength=likely.shape[0]).astype(np.int64)
    reached = ends[starts + counts] - ends[starts] >= top_p
    least = np.zeros(likely.shape[0])
    least[reached] = falling[(starts + kept)[reached] - 1]  # where something is reached, something is kept
    return torch.from_numpy(least).to(likely.mass.dtype)


def _threshold(probs, top_p):
    """The least probability that is kept, (B,). A GPU sorts all rows at once, and one by one would stop it."""
    if probs.device.type != "cpu":
        return _least_kept(probs.sort(-1, descending=True).values, top_p)
    rows = (torch.from_numpy(_falling(row))[None] for row in probs.numpy())  # one by one: sums in fp64 take memory
    return torch.cat([_least_kept(falling, top_p) for falling in rows])


def _falling(mass):
    """The largest first. NumPy sorts with vector instructions, a dozen times as fast as PyTorch."""
    return -np.sort(-mass)


def _least_kept(falling, top_p):
    """The smallest probability whose more probable tokens hold less than `top_p`, (B, s) falling -> (B,)."""
    before = falling.cumsum(-1, dtype=torch.float64) - falling
    count = (before < top_p).sum(-1, keepdim=True)
    return falling.gather(-1, count.clamp(min=1) - 1).squeeze(-1)  # a top_p that rounds to 0 keeps the first
