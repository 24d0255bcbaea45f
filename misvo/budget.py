"""A KL budget in nats per response, held with exact KLs and not with the Fisher quadratic.

The quadratic is blind to tokens that the reference rarely uses: they have little variance and are promoted without
limit (54 nats were measured where it said 8). So after each update the exact token KL of the new vectors is evaluated
at a sample of prefixes that the last steps visited, and the vectors are shrunk until that prediction fits.

KLs of responses have heavy tails (a loop costs ten times the others), so what K responses measure is noise in part. A
budget that believes the last step alone swings between too much and too little; this one remembers: prefixes of
several steps speak, how far measurements exceeded predictions is averaged over steps, and the mean that is aimed at
stays below the budget by the standard error that a measurement has.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import torch

from misvo.decoding import Rollouts
from misvo.head import Head, centred, log_partition, softmax, token_kl

PREFIXES = 32  # of each step that a prediction looks at
STEPS = 3  # how many steps are remembered
FORGET = 0.7  # the weight of a step against the one after it


@dataclass
class _Visited:
    """A sample of the prefixes of one step, and what that step measured."""

    hidden: torch.Tensor  # (n, d)
    positions: torch.Tensor  # (n,)
    measured: float  # nats per response, all prefixes
    seen: float  # the sum of the token KLs of the sample
    share: float  # nats per response for each nat of the sample

    def nats(self, moved: float) -> float:
        """Nats per response where the token KLs of the sample become `moved` in sum.

        Where the step had measured a KL, relative to it: the accidents of the sample cancel.
        """
        return self.measured * moved / self.seen if self.seen > 0 else self.share * moved


@dataclass
class KLBudget:
    head: Head
    nats: float  # per response, or per token of the step's mean length
    temperature: float = 1.0
    per_token: bool = False
    predicted: float | None = None
    limit: float | None = None  # of the last step, per response
    _visited: deque = field(default_factory=lambda: deque(maxlen=STEPS))  # the latest last
    _foreseen: float | None = None  # what the prediction was before its correction
    # Sums over steps that fade: measured, foreseen, and the variance of a measured mean over its square.
    _sums: torch.Tensor = field(default_factory=lambda: torch.tensor([1.0, 1.0], dtype=torch.float64))
    _noise: float = 0.0

    def shrink(self, rollouts: Rollouts, u: torch.Tensor) -> float:
        """The largest factor α ≤ 1 for which the sequence KL of α·u is predicted to stay within the budget."""
        self._learn(rollouts)
        self.limit = self.nats * (rollouts.lengths.double().mean().item() if self.per_token else 1.0)
        aim, predict = self.limit / (1 + self._noise), self._predictor(u)
        low, high = 0.0, 1.0
        if predict(1.0) > aim:
            for _ in range(12):
                middle = (low + high) / 2
                low, high = (middle, high) if predict(middle) <= aim else (low, middle)
            high = low
        self.predicted = predict(high)
        self._foreseen = self.predicted / self._excess
        return high

    @property
    def _excess(self) -> float:
        """How far measurements exceed predictions: steering moves the prefixes too, and older ones lag behind."""
        measured, foreseen = self._sums.tolist()
        return measured / foreseen

    def _learn(self, rollouts):
        """Remember prefixes of a step, and compare what it measured with what was foreseen."""
        each = rollouts.kl.sum(1).double()  # (K,)
        measured = each.mean().item()
        if self._foreseen:
            self._sums = FORGET * self._sums + torch.tensor([measured, self._foreseen], dtype=torch.float64)
        if measured > 0 and len(each) > 1:
            noise = each.std().item() / math.sqrt(len(each)) / measured
            self._noise = noise if not self._noise else FORGET * self._noise + (1 - FORGET) * noise
        places = torch.nonzero(rollouts.alive)  # (n, 2) rollout and position
        picks = torch.linspace(0, len(places) - 1, min(PREFIXES, len(places))).round().long()
        rows, positions = places[picks.to(places.device)].unbind(1)
        share = len(places) / (len(rollouts.tokens) * len(picks))
        seen = rollouts.kl[rows, positions].sum().item()
        self._visited.append(_Visited(rollouts.hidden[rows, positions].clone(), positions, measured, seen, share))

    def _predictor(self, u):
        """α -> predicted nats per response, from exact token KLs at prefixes of the last steps."""
        shared = u.stride(0) == 0  # one vector for all positions: one shift for all prefixes
        common = self.head.shift(u[:1]).div_(self.temperature)[0] if shared else None
        parts = []
        for visited in self._visited:
            logits = centred(self.head.logits(visited.hidden).div_(self.temperature))
            shift = common if shared else self.head.shift(u[visited.positions]).div_(self.temperature)
            parts.append((visited, logits, shift, log_partition(logits)))
        weights = [FORGET**age for age in reversed(range(len(parts)))]

        def predict(factor):
            nats = 0.0
            for weight, (visited, logits, shift, ref_partition) in zip(weights, parts, strict=True):
                moved = factor * shift
                probs, partition = softmax(logits + moved)
                nats += weight * visited.nats(token_kl(ref_partition, partition, probs, moved).sum().item())
            return self._excess * nats / sum(weights)

        return predict
