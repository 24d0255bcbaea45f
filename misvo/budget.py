"""A KL budget in nats per response, held with exact KLs and not with the Fisher quadratic.

The quadratic is blind to tokens that the reference rarely uses: they have little variance and are promoted without
limit (54 nats were measured where it said 8). So after each update the exact token KL of the new vectors is evaluated
at a sample of the prefixes that the step has just visited, and the vectors are shrunk until that prediction fits.
Steering moves the prefixes too; how far measurements exceeded predictions so far corrects the next prediction.
"""

from dataclasses import dataclass

import torch

from misvo.decoding import Rollouts
from misvo.head import Head, centred, log_partition, softmax, token_kl

PREFIXES = 96  # how many prefixes a prediction looks at
CHUNK = 16  # and how many at a time


@dataclass
class KLBudget:
    head: Head
    nats: float  # per response, or per token of the step's mean length
    temperature: float = 1.0
    per_token: bool = False
    excess: float = 1.0  # measured over predicted, learnt from the steps so far
    predicted: float | None = None
    limit: float | None = None  # of the last step, per response

    def shrink(self, rollouts: Rollouts, u: torch.Tensor) -> float:
        """The largest factor α ≤ 1 for which the sequence KL of α·u is predicted to stay within the budget."""
        measured = rollouts.kl.sum().item() / len(rollouts.tokens)
        if self.predicted and measured > 0:
            # A step that went too far counts in full, one that stayed below only a little: KLs have heavy tails, and
            # a budget that loosens at once swings between too much and too little. Never below 1.
            ratio = measured / self.predicted
            self.excess = max(1.0, self.excess * (ratio if ratio > 1 else ratio**0.25))
        self.limit = self.nats * (rollouts.lengths.double().mean().item() if self.per_token else 1.0)
        predict = self._predictor(rollouts, u)
        low, high = 0.0, 1.0
        if predict(1.0) > self.limit:
            for _ in range(12):
                middle = (low + high) / 2
                low, high = (middle, high) if predict(middle) <= self.limit else (low, middle)
            high = low
        self.predicted = predict(high)
        return high

    def _predictor(self, rollouts, u):
        """α -> predicted nats per response, from exact token KLs at evenly spaced visited prefixes."""
        places = torch.nonzero(rollouts.alive)  # (n, 2) rollout and position
        picks = torch.linspace(0, len(places) - 1, min(PREFIXES, len(places))).round().long()
        rows, positions = places[picks.to(places.device)].unbind(1)
        shared = u.stride(0) == 0  # one vector for all positions: one shift for all prefixes
        common = self.head.shift(u[:1]).div_(self.temperature)[0] if shared else None
        parts = []
        for row, position in zip(rows.split(CHUNK), positions.split(CHUNK), strict=True):
            logits = centred(self.head.logits(rollouts.hidden[row, position]).div_(self.temperature))
            shift = common if shared else self.head.shift(u[position]).div_(self.temperature)
            parts.append((logits, shift, log_partition(logits)))
        scale = self.excess * len(places) / (len(rollouts.tokens) * len(picks))

        def predict(factor):
            nats = 0.0
            for logits, shift, ref_partition in parts:
                moved = factor * shift
                probs, partition = softmax(logits + moved)
                nats += token_kl(ref_partition, partition, probs, moved).sum().item()
            return scale * nats

        return predict
