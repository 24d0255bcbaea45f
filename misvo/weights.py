"""Importance weights: exponentiated rewards, how many samples they leave, and drawing again by them."""

import math

import torch


def importance_weights(rewards, bias, temperature) -> torch.Tensor:
    """softmax_k(r^k/λ + bias^k) in log space, (K,); what could not be scored has no weight, λ = 0 means the best."""
    return torch.softmax(log_weights(rewards, bias, temperature), dim=0)


def log_weights(rewards, bias, temperature) -> torch.Tensor:
    """(r^k − max r)/λ + bias^k, (K,); −∞ for what could not be scored."""
    scored = ~rewards.isnan()
    gaps = torch.where(scored, rewards - rewards[scored].max(), -math.inf)  # ≤ 0, so that r/λ cannot overflow
    logits = gaps / temperature if temperature > 0 else torch.where(gaps == 0, 0.0, -math.inf)
    return logits + torch.where(scored, bias, 0.0)


def effective_sample_size(weights) -> float:
    """1 / Σ w²: how many responses the weighted mean really rests on."""
    return 1 / weights.square().sum().item()


def temperature_for(rewards, bias, wanted: float) -> float:
    """The λ at which the effective sample size is `wanted`, or the nearest that these rewards allow."""

    def excess(log_temperature):
        return effective_sample_size(importance_weights(rewards, bias, math.exp(log_temperature))) - wanted

    known = rewards[~rewards.isnan()]
    spread = max((known.max() - known.min()).item(), 1e-12)
    low, high = math.log(spread) - 12, math.log(spread) + 12
    if excess(low) >= 0:
        return math.exp(low)
    if excess(high) <= 0:
        return math.exp(high)
    from scipy.optimize import brentq  # half a second, which nobody waits for before the first token

    return math.exp(brentq(excess, low, high))


def systematic(weights: torch.Tensor, uniform: float) -> torch.Tensor:
    """Who goes on, (K,) rising: row k is drawn ⌊K·w_k⌋ or ⌈K·w_k⌉ times, K·w_k on average over a uniform number."""
    count = len(weights)
    points = (torch.arange(count, dtype=torch.float64) + uniform) / count
    borders = weights.double().cumsum(0)
    return torch.searchsorted(borders / borders[-1], points, right=True).clamp(max=count - 1)
