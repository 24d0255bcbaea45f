"""A steered policy that writes for a method with pauses, and learns from what survives them.

It begins as the model itself. After a first round without pauses it takes `auto`'s own step; after every later round it
comes closer to the law that the survivors follow (`misvo.genealogy`). Weights make up for the difference of the two
policies, token by token, so whoever uses it samples toward the same law as without it.
"""

from dataclasses import replace

import torch

from misvo.genealogy import Genealogy
from misvo.methods.base import Context
from misvo.methods.misvo import Misvo
from misvo.settings import PRESETS, SAMPLER


class Guide:
    def __init__(self, context: Context):
        own = context.settings
        usual = {name: value for name, value in PRESETS["auto"].items() if name not in SAMPLER}
        if own.kl_budget or own.kl_budget_per_token:
            usual |= {"kl_budget": own.kl_budget, "kl_budget_per_token": own.kl_budget_per_token}
        settings = replace(own, **{**usual, "method": "misvo", "penalty": None})
        self.context, self.settings = context, settings
        self.misvo = Misvo(replace(context, settings=settings))
        self._families: dict[int, Genealogy] = {}  # of the rounds under way

    @property
    def vectors(self):
        return self.misvo.vectors

    @property
    def intervention(self):
        return self.misvo.intervention

    def propose(self, step: int):
        """The policy that writes, and what is to be kept of it for learning and for weights."""
        proposal = self.misvo.propose(step)
        return proposal if step == 0 else replace(proposal, anchored=True)

    def part(self, step: int, rollouts, ancestors: torch.Tensor) -> None:
        """Rows at a pause, and who goes on."""
        self._families.setdefault(step, Genealogy()).add(rollouts, ancestors)

    def learn(self, step: int, rollouts, scores, weights: torch.Tensor | None):
        """From a round that has ended; `weights` (K,) are those of its rows, None in the first."""
        if weights is None:
            return self.misvo.update(step, rollouts, scores)
        self.part(step, rollouts, torch.arange(len(weights)))
        family, settings = self._families.pop(step), self.settings
        gradient = family.gradient(self.misvo.head, weights, settings.max_new_tokens, settings.temperature)
        return self.misvo.move(step, rollouts, gradient)
