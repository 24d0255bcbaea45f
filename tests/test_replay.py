"""The steering vectors of a run, rebuilt from its candidates by the literal algorithm of the paper."""

import pytest
import torch
from conftest import ARCHITECTURES, letter_reward, make_policy
from literal import Literal

import misvo

PROMPT = "a b c d e f g h"


def replay_error(policy, result, **sampler):
    s = result.settings
    literal = Literal(policy.model, policy.encode(result.prompt), s.max_new_tokens, s.temperature, s.top_p)
    expected = literal.run(result.candidates, s.steps, s.rollouts, s.cost, s.learning_rate, s.penalty)
    return ((result.steering.vectors - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("sampler", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["plain", "tempered-nucleus"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replay_on_every_architecture(architecture, sampler):
    policy = make_policy(architecture)
    result = misvo.steer(
        policy,
        PROMPT,
        letter_reward,
        rollouts=5,
        steps=4,
        max_new_tokens=12,
        learning_rate=0.3,
        penalty=0.5,
        seed=3,
        **sampler,
    )
    lengths = [len(c.tokens) for c in result.candidates]
    assert min(lengths) < 12 and len(result.candidates) == 20  # some rows ended early
    assert result.steering.norm > 0.1
    assert replay_error(policy, result) < 1e-4


@pytest.mark.parametrize("cost", ["frozen-fisher", "euclidean", "none"])
def test_replay_of_every_cost(cost):
    policy = make_policy("llama")
    result = misvo.steer(
        policy,
        PROMPT,
        letter_reward,
        cost=cost,
        rollouts=6,
        steps=5,
        max_new_tokens=9,
        learning_rate=0.2,
        penalty=0.4,
        temperature=1.3,
    )
    assert replay_error(policy, result) < 1e-4


def test_bf16_model_keeps_fp32_vectors_and_small_interventions():
    policy = make_policy("llama")
    policy = misvo.Policy(policy.model.to(torch.bfloat16), policy.tokenizer)
    result = misvo.steer(
        policy, PROMPT, letter_reward, rollouts=4, steps=3, max_new_tokens=8, learning_rate=0.1, penalty=0.5
    )
    assert result.steering.vectors.dtype == torch.float32
    # bf16 body noise moves the hidden states, so the oracle only has to agree to bf16 precision.
    assert replay_error(policy, result) < 0.05
