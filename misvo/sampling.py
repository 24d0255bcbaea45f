"""From logits to tokens: temperature, top-p, and random numbers that depend on nothing but their address.

The sampler is part of the policy. At temperature τ the policy is softmax(z/τ); under top-p it is that law cut to
its nucleus and renormalised. A token comes from one uniform number by inverse CDF, and that number is a function
of (seed, prompt, step, rollout, position) alone: batch mates, resume and the number of workers cannot change it.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

TOKENS, NOISE = 0, 1  # separate streams for sampled tokens and for noise that a method may want


class RandomStream:
    """The random numbers of one (seed, prompt): a counter-based Philox generator addressed by step and rollout."""

    def __init__(self, seed: int, prompt_tokens):
        address = f"{seed}:{','.join(str(int(token)) for token in prompt_tokens)}"
        digest = hashlib.blake2b(address.encode(), digest_size=16).digest()
        self.key = np.frombuffer(digest, dtype=np.uint64)

    def uniforms(self, step: int, rollouts: range, length: int) -> torch.Tensor:
        """One number in [0, 1) per rollout and position, (K, T) in fp64; a longer row begins like a shorter one."""
        raw = np.stack([self._philox(TOKENS, step, rollout).random_raw(length) for rollout in rollouts])
        return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def generator(self, step: int, rollout: int) -> np.random.Generator:
        """A generator for any other noise of this rollout, such as the Gaussian vectors of AISP."""
        return np.random.Generator(self._philox(NOISE, step, rollout))

    def _philox(self, stream, step, rollout):
        return np.random.Philox(key=self.key, counter=np.array([0, stream, step, rollout], dtype=np.uint64))


STAGES = (128, 2048)  # on a CPU, how many of the most probable tokens are looked at before a row is sorted


def nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The law that top-p leaves, (B, V), renormalised.

    Every token is kept whose more probable tokens together hold less than `top_p`; ties stand or fall together.
    """
    kept = torch.where(probs >= _threshold(probs, top_p)[:, None], probs, 0.0)
    return kept.div_(kept.sum(-1, keepdim=True))


def _threshold(probs, top_p):
    """The least probability that is kept, (B,). A GPU sorts quickly, and looking at rows one by one would stop it."""
    if probs.device.type != "cpu":
        return _least_kept(probs.sort(-1, descending=True).values, top_p)[0]
    least, rows = probs.new_empty(len(probs)), torch.arange(len(probs))
    for size in STAGES:
        if size >= probs.shape[-1] or not len(rows):
            break
        least[rows], wide = _least_kept(probs[rows].topk(size, dim=-1).values, top_p)
        rows = rows[wide]
    # Tokens below (1 − top_p)/V hold less than 1 − top_p together, so none of them is needed.
    floor = 0.99 * (1 - top_p) / probs.shape[-1]
    for row in rows:
        likely = probs[row][probs[row] > floor]
        least[row] = _least_kept(likely.sort(descending=True).values[None], top_p)[0]
    return least


def _least_kept(falling, top_p):
    """The smallest probability whose more probable tokens hold less than `top_p`, (B, s) falling -> (B,).

    And whether it is the last of them, so that tokens beyond these may have to stay too.
    """
    before = falling.cumsum(-1, dtype=torch.float64) - falling
    count = (before < top_p).sum(-1, keepdim=True)
    least = falling.gather(-1, count - 1).squeeze(-1)
    return least, falling[:, -1] >= least


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The index at which the running sum of each row first exceeds its uniform share of the total, (B, n) -> (B,).

    Two levels, so that only √n numbers per row are summed in order, in fp64: the blocks, then one block.
    """
    rows, size = weights.shape
    block = 1 << max(0, (size.bit_length() + 1) // 2)
    whole = size // block * block
    sums = weights[:, :whole].view(rows, -1, block).sum(-1).double()
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True).double()], dim=-1)
    ends = sums.cumsum(-1)
    target = uniforms.to(ends)[:, None] * ends[:, -1:]
    chosen = _first_above(ends, target)  # (B, 1)
    inside = target - (ends - sums).gather(-1, chosen)
    offsets = chosen * block + torch.arange(block, device=weights.device)
    values = weights.gather(-1, offsets.clamp(max=size - 1)).double()
    ends = torch.where(offsets < size, values, 0.0).cumsum(-1)
    return (chosen * block + _first_above(ends, inside)).squeeze(-1)


def _first_above(ends, target):
    """First index whose running sum exceeds the target; rounding may not push it past the last positive weight."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous(), right=False)  # the first index that reaches the total
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)


@dataclass(frozen=True)
class Sampler:
    """Temperature and top-p, or the most probable token."""

    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False

    @property
    def samples_whole_law(self) -> bool:
        return self.top_p == 1.0 and not self.greedy

    def draw(self, probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens (B,) from the untruncated law `probs` (B, V) at the sampler's temperature.

        Beside them the law (B, V) that they were drawn from, where it is another one.
        """
        if self.greedy:
            tokens = probs.argmax(-1)
            return tokens, torch.zeros_like(probs).scatter_(-1, tokens[:, None], 1.0)
        if self.top_p == 1.0:
            return inverse_cdf(probs, uniforms), None
        kept = nucleus(probs, self.top_p)
        return inverse_cdf(kept, uniforms), kept
