"""Where memory runs out, decoding goes on with fewer rows and gives the same result."""

import pytest
import torch
from conftest import letter_reward, make_policy
from literal import replay
from tolerances import assert_near, room

import misvo
from misvo import cache as kv
from misvo.tie import TIES

SETTINGS = {"rollouts": 6, "steps": 3, "max_new_tokens": 8, "penalty": 0.5, "seed": 3}


def short_of_memory(policy, rows, error, calls_before=0):
    """Let the body fail when it is given more rows than `rows`, after a few calls that succeed."""
    step, calls = policy.body_step, []

    def limited(tokens, cache, depths):
        calls.append(len(tokens))
        if len(tokens) > rows and len(calls) > calls_before:
            raise error
        return step(tokens, cache, depths)

    policy.body_step = limited
    return calls


def same(policy, one, other):
    assert [c.tokens for c in one.candidates] == [c.tokens for c in other.candidates]
    if one.settings.method == "aisp":  # vectors of tokens and noise alone
        assert torch.equal(one.steering.vectors, other.steering.vectors)
        return
    basis = TIES[one.settings.tie](one.settings.max_new_tokens).basis
    allowed = room(lambda model: replay(model, policy.encode(one.prompt), one, basis), policy.model, copies=1)
    assert allowed < 1e-4 * one.steering.norm  # rounding must not hide a difference
    assert_near(other.steering.vectors, one.steering.vectors, allowed)


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu"])
@pytest.mark.parametrize("options", [{}, {"tie": "shared"}, {"cost": "iterate-fisher"}, {"method": "aisp"}], ids=str)
@pytest.mark.parametrize("calls_before", [0, 5])
def test_the_result_is_the_same(error, options, calls_before):
    whole = misvo.steer(make_policy("llama"), "a b c", letter_reward, **{**SETTINGS, **options}, preset="paper")
    policy = make_policy("llama")
    calls = short_of_memory(policy, 2, error, calls_before)
    with pytest.warns(UserWarning, match="out of memory"):
        limited = misvo.steer(policy, "a b c", letter_reward, **{**SETTINGS, **options}, preset="paper")
    same(policy, whole, limited)
    assert max(calls[-5:]) <= 2  # it does not try again what failed


def test_many_prompts_lose_nothing():
    prompts = ["a b c", "q w e r t y", "m"]
    whole = misvo.steer_many(make_policy("llama"), prompts, letter_reward, **SETTINGS, preset="paper")
    policy = make_policy("llama")
    short_of_memory(policy, 4, ERRORS[0], calls_before=7)
    with pytest.warns(UserWarning, match="out of memory"):
        limited = misvo.steer_many(policy, prompts, letter_reward, **SETTINGS, preset="paper")
    for one, other in zip(whole, limited, strict=True):
        same(policy, one, other)


def test_a_single_row_that_does_not_fit_is_an_error_of_one_sentence():
    policy = make_policy("llama")
    short_of_memory(policy, 0, ERRORS[0])
    with pytest.warns(UserWarning), pytest.raises(misvo.MisvoError, match="a single row"):
        misvo.steer(policy, "a b c", letter_reward, **SETTINGS, preset="paper")


def test_other_errors_are_not_swallowed():
    policy = make_policy("llama")
    short_of_memory(policy, 0, RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        misvo.steer(policy, "a b c", letter_reward, **SETTINGS, preset="paper")


@pytest.mark.parametrize(
    ("operation", "calls_before"),  # of "select", some are at a moment when a request has just ended
    [("replicate", 0), ("join", 0), ("select", 0), ("select", 2), ("select", 4), ("select", 6)],
)
def test_rows_for_which_there_was_no_room_are_not_lost(monkeypatch, operation, calls_before):
    prompts = ["a b c", "q w e r t y", "m"]
    whole = misvo.steer_many(make_policy("llama"), prompts, letter_reward, **SETTINGS, preset="paper")
    original, calls = getattr(kv, operation), []

    def limited(*arguments):
        calls.append(arguments)
        if len(calls) == calls_before + 1:
            raise ERRORS[0]
        return original(*arguments)

    monkeypatch.setattr(kv, operation, limited)
    with pytest.warns(UserWarning, match="out of memory"):
        limited = misvo.steer_many(policy := make_policy("llama"), prompts, letter_reward, **SETTINGS, preset="paper")
    for one, other in zip(whole, limited, strict=True):
        same(policy, one, other)
