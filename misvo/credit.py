"""Which tokens earned the reward: credit from scores of prefixes.

A response has one reward, and the paper's gradient weighs the score of each of its tokens with it: 64 tokens share one
number, and most of it is noise to each of them. Where a reward can also score the beginnings of a response (`r_j`, at
cuts of a few tokens), the score says how the reward came about. A linear critic predicts the final reward from it,
V_j = R̄ + β_j (r_j − r̄_j), with β_j fitted to all steps so far, and the tokens between two cuts get

    A_j = V_j − V_{j−1} + RESIDUAL · (R − V_j),      V_0 = R̄, V_last = R.

With RESIDUAL = 1 this is R − V_{j−1}, the plain estimator with a baseline that depends on the past alone, unbiased but
for the fit; with 0 it trusts the critic. In between, the gradient had about twice the signal for its noise on real
prompts (docs/untuned.md). Means are over the other responses, as in the paper. Where prefixes say nothing, β_j = 0 and
what is left is the paper's gradient, a little heavier on the last tokens.
"""

from dataclasses import dataclass, field

import torch

from misvo.numbers import as_numbers

CUTS = 16  # at most so many segments in a response
RESIDUAL = 0.2


def cuts(length: int) -> list[int]:
    """Where responses of up to `length` tokens are cut: evenly, the end not included."""
    segment = -(-length // CUTS)
    return list(range(segment, length, segment))


def prefix_rewards(responses: list[list[int]], rewards: list, length: int, ask) -> torch.Tensor:
    """The reward of every response at every cut, (K, cuts); behind its end, its own. NaN is what could not be scored.

    `ask` takes the tokens of many prefixes and gives their rewards.
    """
    places = cuts(length)
    table = as_numbers(rewards)[:, None].repeat(1, len(places))
    cells = [(i, j) for i, row in enumerate(responses) for j, cut in enumerate(places) if cut < len(row)]
    values = ask([responses[i][: places[j]] for i, j in cells])
    for (i, j), value in zip(cells, as_numbers(values), strict=True):
        table[i, j] = value
    return table


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """R_i − R̄_i, each reward against the mean of the others, (K,) -> (K,); zero for what could not be scored."""
    scored = ~rewards.isnan()
    count = int(scored.sum())
    if count < 2:
        return torch.zeros_like(rewards)
    centred = torch.where(scored, rewards - rewards[scored].mean(), 0.0)
    return centred * count / (count - 1)  # R_i − (S − R_i)/(n − 1) = n/(n − 1) · (R_i − S/n)


@dataclass
class Critic:
    """Regressions of the final reward on the scores of prefixes, one for each cut, over the steps so far."""

    length: int
    covariance: torch.Tensor = field(init=False)  # Σ (r_j − r̄_j)(R − R̄), (cuts,)
    variance: torch.Tensor = field(init=False)  # Σ (r_j − r̄_j)²
    explained: float = 0.0  # share of the last step's variance of R that the critic explained, mean over the cuts

    def __post_init__(self):
        self.covariance = torch.zeros(len(cuts(self.length)), dtype=torch.float64)
        self.variance = self.covariance.clone()

    def advantages(self, prefixes: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
        """The credit of every token, (K, T), from scores of prefixes (K, cuts) and rewards (K,); NaN is unknown."""
        known = ~rewards.isnan()
        total = torch.where(known, rewards, 0.0)
        centred = torch.where(known, rewards - _mean(total, known), 0.0)
        usable = known[:, None] & ~prefixes.isnan()
        scores = torch.where(usable, prefixes, 0.0)
        off = torch.where(usable, scores - _mean(scores, usable), 0.0)  # (K, cuts)
        self.covariance += (off * centred[:, None]).sum(0)
        self.variance += off.square().sum(0)
        slope = torch.where(self.variance > 0, self.covariance / self.variance.clamp(min=1e-300), 0.0)
        spread = centred.square().sum().clamp(min=1e-300)
        self.explained = (1 - (centred[:, None] - slope * off).square().sum(0) / spread).mean().clamp(min=0).item()
        count = int(known.sum())
        if count < 2:
            return torch.zeros(len(rewards), self.length, dtype=torch.float64)
        # V relative to the mean of the others; against the mean of all it is smaller by (n − 1)/n
        value = torch.cat([torch.zeros(len(off), 1), slope * off, centred[:, None]], 1) * count / (count - 1)
        credit = value.diff(dim=1) + RESIDUAL * (value[:, -1:] - value[:, 1:])  # (K, cuts + 1)
        segment = torch.searchsorted(torch.tensor(cuts(self.length)), torch.arange(self.length), right=True)
        return credit[:, segment]


def _mean(values, usable):
    return values.sum(0) / usable.sum(0).clamp(min=1)
