"""How much a beginning promises: by the reward's own score of it, or by a value that the run learns.

Where a reward declares `scores_prefixes`, its score of a beginning is what it would be as a response. Elsewhere a line
is fitted, V(h) = R̄ + w·z(h), from the states before the LM head to the rewards of the responses that they were part of.
A ridge holds it back: weights have the prior of a line that could explain all of the variance, N(0, 1/d), and the L
states of one response, which share one reward, count as one observation. It learns from the states that it is asked
about, those at pauses and ends, so that what it keeps is a small part of what was decoded.
"""

import torch

from misvo.rollouts import Rollouts
from misvo.settings import Settings
from misvo.updates import conjugate_gradients


class ScoredPrefixes:
    """The reward's own word."""

    learns = False  # so pauses are scored

    def of(self, rollouts: Rollouts, scores: torch.Tensor | None) -> torch.Tensor:
        """(K,); NaN where a beginning could not be scored."""
        assert scores is not None
        return scores

    def learn(self, rollouts: Rollouts, rewards: torch.Tensor) -> None:
        pass


class LearnedValue:
    """A line from states to rewards, fitted to all responses so far."""

    learns = True

    def __init__(self, block: int):
        self.block = block
        self.states: list[torch.Tensor] = []  # of each response, (looks, d)
        self.rewards: list[float] = []
        self.mean = self.scale = self.weights = None
        self.level = 0.0

    def of(self, rollouts, scores):
        last = rollouts.states(torch.arange(len(rollouts.lengths)), rollouts.lengths.cpu() - 1).double().cpu()
        if self.weights is None:
            return torch.full((len(last),), self.level, dtype=torch.float64)
        return self.level + (last - self.mean) / self.scale @ self.weights

    def learn(self, rollouts, rewards):
        scored = torch.nonzero(~rewards.isnan())[:, 0].tolist()
        for states in rollouts.states_of(scored):
            looks = [*range(self.block - 1, len(states) - 1, self.block), len(states) - 1]
            self.states.append(states[looks].float().cpu())
        self.rewards += rewards[scored].tolist()
        states = torch.cat(self.states).double()
        lengths = torch.tensor([len(own) for own in self.states])
        targets = torch.tensor(self.rewards, dtype=torch.float64)
        self.level, spread = targets.mean().item(), targets.std(unbiased=False)
        self.mean, self.scale = states.mean(0), states.std(0, unbiased=False).clamp(min=1e-6)
        if not spread > 0:
            self.weights = None
            return
        z = (states - self.mean) / self.scale
        y = ((targets - self.level) / spread).repeat_interleave(lengths)
        ridge = z.shape[1] * lengths.double().mean()
        self.weights = spread * conjugate_gradients(lambda w: z.T @ (z @ w) + ridge * w, z.T @ y)


def potential_for(settings: Settings, scores_prefixes: bool) -> ScoredPrefixes | LearnedValue:
    """The one that is asked for, or the one that a reward allows."""
    setting = settings.potential
    if setting == "auto":
        setting = "prefix" if scores_prefixes else "value"
    return ScoredPrefixes() if setting == "prefix" else LearnedValue(settings.block)
