"""`policy.generate` for a list of prompts: each answered as it is alone; what is one prompt and what are many."""

import pytest
from conftest import letter_reward, make_policy

import misvo
from misvo.prompts import is_many

CHAT = [{"role": "user", "content": "a b"}]
OTHER = [{"role": "system", "content": "q"}, {"role": "user", "content": "c"}]
LONG = {"max_new_tokens": 12, "seed": 3, "temperature": 0.9}


@pytest.mark.parametrize(
    ("prompt", "many"),
    [
        ("a b", False),
        (["a b"], True),
        (["a b", "c"], True),
        (("a b", "c"), True),
        (CHAT, False),
        ([CHAT], True),
        ([CHAT, OTHER], True),
        ([5, 6, 7], False),
        ([[5, 6, 7]], True),
        (["a", CHAT, [5]], True),
        (["a", *CHAT], False),
        ([5, "a"], False),
        ([True, False], False),
        ([], False),
        (None, False),
        ({"role": "user", "content": "a"}, False),
    ],
)
def test_one_prompt_and_many(prompt, many):
    assert is_many(prompt) == many


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("samples", [None, 3])
def test_each_prompt_has_the_answer_that_it_has_alone(architecture, samples):
    """Of other lengths and forms, one of them twice, with more rows than decode at once."""
    policy = make_policy(architecture, chat=True)
    prompts = ["a b c", CHAT, [5, 6, 7, 8, 9, 10], OTHER, "a b c", "z"]
    alone = [policy.generate(prompt, samples=samples, **LONG) for prompt in prompts]
    assert len({str(answer) for answer in alone}) > 3  # else the order would not matter
    counts, step = [], policy.body_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "body_step", lambda tokens, *rest: counts.append(len(tokens)) or step(tokens, *rest))
        assert policy.generate(prompts, samples=samples, **LONG) == alone
        assert max(counts) > (samples or 1)  # together
        patch.setattr(policy, "rows_that_fit", lambda *_, **__: 2)
        counts.clear()
        assert policy.generate(prompts, samples=samples, **LONG) == alone
        assert max(counts) <= 2
    assert [policy.generate([prompt], samples=samples, **LONG) for prompt in prompts] == [[one] for one in alone]


def test_steering_and_stops_hold_for_all():
    policy = make_policy()
    result = misvo.steer(policy, "a b", letter_reward, rollouts=4, steps=2, max_new_tokens=8, learning_rate=3.0)
    options = {"steering": result, "strength": 40.0, "stop": ("e", "w1"), "seed": 1}
    prompts = ["a b", "c d e", "f"]
    steered = policy.generate(prompts, **options)
    assert steered == [policy.generate(prompt, **options) for prompt in prompts]
    assert steered != policy.generate(prompts, seed=1, max_new_tokens=8)
    assert not any("e" in text.split() for text in steered)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (["a", ""], "the prompt is empty"),
        (["a", []], "the prompt is empty"),
        ([], "the prompt is empty"),
        (["a", CHAT[0]], "a prompt is a string or a list of messages"),
        (["a", 5], "a prompt is a string or a list of messages"),
        ([["a", "b"]], "a prompt is a string or a list of messages"),
        (["a", "b " * 126], "has 126 tokens and max_new_tokens is 12, but"),
    ],
)
def test_what_is_wrong_with_one_is_said_before_any_work(prompts, says):
    policy = make_policy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "prefill", lambda *_: pytest.fail("work was done"))
        with pytest.raises(misvo.MisvoError, match=says):
            policy.generate(prompts, **LONG)
