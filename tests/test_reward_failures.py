"""Rewards that fail: what is asked again, what counts as not scored, and what is said of it."""

import itertools
import math
import statistics

import pytest
import torch
from conftest import letter_reward, make_policy

import misvo
from misvo import rewards
from misvo.rewards import Clipped, Combined, Standardised, insisting

TEXTS = ["a b c", "bad", "a b", "a"]
SIZES = {"rollouts": 5, "steps": 4, "max_new_tokens": 5, "learning_rate": 1.0, "preset": "paper"}


def call(reward, on_error="none", retries=0, texts=TEXTS, **columns):
    return rewards.score(
        insisting(rewards.as_reward(reward), on_error, retries), "p", texts, [[1]] * len(texts), columns
    )


def words(text):
    return float(len(text.split()))


class Picky:
    """Words; a call with a bad text in it does what `fault` says. Keeps the sizes of its calls."""

    def __init__(self, fault):
        self.fault, self.calls = fault, []

    def __call__(self, completions, answer=None, **_):
        self.calls.append(len(completions))
        assert answer is None or len(answer) == len(completions)
        return [words(text) if text != "bad" else self.fault() for text in completions]


def explode():
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (explode, "raised RuntimeError (no such luck) on the responses to 'p', the first of which is 'bad'"),
        (lambda: math.nan, "gave nan for the response 'bad'"),
        (lambda: -math.inf, "gave -inf for the response 'bad'"),
        (lambda: "high", "'high', which is not a number"),
    ],
)
def test_only_the_guilty_are_not_scored(fault, says):
    picky = Picky(fault)
    got = call(picky, answer=4)
    assert got == [3.0, None, 2.0, 1.0] and picky.calls == [4, 1, 1, 1, 1]
    assert says in str(got.failure)
    with pytest.raises(misvo.RewardError, match=r"bad|no such luck"):
        call(Picky(fault), "raise")


def test_a_call_is_tried_again_as_often_as_allowed():
    def flaky(failures):
        left = itertools.count(failures, -1)
        return lambda completions: [1 / 0 if next(left) > 0 else words(text) for text in completions]

    good = [words(text) for text in TEXTS]
    for on_error in ("raise", "none"):
        got = call(flaky(2), on_error, retries=2)
        assert got == good and got.failure is None
    with pytest.raises(misvo.RewardError, match="ZeroDivisionError"):
        call(flaky(2), "raise", retries=1)
    picky = Picky(explode)
    assert call(picky, retries=2) == [3.0, None, 2.0, 1.0]
    assert picky.calls == [4] * 3 + [1] * 4 + [1] * 2  # all rows once, the bad one twice more


def test_none_is_an_answer_and_not_a_failure():
    calls = []
    got = call(lambda completions: calls.append(1) or [None, 1.0, 2.0, None], retries=3)
    assert got == [None, 1.0, 2.0, None] and got.failure is None and len(calls) == 1


def test_of_a_sum_only_the_part_that_fails_is_called_again():
    picky, other = Picky(explode), Picky(lambda: 7.0)
    got = call(Combined({"in": Clipped(Combined({"picky": picky}), high=2.5), "other": other}, {"other": 10.0}))
    assert got == [32.5, None, 22.0, 11.0] and got.parts["in/raw/picky"] == [3.0, None, 2.0, 1.0]
    assert other.calls == [4] and picky.calls == [4, 1, 1, 1, 1]
    assert str(got.failure).startswith("in the part 'in', in the part 'picky', the reward raised RuntimeError")


def test_the_scale_of_a_run_comes_from_all_first_responses():
    """Were they scored one by one by the whole of the reward, the first of them would be the scale."""
    mean, std = statistics.fmean([3, 2, 1]), statistics.stdev([3, 2, 1])
    expected = [None if text == "bad" else (words(text) - mean) / std for text in TEXTS]
    assert call(Standardised(Picky(explode))) == pytest.approx(expected)


def test_of_many_async_calls_only_the_failed_one_is_not_scored():
    async def each(text):
        return explode() if text == "bad" else words(text)

    assert call(each) == [3.0, None, 2.0, 1.0]
    with pytest.raises(misvo.RewardError, match="no such luck"):
        call(each, "raise")


def even(text):
    return len(text.split()) % 2 == 0


def test_a_run_goes_on_as_if_the_reward_had_said_none():
    def raises(text):
        return explode() if even(text) else letter_reward([text])[0]

    def abstains(text):
        return None if even(text) else letter_reward([text])[0]

    policy = make_policy()
    result = misvo.steer(policy, "a b c", raises, on_reward_error="none", **SIZES)
    expected = misvo.steer(policy, "a b c", abstains, **SIZES)
    assert [(c.tokens, c.reward) for c in result.candidates] == [(c.tokens, c.reward) for c in expected.candidates]
    assert torch.equal(result.steering.vectors, expected.steering.vectors)
    for row in result.trace:
        own = [c for c in result.candidates if c.step == row["step"]]
        assert row["unscored"] == sum(even(c.text) for c in own) == sum(c.reward is None for c in own)
    assert sum(row["unscored"] > 0 for row in result.trace) > 1
    noted = [row["step"] for row in result.trace if "no such luck" in row.get("note", "")]
    assert noted == [next(row["step"] for row in result.trace if row["unscored"])]


def test_a_reward_that_fails_on_everything_of_a_step_ends_the_run_with_its_own_error():
    def breaks(completions, trainer_state, **_):
        return explode() if trainer_state.global_step == 2 else letter_reward(completions)

    with pytest.raises(misvo.RewardError, match="raised RuntimeError \\(no such luck\\)") as caught:
        misvo.steer(make_policy(), "a b c", breaks, on_reward_error="none", reward_retries=1, **SIZES)
    assert len(caught.value.result.trace) == 2 and caught.value.result.reward is not None
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_credit_goes_on_where_the_beginnings_cannot_be_scored():
    """Beginnings are not answers: that none of them has a score says nothing about the step."""

    beginnings = []

    def whole(text):
        if len(text.split()) == 6:
            return letter_reward([text])[0]
        beginnings.append(text)
        return explode()

    whole.scores_prefixes = True
    options = {"rollouts": 16, "steps": 2, "max_new_tokens": 6, "preset": "auto", "select": "best"}
    result = misvo.steer(make_policy(), "a b c", whole, on_reward_error="none", **options)
    assert len(result.trace) == 2 and torch.isfinite(result.steering.vectors).all()
    assert len(beginnings) > 2 * 16 and any(c.reward is not None for c in result.candidates)


def test_settings_say_what_they_take():
    with pytest.raises(misvo.MisvoError, match="unknown on_reward_error 'ignore': choose one of raise, none"):
        misvo.Settings(on_reward_error="ignore")
    with pytest.raises(misvo.MisvoError, match="reward_retries must be a whole number of at least 0, not -1"):
        misvo.Settings(reward_retries=-1)


def test_a_value_network_is_fitted_to_what_was_scored():
    def raises(text):
        return explode() if even(text) else letter_reward([text])[0]

    options = {"rollouts": 6, "max_new_tokens": 5, "temperature": 1.0, "top_p": 1.0}
    network = misvo.train_value(make_policy(), ["a b"], raises, on_reward_error="none", **options)
    assert network.budget["responses"] == 6
    with pytest.raises(misvo.RewardError):
        misvo.train_value(make_policy(), ["a b"], raises, **options)
