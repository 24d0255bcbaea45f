"""How far a steering moves the model on reference prefixes: KL_ref (eq:kl-estimator), and which tokens it promotes.

The sequence KL (eq:kl-effort) needs no meter of its own: decoding measures it at every prefix that it visits.
"""

import torch

from misvo.decoding import Rollouts
from misvo.head import Head, position_blocks
from misvo.result import Divergence, Moved


@torch.no_grad()
def kl_ref(head: Head, reference: Rollouts, u: torch.Tensor, temperature: float = 1.0) -> Divergence:
    """(1/K) Σ_i Σ_t KL(π_u ‖ π_ref) over the prefixes of K reference rollouts, position by position."""
    rollouts, alive = len(reference.tokens), reference.alive
    per_position = []
    for block in position_blocks(len(u), head, rows=3 * rollouts):
        shift = head.shift(u[block]) / temperature  # (t, V)
        before, after = _laws(head, reference.hidden[:, block], shift, temperature)  # (K, t, V) logs
        token_kl = torch.sum(after.exp() * (after - before), dim=-1, dtype=torch.float64)  # (K, t)
        per_position += (token_kl * alive[:, block]).sum(0).div(rollouts).tolist()
    return Divergence([max(0.0, value) for value in per_position])


@torch.no_grad()
def most_moved(policy, reference: Rollouts, u, kl: Divergence, temperature=1.0, positions=3, tokens=5) -> list[Moved]:
    """The positions with the largest KL_ref, and the tokens whose mean probability over the prefixes rose most."""
    head, found = policy.head, []
    ranked = sorted(range(len(kl.per_position)), key=lambda t: -kl.per_position[t])
    for t in [t for t in ranked[:positions] if kl.per_position[t] > 0]:
        rows = reference.alive[:, t]
        shift = head.shift(u[t : t + 1]) / temperature
        before, after = _laws(head, reference.hidden[rows, t : t + 1], shift, temperature)
        before, after = before.exp().mean((0, 1)), after.exp().mean((0, 1))  # (V,)
        top = (after - before).topk(min(tokens, head.vocab_size)).indices.tolist()
        rises = [(policy.tokenizer.decode([v]), before[v].item(), after[v].item()) for v in top]
        found.append(Moved(t, kl.per_position[t], rises))
    return found


def _laws(head, hidden, shift, temperature):
    """Log-probabilities without and with the shift, both (K, t, V), from hidden states (K, t, d)."""
    flat = head.logits(hidden.reshape(-1, hidden.shape[-1])) / temperature
    logits = flat.view(*hidden.shape[:2], -1)
    return logits.log_softmax(-1), (logits + shift).log_softmax(-1)
