"""Which tokens a steering promoted and demoted along one response: probabilities before and after, at every position.

The response is read once behind its prompt, so this costs about as much as reading a prompt of that length.
"""

import torch

from misvo.head import centred, softmax
from misvo.interventions import Vectors
from misvo.policy import Policy
from misvo.sampling import Sampler


@torch.no_grad()
def alternatives(
    policy: Policy, prompt: tuple[int, ...], tokens: list[int], vectors: Vectors, sampler: Sampler, count: int = 5
) -> list[dict]:
    """For each token: its probability before and after, and the `count` tokens that rose and that fell most there."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=policy.device)
    states = policy.body(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    found = []
    for place, token in enumerate(tokens):  # one position at a time: (1, V)
        hidden = states[place : place + 1].to(policy.head.device)
        logits = centred(sampler.tempered(policy.head.logits(hidden), place))
        before = softmax(logits)[0][0]
        u = vectors.at(torch.zeros(1), place, hidden)
        shift = 0.0 if u is None else policy.head.shift(u).div_(sampler.temperature)
        after = softmax(logits + shift)[0][0]
        gain = after - before
        most = min(count, len(gain))
        found.append(
            {
                "token": policy.spell(token),
                "before": before[token].item(),
                "after": after[token].item(),
                "promoted": _rows(policy, gain.topk(most).indices, before, after),
                "demoted": _rows(policy, gain.topk(most, largest=False).indices, before, after),
            }
        )
    return found


def _rows(policy, picks, before, after):
    """Those that moved at all: text, probability before, probability after."""
    return [
        {"token": policy.spell(pick), "before": before[pick].item(), "after": after[pick].item()}
        for pick in picks.tolist()
        if before[pick] != after[pick]
    ]
