"""The value network of RE-Control (Kong et al., 2024): how much reward a hidden state promises.

V(h) is a small network on the states before the LM head, fitted on rollouts of the reference policy to
`Σ_t (V(h_t) − V(h_{t+1}))² + (V(h_last) − r)²`: neighbours agree, and the last state knows the reward. States and
rewards are standardised inside, so that neither unit matters to the fit; V itself speaks in units of reward.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from misvo.errors import MisvoError

WEIGHTS, METADATA = "value.safetensors", "value.json"


@dataclass
class Episode:
    """One scored response: its states before the LM head (length, d), and its reward."""

    hidden: torch.Tensor
    reward: float


class ValueNetwork(nn.Module):
    """V(h): d -> width -> width -> 1, on standardised states."""

    def __init__(self, hidden_size: int, width: int = 256, head: str | None = None):
        super().__init__()
        self.head, self.budget = head, {}  # the head that the states came from; what the fit cost
        self.mean: torch.Tensor
        self.loss: float = float("nan")  # of the last epoch of a fit
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("scale", torch.ones(hidden_size))
        self.register_buffer("reward", torch.tensor([0.0, 1.0]))  # mean and spread
        layers = [nn.Linear(hidden_size, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., d) -> (...)"""
        value = self.layers((hidden - self.mean) / self.scale).squeeze(-1)
        return self.reward[0] + self.reward[1] * value

    def climb(self, hidden: torch.Tensor, iterations: int, step_size: float) -> torch.Tensor:
        """The shift u that `iterations` steps h ← h + α∇V(h) add up to, (B, d) -> (B, d)."""
        start = hidden.to(self.mean)
        state = start.clone()
        with torch.enable_grad():
            for _ in range(iterations):
                state.requires_grad_(True)
                (gradient,) = torch.autograd.grad(self(state).sum(), state)
                state = (state + step_size * gradient).detach()
        return state - start

    @classmethod
    def fit(cls, episodes: list[Episode], seed=0, epochs=200, rate=1e-3, head=None) -> "ValueNetwork":
        """Fit on scored responses; the same episodes and seed give the same network."""
        if not episodes:
            raise MisvoError("there is no scored response to fit a value network on.")
        states = nn.utils.rnn.pad_sequence([e.hidden.float() for e in episodes], batch_first=True)  # (n, L, d)
        lengths = torch.tensor([len(e.hidden) for e in episodes], device=states.device)
        rewards = torch.tensor([e.reward for e in episodes], device=states.device)
        alive = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
        with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
            torch.manual_seed(seed)
            network = cls(states.shape[-1], head=head).to(states.device)
        network.mean.copy_(states[alive].mean(0))
        network.scale.copy_(states[alive].std(0, unbiased=False).clamp(min=1e-3))
        network.reward.copy_(torch.stack([rewards.mean(), rewards.std(unbiased=False).clamp(min=1e-6)]))
        optimizer = torch.optim.Adam(network.parameters(), lr=rate)
        with torch.enable_grad():
            for _ in range(epochs):
                loss = bellman_loss(
                    network(states) / network.reward[1], alive, lengths - 1, rewards / network.reward[1]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        network.loss = loss.item()
        return network.requires_grad_(False).eval()

    def save_pretrained(self, folder) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(self.state_dict(), folder / WEIGHTS)
        shape = {"hidden_size": len(self.mean), "width": self.layers[0].out_features}
        text = json.dumps({"format": "misvo-value-1", **shape, "head": self.head, "budget": self.budget}, indent=2)
        (folder / METADATA).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder) -> "ValueNetwork":
        folder = Path(folder)
        try:
            metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
            network = cls(metadata["hidden_size"], metadata["width"], metadata["head"])
            network.budget = metadata["budget"]
            network.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
            raise MisvoError(f"{folder} holds no value network that can be read ({type(error).__name__}).") from error
        return network.requires_grad_(False).eval()


def bellman_loss(values, alive, carrier, rewards) -> torch.Tensor:
    """Mean over responses of Σ_t (V(h_t) − V(h_{t+1}))² + (V(h_carrier) − r)²; values (n, L), alive (n, L)."""
    neighbours = (values[:, :-1] - values[:, 1:]).square() * alive[:, 1:]
    ends = (values.gather(1, carrier[:, None]).squeeze(1) - rewards).square()
    return (neighbours.sum(1) + ends).mean()
