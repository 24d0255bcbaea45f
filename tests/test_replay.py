"""The steering vectors of a run, rebuilt from its candidates by the literal algorithm of the paper."""

import pytest
import torch
from conftest import ARCHITECTURES, letter_reward, make_policy
from literal import replay
from tolerances import assert_near, room, unit

import misvo

PROMPT = "a b c d e f g h"


def assert_replays(policy, result, relative=None, meaningful=1e-4):
    """The vectors are those of the literal algorithm in fp64, but for the rounding of the model's own precision."""
    tokens = policy.encode(result.prompt)
    expected = replay(policy.model, tokens, result)
    allowed = room(lambda model: replay(model, tokens, result), policy.model, relative)
    assert allowed < meaningful * expected.norm()  # rounding must not hide an error of the algorithm
    assert_near(result.steering.vectors, expected, allowed)


SAMPLERS = {
    "plain": {},
    "tempered-nucleus": {"temperature": 0.7, "top_p": 0.9},
    "all at once": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.1, "min_new_tokens": 4},
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
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
        seed=4,
        **sampler,
        preset="paper",
    )
    lengths = [len(c.tokens) for c in result.candidates]
    assert min(lengths) < 12 and len(result.candidates) == 20  # some rows ended early
    assert result.steering.norm > 0.1
    assert_replays(policy, result)


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
        preset="paper",
    )
    assert_replays(policy, result)


def test_bf16_model_keeps_fp32_vectors_and_small_interventions():
    policy = make_policy("llama")
    policy = misvo.Policy(policy.model.to(torch.bfloat16), policy.tokenizer)
    result = misvo.steer(
        policy,
        PROMPT,
        letter_reward,
        rollouts=4,
        steps=3,
        max_new_tokens=8,
        learning_rate=0.1,
        penalty=0.5,
        preset="paper",
    )
    assert result.steering.vectors.dtype == torch.float32
    # bf16 kernels add up in fp32 and round what they hand on. From one product to the next these are four roundings
    # (norm, product, activation, sum), whose root of squares is 2u.
    assert_replays(policy, result, relative=2 * unit(torch.bfloat16), meaningful=0.2)
