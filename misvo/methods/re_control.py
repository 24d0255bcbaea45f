"""RE-Control (Kong et al., 2024): steer each token by gradient steps on a value network of the hidden state.

With a fitted network (`value=FOLDER`, see `misvo.train_value`) every step steers. Without one, the first `value_steps`
steps sample from the reference policy to fit it: they are part of the K·N responses, and the trace says which is which.
"""

import torch

from misvo.errors import MisvoError
from misvo.interventions import Climb
from misvo.methods.base import Prefixes, Proposal, Update
from misvo.rollouts import Keep
from misvo.value import Episode, ValueNetwork


class ReControl:
    sequential = True  # steering waits for the network
    steers = True
    wants_prefixes: Prefixes = "never"
    vectors = None

    def __init__(self, context):
        self.head, self.settings, settings = context.head, context.settings, context.settings
        self.value, self.episodes, self.collecting = None, [], settings.collecting_steps
        if settings.value is not None:
            self.value = ValueNetwork.from_pretrained(settings.value).to(self.head.device)
            size, made_for = len(self.value.mean), self.value.head
            if size != self.head.hidden_size or made_for not in (None, self.head.fingerprint):
                raise MisvoError(f"the value network in {settings.value} was fitted for a model with another LM head.")
        self.starts_at_reference = self.collecting > 0

    @property
    def intervention(self):
        if self.value is None:  # a run may stop before there is a network
            return None
        return Climb(self.value, self.settings.value_iterations, self.settings.value_step_size)

    def propose(self, step):
        return Proposal(keep=Keep(hidden=True)) if step < self.collecting else Proposal(self.intervention)

    def update(self, step, rollouts, scores):
        if step >= self.collecting:
            return Update({"phase": "steer", "norm": rollouts.squares.double().sum(1).mean().sqrt().item()})
        self.episodes += episodes_of(rollouts, scores.rewards)
        if step + 1 < self.collecting:
            return Update({"phase": "collect"})
        self.value = ValueNetwork.fit(self.episodes, self.settings.seed, head=self.head.fingerprint)
        self.value.budget = {"responses": len(self.episodes)}
        return Update({"phase": "fit", "value_loss": self.value.loss})


def episodes_of(rollouts, rewards: torch.Tensor) -> list[Episode]:
    """The scored responses of a batch of rollouts whose hidden states were kept."""
    scored = torch.nonzero(~rewards.isnan())[:, 0].tolist()
    states = zip(rollouts.states_of(scored), scored, strict=True)
    return [Episode(hidden, rewards[row].item()) for hidden, row in states]
