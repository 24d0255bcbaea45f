"""Texts that end a response, found as its tokens are drawn."""

from collections.abc import Callable

import torch

from misvo.law_step import Group

SPARE = 8  # more tokens to look at for a stop text than it has bytes: some have no text, or a part of a letter


def stopped(group: Group, decode: Callable[[list[int]], str]) -> torch.Tensor:
    """Which rows of a group have completed a text that ends them, (B,) bool.

    Every token has a byte of text or more, so the last few tokens hold whatever the newest one completed.
    """
    stops = group.job.request.stop
    reach = max(len(stop.encode()) for stop in stops) + SPARE
    recent = group.job.rollouts.tokens[group.rows, max(0, group.position + 1 - reach) : group.position + 1]
    texts = [decode(row) for row in recent.tolist()]
    return torch.tensor([any(stop in text for stop in stops) for text in texts])
