"""Cost matrices Σ_t of eq:objective: what the penalty ½ Σ_t u_tᵀ Σ_t u_t calls far.

A cost sees each step's rollouts once and then gives the gradient Σ_t u_t for all positions. The names are those of
`misvo.settings.COSTS`; the table at the end is the whole dispatch.
"""

from dataclasses import dataclass

import torch

from misvo.decoding import Rollouts
from misvo.head import Fisher, Head


@dataclass
class Cost:
    """No penalty: Σ_t = 0. The other costs override what differs."""

    head: Head
    temperature: float = 1.0

    def needs_fisher(self, step: int) -> bool:
        """Whether this step's decoding has to collect the mean law and the untruncated expected rows."""
        return False

    def observe(self, step: int, rollouts: Rollouts) -> None:
        """Take from the step's rollouts what later gradients need."""

    def gradient(self, u: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        """Σ_t u_t at every position, (T, d) -> (T, d); `shift` is Wu (T, V), None while u is zero."""
        return torch.zeros_like(u)


class Euclidean(Cost):
    """Σ_t = I: the squared length of the hidden-space shift, blind to what it does to the tokens."""

    def gradient(self, u, shift):
        return u


class FrozenFisher(Cost):
    """Σ_t = F̂_t, the Fisher matrix at zero averaged over the first step's prefixes (eq:surr-offoff).

    At the first step u = 0, so its rollouts follow the reference policy and the estimate costs no generation.
    """

    fisher: Fisher | None = None

    def needs_fisher(self, step):
        return step == 0

    def observe(self, step, rollouts):
        if step == 0:
            self.fisher = Fisher(self.head, rollouts.mean_probs, rollouts.fisher_rows, self.temperature)

    def gradient(self, u, shift):
        return torch.zeros_like(u) if shift is None else self.fisher.product(u, shift)


COSTS = {
    "frozen-fisher": FrozenFisher,
    "euclidean": Euclidean,
    "none": Cost,
}
