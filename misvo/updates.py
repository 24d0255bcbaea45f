"""From a gradient to a step. Every step sees the free vectors c (r, d), the ascent direction and the Fisher product.

`euler` is the paper's explicit step, stable only while η·λ·‖F‖ < 2. `proximal` is implicit in the penalty and stable
for every η. `natural` climbs in the Fisher metric and always moves a fixed number of nats, so that neither the unit of
the reward nor the scale of the head is left in it. `dual` goes where the gradients of all steps so far point: most of a
single step's gradient is noise, and their sum has less of it.
"""

from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]  # c -> F c


def euler(c, reward_gradient, penalty_gradient, fisher: Product | None, settings, nats=None):
    """c + η(g − λ∇cost), eq:update."""
    return c + settings.learning_rate * (reward_gradient - settings.penalty * penalty_gradient)


def proximal(c, reward_gradient, penalty_gradient, fisher: Product, settings, nats=None):
    """(I + ηλF) c⁺ = c + η(g − λ(∇cost − F c)): what of the penalty is F c is taken at the new point."""
    rate, weight = settings.learning_rate, settings.penalty
    explicit = penalty_gradient - fisher(c)  # the suffix term of sequence-kl; zero for the Fisher costs
    target = c + rate * (reward_gradient - weight * explicit)
    return conjugate_gradients(lambda x: x + rate * weight * fisher(x), target)


def natural(c, reward_gradient, penalty_gradient, fisher: Product, settings, nats):
    """c + s with (F + δI) s ∝ g − λ∇cost, scaled so that ½ sᵀFs = nats.

    The damping δ is a share of the direction's own curvature gᵀFg/gᵀg, so that it has the unit of F.
    """
    direction = reward_gradient - settings.penalty * penalty_gradient
    return c + natural_vectors(direction, fisher, settings.damping, nats)


class Dual:
    """(F + δI)⁻¹ Σ_s (g_s − λ∇cost_s) over all steps s so far, scaled to so many nats for each of them.

    Dual averaging: where `natural` adds steps to each other, each as noisy as its own gradient, this adds gradients.
    """

    def __init__(self):
        self.gathered, self.nats = 0.0, 0.0

    def __call__(self, c, reward_gradient, penalty_gradient, fisher: Product, settings, nats):
        self.gathered = self.gathered + reward_gradient - settings.penalty * penalty_gradient
        self.nats += nats
        return natural_vectors(self.gathered, fisher, settings.damping, self.nats)


def natural_vectors(direction, fisher: Product, share: float, nats: float):
    """s with (F + δI) s ∝ direction and ½ sᵀFs = nats."""
    square = direction.square().sum()
    if not square > 0:
        return torch.zeros_like(direction)
    damping = share * (direction * fisher(direction)).sum() / square
    step = conjugate_gradients(lambda x: fisher(x) + damping * x, direction)
    own = 0.5 * (step * fisher(step)).sum()
    return step * torch.sqrt(nats / own.clamp(min=1e-30))


# What makes the step of a run: a step that remembers is made anew for each.
UPDATES: dict[str, Callable[[], Callable]] = {
    "euler": lambda: euler,
    "proximal": lambda: proximal,
    "natural": lambda: natural,
    "dual": Dual,
}


def conjugate_gradients(product: Product, target, iterations: int = 20, tolerance: float = 1e-3):
    """x with A x = target for a positive definite A, until the residual is `tolerance` of the target."""
    x = torch.zeros_like(target)
    residual = target.clone()
    direction, square = residual, residual.square().sum()
    goal = tolerance**2 * square
    for _ in range(iterations):
        if square <= goal:
            break
        image = product(direction)
        rate = square / (direction * image).sum()
        x = x + rate * direction
        residual = residual - rate * image
        square, previous = residual.square().sum(), square
        direction = residual + square / previous * direction
    return x
