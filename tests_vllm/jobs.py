"""Requests of many kinds, for the checker."""

import torch

from misvo.interventions import Noise, Vectors
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.tie import TIES

ALL = Keep(scores=True, fisher="steered", hidden=True)


def vectors(policy, length, tie="position", size=1.0, seed=1):
    """Random vectors that move logits by about `size`."""
    tied, generator = TIES[tie](length), torch.Generator().manual_seed(seed)
    rows = policy.head.weight[:2048].float() * policy.head.scale
    scale = size / rows.norm(dim=-1).mean().item()
    return Vectors(torch.randn(tied.size, policy.head.hidden_size, generator=generator) * scale, tied)


def request(policy, prompt, *, rollouts=6, length=24, seed=0, step=0, keep=ALL, sampler=None, how=None, stop=()):
    return Request(tuple(prompt), seed, step, range(rollouts), length, sampler or Sampler(), how, keep, stop)


def several(policy, prompts, **options):
    """Requests of several sizes, the first unsteered, the others steered; one of them has fewer vectors than tokens."""
    made = []
    for index, prompt in enumerate(prompts):
        length = (16, 40, 24, 32)[index % 4]
        how = None if index == 0 else vectors(policy, length - 4 * (index == 2), seed=index)
        rollouts = (8, 6, 8, 5)[index % 4]
        made.append(
            request(policy, prompt, rollouts=rollouts, length=length, seed=index, step=index, how=how, **options)
        )
    return made


def noise(policy, prompt, length, tie="position", sigma2=0.01, step=1):
    centre = vectors(policy, length, tie, size=0.5)
    return Noise(centre.free, centre.tie, 0, tuple(prompt), step, sigma2, length - 3)
