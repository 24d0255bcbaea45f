"""Steering is a value: arithmetic, a round trip through files, and sampling again from the steered policy."""

import json

import pytest
import torch
from conftest import letter_reward, make_policy

import misvo

SETTINGS = {"rollouts": 4, "steps": 3, "max_new_tokens": 6, "learning_rate": 0.5, "penalty": 0.2, "seed": 9}


@pytest.fixture
def result(policy):
    return misvo.steer(policy, "a b c", letter_reward, **SETTINGS, preset="paper")


def test_arithmetic(result):
    v = result.steering
    assert (v - v).norm == 0
    assert torch.equal((v + v).vectors, (2 * v).vectors)  # powers of two round nothing
    assert torch.equal((-v * 0.5).vectors, v.vectors / -2)
    longer = misvo.Steering(torch.ones(9, 32), v.head)
    total = v + longer
    assert len(total) == 9 and torch.equal(total.vectors[6:], longer.vectors[6:])
    with pytest.raises(misvo.MisvoError):
        v + misvo.Steering(torch.ones(6, 31))
    with pytest.raises(misvo.MisvoError):
        v + misvo.Steering(torch.ones(6, 32), head="another")
    with pytest.raises(TypeError):
        v * "two"


def test_round_trip(result, tmp_path):
    result.steering.save_pretrained(tmp_path / "s")
    again = misvo.Steering.from_pretrained(tmp_path / "s")
    assert torch.equal(again.vectors, result.steering.vectors)
    assert again.head == result.steering.head and again.metadata == result.steering.metadata
    stored = json.loads((tmp_path / "s" / "steering.json").read_text())
    assert stored["prompt"] == "a b c" and stored["settings"]["seed"] == 9 and stored["head"]


def test_generate(policy, result):
    v = result.steering
    paper = {"temperature": 1.0, "top_p": 1.0}  # how the steering was made, so how it is sampled with
    plain = policy.generate("a b c", samples=5, max_new_tokens=6, seed=3, **paper)
    assert plain == policy.generate("a b c", steering=0 * v, samples=5, seed=3)
    assert plain[0] == policy.generate("a b c", max_new_tokens=6, seed=3, **paper)
    assert plain != policy.generate("a b c", steering=50 * v, samples=5, seed=3)
    # Beyond the vectors' length the policy is the reference: sampling goes on.
    tokens = policy.tokenizer(policy.generate("a b c", steering=v, samples=8, max_new_tokens=40, seed=3))["input_ids"]
    assert max(map(len, tokens)) > 6


def test_generate_is_the_sampler_of_steer(policy):
    sizes = {"rollouts": 4, "steps": 1, "max_new_tokens": 6, "seed": 9}
    best_of_n = misvo.steer(policy, "a b c", letter_reward, method="best-of-n", **sizes)
    assert policy.generate("a b c", samples=4, max_new_tokens=6, seed=9) == [c.text for c in best_of_n.candidates]


def test_chat_prompts_reach_template_and_reward():
    policy = make_policy(chat=True)
    seen = []

    def reward(prompts, completions, flavour, **_):
        seen.append((prompts[0], completions[0], flavour))
        return [float(len(c[0]["content"])) for c in completions]

    messages = [{"role": "system", "content": "x y"}, {"role": "user", "content": "a b"}]
    result = misvo.steer(policy, messages, reward, columns={"flavour": "mint"}, **SETTINGS, preset="paper")
    prompt, completion, flavour = seen[0]
    assert prompt == messages and flavour == ["mint"] * 4
    assert completion == [{"role": "assistant", "content": result.candidates[0].text}]
    as_text = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}], add_generation_prompt=True, tokenize=False
    )
    assert policy.encode("a b") == policy.tokenizer(as_text)["input_ids"]
