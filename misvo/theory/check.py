"""What a check is: one claim of the paper, one measured number, one limit, and the verdict that follows.

Four kinds, so that all checks report alike:
- identity: the largest error, relative to max(1, |value|), over all policies; at most a tolerance.
- bound: the largest quotient of the bounded quantity and its bound; at most 1.
- order: the smallest slope of log error against log ‖u‖ over all policies; at least the claimed order.
- existence: a number that must exceed a limit, for claims that something occurs or leads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-9  # of identities in double precision and of first derivatives, which are exact to rounding
DIFFERENCE_TOLERANCE = 1e-7  # of second derivatives, which are differences
ROUNDING = 1e-13  # what is subtracted from a bounded quantity before it is held against its bound
ORDER_SLACK = 0.1  # of a fitted slope
RELATIONS = {"≤": operator.le, "≥": operator.ge, ">": operator.gt}


@dataclass(frozen=True)
class Curve:
    """The error of one policy at several sizes σ_max(W)·‖u‖."""

    sizes: tuple[float, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Check:
    name: str
    claim: str
    where: str  # in the paper
    quantity: str  # what `measured` is
    kind: str  # identity, bound, order or existence
    measured: float
    relation: str
    limit: float
    order: float | None = None  # the claimed order, for kind "order"
    curves: tuple[Curve, ...] = ()

    @property
    def passed(self) -> bool:
        """NaN passes nothing: every comparison with it is false."""
        return bool(RELATIONS[self.relation](self.measured, self.limit))


@dataclass(frozen=True)
class Statement:
    """The words of a check; the verdict comes with `identity`, `bound`, `order` or `exists`."""

    name: str
    claim: str
    where: str

    def identity(self, quantity: str, errors: Iterable[float], tolerance: float = TOLERANCE) -> Check:
        return self._check(quantity, "identity", worst(errors), "≤", tolerance)

    def bound(self, quantity: str, ratios: Iterable[float]) -> Check:
        # A tight bound is met with equality, so rounding must not count as a violation.
        return self._check(quantity, "bound", worst(ratios), "≤", 1 + TOLERANCE)

    def order(self, quantity: str, order: float, curves: Iterable[Curve]) -> Check:
        curves = tuple(curves)
        slope = -worst(-fitted_slope(curve) for curve in curves)
        return self._check(quantity, "order", slope, "≥", order - ORDER_SLACK, order=order, curves=curves)

    def exists(self, quantity: str, measured: float, limit: float) -> Check:
        return self._check(quantity, "existence", measured, ">", limit)

    def _check(self, quantity: str, kind: str, measured: float, relation: str, limit: float, **rest) -> Check:
        measured, limit = float(measured), float(limit)
        return Check(self.name, self.claim, self.where, quantity, kind, measured, relation, limit, **rest)


def worst(values: Iterable[float]) -> float:
    """The largest value; NaN if any is NaN or if nothing was measured, so that an empty check cannot pass."""
    values = np.array(list(values), dtype=float)
    return values.max() if values.size else np.nan


def error(value: np.ndarray, truth: np.ndarray) -> float:
    """The largest deviation, relative to max(1, |truth|)."""
    return np.abs(value - truth).max() / max(1.0, np.abs(truth).max())


def ratio(quantity: np.ndarray, limit: np.ndarray, scale: float = 1.0) -> float:
    """The largest quotient of a nonnegative quantity and its bound; infinite where a zero bound is exceeded.

    `scale` is the size of the numbers whose difference the quantity is: their rounding is not a violation.
    """
    quantity, limit = np.broadcast_arrays(np.asarray(quantity, float), np.asarray(limit, float))
    excess = np.maximum(quantity - ROUNDING * scale, 0)
    quotients = np.full(excess.shape, np.inf)
    np.divide(excess, limit, out=quotients, where=limit != 0)
    quotients[(excess == 0) & (limit == 0)] = 0
    return quotients.max()


def fitted_slope(curve: Curve) -> float:
    """Least-squares slope of log error against log size; NaN (a failure) unless every error is positive."""
    sizes, errors = np.array(curve.sizes), np.array(curve.errors)
    return np.polyfit(np.log(sizes), np.log(errors), 1)[0] if (errors > 0).all() else np.nan
