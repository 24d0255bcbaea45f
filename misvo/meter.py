"""How far a steering moves the model on reference prefixes: KL_ref (eq:kl-estimator), and which tokens it promotes.

The sequence KL (eq:kl-effort) needs no meter of its own: decoding measures it at every prefix that it visits.
"""

from collections.abc import Callable

import torch

from misvo.far import beside
from misvo.head import Head, centred, log_partition, softmax, token_kl
from misvo.interventions import Intervention, Vectors
from misvo.result import Divergence, Moved
from misvo.rollouts import Rollouts
from misvo.sampling import Sampler


@torch.no_grad()
def kl_ref(head: Head, reference: Rollouts, steering: Intervention, sampler: Sampler) -> Divergence:
    """(1/K) Σ_i Σ_t KL(π_u ‖ π_ref) over the prefixes of K reference rollouts, position by position."""
    return Divergence(beside(head, reference, reference.hidden, _nats, steering, sampler))


def _nats(head, reference, steering, sampler) -> list[float]:
    """KL_ref of every position."""
    per_position = []
    for t in range(reference.tokens.shape[1]):
        logits, shift = _at(head, reference, steering, t, sampler)
        ref_partition = log_partition(logits)
        probs, partition = softmax(logits.add_(shift))
        kl = token_kl(ref_partition, partition, probs, shift.expand_as(probs))
        per_position.append(kl.sum().item() / len(reference.tokens))
    return per_position


@torch.no_grad()
def most_moved(
    head: Head,
    reference: Rollouts,
    steering: Intervention,
    kl: Divergence,
    spell: Callable[[int], str],
    sampler: Sampler,
    positions: int = 3,
    tokens: int = 5,
) -> list[Moved]:
    """The positions with the largest KL_ref, and the tokens whose mean probability over the prefixes rose most."""
    ranked = sorted(range(len(kl.per_position)), key=lambda t: -kl.per_position[t])
    places = [t for t in ranked[:positions] if kl.per_position[t] > 0]
    found = beside(head, reference, reference.hidden, _rises, steering, sampler, places, tokens)
    return [
        Moved(t, kl.per_position[t], [(spell(token), *probabilities) for token, *probabilities in rises])
        for t, rises in zip(places, found, strict=True)
    ]


def _rises(head, reference, steering, sampler, places, count) -> list[list[tuple[int, float, float]]]:
    """At each place the tokens whose mean probability rose most, with that probability before and after."""
    found = []
    for t in places:
        logits, shift = _at(head, reference, steering, t, sampler)
        before = softmax(logits)[0].mean(0)
        after = softmax(logits.add_(shift))[0].mean(0)
        top = (after - before).topk(min(count, head.vocab_size)).indices.tolist()
        found.append([(v, before[v].item(), after[v].item()) for v in top])
    return found


def _at(head, reference, steering, t, sampler):
    """Reference logits (n, V) of the rollouts that reach position t, and the shift of the steering there."""
    rows = torch.nonzero(reference.alive[:, t]).squeeze(-1)
    hidden = reference.hidden[rows, t]
    asked = slice(0, 1) if isinstance(steering, Vectors) else slice(None)  # one shift may serve all rows
    u = steering.at(rows[asked], t, hidden[asked])
    return centred(sampler.tempered(head.logits(hidden), t)), head.shift(u).div_(sampler.temperature)
