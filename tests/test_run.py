"""One prompt as a state machine, without any model: what it asks, what it is told, when it is done."""

import pytest
import torch
from fakes import FakePolicy, rollouts_of
from tolerances import assert_within, rounding

import misvo
from misvo.methods.misvo import leave_one_out
from misvo.rewards import Scores
from misvo.run import Run
from misvo.scoring import Answer


def make(**options):
    policy = FakePolicy()
    settings = misvo.Settings.from_preset("paper", **{"rollouts": 3, "steps": 4, "max_new_tokens": 5, **options})
    return Run("why", tuple(policy.encode("why")), policy.head, settings, policy)


def told(run, request, rewards):
    rollouts = run.gather(request, rollouts_of(request))
    answer = Answer(Scores(rewards), None, 0.5) if run.is_scored(request) else None
    return run.tell(request, rollouts, run.responses(rollouts), answer)


def test_a_method_that_learns_asks_for_one_step_after_the_other():
    run = make()
    for step in range(4):
        (request,) = run.ask()
        assert request.step == step and run.ask() == []  # nothing more before it is told
        assert (request.intervention is None) == (step == 0) and request.keep.scores
        row = told(run, request, [1.0, float(step), 3.0])
        assert row["step"] == step and row["mean"] == pytest.approx((4 + step) / 3) and row["seconds"]["reward"] == 0.5
    assert run.finished and run.ask() == []
    assert [c.step for c in run.result.candidates] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_vectors_move_along_the_score_of_what_earned_more():
    run = make(steps=1, cost="none", learning_rate=0.7)
    (request,) = run.ask()
    told(run, request, [1.0, 2.0, 6.0])
    rollouts, rewards = rollouts_of(request), torch.tensor([1.0, 2.0, 6.0]).double()
    chosen = run.head.weight[rollouts.tokens].double()  # W[y]; m is zero in these rollouts
    advantages = torch.tensor([1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2], dtype=torch.float64)  # against the mean of the others
    assert torch.equal(leave_one_out(rewards), advantages)
    terms = 0.7 / 3 * advantages[:, None, None] * chosen  # (K, T, d)
    bound = rounding(torch.float32, 3 + 3, terms.abs().sum(0))  # three terms, of three factors more each
    assert_within(run.result.steering.vectors, terms.sum(0), bound)


def test_best_of_n_asks_for_everything_at_once_and_takes_answers_in_any_order():
    run = make(method="best-of-n")
    requests = run.ask()
    assert [request.step for request in requests] == [0, 1, 2, 3]
    for request in reversed(requests):
        told(run, request, [float(request.step), 0.0, None])
    assert run.finished and [row["best"] for row in run.result.trace] == [0.0, 1.0, 2.0, 3.0]
    assert [row["unscored"] for row in run.result.trace] == [1] * 4 and run.result.reward == 3.0


def test_with_a_stop_rule_best_of_n_asks_step_by_step_and_stops():
    run = make(method="best-of-n", stop_reward=5.0)
    (first,) = run.ask()
    told(run, first, [1.0, 2.0, 3.0])
    (second,) = run.ask()
    row = told(run, second, [5.0, 2.0, 3.0])
    assert row["note"].startswith("stopped") and run.finished and run.ask() == []


def test_stop_lets_what_is_decoding_end_and_asks_for_no_more():
    run = make()
    (first,) = run.ask()
    told(run, first, [1.0, 2.0, 3.0])
    (second,) = run.ask()
    run.stop("enough")
    assert run.result.trace[-1]["note"] == "enough" and not run.finished
    told(run, second, [1.0, 2.0, 4.0])
    assert run.finished and len(run.result.trace) == 2


def test_rollouts_for_the_meter_are_asked_for_beside_the_first_step_and_not_scored():
    run = make(method="aisp", kl_ref=True, steps=1)
    first, extra = run.ask()
    assert not run.is_scored(extra)
    assert first.intervention is not None and extra.intervention is None and extra.keep.hidden
    told(run, extra, None)
    assert not run.finished and run.result.reference.reward is None
    assert told(run, first, [1.0, 2.0, 3.0])["mean"] == 2.0
    assert run.finished and run.result.kl_ref.total > 0


def test_a_step_that_nobody_could_score_is_an_error_and_keeps_what_there_is():
    run = make()
    (first,) = run.ask()
    told(run, first, [1.0, 2.0, 3.0])
    (second,) = run.ask()
    with pytest.raises(misvo.RewardError, match="none of the 3 responses of step 1"):
        told(run, second, [None, None, None])
    run.settle()
    assert run.result.reward == 3.0 and run.result.steering is not None
