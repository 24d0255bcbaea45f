"""What a method is asked and what it answers. A method never sees text, files, batches or other prompts.

`scores.rewards` is a float64 tensor (K,) in which NaN stands for a response that could not be scored.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from misvo.adapted import AdaptedModel
from misvo.adapter import Adapter
from misvo.head import Head
from misvo.interventions import Intervention
from misvo.rollouts import Keep, Rollouts
from misvo.sampling import Sampler
from misvo.settings import Settings

Prefixes = Literal["never", "cheap", "always"]


@dataclass(frozen=True)
class Context:
    """What a method is made for: one prompt on one head."""

    head: Head
    prompt: tuple[int, ...]  # token ids; with the seed, the address of all random numbers
    sampler: Sampler
    settings: Settings
    scores_prefixes: bool = False  # whether the reward has a word on beginnings of responses
    adapted: AdaptedModel | None = None  # the model with adapters, for methods that train them


@dataclass(frozen=True)
class Proposal:
    """What to decode at a step."""

    intervention: Intervention | None = None  # None: the reference policy
    keep: Keep = field(default_factory=Keep)
    anchored: bool = False  # see misvo.rollouts.Request
    pauses: tuple[int, ...] = ()  # positions at which the method says which rows go on (`PausingMethod.regroup`)
    scores_pauses: bool = False  # whether the reward scores the beginnings there
    adapter: Adapter | None = None  # None: the model as it is


@dataclass(frozen=True)
class Scores:
    """What the reward said of a step's responses, and of their beginnings where the method wants to know."""

    rewards: torch.Tensor  # (K,) float64
    prefixes: torch.Tensor | None = None  # (K, cuts) float64, see misvo.credit


@dataclass(frozen=True)
class Update:
    """What a step changed: columns for its trace row, a note where something was odd, why the run should end."""

    columns: dict[str, float | str | list[float] | None] = field(default_factory=dict)
    note: str | None = None
    stop: str | None = None


class Method(Protocol):
    def __init__(self, context: Context): ...

    @property
    def sequential(self) -> bool:
        """Whether a step waits for the update of the step before it."""

    @property
    def steers(self) -> bool:
        """Whether it ever samples from another policy than the reference, so that there is a KL to measure."""

    @property
    def starts_at_reference(self) -> bool:
        """Whether the first step samples from the reference policy."""

    @property
    def wants_prefixes(self) -> Prefixes:
        """Whether the beginnings of responses are to be scored; cheap: where the reward offers it."""

    @property
    def vectors(self) -> torch.Tensor | None:
        """u (T, d), or None where the method has no vectors to keep."""

    @property
    def intervention(self) -> Intervention | None:
        """What it ended with, for the meter."""

    def propose(self, step: int) -> Proposal: ...

    def update(self, step: int, rollouts: Rollouts, scores: Scores) -> Update: ...


class PausingMethod(Method, Protocol):
    """A method whose proposals pause."""

    def regroup(self, step: int, rollouts: Rollouts, scores: Scores | None) -> torch.Tensor:
        """Which row each row goes on from, (K,), given all rows so far and, where they were asked for, their scores."""
        ...
