"""Blockwise best-of-k (controlled decoding's form): of k continuations of each block the most promising goes on.

The K rows are K/k answers in the making, each with k branches. At every pause the best branch of an answer takes the
place of the others (`misvo.potential` says what a beginning is worth), and all of them go on from it. Choosing the best
of k costs log k − (k − 1)/k nats at most, so a whole answer costs at most that for each of its blocks.

With `proposal="steered"` a policy that learns from the survivors writes the branches; what it moves adds to the bound.
"""

import math

import torch

from misvo.methods.pausing import Pausing


class Blockwise(Pausing):
    def __init__(self, context):
        super().__init__(context)
        self.branches = self.settings.branches or self.settings.rollouts  # settings of this method have a number
        self._choices: dict[int, list[float]] = {}  # at each pause of a step: the share of answers with a choice

    def regroup(self, step, rollouts, scores):
        best = self._best(step, rollouts, self.promised(rollouts, scores))
        ancestors = best.repeat_interleave(self.branches)
        if self.guide is not None:
            self.guide.part(step, rollouts, ancestors)
        return ancestors

    def update(self, step, rollouts, scores):
        self.potential.learn(rollouts, scores.rewards)
        if self.only_learns(step):
            return self.learn(step, rollouts, scores, None)
        best = self._best(step, rollouts, scores.rewards)
        weights = torch.zeros(len(scores.rewards)).double().index_fill_(0, best, 1 / len(best))
        update = self.learn(step, rollouts, scores, weights)
        bound = sum(self._choices.pop(step)) * kl_of_best(self.branches)
        update.columns["kl_bound"] = bound + rollouts.kl[best].sum(1).mean().item()
        return update

    def _best(self, step, rollouts, promised) -> torch.Tensor:
        """The best branch of every answer, as rows (K/k,), the first of equals; what has no score comes last."""
        lanes = torch.where(promised.isnan(), -math.inf, promised).view(-1, self.branches)
        tokens = rollouts.tokens.view(len(lanes), self.branches, -1)
        choice = (tokens != tokens[:, :1]).any(-1).any(-1)  # where all branches have ended alike there is none
        self._choices.setdefault(step, []).append(choice.double().mean().item())
        return lanes.argmax(1) + torch.arange(len(lanes)) * self.branches


def kl_of_best(k: int) -> float:
    """The most that the best of k samples is away from one of them, in nats."""
    return math.log(k) - (k - 1) / k
