"""LoRA (Hu et al., 2021) for each prompt: low-rank adapters, which the paper leaves open, trained at test time.

Sampling, advantages and the score of each token are those of `misvo`; what moves is not a vector behind the body but
weights inside it. So the gradient in hidden space, a (W[y] − m)/τ at every token, goes on through the body to the
adapter, and Adam takes a step. A budget holds exact KLs, as for vectors.
"""

import math
from dataclasses import replace

import torch

from misvo.adapter_budget import AdapterBudget
from misvo.cost import token_scores
from misvo.credit import Critic
from misvo.interventions import Displaced
from misvo.methods.base import Proposal, Update
from misvo.methods.misvo import WANTS_PREFIXES, leave_one_out
from misvo.rollouts import Keep


class Lora:
    sequential = True  # a step samples from the policy that the step before it made
    steers = True
    starts_at_reference = True  # B = 0 at first, so the first step samples from the reference policy
    vectors = None

    def __init__(self, context):
        settings, adapted, prompt, sampler = context.settings, context.adapted, context.prompt, context.sampler
        self.head, self.prompt, self.settings, self.adapted = context.head, prompt, settings, adapted
        self.wants_prefixes = WANTS_PREFIXES[settings.credit]
        nats, per_token = settings.kl_budget or settings.kl_budget_per_token, settings.kl_budget is None
        self.budget = None
        if nats:
            self.budget = AdapterBudget(self.head, nats, sampler, per_token, adapted=adapted, prompt=prompt)
        self.adapter = adapted.fresh(settings.seed, prompt)
        self.critic = Critic(settings.max_new_tokens)
        self.weights = [weight.clone() for weight in self.adapter.tensors]  # what Adam moves, in place
        self.adam = torch.optim.Adam(self.weights, lr=settings.lora_learning_rate, maximize=True)
        self.reference = None  # the first step's rollouts, where KL_ref is to be measured on them

    @property
    def intervention(self):
        if self.reference is None:
            return None
        return Displaced(self.adapted.states(self.adapter, self.prompt, self.reference))

    def propose(self, step):
        keep = Keep(scores=True, hidden=self.budget is not None)
        return Proposal(adapter=self.adapter if step > 0 else None, keep=keep)

    def update(self, step, rollouts, scores):
        norm, pull = self.adapter.norm, self._pull(rollouts, scores)
        if step == 0 and self.settings.kl_ref:
            self.reference = replace(rollouts, score_rows=None, hidden=None)
        if not pull.any():  # Adam would go on by what it remembers
            return Update({"norm": norm}, "no response is better than another, so nothing is learned")
        gradient = self.adapted.gradient(self.adapter, self.prompt, rollouts, pull).tensors
        columns = {"norm": norm, "gradient_norm": math.hypot(*(part.norm().item() for part in gradient))}
        moved = self._moved(gradient)
        if not all(torch.isfinite(weight).all() for weight in moved.tensors):
            return Update(columns, stop="diverged: the adapter is no longer finite; the last finite one is kept")
        if self.budget is not None:
            factor = self.budget.shrink(rollouts, moved)
            moved = moved.scaled(factor)
            columns |= {"kl_budget": self.budget.limit, "kl_predicted": self.budget.predicted, "shrunk": factor}
        if scores.prefixes is not None:
            columns["credit"] = self.critic.explained
        self.adapter = moved
        return Update(columns)

    def _pull(self, rollouts, scores):
        """∇ of (1/K) Σ_i a_i log π(y_i) for the states that tokens were drawn from, (K, T, d).

        As in `misvo`: π is the law sampled from, and K counts the responses that were scored.
        """
        scored = max(1, int((~scores.rewards.isnan()).sum()))
        advantages = leave_one_out(scores.rewards)[:, None]
        if scores.prefixes is not None:
            advantages = self.critic.advantages(scores.prefixes, scores.rewards)
        return token_scores(self.head, rollouts, advantages / scored, self.settings.temperature)

    def _moved(self, gradient):
        """The adapter after a step of Adam."""
        for weight, now, slope in zip(self.weights, self.adapter.tensors, gradient, strict=True):
            weight.copy_(now)  # the budget may have scaled it
            weight.grad = slope
        self.adam.step()
        return self.adapter.with_tensors([weight.clone() for weight in self.weights])
