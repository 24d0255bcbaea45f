"""Low-rank adapters as plain data (LoRA, Hu et al., 2021): W + (α/r)·BA beside linear layers of a model's body.

B = 0 at first, so a fresh adapter changes nothing. What trains and runs them is `misvo.adapted`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True)
class AdapterForm:
    """Which layers of a model have low-rank weights beside them, and of which size; by the names that peft has."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] | None = None  # ends of layers' names, such as "q_proj"; None: all linear layers

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Pair:
    """The weights beside one layer."""

    down: torch.Tensor  # A (r, in)
    up: torch.Tensor  # B (out, r)

    @classmethod
    def fresh(cls, rank: int, inputs: int, outputs: int, generator: np.random.Generator) -> "Pair":
        """A as peft draws it, uniform within ±1/√in, from a generator of its own; B = 0."""
        drawn = generator.uniform(-1, 1, (rank, inputs)) / math.sqrt(inputs)
        return cls(torch.from_numpy(drawn), torch.zeros(outputs, rank))

    def to(self, *where) -> "Pair":
        return Pair(self.down.to(*where), self.up.to(*where))


@dataclass(frozen=True, eq=False)
class Adapter:
    """Weights for every layer of a form, by the layer's name."""

    form: AdapterForm
    pairs: Mapping[str, Pair]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All weights, in the order of the layers: A, B, A, B, …"""
        return [tensor for pair in self.pairs.values() for tensor in (pair.down, pair.up)]

    def with_tensors(self, tensors: list[torch.Tensor]) -> "Adapter":
        """An adapter with these weights, in the order of `tensors`."""
        pairs = (Pair(down, up) for down, up in zip(tensors[::2], tensors[1::2], strict=True))
        return replace(self, pairs=dict(zip(self.pairs, pairs, strict=True)))

    def scaled(self, factor: float) -> "Adapter":
        """The adapter that changes every weight of the model by so many times as much."""
        return replace(self, pairs={name: Pair(pair.down, factor * pair.up) for name, pair in self.pairs.items()})

    @property
    def norm(self) -> float:
        """‖(α/r)·BA‖, the Euclidean norm of what all layers' weights are changed by."""
        squares = [((pair.up.T @ pair.up) * (pair.down @ pair.down.T)).sum().item() for pair in self.pairs.values()]
        return self.form.scaling * math.sqrt(max(0.0, sum(squares)))  # ‖BA‖² = tr(BᵀB · AAᵀ)
