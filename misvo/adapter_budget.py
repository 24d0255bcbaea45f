"""A KL budget for adapters: as `misvo.budget`, with the exact KLs of the new adapter on responses of the last step.

Scaling B by α scales what the adapter does to every weight, so α is found as for vectors: largest with a prediction
within the budget. A prediction is a pass of the adapted model over a few responses, so only some are asked.
"""

from dataclasses import dataclass

import torch

from misvo.adapted import AdaptedModel
from misvo.adapter import Adapter
from misvo.budget import Budget, luck_of
from misvo.rollouts import Rollouts
from misvo.sampling import Sampler
from misvo.two_laws import token_kls

RESPONSES = 4  # of a step that a prediction looks at


@dataclass
class AdapterBudget(Budget):
    """The budget of adapters, for one prompt."""

    adapted: AdaptedModel
    prompt: tuple[int, ...]
    sampler: Sampler

    def shrink(self, rollouts: Rollouts, adapter: Adapter) -> float:
        """The largest factor α ≤ 1 for which the sequence KL of the adapter times α is predicted to be within it."""
        measured, head = self.observe(rollouts), self.adapted.model.head
        picks = torch.linspace(0, len(rollouts.tokens) - 1, min(RESPONSES, len(rollouts.tokens))).round().long()
        names = ("tokens", "lengths", "kl", "logprobs", "ref_logprobs", "hidden")
        some = Rollouts(**{name: getattr(rollouts, name)[picks] for name in names})
        luck = luck_of(measured, some.kl.sum().item() / len(picks))

        def predict(factor):
            moved = self.adapted.states(adapter.scaled(factor), self.prompt, some)
            kl = token_kls(head, self.sampler, some, some.hidden, moved)
            return luck * kl.sum().item() / len(picks)

        return self.largest(rollouts, predict)
