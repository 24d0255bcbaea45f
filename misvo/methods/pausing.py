"""What methods that look at rows while they are written have in common: what a beginning is worth, and who writes.

Every `block` tokens decoding pauses, and `regroup` says which row each row goes on from. Where something has to be
learned first, a value of beginnings or a policy that steers, the first round is the reference's own, without pauses.
"""

from dataclasses import replace

import torch

from misvo.guide import Guide
from misvo.methods.base import Context, Prefixes, Proposal, Update
from misvo.potential import potential_for


class Pausing:
    wants_prefixes: Prefixes = "never"

    def __init__(self, context: Context):
        self.context, self.settings = context, context.settings
        self.potential = potential_for(context.settings, context.scores_prefixes)
        self.guide = Guide(context) if context.settings.proposal == "steered" else None
        self.steers = self.guide is not None
        self.starts_at_reference = self.steers or self.potential.learns
        self.sequential = self.starts_at_reference

    @property
    def vectors(self):
        return None if self.guide is None else self.guide.vectors

    @property
    def intervention(self):
        return None if self.guide is None else self.guide.intervention

    def propose(self, step):
        proposal = Proposal() if self.guide is None else self.guide.propose(step)
        keep = replace(proposal.keep, hidden=proposal.keep.hidden or self.potential.learns)
        if self.only_learns(step):
            return replace(proposal, keep=keep)
        pauses = tuple(range(self.settings.block, self.settings.max_new_tokens, self.settings.block))
        return replace(proposal, keep=keep, pauses=pauses, scores_pauses=not self.potential.learns)

    def only_learns(self, step: int) -> bool:
        """Whether a round has no pauses."""
        return step == 0 and self.starts_at_reference

    def promised(self, rollouts, scores) -> torch.Tensor:
        """What the beginnings at a pause are worth, (K,)."""
        return self.potential.of(rollouts, None if scores is None else scores.rewards)

    def learn(self, step, rollouts, scores, weights: torch.Tensor | None) -> Update:
        """From a round that has ended; `weights` (K,) are those of its rows, None where it had no pauses."""
        return Update() if self.guide is None else self.guide.learn(step, rollouts, scores, weights)
