"""From logits to tokens: temperature, top-p, and random numbers that depend on nothing but their address.

The sampler is part of the policy. At temperature τ the policy is softmax(z/τ); under top-p it is that law cut to
its nucleus and renormalised. A token comes from a race whose times are a function of (seed, prompt, step, rollout,
position, token) alone (`misvo.race`): batch mates, resume and the number of workers cannot change them.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from misvo.race import FLOOR, Entries, race, race_with_all_times

TOKENS, NOISE = 0, 1  # separate streams for sampled tokens and for noise that a method may want


class RandomStream:
    """The random numbers of one (seed, prompt): a counter-based Philox generator addressed by step and rollout."""

    def __init__(self, seed: int, prompt_tokens):
        address = f"{seed}:{','.join(str(int(token)) for token in prompt_tokens)}"
        digest = hashlib.blake2b(address.encode(), digest_size=16).digest()
        self.key = np.frombuffer(digest, dtype=np.uint64)

    def keys(self, step: int, rollouts: range, length: int) -> torch.Tensor:
        """64 random bits per rollout and position, the key of its race, (K, T); longer rows begin like shorter ones."""
        raw = np.stack([self._philox(TOKENS, step, rollout).random_raw(length) for rollout in rollouts])
        return torch.from_numpy(raw.view(np.int64))

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


def nucleus_entries(probs: torch.Tensor, top_p: float) -> Entries:
    """The same law on a CPU, without its zeros. Few tokens are likely, and mostly the nucleus is among them."""
    likely = Entries.where(probs.numpy() > np.float32(FLOOR), probs)
    least = _least_likely(likely, top_p)
    if least.all():
        kept = likely.only(likely.mass >= least[likely.rows])
    else:
        kept = Entries.where(probs.numpy() >= _threshold(probs, top_p)[:, None].numpy(), probs)
    return replace(kept, mass=(kept.mass / kept.row_sums()[kept.rows]).to(probs.dtype))


def _least_likely(likely, top_p):
    """The least probability that is kept, (B,); 0 where the likely tokens of a row hold less than `top_p`."""
    rows, mass = likely.rows.numpy(), likely.mass.numpy()
    falling = mass[np.lexsort((-mass, rows))].astype(np.float64)  # row by row
    counts = np.bincount(rows, minlength=likely.shape[0])
    ends = np.concatenate([[0.0], falling.cumsum()])
    starts = counts.cumsum() - counts
    before = ends[:-1] - ends[starts][rows]  # what the more probable tokens of the same row hold
    kept = np.bincount(rows, weights=before < top_p, minlength=likely.shape[0]).astype(np.int64)
    reached = ends[starts + counts] - ends[starts] >= top_p
    least = np.zeros(likely.shape[0])
    least[reached] = falling[(starts + kept)[reached] - 1]  # where something is reached, something is kept
    return torch.from_numpy(least).to(likely.mass.dtype)


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


@dataclass(frozen=True)
class Sampler:
    """Temperature and top-p, or the most probable token."""

    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False

    @property
    def samples_whole_law(self) -> bool:
        return self.top_p == 1.0 and not self.greedy

    def draw(self, probs: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | Entries | None]:
        """Tokens (B,) from the untruncated law `probs` (B, V) at the sampler's temperature, by races with these keys.

        Beside them the law (B, V) that they were drawn from, where it is another one; on a CPU as its entries.
        """
        if self.greedy:
            tokens = probs.argmax(-1)
            return tokens, torch.zeros_like(probs).scatter_(-1, tokens[:, None], 1.0)
        if self.top_p == 1.0:
            return race(probs, keys), None
        if probs.device.type == "cpu":
            kept = nucleus_entries(probs, self.top_p)
            return kept.race(keys)[0], kept
        kept = nucleus(probs, self.top_p)
        return race_with_all_times(kept, keys), kept
