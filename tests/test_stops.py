"""A stop really stops, whatever the method: nothing is decoded beyond it, and all that a result tells agrees."""

import pytest
from conftest import letter_reward, make_policy

import misvo

SIZES = {"rollouts": 4, "steps": 12, "max_new_tokens": 10, "seed": 1}
METHODS = ["misvo", "best-of-n", "aisp", "re-control", "lora"]


def falling():
    """A reward that is highest at the first step, so that patience runs out in time."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        return [float(index == 0) - len(calls) for index, _ in enumerate(completions)]

    return reward


def watched(policy):
    """The sizes of the batches that the body is given, filled while a run decodes."""
    step, batches = policy.body_step, []

    def counted(tokens, cache, depths):
        batches.append(len(tokens))
        return step(tokens, cache, depths)

    policy.body_step = counted
    return batches


def said(result):
    return [(c.step, c.rollout, c.tokens, c.reward) for c in result.candidates]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("options", "steps", "says"),
    [
        ({"stop_reward": -100.0}, 1, "the best reward has reached -100"),
        ({"patience": 3}, 4, "no better response for 3 steps"),
        ({"token_budget": 1}, 1, "tokens were sampled"),
        ({"seconds_budget": 0.0}, 1, "stopped after"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_nothing_is_decoded_beyond_a_stop(method, options, steps, says):
    policy = make_policy()
    batches = watched(policy)
    result = misvo.steer(policy, "a b c", falling(), method=method, kl_ref=True, **SIZES, **options, preset="paper")
    assert [row["step"] for row in result.trace] == list(range(steps))
    assert says in result.trace[-1]["note"] and not any("stopped" in row.get("note", "") for row in result.trace[:-1])
    assert [(c.step, c.rollout) for c in result.candidates] == [(n, k) for n in range(steps) for k in range(4)]
    tokens = [sum(len(c.tokens) for c in result.candidates if c.step == n) for n in range(steps)]
    assert [row["tokens"] for row in result.trace] == tokens
    # Each token but a response's last goes through the body once. KL_ref of aisp samples four responses more.
    beside = 4 * SIZES["max_new_tokens"] if method == "aisp" else 0
    assert sum(tokens) - 4 * steps <= sum(batches) <= sum(tokens) - 4 * steps + beside


def test_a_stopped_run_is_the_beginning_of_the_whole_one():
    whole = misvo.steer(make_policy(), "a b c", letter_reward, method="best-of-n", **SIZES, preset="paper")
    budget = sum(row["tokens"] for row in whole.trace[:5])
    stopped = misvo.steer(
        make_policy(), "a b c", letter_reward, method="best-of-n", token_budget=budget, **SIZES, preset="paper"
    )
    assert said(stopped) == said(whole)[:20]


def test_prompts_stop_each_in_its_own_time():
    prompts = ["a b c", "q w e r t y", "m"]
    options = {"method": "best-of-n", "token_budget": 100, **SIZES}
    alone = [misvo.steer(make_policy(), prompt, letter_reward, **options, preset="paper") for prompt in prompts]
    together = misvo.steer_many(make_policy(), prompts, letter_reward, **options, preset="paper")
    assert [said(result) for result in together] == [said(result) for result in alone]
    assert all(0 < len(r.trace) < 12 for r in together)


def test_without_a_stop_best_of_n_decodes_all_steps_at_once():
    policy = make_policy()
    batches = watched(policy)
    misvo.steer(policy, "a b c", letter_reward, method="best-of-n", max_rows=48, **SIZES, preset="paper")
    assert len(batches) == SIZES["max_new_tokens"] - 1


def test_the_last_step_was_not_stopped():
    """A rule that is met when there is nothing left to stop has stopped nothing."""
    result = misvo.steer(make_policy(), "a b c", falling(), stop_reward=-100.0, **{**SIZES, "steps": 1}, preset="paper")
    assert "note" not in result.trace[0]
