"""MISVO, the paper's Algorithm 1: stochastic gradient ascent on reward minus a quadratic cost.

Lines 4 to 5 (sampling) are `propose` and the decoding it asks for; lines 6 to 12 (advantages, gradient, step for
all positions from the same iterate) are `update`. The paper's own choices are tie="position" and step="euler"; with
others the same gradient moves the free vectors c of a tied u = B c, or moves them differently.
"""

import math

import torch

from misvo.budget import KLBudget
from misvo.cost import COSTS, mean_score
from misvo.credit import Critic, leave_one_out
from misvo.interventions import Vectors
from misvo.methods.base import Prefixes, Proposal, Update
from misvo.rollouts import Keep
from misvo.tie import TIES
from misvo.updates import UPDATES

# Laws that positions pool are few, and are added up position by position: rounding them would save nothing.
LAW_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
STEP_SHARE, STEP_NATS = 1 / 3, 0.5  # of a budget, and where there is none
WANTS_PREFIXES: dict[str, Prefixes] = {"response": "never", "cheap": "cheap", "prefix": "always"}  # by what tokens earn


class Misvo:
    sequential = True  # a step samples from the policy that the step before it made
    steers = True
    starts_at_reference = True  # u = 0 at first, so the first step samples from the reference policy

    def __init__(self, context):
        head, settings = context.head, context.settings
        self.head, self.settings = head, settings
        self.wants_prefixes = WANTS_PREFIXES[settings.credit]
        self.tie = TIES[settings.tie](settings.max_new_tokens)
        self.cost = COSTS[settings.cost](head, context.sampler, self.tie, settings.explicit_fisher)
        nats = settings.kl_budget or settings.kl_budget_per_token
        per_token = settings.kl_budget is None
        self.budget = KLBudget(head, nats, context.sampler, per_token) if nats else None
        self.free = torch.zeros(self.tie.size, head.hidden_size, dtype=head.dtype, device=head.device)  # c (r, d)
        self.critic = Critic(settings.max_new_tokens)
        self.step = UPDATES[settings.step]()
        self.spreads = []  # variances of the rewards of the steps so far

    @property
    def vectors(self):
        return self.tie.spread(self.free)  # u (T, d)

    @property
    def intervention(self):
        return Vectors(self.free, self.tie)

    def propose(self, step):
        keep = Keep(
            scores=True,
            fisher=self.cost.needs_fisher(step),
            pool=self.tie.pool,
            law_dtype=LAW_DTYPES[self.settings.law_dtype] if self.tie.pool is None else None,
            hidden=self.budget is not None,
        )
        return Proposal(self.intervention if step > 0 else None, keep)

    def update(self, step, rollouts, scores):
        rewards, advantages = scores.rewards, self._advantages(scores)
        if self.settings.standardize and advantages.any():
            self.spreads.append(rewards[~rewards.isnan()].var().item())
            advantages = advantages / math.sqrt(sum(self.spreads) / len(self.spreads))
        gradient = reward_gradient(self.head, rollouts, rewards, self.settings.temperature, advantages)
        update = self.move(step, rollouts, gradient)
        if scores.prefixes is not None:
            update.columns["credit"] = self.critic.explained
        return update

    def move(self, step, rollouts, gradient):
        """Lines 9 to 12: from a gradient of the objective (T, d) to the next vectors."""
        settings, cost, note = self.settings, self.cost, None
        cost.observe(step, rollouts)
        gradient = self.tie.gather(gradient)
        penalty = cost.gradient(self.free)
        moved = self.step(self.free, gradient, penalty, cost.product, settings, self._step_nats(rollouts))
        columns = {"gradient_norm": gradient.norm().item(), "penalty_norm": penalty.norm().item()}
        stiffness = settings.learning_rate * settings.penalty * _rayleigh(self.free, penalty)
        if settings.step == "euler" and stiffness > 2:
            note = f"unstable: learning_rate × penalty × curvature = {stiffness:.3g} > 2, so steps overshoot"
        if not torch.isfinite(moved).all():
            stop = "diverged: the vectors are no longer finite; the last finite ones are kept"
            return Update(columns, note, stop)
        if self.budget is not None:
            factor = self.budget.shrink(rollouts, self.tie.spread(moved))
            moved = factor * moved
            columns |= {"kl_budget": self.budget.limit, "kl_predicted": self.budget.predicted, "shrunk": factor}
        self.free = moved
        cost.release()
        return Update(columns, note)

    def _step_nats(self, rollouts):
        """How far a natural step goes: as told, or a share of what the model may move in all."""
        if self.settings.step_nats is not None:
            return self.settings.step_nats
        return STEP_NATS if self.budget is None else STEP_SHARE * self.budget.for_lengths(rollouts.lengths)

    def _advantages(self, scores):
        """What each token earned, (K, T), or each response where its prefixes were not scored, (K, 1)."""
        if scores.prefixes is None:
            return leave_one_out(scores.rewards)[:, None]
        return self.critic.advantages(scores.prefixes, scores.rewards)


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
