"""RE-Control (Kong et al., 2024): steer each token by gradient steps on a value network of the hidden state.

With a fitted network (`value=FOLDER`, see `misvo.train_value`) every step steers. Without one, the first `value_steps`
steps sample from the reference policy to fit it: they are part of the K·N responses, and the trace says which is which.
"""

import torch

from misvo.errors import MisvoError
from misvo.value import Episode, ValueNetwork


class ReControl:
    sequential = True  # steering waits for the network

    def __init__(self, head, stream, sampler, settings):
        self.head, self.settings, self.vectors = head, settings, None
        self.value, self.episodes, self.collecting = None, [], settings.collecting_steps
        if settings.value is not None:
            self.value = ValueNetwork.from_pretrained(settings.value).to(head.device)
            if len(self.value.mean) != head.hidden_size or self.value.head not in (None, head.fingerprint):
                raise MisvoError(f"the value network in {settings.value} was fitted for a model with another LM head.")
        self.starts_at_reference = self.collecting > 0
        self.squares = torch.zeros(settings.rollouts, dtype=torch.float64)  # Σ‖u‖² of each response of the step

    def propose(self, step):
        if step < self.collecting:
            return {"keep_scores": False, "keep_hidden": True}
        return {"keep_scores": False, "intervene": self._climb}

    def update(self, step, rollouts, rewards):
        if step < self.collecting:
            self.episodes += episodes_of(rollouts, rewards)
            if step + 1 == self.collecting:
                self.value = ValueNetwork.fit(
                    self.episodes, self.settings.value_target, self.settings.seed, head=self.head.fingerprint
                )
                self.value.budget = {"responses": len(self.episodes)}
                return {"phase": "fit", "value_loss": self.value.loss}
            return {"phase": "collect"}
        return {"phase": "steer", "norm": self.squares.mean().sqrt().item()}

    def intervention(self):
        return None if self.value is None else self._climb  # a run may stop before there is a network

    def _climb(self, rows, position, hidden):
        u = self.value.climb(hidden, self.settings.value_iterations, self.settings.value_step_size)
        if position == 0:  # a row may begin again, see Engine
            self.squares[rows] = 0.0
        self.squares[rows] += u.double().square().sum(-1).cpu()
        return u.to(self.head.dtype)


def episodes_of(rollouts, rewards: torch.Tensor) -> list[Episode]:
    """The scored responses of a batch of rollouts whose hidden states were kept."""
    rows = zip(rollouts.hidden, rollouts.lengths.tolist(), rewards.tolist(), strict=True)
    return [Episode(hidden[:length].clone(), reward) for hidden, length, reward in rows if reward == reward]
