"""AISP (Kanai et al., 2025), the paper's sampling-based baseline; written from its formulas, as no code is public.

U = 0. Each step draws noise ε^k ~ N(0, σ²I) of shape (T, d) for each response, decodes response k with U + ε^k, and
moves U by the noise weighted with the rewards: w = softmax_k(r^k/λ − ((1−α)/σ²) Σ_t U_t·ε_t^k), U ← U + Σ_k w^k ε^k.
The noise is never stored: it is a function of (seed, prompt, step, rollout), drawn while decoding and again to update.
"""

from functools import partial

import torch

from misvo.interventions import Noise, Vectors
from misvo.methods.base import Prefixes, Proposal, Update
from misvo.tie import TIES
from misvo.weights import effective_sample_size, importance_weights, temperature_for


class Aisp:
    sequential = True  # a step's noise is added to the mean that the step before it made
    steers = True
    starts_at_reference = False  # the first step is noisy already
    wants_prefixes: Prefixes = "never"

    def __init__(self, context):
        self.context, self.settings = context, context.settings
        head, length = context.head, context.settings.max_new_tokens
        self.tie = TIES[context.settings.tie](length)
        self.free = torch.zeros(self.tie.size, head.hidden_size, dtype=head.dtype, device=head.device)
        self.window = min(context.settings.window or length, length)

    @property
    def vectors(self):
        u = self.tie.spread(self.free)
        return u if self.window == len(u) else torch.cat([u[: self.window], torch.zeros_like(u[self.window :])])

    @property
    def intervention(self):
        return Vectors.by_position(self.vectors)

    def propose(self, step):
        return Proposal(self._noise(step))

    def update(self, step, rollouts, scores):
        settings, lengths, noise = self.settings, rollouts.lengths.tolist(), self._noise(step)
        own = [self._counted(noise, rollout, length) for rollout, length in enumerate(lengths)]  # functions: drawn anew
        inner = [torch.sum(self.free[: len(e)] * e).item() for e in (draw() for draw in own)]
        bias = (settings.alpha - 1) / settings.sigma2 * torch.tensor(inner, dtype=torch.float64)
        temperature = settings.penalty
        if settings.target_ess is not None:
            temperature = temperature_for(scores.rewards, bias, settings.target_ess)
        weights = importance_weights(scores.rewards, bias, temperature)
        moved = self.free.clone()
        for weight, draw in zip(weights.tolist(), own, strict=True):
            e = draw()
            moved[: len(e)].add_(e, alpha=weight)
        if not torch.isfinite(moved).all():
            return Update(stop="diverged: the vectors are no longer finite; the last finite ones are kept")
        self.free = moved
        return Update({"ess": effective_sample_size(weights), "lambda": temperature})

    def _noise(self, step):
        settings = self.settings
        seed, prompt = settings.seed, self.context.prompt
        return Noise(self.free, self.tie, seed, prompt, step, settings.sigma2, self.window)

    def _counted(self, noise, rollout, length):
        """Draws what counts of ε of one response: tied, all of it; else what is in the window, before a masked end."""
        counted = min(self.window, length) if self.settings.mask_after_eos else self.window
        return partial(noise.of, rollout, counted if self.tie.basis is None else self.tie.size)
