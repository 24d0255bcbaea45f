"""What is added to the hidden state before the LM head, as plain data: it can be pickled and sent to a worker.

    intervention.at(rows, position, hidden) -> u (B, d), or None for nothing

`rows` (B,) are the rollouts that stand at this position, `hidden` (B, d) their states. `Vectors` are the same for all
rollouts, so an engine makes Wu of them once for each position and need not ask row by row.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from misvo.sampling import RandomStream
from misvo.tie import Tie
from misvo.value import ValueNetwork


class Intervention(Protocol):
    def at(self, rows: torch.Tensor, position: int, hidden: torch.Tensor) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Vectors:
    """u = B c, the same for all rollouts: free vectors c (r, d) and how positions share them. Beyond them, nothing."""

    free: torch.Tensor
    tie: Tie

    @classmethod
    def by_position(cls, u: torch.Tensor) -> "Vectors":
        """One vector for each position, (T, d)."""
        return cls(u, Tie(len(u)))

    def at(self, rows, position, hidden):
        if position >= self.tie.positions:
            return None
        return self.tie.spread(self.free)[position].expand(len(rows), -1).to(hidden.device)


@dataclass
class Noise:
    """AISP: U + ε^k with ε^k ~ N(0, σ²I) of its own for each rollout k, within the first `window` positions.

    The noise is not data: it is a function of (seed, prompt, step, rollout), drawn as decoding comes to it.
    """

    centre: torch.Tensor  # the free vectors of U (r, d)
    tie: Tie
    seed: int
    prompt: tuple[int, ...]
    step: int
    sigma2: float
    window: int
    _generators: dict[int, np.random.Generator] = field(default_factory=dict, repr=False)
    _at: dict[int, int] = field(default_factory=dict, repr=False)  # the position that each generator stands at
    _kept: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def at(self, rows, position, hidden):
        if position >= self.window:
            return None
        rollouts = rows.tolist()
        if self.tie.basis is not None:  # a few vectors for each response: drawn at once and kept
            self._kept |= {row: self.of(row, self.tie.size) for row in rollouts if row not in self._kept}
            noise = torch.stack([self._kept[row] for row in rollouts])
            return torch.einsum("r,krd->kd", self.tie.basis[position].to(noise), self.centre + noise)
        return self.centre[position] + torch.cat([self._next(row, position) for row in rollouts])

    def of(self, rollout: int, count: int) -> torch.Tensor:
        """The first so many of the vectors of ε of one rollout, (count, d)."""
        return self._draw(self._generator(rollout), count)

    def _next(self, rollout, position):
        """ε of one rollout at a position, (1, d). Positions are asked for in order, but where a row begins."""
        if self._at.get(rollout) != position:  # at the prompt's end, behind a beginning, or once more
            self._generators[rollout] = self._generator(rollout)
            self._draw(self._generators[rollout], position)
        self._at[rollout] = position + 1
        return self._draw(self._generators[rollout], 1)

    def _generator(self, rollout):
        return RandomStream(self.seed, self.prompt).generator(self.step, rollout)

    def _draw(self, generator, count):
        drawn = generator.standard_normal((count, self.centre.shape[1]), dtype="float32")
        return torch.from_numpy(drawn).to(self.centre).mul_(math.sqrt(self.sigma2))

    def __getstate__(self):
        return {**self.__dict__, "_generators": {}, "_at": {}, "_kept": {}}  # every row begins at its beginning


@dataclass(frozen=True)
class Displaced:
    """An adapted model at the prefixes of rollouts: what its states there (K, T, d) differ by from the model's own."""

    states: torch.Tensor

    def at(self, rows, position, hidden):
        return self.states[rows, position].to(hidden.device) - hidden


@dataclass(frozen=True)
class Climb:
    """RE-Control: the shift that gradient steps on a value network add up to, at every state anew."""

    value: ValueNetwork
    iterations: int
    step_size: float

    def at(self, rows, position, hidden):
        return self.value.to(hidden.device).climb(hidden, self.iterations, self.step_size)
