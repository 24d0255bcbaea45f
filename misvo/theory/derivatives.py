"""Derivatives that know nothing of the paper's algebra: the complex step, and differences of it for Hessians.

Im f(x + ih)/h has no cancellation, so h can be 1e-30 and the derivative is exact to rounding. It needs f to
be written with analytic operations (no abs, no max of complex numbers), as `misvo.theory.tabular` is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

COMPLEX_STEP = 1e-30
REAL_STEP = 1e-5  # truncation about 1e-10, rounding about 1e-11


def jacobian(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """d function / d x for a function that maps (..., *x.shape) to (..., *out): returns (*out, *x.shape)."""
    nudges = np.eye(x.size).reshape(x.size, *x.shape)  # one nudge for each entry of x, all in one batch
    slopes = function(x + 1j * COMPLEX_STEP * nudges).imag / COMPLEX_STEP  # (x.size, *out)
    return np.moveaxis(slopes, 0, -1).reshape(*slopes.shape[1:], *x.shape)


def hessian(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Second derivatives of a scalar function: (x.size, x.size), by central differences of `jacobian`."""
    nudges = REAL_STEP * np.eye(x.size).reshape(x.size, *x.shape)
    rows = [(jacobian(function, x + e) - jacobian(function, x - e)).ravel() for e in nudges]
    return np.stack(rows) / (2 * REAL_STEP)
