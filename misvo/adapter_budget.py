"""A KL budget for adapters: as `misvo.budget`, with the exact KLs of the new adapter on responses of the last step.

Scaling B by α scales what the adapter does to every weight, so α is found as for vectors: the largest whose prediction
is within the budget. A prediction is a pass of the adapted model over whole responses, so only some of them are asked.
"""

from dataclasses import dataclass

import torch

from misvo.adapted import AdaptedModel
from misvo.adapter import Adapter
from misvo.budget import DOUBT, KLBudget, _largest
from misvo.rollouts import Rollouts
from misvo.two_laws import token_kls

RESPONSES = 4  # of a step that a prediction looks at


@dataclass(kw_only=True)
class AdapterBudget(KLBudget):
    """The budget of one prompt's adapter. What it remembers of its steps is what that of vectors does."""

    adapted: AdaptedModel
    prompt: tuple[int, ...]

    def shrink(self, rollouts: Rollouts, adapter: Adapter) -> float:  # type: ignore[override]
        """The largest factor α ≤ 1 for which the sequence KL of the adapter times α is predicted to be within it."""
        self._learn(rollouts)
        self.limit = self.for_lengths(rollouts.lengths)
        aim, predict = self.limit / (1 + self._noise), self._prediction(rollouts, adapter)
        factor, self.predicted = 1.0, predict(1.0)
        if self.predicted > aim:
            factor, self.predicted = _largest(predict, aim, self.predicted)
        self._foreseen = self.predicted / self._excess
        return factor

    def _prediction(self, rollouts, adapter):
        """α -> predicted nats per response, from exact token KLs on some of the step's responses."""
        count = min(RESPONSES, len(rollouts.tokens))
        picks = torch.linspace(0, len(rollouts.tokens) - 1, count).round().long()
        names = ("tokens", "lengths", "kl", "logprobs", "ref_logprobs", "hidden")
        some = Rollouts(**{name: getattr(rollouts, name)[picks] for name in names})
        # What these say of the step that they are from, against what it measured: accidents cancel.
        measured, seen = rollouts.kl.sum().item() / len(rollouts.kl), some.kl.sum().item() / count
        luck = min(max(measured / seen, 1 / DOUBT), DOUBT) if seen > 0 else 1.0

        def predict(factor):
            moved = self.adapted.states(adapter.scaled(factor), self.prompt, some)
            kl = token_kls(self.head, self.sampler, some, some.hidden, moved)
            return self._excess * luck * kl.sum().item() / count

        return predict
