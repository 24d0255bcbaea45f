"""Rewards as numbers: a response that could not be scored is None to people and NaN to arithmetic."""

import math
from collections.abc import Iterable

import torch


def as_numbers(values: Iterable[float | None]) -> torch.Tensor:
    """(n,) float64."""
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of those that were scored; None where none was."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
