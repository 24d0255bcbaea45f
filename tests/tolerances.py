"""How far a right answer may be off: bounds from the arithmetic, so that no test is fitted to one machine.

Kernels differ between CPUs in the order of their sums and in the last bit of their exponentials, and in nothing else.
So a bound counts roundings: one sum has `rounding`, a whole model is as wrong as one whose weights are a little off
(`nearby`), and `room` says what that little does to any figure. Bounds are computed in fp64, the same on every machine.
"""

import copy

import torch

CONFIDENCE = 6  # λ: a sum of random roundings stays below λ√n·u but for a chance of 2 exp(−λ²/2), 3e-8


def unit(dtype: torch.dtype) -> float:
    """u, the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def rounding(dtype: torch.dtype, terms: int, size=1.0):
    """The error of a sum of `terms` numbers or products whose absolute values add up to `size`, summed in any order.

    At worst γ_n = nu/(1 − nu) of the size, where n counts the roundings that a term goes through: its product and all
    additions. Roundings that are independent and have mean zero stay below λ√n·u (Higham and Mary, 2019), which is less
    from n = λ² on. `size` may be a tensor, and so is the bound then.
    """
    n, u = terms + 1, unit(dtype)
    return min(n * u / (1 - n * u), CONFIDENCE * n**0.5 * u) * size


def nearby(model: torch.nn.Module, relative: float, seed: int) -> torch.nn.Module:
    """The model in fp64 with every weight up or down by a relative error."""
    moved, generator = copy.deepcopy(model).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in moved.parameters():
            signs = 2.0 * torch.randint(2, weight.shape, generator=generator) - 1
            weight.mul_(1 + relative * signs.double())
    return moved


@torch.no_grad()
def room(compute, model: torch.nn.Module, relative: float | None = None, copies: int = 2) -> float:
    """How far, in norm, a figure `compute(model)` may be from its exact value when the model runs in its own precision.

    Backward error: what a product with W gives in floating point is the exact product with a W whose entries are off
    by the `rounding` of a row (Higham, Accuracy and Stability, 3.5). So the figure is computed in fp64 for the model
    and for some copies with such weights, and the largest departure counts. By default the error is that of the
    longest sum that a linear layer makes, forwards or, as Wᵀp, backwards; it is λ times what is probable, which leaves
    room for norms, exponentials and two runs that are both off.
    """
    if relative is None:
        sides = [max(layer.weight.shape) for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
        relative = rounding(next(model.parameters()).dtype, max(sides))
    exact = torch.as_tensor(compute(copy.deepcopy(model).double()))
    moved = [torch.as_tensor(compute(nearby(model, relative, seed))) for seed in range(copies)]
    return max((other - exact).norm().item() for other in moved)


def assert_within(got, expected, bound) -> None:
    """Entry by entry, |got − expected| ≤ bound; says how far outside the worst entry is."""
    error = (torch.as_tensor(got).double() - torch.as_tensor(expected).double()).abs()
    bound = torch.as_tensor(bound, dtype=torch.float64).expand_as(error)
    assert (error <= bound).all(), f"off by {error.max():.3g}, {(error / bound).max():.3g} of what rounding allows"


def assert_near(got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """In norm, ‖got − expected‖ ≤ bound, which is what `room` speaks of."""
    error = (got.double() - expected.double()).norm().item()
    assert error <= bound, f"off by {error:.3g} where rounding allows {bound:.3g}, of a norm of {expected.norm():.3g}"
