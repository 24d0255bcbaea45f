"""What an interactive session prints of each thing: one short line, whatever the thing holds."""

import dataclasses

import pytest
import torch
from conftest import letter_reward, make_policy

import misvo
from misvo.candidate import Candidate
from misvo.rollouts import Keep, Request
from misvo.session import Event, Session

EVIL = "a\\'\"\n\x07\u202e€ " * 999


@pytest.fixture(scope="module")
def things():
    """Of every kind, each once as usual and once with as much as it can hold."""
    policy, long = make_policy(), misvo.Policy(make_policy().model, make_policy().tokenizer, name="/'\\" * 999)
    settings = misvo.Settings(
        rollouts=4, steps=2, max_new_tokens=5, stop=(EVIL, EVIL), stop_reward=-1e300, value=EVIL, memory="9" * 200
    )
    sessions = [Session(policy), Session(long)]
    handles = [
        sessions[0].add("a b", letter_reward, misvo.Settings(max_new_tokens=5)),
        sessions[1].add("a b", letter_reward, settings),
    ]
    result = misvo.steer(policy, "a b", letter_reward, rollouts=4, steps=2, max_new_tokens=5)
    candidate = dataclasses.replace(result.best, text=EVIL, reward=-1.2345678e-300, token_kl=[1e300] * 9, step=10**9)
    big = dataclasses.replace(result, prompt=EVIL, candidates=[candidate], trace=[{"kl": -1.23456e-300}])
    handles[1].run.result = big
    tie, metadata = EVIL, {"model": EVIL, "prompt": EVIL}
    steering = dataclasses.replace(result.steering, tie=tie, metadata=metadata)
    keep = Keep(scores=True, fisher="steered", hidden=True)
    rollouts = policy.engine().run(Request((5, 6), 0, 0, range(3), 4, keep=keep))
    huge = dataclasses.replace(rollouts, tokens=torch.empty(1, device="meta").expand(10**6, 10**6))
    usual = [policy, misvo.Settings(), result.settings, *sessions, *handles, result, result.best, result.steering]
    return [*usual, rollouts, long, settings, big, candidate, steering, huge, Event(handles[1], {"x": EVIL})]


def test_all_are_short_lines(things):
    kinds = {type(thing).__name__ for thing in things}
    assert kinds >= {"Result", "Policy", "Steering", "Candidate", "Settings", "Session", "Handle", "Rollouts", "Event"}
    for thing in things:
        shown = repr(thing)
        assert shown.startswith(f"{type(thing).__name__}(") and shown.endswith(")")
        assert len(shown) < 300 and shown.isprintable(), shown


def test_settings_say_what_is_not_usual_and_can_be_read_back():
    for settings in (
        misvo.Settings(),
        misvo.Settings("best-of-n", rollouts=3),
        misvo.Settings.from_preset("auto", seed=4),
        misvo.Settings("aisp", sigma2=0.25, stop=("x", "y")),
    ):
        assert eval(repr(settings), {"Settings": misvo.Settings}) == settings
    assert repr(misvo.Settings("misvo", rollouts=3)) == "Settings(method='misvo', rollouts=3)"


def test_rollouts_say_their_shapes():
    policy = make_policy()
    rollouts = policy.engine().run(Request((5, 6), 0, 0, range(3), 4, keep=Keep(hidden=True)))
    shown = repr(rollouts)
    assert "tokens 3×4, lengths 3, kl 3×4" in shown and "hidden 3×4×32" in shown and "fisher_rows" not in shown


def test_a_candidate_is_a_candidate():
    assert repr(Candidate(0, 1, [2], "hi", None)) == "Candidate(step=0, rollout=1, reward=None, kl=None, text='hi')"
