"""One sampled response, and what is known of it."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from misvo.text import one_line


@dataclass(frozen=True)
class Candidate:
    """One sampled response."""

    step: int  # from 0
    rollout: int
    tokens: list[int]  # up to and with EOS
    text: str
    reward: float | None  # None where the reward could not score it
    ref_logprob: float | None = None  # mean log-probability per token under the reference policy
    token_kl: list[float] = field(default_factory=list)  # nats at each token: KL of the steered to the reference law
    ended: bool | None = None  # by itself, or cut off at max_new_tokens; None where that is not known
    changed: list[int] | None = None  # positions where the reference draws another token, same noise; None: not known
    parts: dict[str, float | None] = field(default_factory=dict)  # what the reward was made of, before weights
    held_out: float | None = None  # of a reward that was watched and not optimised; None: there was none, or no score

    @property
    def kl(self) -> float | None:
        """How far the model was moved on the way through this response, in nats; None where that is not known."""
        return sum(self.token_kl) if self.token_kl else None

    @property
    def kl_per_token(self) -> float | None:
        return sum(self.token_kl) / len(self.token_kl) if self.token_kl else None

    @property
    def distinct(self) -> float:
        """The share of its pairs of neighbouring tokens that are not repeated; 1 for a response of one token."""
        pairs = list(pairwise(self.tokens))
        return len(set(pairs)) / len(pairs) if pairs else 1.0

    @property
    def stutter(self) -> float:
        """The share of its tokens that repeat the one before them; a single one ("very very", "100") is none."""
        repeats = sum(first == second for first, second in pairwise(self.tokens))
        return max(0, repeats - 1) / max(1, len(self.tokens))

    def __repr__(self) -> str:
        reward, kl = (None if value is None else f"{value:.4g}" for value in (self.reward, self.kl))
        place = f"step={self.step}, rollout={self.rollout}"
        return f"Candidate({place}, reward={reward}, kl={kl}, text='{one_line(self.text, 60)}')"

    @classmethod
    def from_dict(cls, row: dict) -> "Candidate":
        """From what `vars` made of one and JSON kept; KeyError or TypeError names the field that is missing or wrong.

        A field with a default may be missing, as it is in files of old; what is no field is passed over.
        """
        optional = {"ref_logprob": None, "token_kl": [], "ended": None, "changed": None, "parts": {}, "held_out": None}
        row = {**optional, **row}
        return cls(**{name: take(row, name, holds) for name, holds in FIELDS.items()})


def whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(value) -> bool:
    return isinstance(value, list) and all(map(number, value))


def reward(value) -> bool:
    return value is None or (number(value) and math.isfinite(value))


def rewards_by_name(value) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value) and all(map(reward, value.values()))


def wholes(value) -> bool:
    return isinstance(value, list) and all(map(whole, value))


def take(row: dict, name: str, holds):
    """An entry that must be there and be what `holds` says; KeyError or TypeError else, with its name."""
    if not holds(row[name]):
        raise TypeError(repr(name))
    return row[name]


FIELDS = {
    "step": whole,
    "rollout": whole,
    "tokens": wholes,
    "text": lambda value: isinstance(value, str),
    "reward": reward,
    "ref_logprob": lambda value: value is None or number(value),
    "token_kl": numbers,
    "ended": lambda value: value is None or isinstance(value, bool),
    "changed": lambda value: value is None or wholes(value),
    "parts": rewards_by_name,
    "held_out": reward,
}
