"""From logits to tokens: temperature, truncation, and random numbers that depend on nothing but their address.

The sampler is part of the policy. At temperature τ the policy is softmax(z/τ); under top-k, top-p and min-p it is what
these leave of that law, renormalised (`misvo.truncation`). A token comes from a race whose times are a function of
(seed, prompt, step, rollout, position, token) alone (`misvo.race`): batch mates, resume and the number of workers
cannot change them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from misvo.race import Entries, race, race_with_all_times
from misvo.settings import Settings
from misvo.truncation import Truncation

TOKENS, NOISE = 0, 1  # separate streams for sampled tokens and for noise that a method may want


class RandomStream:
    """The random numbers of one (seed, prompt): a counter-based Philox generator addressed by step and rollout."""

    def __init__(self, seed: int, prompt_tokens):
        address = f"{seed}:{','.join(str(int(token)) for token in prompt_tokens)}"
        digest = hashlib.blake2b(address.encode(), digest_size=16).digest()
        self.key = np.frombuffer(digest, dtype=np.uint64)

    def keys(self, step: int, rollouts: Sequence[int], length: int) -> torch.Tensor:
        """64 random bits per rollout and position, the key of its race, (K, T); longer rows begin like shorter ones."""
        raw = np.stack([self._philox(TOKENS, step, rollout).random_raw(length) for rollout in rollouts])
        return torch.from_numpy(raw.view(np.int64))

    def generator(self, step: int, rollout: int) -> np.random.Generator:
        """A generator for any other noise of this rollout, such as the Gaussian vectors of AISP."""
        return np.random.Generator(self._philox(NOISE, step, rollout))

    def _philox(self, stream, step, rollout):
        return np.random.Philox(key=self.key, counter=np.array([0, stream, step, rollout], dtype=np.uint64))


@dataclass(frozen=True)
class Sampler:
    """How tokens are drawn: temperature, truncation, ends that are held back; or the most probable token."""

    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False
    top_k: int = 0
    min_p: float = 0.0
    min_new_tokens: int = 0  # at so many positions no token of `ends` is drawn
    ends: tuple[int, ...] = ()

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.top_k, self.top_p, self.min_p)

    @property
    def samples_whole_law(self) -> bool:
        return self.truncation.keeps_all and not self.greedy

    def tempered(self, logits: torch.Tensor, positions: int | torch.Tensor) -> torch.Tensor:
        """Logits (B, V) at this temperature, without the ends where responses may not end yet; in place.

        `positions` is where the rows stand, one for all of them or (B,).
        """
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.ends and self.min_new_tokens:
            early = torch.as_tensor(positions, device=logits.device) < self.min_new_tokens
            for end in self.ends:
                logits[:, end].masked_fill_(early, -torch.inf)
        return logits

    def draw(
        self, probs: torch.Tensor, keys: torch.Tensor, within: torch.Tensor | Entries | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | Entries | None]:
        """Tokens (B,) from the untruncated law `probs` (B, V) at the sampler's temperature, by races with these keys.

        Beside them the law (B, V) that they were drawn from, where it is another one; on a CPU as its entries. `within`
        is a truncated law whose tokens are kept, in the place of what truncation would keep of this one.
        """
        if isinstance(within, Entries):
            entries = within.reweighed(probs)
            return entries.race(keys)[0], entries
        if within is not None:
            law = torch.where(within > 0, probs, 0.0)
            law.div_(law.sum(-1, keepdim=True))
            return race_with_all_times(law, keys), law
        if self.greedy:
            tokens = probs.argmax(-1)
            return tokens, torch.zeros_like(probs).scatter_(-1, tokens[:, None], 1.0)
        if self.samples_whole_law:
            return race(probs, keys), None
        if probs.device.type == "cpu":
            entries = self.truncation.entries(probs)
            return entries.race(keys)[0], entries
        law = self.truncation.law(probs)
        return race_with_all_times(law, keys), law


def sampler_of(settings: Settings, ends: tuple[int, ...] = ()) -> Sampler:
    """The sampler of settings in which nothing is left to the model; `ends` are the tokens that end its responses."""
    return Sampler(
        settings.temperature,
        settings.top_p,
        settings.greedy,
        settings.top_k,
        settings.min_p,
        settings.min_new_tokens,
        ends if settings.min_new_tokens else (),
    )
