"""Cost matrices Σ_t of eq:objective: what the penalty ½ Σ_t u_tᵀ Σ_t u_t calls far.

A cost sees each step's rollouts once and then gives the gradient of the penalty for all positions, without anything
of the size K×T×V. The names are those of `misvo.names.COSTS`; the table at the end is the whole dispatch.
"""

import math
from dataclasses import dataclass

import torch

from misvo.far import Far
from misvo.fisher import FarFisher, Fisher
from misvo.head import Head
from misvo.rollouts import Law, Rollouts
from misvo.sampling import Sampler
from misvo.tie import Tie

COLUMNS = 32  # d×d numbers take as long to make as d / COLUMNS products that read W twice (d = 576: 20)


@dataclass
class Cost:
    """No penalty: Σ_t = 0. The other costs override what differs.

    Vectors come as the free ones c (r, d) of `tie`, u = B c, and so do gradients; untied, c is u.
    """

    head: Head
    sampler: Sampler
    tie: Tie
    explicit: bool = False  # form the frozen Fisher matrices, T·d² numbers, instead of multiplying without them

    def needs_fisher(self, step: int) -> Law | None:
        """The law whose mean and expected rows this step's decoding has to collect: "steered", "reference", none."""
        return None

    def observe(self, step: int, rollouts: Rollouts) -> None:
        """Take from the step's rollouts what gradients need."""

    def product(self, c: torch.Tensor) -> torch.Tensor:
        """BᵀΣB c, (r, d) -> (r, d)."""
        return torch.zeros_like(c)

    def gradient(self, c: torch.Tensor) -> torch.Tensor:
        """∇ of the penalty."""
        return self.product(c) if c.any() else torch.zeros_like(c)

    def release(self) -> None:
        """Let go of what the next step collects anew."""


class Euclidean(Cost):
    """Σ_t = I: the squared length of the hidden-space shift, blind to what it does to the tokens."""

    def product(self, c):
        return self.tie.gather(self.tie.spread(c))


class FrozenFisher(Cost):
    """F̄_t u_t: the Fisher matrix at zero, averaged over the first step's prefixes (eq:surr-offoff).

    At the first step u = 0, so its rollouts follow the reference policy and the estimate costs no generation. The one
    matrix of a shared vector is formed once as many products were made as that takes: a natural step makes some twenty.
    """

    until_formed: float = math.inf  # so many products are still made without the matrix

    def needs_fisher(self, step):
        return "steered" if step == 0 else None

    def observe(self, step, rollouts):
        if step == 0:
            fisher, width = self._fisher(rollouts), self.head.hidden_size
            self.fisher = fisher.formed() if self.explicit else fisher
            shared = self.tie.basis is not None and self.tie.size == 1
            if shared and width <= rollouts.tokens.numel():  # it holds no more than the expected rows that it replaces
                self.until_formed = width // COLUMNS

    def product(self, c):
        if self.until_formed == 0:
            self.fisher = self.fisher.formed()
        self.until_formed -= 1
        return self.fisher.product(c)

    def _fisher(self, rollouts):
        if isinstance(rollouts.mean_probs, Far):
            return FarFisher(rollouts.mean_probs, self.sampler.temperature, self.tie)
        return Fisher(self.head, rollouts.mean_probs, rollouts.fisher_rows, self.sampler.temperature, self.tie)


class PrefixFisher(FrozenFisher):
    """F̄ᵘ_t u_t: the Fisher matrix at zero, averaged over this step's steered prefixes (eq:surr-onoff)."""

    def needs_fisher(self, step):
        return "reference"

    def observe(self, step, rollouts):
        self.fisher = self._fisher(rollouts)

    def release(self):
        self.fisher = None  # two mean laws at once would double the memory


class IterateFisher(PrefixFisher):
    """F̃ᵘ_t u_t: the Fisher matrix at u, averaged over this step's steered prefixes (eq:surr-onon)."""

    def needs_fisher(self, step):
        return "steered"


class SequenceKL(IterateFisher):
    """The gradient of the sequence KL itself (Theorem 1, eq:seqkl-grad): the analytic term F̃ᵘ_t u_t plus the suffix
    score-function term, with each rollout's suffix measured against the mean suffix of the others.

    The suffix is the paper's log-ratio ℓ_{>t}. Under truncated sampling its mean is no longer the suffix KL, so there
    the exact token KLs of the visited prefixes take its place.
    """

    def observe(self, step, rollouts):
        super().observe(step, rollouts)
        self.suffix = self.tie.gather(suffix_term(self.head, rollouts, self.sampler))

    def gradient(self, c):
        return super().gradient(c) + self.suffix


def suffix_term(head: Head, rollouts: Rollouts, sampler: Sampler) -> torch.Tensor:
    """(1/K) Σ_i ∇_{u_t} log π_u(y_t) · (ℓ_{>t} − mean of the others' ℓ_{>t}), (T, d)."""
    whole = sampler.samples_whole_law
    ratios = rollouts.logprobs - rollouts.ref_logprobs if whole else rollouts.kl  # (K, T), zero after the end
    later = ratios.flip(1).cumsum(1).flip(1) - ratios  # ℓ_{>t}
    count = len(later)
    against_others = (later - later.mean(0)) * count / (count - 1)
    return mean_score(head, rollouts, against_others, sampler.temperature)


def token_scores(head: Head, rollouts: Rollouts, weights: torch.Tensor, temperature: float) -> torch.Tensor:
    """a (W[y] − m)/τ of every token, weights a (K, T) -> (K, T, d). Ended rows have zeros."""
    weights = weights.to(head.device, head.dtype) * rollouts.alive / temperature
    return weights[..., None] * (head.rows(rollouts.tokens) - rollouts.score_rows)


def mean_score(head: Head, rollouts: Rollouts, weights: torch.Tensor, temperature: float) -> torch.Tensor:
    """(1/K) Σ_i a_i (W[y_i] − m_i)/τ at every position, weights a (K, T) -> (T, d). Ended rows add nothing."""
    weights = weights.to(head.device, head.dtype) * rollouts.alive / (len(weights) * temperature)
    expected = torch.einsum("kt,ktd->td", weights, rollouts.score_rows)
    return torch.einsum("kt,ktd->td", weights, head.rows(rollouts.tokens)) - expected


COSTS = {
    "frozen-fisher": FrozenFisher,
    "prefix-fisher": PrefixFisher,
    "iterate-fisher": IterateFisher,
    "euclidean": Euclidean,
    "sequence-kl": SequenceKL,
    "none": Cost,
}
