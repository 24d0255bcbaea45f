"""MISVO, the paper's Algorithm 1: stochastic gradient ascent on reward minus a quadratic cost.

Lines 4 to 5 (sampling) are `propose` and the decoding it asks for; lines 6 to 12 (advantages, gradient, step for
all positions from the same iterate) are `update`. The paper's own choices are tie="position" and step="euler"; with
others the same gradient moves the free vectors c of a tied u = B c, or moves them differently.
"""

import math

import torch

from misvo.budget import KLBudget
from misvo.cost import COSTS, mean_score
from misvo.credit import Critic
from misvo.head import Shift
from misvo.steps import STEPS
from misvo.tie import TIES

# Laws that positions pool are few, and are added up position by position: rounding them would save nothing.
LAW_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


class Misvo:
    sequential = True  # a step samples from the policy that the step before it made
    starts_at_reference = True  # u = 0 at first, so the first step samples from the reference policy

    def __init__(self, head, stream, sampler, settings):
        self.head, self.settings = head, settings
        self.tie = TIES[settings.tie](settings.max_new_tokens)
        self.cost = COSTS[settings.cost](head, sampler, self.tie, settings.explicit_fisher)
        nats = settings.kl_budget or settings.kl_budget_per_token
        per_token = settings.kl_budget is None
        self.budget = nats and KLBudget(head, nats, settings.temperature, per_token)
        self.free = torch.zeros(self.tie.size, head.hidden_size, dtype=head.dtype, device=head.device)  # c (r, d)
        self.critic = Critic(settings.max_new_tokens)
        self.step = STEPS[settings.step]()
        self.spreads = []  # variances of the rewards of the steps so far
        self.shift = None  # W(Bc), made as sampling comes to each position

    @property
    def vectors(self):
        return self.tie.spread(self.free)  # u (T, d)

    def propose(self, step):
        self.shift = Shift(self.head, self.free, self.tie) if step > 0 else None
        return {
            "shift": self.shift,
            "keep_fisher": self.cost.needs_fisher(step),
            "pool": self.tie.pool,
            "law_dtype": LAW_DTYPES[self.settings.law_dtype] if self.tie.pool is None else None,
            "keep_hidden": self.budget is not None,
        }

    def update(self, step, rollouts, rewards):
        settings, cost = self.settings, self.cost
        cost.observe(step, rollouts)
        advantages = self._advantages(rollouts, rewards)
        if settings.standardize and advantages.any():
            self.spreads.append(rewards[~rewards.isnan()].var().item())
            advantages = advantages / math.sqrt(sum(self.spreads) / len(self.spreads))
        gradient = self.tie.gather(reward_gradient(self.head, rollouts, rewards, settings.temperature, advantages))
        penalty = cost.gradient(self.free, None if self.shift is None else self.shift.knots)
        moved = self.step(self.free, gradient, penalty, cost.product, settings)
        trace = {"gradient_norm": gradient.norm().item(), "penalty_norm": penalty.norm().item()}
        stiffness = settings.learning_rate * settings.penalty * _rayleigh(self.free, penalty)
        if settings.step == "euler" and stiffness > 2:
            trace["note"] = f"unstable: learning_rate × penalty × curvature = {stiffness:.3g} > 2, so steps overshoot"
        if not torch.isfinite(moved).all():
            moved, trace["stop"] = (
                self.free,
                "diverged: the vectors are no longer finite; the last finite ones are kept",
            )
        elif self.budget is not None:
            factor = self.budget.shrink(rollouts, self.tie.spread(moved))
            moved = factor * moved
            trace |= {"kl_budget": self.budget.limit, "kl_predicted": self.budget.predicted, "shrunk": factor}
        if rollouts.prefix_rewards is not None:
            trace["credit"] = self.critic.explained
        self.free = moved
        cost.release()
        return trace

    def _advantages(self, rollouts, rewards):
        """What each token earned, (K, T), or each response where its prefixes were not scored, (K, 1)."""
        if rollouts.prefix_rewards is None:
            return leave_one_out(rewards)[:, None]
        return self.critic.advantages(rollouts.prefix_rewards, rewards)

    def intervention(self):
        return self.vectors


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """R_i − R̄_i, each reward against the mean of the others, (K,) -> (K,); zero for what could not be scored."""
    scored = ~rewards.isnan()
    count = int(scored.sum())
    if count < 2:
        return torch.zeros_like(rewards)
    centred = torch.where(scored, rewards - rewards[scored].mean(), 0.0)
    return centred * count / (count - 1)  # R_i − (S − R_i)/(n − 1) = n/(n − 1) · (R_i − S/n)


def reward_gradient(head, rollouts, rewards, temperature, advantages=None):
    """g_t of eq:update, (T, d): the score of each token, weighted by its response's advantage, or by its own (K, T).

    The score is that of the law the token was sampled from, and K counts the responses that were scored.
    """
    advantages = leave_one_out(rewards)[:, None] if advantages is None else advantages
    scored = max(1, int((~rewards.isnan()).sum()))
    return mean_score(head, rollouts, advantages * len(rewards) / scored, temperature)


def _rayleigh(u, product):
    """uᵀΣu / uᵀu, how strongly the cost bends along u; 0 while u is 0."""
    square = u.square().sum()
    return (torch.sum(u * product) / square).item() if square > 0 else 0.0
