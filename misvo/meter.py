"""How far a steering moves the model on reference prefixes: KL_ref (eq:kl-estimator), and which tokens it promotes.

The sequence KL (eq:kl-effort) needs no meter of its own: decoding measures it at every prefix that it visits.
"""

import torch

from misvo.decoding import Rollouts
from misvo.head import Head, centred, position_blocks, softmax, token_kl
from misvo.result import Divergence, Moved


@torch.no_grad()
def kl_ref(head: Head, reference: Rollouts, u: torch.Tensor, temperature: float = 1.0) -> Divergence:
    """(1/K) Σ_i Σ_t KL(π_u ‖ π_ref) over the prefixes of K reference rollouts, position by position."""
    rollouts, per_position = len(reference.tokens), []
    for block in position_blocks(len(u), head, rows=rollouts):
        shift = head.shift(u[block]).div_(temperature)[None].expand(rollouts, -1, -1).flatten(0, 1)  # (K·t, V)
        logits = centred(head.logits(reference.hidden[:, block].flatten(0, 1)).div_(temperature))
        _, ref_partition = softmax(logits)
        probs, partition = softmax(logits.add_(shift))
        kl = token_kl(ref_partition, partition, probs, shift).view(rollouts, -1)  # (K, t)
        per_position += (kl * reference.alive[:, block]).sum(0).div(rollouts).tolist()
    return Divergence(per_position)


@torch.no_grad()
def most_moved(policy, reference: Rollouts, u, kl: Divergence, temperature=1.0, positions=3, tokens=5) -> list[Moved]:
    """The positions with the largest KL_ref, and the tokens whose mean probability over the prefixes rose most."""
    head, found = policy.head, []
    ranked = sorted(range(len(kl.per_position)), key=lambda t: -kl.per_position[t])
    for t in [t for t in ranked[:positions] if kl.per_position[t] > 0]:
        logits = head.logits(reference.hidden[reference.alive[:, t], t]).div_(temperature)  # (n, V)
        before, _ = softmax(logits)
        after, _ = softmax(logits.add_(head.shift(u[t : t + 1]).div_(temperature)))
        before, after = before.mean(0), after.mean(0)
        top = (after - before).topk(min(tokens, head.vocab_size)).indices.tolist()
        rises = [(policy.tokenizer.decode([v]), before[v].item(), after[v].item()) for v in top]
        found.append(Moved(t, kl.per_position[t], rises))
    return found
