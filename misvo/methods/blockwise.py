"""Blockwise best-of-k (controlled decoding's form): of k continuations of each block the most promising goes on.

The K rows are K/k answers in the making, each with k branches. At every pause the best branch of an answer takes the
place of the others (`misvo.potential` says what a beginning is worth), and all of them go on from it. Choosing the best
of k costs log k − (k − 1)/k nats at most, so a whole answer costs at most that for each of its blocks.

With `proposal="steered"` a policy that learns from the survivors writes the branches; what it moves adds to the bound.
"""

import math
from dataclasses import replace

import torch

from misvo.guide import Guide, hidden_kept
from misvo.methods.base import Prefixes, Proposal, Update
from misvo.potential import potential_for


class Blockwise:
    wants_prefixes: Prefixes = "never"

    def __init__(self, context):
        self.settings = context.settings
        self.potential = potential_for(context.settings, context.scores_prefixes)
        self.guide = Guide(context) if context.settings.proposal == "steered" else None
        self.steers = self.guide is not None
        self.starts_at_reference = self.steers or self.potential.learns  # a first round to learn from, without pauses
        self.sequential = self.starts_at_reference
        self._choices: dict[int, list[float]] = {}  # at each pause of a step: the share of answers with a choice

    @property
    def vectors(self):
        return None if self.guide is None else self.guide.vectors

    @property
    def intervention(self):
        return None if self.guide is None else self.guide.intervention

    def propose(self, step):
        proposal = Proposal() if self.guide is None else self.guide.propose(step)
        keep = hidden_kept(proposal.keep, self.potential.learns)
        if step == 0 and self.starts_at_reference:
            return replace(proposal, keep=keep)
        pauses = tuple(range(self.settings.block, self.settings.max_new_tokens, self.settings.block))
        return replace(proposal, keep=keep, pauses=pauses, scores_pauses=not self.potential.learns)

    def regroup(self, step, rollouts, scores):
        promised = self.potential.of(rollouts, None if scores is None else scores.rewards)
        ancestors = self._best(step, rollouts, promised).repeat_interleave(self.settings.branches)
        if self.guide is not None:
            self.guide.part(step, rollouts, ancestors)
        return ancestors

    def update(self, step, rollouts, scores):
        self.potential.learn(rollouts, scores.rewards)
        if step == 0 and self.starts_at_reference:
            return Update() if self.guide is None else self.guide.learn(step, rollouts, scores, None)
        best = self._best(step, rollouts, scores.rewards)
        weights = torch.zeros(len(scores.rewards)).double().index_fill_(0, best, 1 / len(best))
        update = Update() if self.guide is None else self.guide.learn(step, rollouts, scores, weights)
        bound = sum(self._choices.pop(step)) * kl_of_best(self.settings.branches)
        update.columns["kl_bound"] = bound + rollouts.kl[best].sum(1).mean().item()
        return update

    def _best(self, step, rollouts, promised) -> torch.Tensor:
        """The best branch of every answer, as rows (K/k,), the first of equals; what has no score comes last."""
        lanes = torch.where(promised.isnan(), -math.inf, promised).view(-1, self.settings.branches)
        tokens = rollouts.tokens.view(len(lanes), self.settings.branches, -1)
        choice = (tokens != tokens[:, :1]).any(-1).any(-1)  # where all branches have ended alike there is none
        self._choices.setdefault(step, []).append(choice.double().mean().item())
        return lanes.argmax(1) + torch.arange(len(lanes)) * self.settings.branches


def kl_of_best(k: int) -> float:
    """The most that the best of k samples is away from one of them, in nats."""
    return math.log(k) - (k - 1) / k
