"""The laws of two states at the same prefix, that of the model as it is and that of an adapted one, side by side.

Steering shifts the logits of one state (`misvo.law_step`); an adapted model has states of its own, so here both laws
are made from states. Positions are taken a few at a time: nothing of the size K×T×V is ever held.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from misvo.head import BLOCK_BYTES, Head, centred, softmax, token_kl
from misvo.rollouts import Rollouts
from misvo.sampling import Sampler


@dataclass(frozen=True)
class _Both:
    places: tuple[torch.Tensor, torch.Tensor]  # (n,) rollouts and (n,) positions
    kl: torch.Tensor  # (n,) exact token KL of the adapted law to the reference law
    ref_logits: torch.Tensor  # (n, V)
    ref_probs: torch.Tensor  # (n, V)
    ref_partition: torch.Tensor  # (n,)


@torch.no_grad()
def token_kls(head: Head, sampler: Sampler, rollouts: Rollouts, reference, adapted) -> torch.Tensor:
    """KL(π_adapted ‖ π_ref) at every prefix of rollouts, (K, T), from states (K, T, d); untruncated laws."""
    kl = torch.zeros_like(rollouts.kl)
    for both in _both(head, sampler, rollouts, reference, adapted):
        kl[both.places] = both.kl.to(kl.dtype)
    return kl


@torch.no_grad()
def compare(head: Head, sampler: Sampler, rollouts: Rollouts, reference, adapted, keys) -> None:
    """Write to rollouts what they say of the reference law: KLs, log-probabilities, which tokens it draws otherwise.

    `keys` (K, T) are those of the races that drew the tokens.
    """
    rollouts.changed = torch.zeros_like(rollouts.tokens, dtype=torch.bool)
    for both in _both(head, sampler, rollouts, reference, adapted):
        tokens = rollouts.tokens[both.places]
        chosen = both.ref_logits.gather(-1, tokens[:, None]).squeeze(-1)
        drawn, _ = sampler.draw(both.ref_probs, keys[both.places])
        rollouts.kl[both.places] = both.kl.to(rollouts.kl.dtype)
        rollouts.ref_logprobs[both.places] = (chosen - both.ref_partition).to(rollouts.kl.dtype)
        rollouts.changed[both.places] = drawn != tokens


def _both(head, sampler, rollouts, reference, adapted) -> Iterator[_Both]:
    places = torch.nonzero(rollouts.alive)  # (n, 2)
    for part in places.split(max(1, BLOCK_BYTES // (head.vocab_size * head.dtype.itemsize))):
        rows, positions = part.unbind(1)
        ref_logits = centred(sampler.tempered(head.logits(reference[rows, positions]), positions))
        logits = centred(sampler.tempered(head.logits(adapted[rows, positions]), positions))
        ref_probs, ref_partition = softmax(ref_logits)
        probs, partition = softmax(logits)
        shift = logits.sub_(ref_logits).nan_to_num_(0.0)  # an end that is held back is so in both laws: −∞ less −∞
        kl = token_kl(ref_partition, partition, probs, shift)
        yield _Both((rows, positions), kl, ref_logits, ref_probs, ref_partition)
