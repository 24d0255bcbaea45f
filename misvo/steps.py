"""From a gradient to a step. Every step sees the free vectors c (r, d), the ascent direction and the Fisher product.

`euler` is the paper's explicit step, stable only while η·λ·‖F‖ < 2. `proximal` is implicit in the penalty and stable
for every η. `natural` climbs in the Fisher metric and always moves a fixed number of nats, so that neither the unit of
the reward nor the scale of the head is left in it.
"""

from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]  # c -> F c


def euler(c, reward_gradient, penalty_gradient, fisher: Product | None, settings):
    """c + η(g − λ∇cost), eq:update."""
    return c + settings.learning_rate * (reward_gradient - settings.penalty * penalty_gradient)


def proximal(c, reward_gradient, penalty_gradient, fisher: Product, settings):
    """(I + ηλF) c⁺ = c + η(g − λ(∇cost − F c)): what of the penalty is F c is taken at the new point."""
    rate, weight = settings.learning_rate, settings.penalty
    explicit = penalty_gradient - fisher(c)  # the suffix term of sequence-kl; zero for the Fisher costs
    target = c + rate * (reward_gradient - weight * explicit)
    return conjugate_gradients(lambda x: x + rate * weight * fisher(x), target)


def natural(c, reward_gradient, penalty_gradient, fisher: Product, settings):
    """c + s with (F + δI) s ∝ g − λ∇cost, scaled so that ½ sᵀFs = step_nats.

    The damping δ is a share of the direction's own curvature gᵀFg/gᵀg, so that it has the unit of F.
    """
    direction = reward_gradient - settings.penalty * penalty_gradient
    square = direction.square().sum()
    if not square > 0:
        return c
    damping = settings.damping * (direction * fisher(direction)).sum() / square
    step = conjugate_gradients(lambda x: fisher(x) + damping * x, direction)
    nats = 0.5 * (step * fisher(step)).sum()
    return c + step * torch.sqrt(settings.step_nats / nats.clamp(min=1e-30))


STEPS = {"euler": euler, "proximal": proximal, "natural": natural}


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
