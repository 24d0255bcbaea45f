"""MISVO, the paper's Algorithm 1: stochastic gradient ascent on reward minus a quadratic cost.

Lines 4 to 5 (sampling) are `propose` and the decoding it asks for; lines 6 to 12 (advantages, gradient, step for
all positions from the same iterate) are `update`.
"""

import torch

from misvo.cost import COSTS, mean_score


class Misvo:
    sequential = True  # a step samples from the policy that the step before it made
    starts_at_reference = True  # u = 0 at first, so the first step samples from the reference policy

    def __init__(self, head, stream, sampler, settings):
        self.head, self.settings = head, settings
        self.cost = COSTS[settings.cost](head, sampler, settings.explicit_fisher)
        self.vectors = torch.zeros(settings.max_new_tokens, head.hidden_size, dtype=head.dtype, device=head.device)
        self.shift = None  # Wu (T, V): sampling and the cost of one step share it

    def propose(self, step):
        self.shift = None  # let the old one go before the new one is made
        if step > 0:
            self.shift = self.head.shift(self.vectors)
        return {"shift": self.shift, "keep_fisher": self.cost.needs_fisher(step)}

    def update(self, step, rollouts, rewards):
        self.cost.observe(step, rollouts)
        gradient = reward_gradient(self.head, rollouts, rewards, self.settings.temperature)
        penalty = self.cost.gradient(self.vectors, self.shift)
        curvature = _rayleigh(self.vectors, penalty)
        # eq:update
        self.vectors = self.vectors + self.settings.learning_rate * (gradient - self.settings.penalty * penalty)
        trace = {"gradient_norm": gradient.norm().item(), "penalty_norm": penalty.norm().item()}
        stiffness = self.settings.learning_rate * self.settings.penalty * curvature
        if stiffness > 2:
            trace["note"] = f"unstable: learning_rate × penalty × curvature = {stiffness:.3g} > 2, so steps overshoot"
        return trace

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


def reward_gradient(head, rollouts, rewards, temperature):
    """g_t of eq:update, (T, d): each response's score, weighted by its advantage.

    The score is that of the law the token was sampled from, and K counts the responses that were scored.
    """
    scored = max(1, int((~rewards.isnan()).sum()))
    advantages = leave_one_out(rewards) * len(rewards) / scored
    return mean_score(head, rollouts, advantages[:, None], temperature)


def _rayleigh(u, product):
    """uᵀΣu / uᵀu, how strongly the cost bends along u; 0 while u is 0."""
    square = u.square().sum()
    return (torch.sum(u * product) / square).item() if square > 0 else 0.0
