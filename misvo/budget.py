"""A KL budget in nats per response, held with exact KLs and not with the Fisher quadratic.

The quadratic is blind to tokens that the reference rarely uses: they have little variance and are promoted without
limit (54 nats were measured where it said 8). So after each update the exact token KL of the new vectors is evaluated
at a sample of prefixes that the last steps visited, and the vectors are shrunk until that prediction fits.

KLs of responses have heavy tails (a loop costs many times the others), so what K responses measure is noise in part. A
budget that believes the last step alone swings between too much and too little; this one remembers: prefixes of
several steps speak, how far measurements exceeded predictions is averaged over steps, and the mean that is aimed at
stays below the budget by the standard error that a measurement has.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import torch

from misvo.far import beside
from misvo.head import Head, centred, log_partition, softmax, token_kl
from misvo.rollouts import Rollouts
from misvo.sampling import Sampler

PREFIXES = 48  # of each step that a prediction looks at
STEPS = 4  # how many steps are remembered
FORGET = 0.8  # the weight of a step against the one after it
PATIENT = 0.9  # the same for the correction of predictions: an unlucky step is among the prefixes already
CHUNK = 16  # prefixes at a time
DOUBT = 2.0  # a single step may say that predictions are wrong by this factor, and not by more


@dataclass
class _Visited:
    """A sample of the prefixes of one step, and what that step measured."""

    hidden: torch.Tensor  # (n, d)
    positions: torch.Tensor  # (n,)
    share: float  # nats per response for each nat of the sample
    measured: float  # nats per response, all prefixes
    seen: float  # what the sample alone would have said of it


@dataclass
class KLBudget:
    head: Head
    nats: float  # per response, or per token of the step's mean length
    sampler: Sampler = field(default_factory=Sampler)
    per_token: bool = False
    predicted: float | None = None
    limit: float | None = None  # of the last step, per response
    _visited: deque = field(default_factory=lambda: deque(maxlen=STEPS))  # the latest last
    _foreseen: float = 0.0  # what the last prediction was before its correction
    _corrected: tuple[float, float] = (1.0, 1.0)  # sums over steps that fade: what was measured, what was foreseen
    _noise: float = 0.0  # the standard error of a measured mean, as a share of it

    def shrink(self, rollouts: Rollouts, u: torch.Tensor) -> float:
        """The largest factor α ≤ 1 for which the sequence KL of α·u is predicted to stay within the budget."""
        self._learn(rollouts)
        self.limit = self.for_lengths(rollouts.lengths)
        aim, asked = self.limit / (1 + self._noise), (list(self._visited), u, self.sampler, self._excess)
        factor, self.predicted = beside(self.head, rollouts, rollouts.hidden, _fit, *asked, aim)
        self._foreseen = self.predicted / self._excess
        return factor

    def for_lengths(self, lengths: torch.Tensor) -> float:
        """Nats per response, where responses have these lengths."""
        return self.nats * (lengths.double().mean().item() if self.per_token else 1.0)

    @property
    def _excess(self) -> float:
        """How far measurements exceed predictions: steering moves the prefixes too, and older ones lag behind."""
        measured, foreseen = self._corrected
        return measured / foreseen

    def _learn(self, rollouts):
        """Remember prefixes of a step, and compare what it measured with what was foreseen."""
        each = rollouts.kl.sum(1).double()  # (K,)
        measured = each.mean().item()
        if self._foreseen:
            bounded = min(max(measured, self._foreseen / DOUBT), self._foreseen * DOUBT)
            new = (bounded, self._foreseen)
            self._corrected = tuple(PATIENT * old + add for old, add in zip(self._corrected, new, strict=True))
        if measured > 0 and len(each) > 1:
            noise = each.std().item() / math.sqrt(len(each)) / measured
            self._noise = FORGET * self._noise + (1 - FORGET) * noise if self._noise else noise
        places = torch.nonzero(rollouts.alive)  # (n, 2) rollout and position
        picks = torch.linspace(0, len(places) - 1, min(PREFIXES, len(places))).round().long()
        rows, positions = places[picks.to(places.device)].unbind(1)
        share = len(places) / (len(rollouts.tokens) * len(picks))
        seen = share * rollouts.kl[rows, positions].sum().item()
        self._visited.append(_Visited(rollouts.states(rows, positions), positions, share, measured, seen))


def _fit(head: Head, _, visited: list[_Visited], u, sampler: Sampler, excess: float, aim: float):
    """The largest factor α ≤ 1 for which α·u is predicted to cost no more than `aim`, and that prediction.

    The head does all of the work, so this is called where it is (`misvo.far`): a sample of states goes there.
    """
    predict = _predictor(head, visited, u, sampler, excess)
    at_one = predict(1.0)
    return (1.0, at_one) if at_one <= aim else _largest(predict, aim, at_one)


def _predictor(head: Head, steps: list[_Visited], u, sampler: Sampler, excess: float):
    """α -> predicted nats per response, from exact token KLs at prefixes of the last steps."""
    temperature = sampler.temperature
    shared = u.stride(0) == 0  # one vector for all positions: one shift for all prefixes
    common = head.shift(u[:1]).div_(temperature)[0] if shared else None
    weights = [FORGET**age for age in reversed(range(len(steps)))]
    measured, seen, parts = 0.0, 0.0, []
    for weight, visited in zip(weights, steps, strict=True):
        measured, seen = measured + weight * visited.measured, seen + weight * visited.seen
        for hidden, positions in zip(visited.hidden.split(CHUNK), visited.positions.split(CHUNK), strict=True):
            logits = centred(sampler.tempered(head.logits(hidden), positions))
            shift = common if shared else head.shift(u[positions]).div_(temperature)
            parts.append((weight * visited.share / sum(weights), logits, shift, log_partition(logits)))
    # What the samples say of the steps that they are from, against what those measured: accidents cancel.
    luck = min(max(measured / seen, 1 / DOUBT), DOUBT) if seen > 0 else 1.0

    space = torch.empty(2, CHUNK, head.vocab_size, dtype=head.dtype, device=head.device)

    def predict(factor):
        nats = 0.0
        for weight, logits, shift, ref_partition in parts:
            moved, (steered, probs) = factor * shift, space[:, : len(logits)]
            probs, partition = softmax(torch.add(logits, moved, out=steered), out=probs)
            nats += weight * token_kl(ref_partition, partition, probs, moved).sum().item()
        return excess * luck * nats

    return predict


def _largest(predict, aim, at_one, rounds=12):
    """The largest factor whose prediction is within `aim`, to 2 % of it, and that prediction.

    By lines through the roots of the predictions, which are near to linear in the factor; an end that stays for two
    rounds counts half (the Illinois rule), because for large factors they are not.
    """
    low, below, kept = 0.0, 0.0, 0.0  # the factor, √ of its prediction as the rule sees it, and the prediction
    high, above, goal = 1.0, math.sqrt(at_one), math.sqrt(0.99 * aim)
    moved = 0
    for _ in range(rounds):
        factor = low + (high - low) * (goal - below) / (above - below)
        nats = predict(factor)
        if nats <= aim:
            low, below, kept = factor, math.sqrt(nats), nats
            if nats >= 0.98 * aim:
                break
            above = goal + (above - goal) / 2 if moved < 0 else above
            moved = -1
        else:
            high, above = factor, math.sqrt(nats)
            below = goal - (goal - below) / 2 if moved > 0 else below
            moved = 1
    return low, kept
