"""AISP (Kanai et al., 2025), the paper's sampling-based baseline; written from its formulas, as no code is public.

U = 0. Each step draws noise ε^k ~ N(0, σ²I) of shape (T, d) for each response, decodes response k with U + ε^k, and
moves U by the noise weighted with the rewards: w = softmax_k(r^k/λ − ((1−α)/σ²) Σ_t U_t·ε_t^k), U ← U + Σ_k w^k ε^k.
The noise is never stored: it is a function of (seed, prompt, step, rollout), drawn while decoding and again to update.
"""

import math

import torch
from scipy.optimize import brentq

from misvo.tie import TIES


class Aisp:
    sequential = True  # a step's noise is added to the mean that the step before it made
    starts_at_reference = False  # the first step is noisy already

    def __init__(self, head, stream, sampler, settings):
        self.head, self.stream, self.settings = head, stream, settings
        self.tie = TIES[settings.tie](settings.max_new_tokens)
        self.free = torch.zeros(self.tie.size, head.hidden_size, dtype=head.dtype, device=head.device)
        self.window = min(settings.window or settings.max_new_tokens, settings.max_new_tokens)

    @property
    def vectors(self):
        u = self.tie.spread(self.free)
        return u if self.window == len(u) else torch.cat([u[: self.window], torch.zeros_like(u[self.window :])])

    def propose(self, step):
        generators = {rollout: self.stream.generator(step, rollout) for rollout in range(self.settings.rollouts)}
        tied = self.tie.basis is not None  # a few vectors for each response: drawn at once and kept
        noise = torch.stack([self._draw(generators[k], self.tie.size) for k in generators]) if tied else None

        def intervene(rows, position, hidden):
            if position >= self.window:
                return None
            if tied:
                return torch.einsum("r,krd->kd", self.tie.basis[position].to(noise), self.free + noise[rows])
            if position == 0:  # a row may begin again, see Engine
                generators.update({row: self.stream.generator(step, row) for row in rows.tolist()})
            # A row asks for its positions in order, so its generator stands where this position begins.
            return self.free[position] + torch.cat([self._draw(generators[row], 1) for row in rows.tolist()])

        return {"intervene": intervene, "keep_scores": False}

    def update(self, step, rollouts, rewards):
        settings, lengths = self.settings, rollouts.lengths.tolist()
        inner = [torch.sum(self.free * self._noise(step, k, lengths[k])).item() for k in range(len(rewards))]
        bias = (settings.alpha - 1) / settings.sigma2 * torch.tensor(inner, dtype=torch.float64)
        temperature = settings.penalty
        if settings.target_ess is not None:
            temperature = temperature_for(rewards, bias, settings.target_ess)
        weights = importance_weights(rewards, bias, temperature)
        moved = self.free.clone()
        for k, weight in enumerate(weights.tolist()):
            moved.add_(self._noise(step, k, lengths[k]), alpha=weight)
        self.free = moved
        return {"ess": effective_sample_size(weights), "lambda": temperature}

    def intervention(self):
        return self.vectors

    def _noise(self, step, rollout, length):
        """ε of one response (r, d); untied, zero where it does not count: outside the window, behind a masked end."""
        counted = min(self.window, length) if self.settings.mask_after_eos else self.window
        counted = counted if self.tie.basis is None else self.tie.size
        noise = torch.zeros_like(self.free)
        noise[:counted] = self._draw(self.stream.generator(step, rollout), counted)
        return noise

    def _draw(self, generator, positions):
        drawn = generator.standard_normal((positions, self.head.hidden_size), dtype="float32")
        return torch.from_numpy(drawn).to(self.head.device, self.head.dtype).mul_(math.sqrt(self.settings.sigma2))


def importance_weights(rewards, bias, temperature) -> torch.Tensor:
    """softmax_k(r^k/λ + bias^k) in log space, (K,); what could not be scored has no weight, λ = 0 means the best."""
    scored = ~rewards.isnan()
    gaps = torch.where(scored, rewards - rewards[scored].max(), -math.inf)  # ≤ 0, so that r/λ cannot overflow
    logits = gaps / temperature if temperature > 0 else torch.where(gaps == 0, 0.0, -math.inf)
    return torch.softmax(logits + torch.where(scored, bias, 0.0), dim=0)


def effective_sample_size(weights) -> float:
    """1 / Σ w²: how many responses the weighted mean really rests on."""
    return 1 / weights.square().sum().item()


def temperature_for(rewards, bias, wished: float) -> float:
    """The λ at which the effective sample size is `wished`, or the nearest that these rewards allow."""

    def excess(log_temperature):
        return effective_sample_size(importance_weights(rewards, bias, math.exp(log_temperature))) - wished

    known = rewards[~rewards.isnan()]
    spread = max((known.max() - known.min()).item(), 1e-12)
    low, high = math.log(spread) - 12, math.log(spread) + 12
    if excess(low) >= 0:
        return math.exp(low)
    if excess(high) <= 0:
        return math.exp(high)
    return math.exp(brentq(excess, low, high))
