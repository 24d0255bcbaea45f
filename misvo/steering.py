"""Steering as a value: the vectors u (T, d), what they were made for, and the arithmetic of vectors.

    half = 0.5 * result.steering
    half.save_pretrained("calm"); misvo.Steering.from_pretrained("calm")

A folder holds `steering.safetensors` and `steering.json`. Vectors fit one head only, so the head's fingerprint
travels with them and `check` refuses any other.
"""

import json
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from misvo.errors import MisvoError
from misvo.text import one_line

WEIGHTS, METADATA = "steering.safetensors", "steering.json"


@dataclass(frozen=True, eq=False)
class Steering:
    """One vector per position, added to the hidden state before the LM head."""

    vectors: torch.Tensor  # (T, d) fp32, on the CPU
    head: str | None = None  # fingerprint of the head that they were made for
    tie: str = "position"  # "shared" and "smooth" vectors go on beyond the last position, "position" ones end there
    metadata: dict = field(default_factory=dict)  # model name, prompt, settings, seed

    @property
    def norm(self) -> float:
        """‖u‖, the Euclidean norm of all positions stacked."""
        return self.vectors.norm().item()

    def __len__(self) -> int:
        return len(self.vectors)

    def __repr__(self) -> str:
        shape, model = "×".join(map(str, self.vectors.shape)), one_line(str(self.metadata.get("model")), 60)
        return f"Steering({shape}, norm={self.norm:.4g}, tie='{one_line(str(self.tie), 20)}', model='{model}')"

    def __add__(self, other: "Steering") -> "Steering":
        if not isinstance(other, Steering):
            return NotImplemented
        width = {self.vectors.shape[1], other.vectors.shape[1]}
        if len(width) > 1 or (self.head and other.head and self.head != other.head):
            raise MisvoError("these two steerings were made for different heads and cannot be added.")
        longest = max(len(self), len(other))
        a, b = self.at(longest), other.at(longest)
        return replace(
            self, vectors=a + b, head=self.head or other.head, tie=self.tie if self.tie == other.tie else "position"
        )

    def __mul__(self, factor: float) -> "Steering":
        if not isinstance(factor, int | float):
            return NotImplemented
        return replace(self, vectors=self.vectors * factor)

    __rmul__ = __mul__

    def __neg__(self) -> "Steering":
        return self * -1.0

    def __sub__(self, other: "Steering") -> "Steering":
        return self + -other if isinstance(other, Steering) else NotImplemented

    def at(self, length: int) -> torch.Tensor:
        """The vectors for responses of `length` tokens, (length, d)."""
        if length <= len(self):
            return self.vectors[:length]
        beyond = self.vectors[-1:] if self.tie != "position" else torch.zeros_like(self.vectors[-1:])
        return torch.cat([self.vectors, beyond.expand(length - len(self), -1)])

    def check(self, policy) -> None:
        """Refuse a policy whose head is not the one that these vectors were made for."""
        if self.vectors.shape[1] != policy.head.hidden_size or (self.head and self.head != policy.head.fingerprint):
            made_for = self.metadata.get("model", "another model")
            raise MisvoError(f"this steering was made for {made_for}, whose LM head is not the one of {policy.name}.")

    def save_pretrained(self, folder) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file({"vectors": self.vectors.contiguous()}, folder / WEIGHTS)
        described = {"format": "misvo-steering-1", "head": self.head, "tie": self.tie, **self.metadata}
        text = json.dumps(described, indent=2)
        (folder / METADATA).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder) -> "Steering":
        folder = Path(folder)
        for name in (WEIGHTS, METADATA):
            if not (folder / name).is_file():
                raise MisvoError(f"{folder} holds no saved steering: {name} is missing.")
        try:
            vectors = safetensors.torch.load_file(folder / WEIGHTS)["vectors"]
        except (safetensors.SafetensorError, KeyError) as error:
            raise MisvoError(
                f"{folder / WEIGHTS} is truncated or not a steering in safetensors format ({error})."
            ) from error
        try:
            metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
            head, tie, _ = metadata.pop("head"), metadata.pop("tie"), metadata.pop("format")
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
            raise MisvoError(f"{folder / METADATA} is not the description of a steering.") from error
        if vectors.ndim != 2 or not torch.isfinite(vectors).all():
            raise MisvoError(f"{folder / WEIGHTS} does not hold finite vectors of shape (positions, hidden size).")
        return cls(vectors, head, tie, metadata)


def as_steering(thing) -> Steering:
    """A steering as it is, by the folder that it was saved in, or of a result that has one."""
    if isinstance(thing, str | PathLike):
        return Steering.from_pretrained(thing)
    steering = getattr(thing, "steering", thing)  # of a result
    if steering is None:
        raise MisvoError("this result has no steering vectors: its method makes none, or had no step.")
    if not isinstance(steering, Steering):
        raise MisvoError(f"steering is a misvo.Steering, its folder or a misvo.Result, not {type(thing).__name__}.")
    return steering
