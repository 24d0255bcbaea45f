"""Bad input: each kind has one clear sentence, raised before work is lost."""

import math

import pytest
import torch
from conftest import Gemma2Config, Gemma2ForCausalLM, letter_reward, make_model, make_policy, make_tokenizer

import misvo

QUICK = {"rollouts": 3, "steps": 2, "max_new_tokens": 5}


def refusal(call, *args, **options) -> str:
    with pytest.raises(misvo.MisvoError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "nope"}, "unknown method 'nope'"),
        ({"cost": "nope"}, "unknown cost 'nope'"),
        ({"rollouts": 1}, "rollouts must be a whole number of at least 2"),
        ({"rollouts": 2.5}, "rollouts must be a whole number"),
        ({"rollouts": 0, "method": "best-of-n"}, "rollouts must be a whole number of at least 1"),
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ({"learning_rate": math.nan}, "learning_rate must be a number above 0"),
        ({"penalty": -1.0}, "penalty must be a number 0 or above"),
        ({"temperature": 0.0}, "temperature must be a number above 0"),
        ({"top_p": 1.5}, "top_p must be a number above 0 and at most 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"rollout": 3}, "did you mean 'rollouts'?"),
        ({"memory": "lots"}, "memory must be a size such as '8GB'"),
        ({"max_rows": 0}, "max_rows must be a whole number of at least 1"),
    ],
)
def test_settings(policy, options, says):
    assert says in refusal(misvo.steer, policy, "a b", letter_reward, **{**QUICK, **options})


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "the prompt is empty"),
        (" \n ", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([{"role": "user"}], "a prompt is a string or a list of messages"),
        (17, "a prompt is a string or a list of messages"),
        ("a\x00b", "control character U+0000 at index 1"),
        ("a b \x1b[31m", "control character U+001B"),
        ("a " * 50_000, "has 50000 tokens"),  # 100 kB
        ("a " * 126, "has 126 tokens and max_new_tokens is 5, but"),
    ],
)
def test_prompts(policy, prompt, says):
    assert says in refusal(misvo.steer, policy, prompt, letter_reward, **QUICK)


def test_one_bad_prompt_among_many_is_refused_before_any_work(policy):
    calls = []
    refusal(
        misvo.steer_many,
        policy,
        ["a b", ""],
        lambda completions: calls.append(1) or [0.0] * len(completions),
        **QUICK,
    )
    assert not calls


def test_prompts_of_other_shapes(policy):
    assert "no chat template" in refusal(
        misvo.steer, policy, [{"role": "user", "content": "a"}], letter_reward, **QUICK
    )
    assert "takes a list of prompts" in refusal(misvo.steer_many, policy, "a b", letter_reward, **QUICK)
    says = refusal(misvo.steer_many, policy, ["a", "b"], letter_reward, columns=[{}], **QUICK)
    assert "2 prompts but 1 rows of columns" in says


def explode(completions, **_):
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (explode, "the reward raised RuntimeError (no such luck) on the responses to 'a b'"),
        (lambda completions: [math.nan] * len(completions), "the reward gave nan for the response"),
        (lambda completions: [math.inf] * len(completions), "the reward gave inf for the response"),
        (lambda completions: [1.0], "returned 1 values for 3 responses"),
        (lambda completions: ["high"] * len(completions), "'high', which is not a number"),
        (lambda completions: [[1.0]] * len(completions), "which is not a number"),
        (lambda completions: 1.0, "must return a list of 3 numbers"),
        (lambda completions: [None] * len(completions), "scored none of the 3 responses of step 0"),
        ("nope", "unknown reward 'nope'"),
        (3, "a reward must be callable"),
        (lambda a, b, c: 1.0, "a reward takes (prompts, completions, **columns)"),
    ],
)
def test_rewards(policy, reward, says):
    assert says in refusal(misvo.steer, policy, "a b", reward, **QUICK)


def test_a_reward_that_fails_later_keeps_what_was_done(policy):
    calls = []

    def fails_at_the_second_step(completions, **_):
        calls.append(1)
        return [math.nan if len(calls) > 1 else float(len(c)) for c in completions]

    with pytest.raises(misvo.RewardError) as caught:
        misvo.steer(policy, "a b", fails_at_the_second_step, **QUICK, preset="paper")
    result = caught.value.result
    assert len(result.candidates) == 3 and len(result.trace) == 1
    assert result.reward == max(c.reward for c in result.candidates)


def test_a_run_that_diverges_says_so_and_stays_finite(policy):
    result = misvo.steer(
        policy,
        "a b c",
        letter_reward,
        rollouts=4,
        steps=40,
        max_new_tokens=5,
        learning_rate=1e4,
        penalty=1e4,
        preset="paper",
    )
    notes = [row["note"] for row in result.trace if "note" in row]
    assert any(note.startswith("unstable") for note in notes)
    assert notes[-1].startswith("diverged") and len(result.trace) < 40
    assert torch.isfinite(result.steering.vectors).all()


def test_equal_rewards_are_said_and_leave_u_alone(policy):
    result = misvo.steer(policy, "a b", lambda completions: [2.0] * len(completions), **QUICK, preset="paper")
    assert result.steering.norm == 0
    assert all("all rewards are equal" in row["note"] for row in result.trace)


def test_models(tmp_path):
    assert "no model could be loaded from the name 'no-such/model'" in refusal(
        misvo.Policy.from_pretrained, "no-such/model"
    )
    assert "no model could be loaded from the folder" in refusal(misvo.Policy.from_pretrained, tmp_path)
    assert "training mode" in refusal(misvo.Policy, make_model("llama").train(), make_tokenizer())
    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    capped = Gemma2ForCausalLM(Gemma2Config(**shape, num_key_value_heads=1, head_dim=16)).eval()
    assert "soft-caps its logits" in refusal(misvo.Policy, capped, make_tokenizer())


def test_a_head_that_is_not_what_it_seems_is_refused():
    class Bent(torch.nn.Linear):
        def forward(self, x):
            return torch.tanh(super().forward(x))

    model = make_model("llama")
    bent = Bent(32, 61, bias=False)
    bent.weight = model.lm_head.weight
    model.lm_head = bent
    assert "not a linear function" in refusal(misvo.Policy, model, make_tokenizer())
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 61), torch.nn.Tanh())
    assert "not a linear layer" in refusal(misvo.Policy, model, make_tokenizer())


def test_steering_files(policy, tmp_path):
    load = misvo.Steering.from_pretrained
    assert "steering.safetensors is missing" in refusal(load, tmp_path)
    result = misvo.steer(policy, "a b c", letter_reward, **QUICK, preset="paper")
    result.steering.save_pretrained(tmp_path / "good")
    stranger = make_policy("llama", seed=1)
    assert "whose LM head is not the one of" in refusal(stranger.generate, "a b", steering=load(tmp_path / "good"))

    weights = tmp_path / "good" / "steering.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-20], b"not safetensors at all", b""):
        weights.write_bytes(content)
        assert "truncated or not a steering" in refusal(load, tmp_path / "good")
    weights.write_bytes(whole)
    (tmp_path / "good" / "steering.json").write_text("{")
    assert "not the description of a steering" in refusal(load, tmp_path / "good")


def test_memory_limits_become_row_limits(policy):
    from misvo.fields import parse_bytes

    assert [parse_bytes(x) for x in ("8GB", "512 MiB", "1e9", "3k")] == [8 * 10**9, 512 * 2**20, 10**9, 3000]
    prefix = policy.prefill(policy.encode("a b c"), 20)
    least, few, many = (
        policy.rows_that_fit(prefix, misvo.Settings("best-of-n", max_new_tokens=20, memory=memory))
        for memory in ("1", "200kB", "400kB")
    )
    assert 1 == least < few < many < 256

    def rows_of(**limit):
        """How many rows the body was ever given at once, and what was sampled."""
        counts, step = [], policy.body_step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "body_step", lambda tokens, *rest: counts.append(len(tokens)) or step(tokens, *rest))
            result = misvo.steer(policy, "a b", letter_reward, **QUICK, **limit, preset="paper")
        return max(counts), [c.tokens for c in result.candidates]

    (unlimited, tokens), (limited, same) = rows_of(), rows_of(memory="1kB")
    assert (unlimited, limited) == (QUICK["rollouts"], 1) and tokens == same
