"""What the checks run on: random policies, the worst cases of the bounds, and the steerings to try on both.

A loose bound holds for random inputs whatever its constant is, so the bounds also meet inputs that make them
tight. Those are coins: two tokens, a head that moves only their difference, and σ_max(W) over orders of
magnitude, so that a wrong power of it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .check import Curve, worst
from .formulas import Formulas
from .tabular import TabularPolicy

MOST_SEQUENCES = 256  # pairs of sequences are enumerated too
ORDER_SIZES = np.logspace(-2.5, -1, 7)  # σ_max(W)·‖u‖: small for the asymptote, not for rounding
PROBE_SIZES = (0.01, 0.5, 5.0)  # σ_max(W)·‖u_t‖: local, moderate, far
COIN_WIDTHS = (0.05, 1.0, 40.0)
CERTAIN = 60.0  # a logit gap at which the other token has no weight in double precision


@dataclass(frozen=True)
class Inputs:
    policies: list[TabularPolicy]  # random: identities and orders
    extremes: list[TabularPolicy]  # worst cases: bounds, beside the random ones
    formulas: Formulas
    rng: np.random.Generator

    @property
    def all_policies(self) -> list[TabularPolicy]:
        return self.policies + self.extremes


def random_policies(count: int, rng: np.random.Generator) -> list[TabularPolicy]:
    """V from 2 to 6, T from 2 to 4, d from 1 to 4, laws from flat to peaked; at most 256 sequences each."""
    policies = []
    while len(policies) < count:
        vocabulary, horizon, width = rng.integers(2, 7), rng.integers(2, 5), rng.integers(1, 5)
        if vocabulary**horizon <= MOST_SEQUENCES:
            spread = rng.uniform(0.4, 1.2)
            policies.append(TabularPolicy.random(rng, int(vocabulary), int(horizon), int(width), spread))
    return policies


def coin(sigma: float, first_gap: float, gap_after_first: float, gap_after_second: float) -> TabularPolicy:
    """Two tosses (V = T = 2, d = 1); a gap is the difference of the two logits.

    W is σ/√2 times (1, −1), so that a steering of size σ·|u| = s moves the gap by √2 s, as far as any head of
    that spectral norm can.
    """
    head = sigma / np.sqrt(2) * np.array([[1.0], [-1.0]])
    gaps = np.array([first_gap]), np.array([gap_after_first, gap_after_second])
    hidden = tuple(gap[:, None] / (np.sqrt(2) * sigma) for gap in gaps)  # gap = 2 (σ/√2) h
    return TabularPolicy(head, np.zeros(2), hidden)


def extreme_policies() -> list[TabularPolicy]:
    """Fair coins (largest variance), skewed coins (largest third cumulant) and forks (the first toss decides
    whether the second is fair or certain: the largest change of E[F_t] through the prefix)."""
    heads = (3 - np.sqrt(3)) / 6  # maximises p(1 − p)(1 − 2p), the third cumulant of a coin
    skew = np.log(heads / (1 - heads))
    gaps = [(0.0, 0.0, 0.0), (skew, skew, skew), (0.0, 0.0, CERTAIN)]
    return [coin(sigma, *gap) for sigma in COIN_WIDTHS for gap in gaps]


def steering_probes(policy: TabularPolicy, rng: np.random.Generator) -> list[np.ndarray]:
    """Steerings (T, d) of several sizes: random, along ± the top singular vector of W, one position alone,
    and the first position far ahead of the others."""
    _, singular, right = np.linalg.svd(policy.head)
    blocks = np.eye(policy.horizon)[:, :, None]
    aligned = np.broadcast_to(right[0], policy.zero.shape)
    probes = []
    for size in PROBE_SIZES:
        gaussian = rng.normal(size=policy.zero.shape)
        units = gaussian / np.linalg.norm(gaussian, axis=-1, keepdims=True)
        alone = units * blocks[rng.integers(policy.horizon)]
        uneven = aligned * np.maximum(blocks[0], 0.01)
        shapes = [units, aligned, -aligned, aligned * blocks[0], alone, uneven]
        probes += [size / singular[0] * shape for shape in shapes]
    return probes


def error_curve(
    policy: TabularPolicy,
    rng: np.random.Generator,
    measure: Callable[[np.ndarray], float],
    directions: int = 4,
) -> Curve:
    """The largest `measure(u)` over random directions of the stacked u, at each of ORDER_SIZES.

    Directions come in opposite pairs: where two orders cancel along one, they add up along the other, so that
    a slope below the true order cannot come from a cancellation.
    """
    gaussian = rng.normal(size=(directions, *policy.zero.shape))
    units = gaussian / np.linalg.norm(gaussian, axis=(-2, -1), keepdims=True)
    units = np.concatenate([units, -units]) / np.linalg.norm(policy.head, 2)
    errors = [worst(measure(size * unit) for unit in units) for size in ORDER_SIZES]
    return Curve(tuple(ORDER_SIZES.tolist()), tuple(map(float, errors)))
