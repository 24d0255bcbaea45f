"""The KL that decoding measures, and KL_ref, against literal sums over full distributions."""

import pytest
import torch
from conftest import letter_reward, make_policy
from literal import Literal

import misvo
from misvo.decoding import Engine, Request
from misvo.sampling import RandomStream, Sampler

PROMPT, T, K = "a b c d e", 9, 6


def literal_kl(literal, tokens, u):
    """KL(π_u ‖ π_ref) at every prefix of a response, by its definition."""
    z = literal.logits(tokens)
    before = (z / literal.tau).log_softmax(-1)
    after = ((z + u[: len(z)] @ literal.W.T) / literal.tau).log_softmax(-1)
    return (after.exp() * (after - before)).sum(-1)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, 0.9)])
@pytest.mark.parametrize("architecture", ["llama", "granite"])
def test_decoding_measures_the_exact_token_kl(architecture, sampler):
    policy = make_policy(architecture)
    literal = Literal(policy.model, policy.encode(PROMPT), T, sampler.temperature)
    u = 0.4 * torch.randn(T, 32, generator=torch.Generator().manual_seed(1))
    prefix = policy.prefill(policy.encode(PROMPT), T)
    engine = Engine(policy, K, sampler)
    rollouts = engine.submit(
        Request(prefix, RandomStream(0, prefix.tokens), 0, range(K), T, shift=policy.head.shift(u))
    )
    while engine.busy:
        engine.advance()
    for i in range(K):
        tokens = rollouts.tokens[i, : rollouts.lengths[i]].tolist()
        expected = literal_kl(literal, tokens, u.double())
        torch.testing.assert_close(rollouts.kl[i, : len(tokens)].double(), expected, rtol=1e-3, atol=1e-5)
        z = literal.logits(tokens)
        after = ((z + u[: len(z)].double() @ literal.W.T) / sampler.temperature).log_softmax(-1)
        picked = after.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(rollouts.logprobs[i, : len(tokens)].double(), picked, rtol=1e-4, atol=1e-4)
        reference = (z / sampler.temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(rollouts.ref_logprobs[i, : len(tokens)].double(), reference, rtol=1e-4, atol=1e-4)


def test_trace_and_kl_ref_are_the_literal_averages(monkeypatch):
    monkeypatch.setattr("misvo.head.BLOCK_BYTES", 61 * 4 * K * 4)  # several blocks of positions
    policy = make_policy("llama")
    settings = {
        "rollouts": K,
        "steps": 3,
        "max_new_tokens": T,
        "learning_rate": 0.4,
        "penalty": 0.2,
        "temperature": 0.9,
    }
    result = misvo.steer(policy, PROMPT, letter_reward, kl_ref=True, **settings)
    literal = Literal(policy.model, policy.encode(PROMPT), T, 0.9)

    def average(rows, u):
        total = torch.zeros(T, dtype=torch.float64)
        for c in rows:
            total[: len(c.tokens)] += literal_kl(literal, c.tokens, u) / K
        return total

    reference = [c for c in result.candidates if c.step == 0]
    expected = average(reference, result.steering.vectors.double())
    assert expected.sum() > 0.01
    torch.testing.assert_close(
        torch.tensor(result.kl_ref.per_position, dtype=torch.float64), expected, rtol=1e-3, atol=1e-6
    )
    assert result.kl_ref.total == pytest.approx(expected.sum().item(), rel=1e-3)
    # The last step was sampled from the vectors that two updates had made.
    earlier = misvo.steer(policy, PROMPT, letter_reward, **{**settings, "steps": 2}).steering.vectors.double()
    last = average([c for c in result.candidates if c.step == 2], earlier)
    row = result.trace[2]
    torch.testing.assert_close(torch.tensor(row["kl_per_position"], dtype=torch.float64), last, rtol=1e-3, atol=1e-6)
    assert row["kl"] == pytest.approx(last.sum().item(), rel=1e-3)
    assert row["norm"] == pytest.approx(earlier.norm().item(), rel=1e-5)


def test_moved_positions_name_the_tokens_that_rose():
    policy = make_policy("llama")
    result = misvo.steer(
        policy,
        PROMPT,
        letter_reward,
        kl_ref=True,
        rollouts=K,
        steps=3,
        max_new_tokens=T,
        learning_rate=0.4,
        penalty=0.2,
    )
    literal = Literal(policy.model, policy.encode(PROMPT), T)
    top = result.moved[0]
    assert top.position == max(range(T), key=lambda t: result.kl_ref.per_position[t])
    rows = [c for c in result.candidates if c.step == 0 and len(c.tokens) > top.position]
    u = result.steering.vectors[top.position].double()
    z = torch.stack([literal.logits(c.tokens)[top.position] for c in rows])
    rise = (torch.softmax(z + literal.W @ u, -1) - torch.softmax(z, -1)).mean(0)
    text, before, after = top.tokens[0]
    assert text == policy.tokenizer.decode([int(rise.argmax())])
    assert after - before == pytest.approx(rise.max().item(), rel=1e-3)
