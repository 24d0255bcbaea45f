"""The settings of a steering run: one frozen dataclass, validated once at the edge. Imports no torch.

Paper symbols: K is `rollouts`, N is `steps`, T is `max_new_tokens`, η is `learning_rate`, λ is `penalty`.
"""

import dataclasses
import math
from dataclasses import dataclass

from misvo.errors import MisvoError

# What each name stands for, in the words of `misvo list`. The classes live in misvo.methods and misvo.cost.
METHODS = {
    "misvo": "Algorithm 1: reward gradient minus a KL-shaped penalty, one vector per position",
    "best-of-n": "K·N samples of the reference policy, the best one returned",
}
COSTS = {
    "frozen-fisher": "Fisher at zero on reference prefixes (eq:surr-offoff), the paper's choice",
    "euclidean": "the identity: squared length of the hidden-space shift",
    "none": "no penalty at all",
}
DEFAULT_PENALTY = {"misvo": 1.0, "best-of-n": 0.0}


@dataclass(frozen=True)
class Settings:
    """Everything that decides a result, besides the model, the prompt and the reward."""

    method: str = "misvo"
    cost: str = "frozen-fisher"
    rollouts: int = 16
    steps: int = 16
    max_new_tokens: int = 512
    learning_rate: float = 0.1
    penalty: float | None = None  # None: the method's own default, see DEFAULT_PENALTY
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    kl_ref: bool = False  # measure eq:kl-estimator on the first step's rollouts at the end
    max_rows: int | None = None  # rows decoded at once; None: as many as memory allows

    def __post_init__(self):
        _one_of("method", self.method, METHODS)
        _one_of("cost", self.cost, COSTS)
        if self.penalty is None:
            object.__setattr__(self, "penalty", DEFAULT_PENALTY[self.method])
        # A leave-one-out baseline needs another rollout to compare with.
        _whole("rollouts", self.rollouts, 1 if self.method == "best-of-n" else 2)
        _whole("steps", self.steps, 1)
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _whole("seed", self.seed, 0)
        if self.max_rows is not None:
            _whole("max_rows", self.max_rows, 1)
        _real("learning_rate", self.learning_rate, lambda x: x > 0, "above 0")
        _real("penalty", self.penalty, lambda x: x >= 0, "0 or above")
        _real("temperature", self.temperature, lambda x: x > 0, "above 0")
        _real("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def _one_of(name, value, known):
    if value not in known:
        raise MisvoError(f"unknown {name} {value!r}: choose one of {', '.join(known)}.")


def _whole(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MisvoError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def _real(name, value, holds, wish):
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not holds(value):
        raise MisvoError(f"{name} must be a number {wish}, not {value!r}.")
