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


@dataclass(frozen=True)
class Nucleus:
    """The law that top-p leaves, in the order of the vocabulary: (B, s) weights on `tokens` (B, s) while nuclei are
    narrow, (B, V) weights and no tokens where one is so wide that nothing is gained by picking it out."""

    tokens: torch.Tensor | None
    weights: torch.Tensor  # renormalised; zero outside a row's nucleus

    def draw(self, uniforms: torch.Tensor) -> torch.Tensor:
        index = inverse_cdf(self.weights, uniforms)
        return index if self.tokens is None else self.tokens.gather(-1, index[:, None]).squeeze(-1)


NARROW = 1024  # a nucleus of at most this many tokens is found without sorting the vocabulary


def nucleus(probs: torch.Tensor, top_p: float) -> Nucleus:
    """Keep every token whose more probable tokens together hold less than `top_p`; ties stand or fall together."""
    top, tokens = probs.topk(min(NARROW, probs.shape[-1]), dim=-1)  # (B, s), falling
    least = _least_kept(top, top_p)
    wide = (top[:, -1] >= least) & (top.shape[-1] < probs.shape[-1])  # the nucleus may go on beyond the top
    for row in torch.nonzero(wide).squeeze(-1):
        least[row] = _least_kept(probs[row : row + 1].sort(-1, descending=True).values, top_p)
    if wide.any():
        tokens, weights = None, torch.where(probs >= least[:, None], probs, 0.0)
    else:
        width = int((top >= least[:, None]).sum(-1).max())
        order = tokens[:, :width].argsort(-1)  # ties have no order of their own; the vocabulary has one
        tokens = tokens[:, :width].gather(-1, order)
        weights = torch.where(top >= least[:, None], top, 0.0)[:, :width].gather(-1, order)
    return Nucleus(tokens, weights.div_(weights.sum(-1, keepdim=True)))


def _least_kept(falling, top_p):
    """The smallest probability whose more probable tokens hold less than `top_p`, (B, s) falling -> (B,)."""
    before = falling.cumsum(-1, dtype=torch.float64) - falling
    count = (before < top_p).sum(-1, keepdim=True)
    return falling.gather(-1, count - 1).squeeze(-1)


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
    """Temperature and top-p, or the most probable token. `draw` gives tokens and, beside them, the nucleus."""

    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False

    @property
    def samples_whole_law(self) -> bool:
        return self.top_p == 1.0 and not self.greedy

    def draw(self, probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, Nucleus | None]:
        """Tokens (B,) from the untruncated law `probs` (B, V) at the sampler's temperature."""
        if self.greedy:
            tokens = probs.argmax(-1)
            return tokens, Nucleus(tokens[:, None], torch.ones_like(probs[:, :1]))
        if self.top_p == 1.0:
            return inverse_cdf(probs, uniforms), None
        kept = nucleus(probs, self.top_p)
        return kept.draw(uniforms), kept
