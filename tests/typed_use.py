"""What an IDE and a type checker see of the package. Nothing runs this: `make lint` reads it.

A line that is wrong carries an `ignore` for the very error that it must be told; mypy refuses one that is not needed.
"""
# mypy: warn-unused-ignores

from typing import assert_type

import misvo


def seen(policy: misvo.Policy, result: misvo.Result) -> None:
    assert_type(misvo.steer(policy, "a", len, preset="paper", rollouts=4, penalty=None, kl_ref=True), misvo.Result)
    assert_type(misvo.steer_many(policy, ["a", "b"], "sentiment", max_new_tokens=8), list[misvo.Result])
    assert_type(misvo.Settings.from_preset("auto", top_p=0.9), misvo.Settings)
    assert_type(misvo.Result.load("run").candidates[0].kl, float | None)
    with misvo.Session(policy) as session:
        session.add("a", "length:12", misvo.Settings(rollouts=4))


def told(policy: misvo.Policy) -> None:
    misvo.steer(policy, "a", len, rollout=4)  # type: ignore[call-arg]
    misvo.steer(policy, "a", len, rollouts="4")  # type: ignore[arg-type]
    misvo.steer(policy, "a", 3.0)  # type: ignore[arg-type]
    misvo.steer_many(policy, ["a"], len, kl_bugdet=4.0)  # type: ignore[call-arg]
    misvo.steer_many(policy, ["a"], len, top_p="all")  # type: ignore[arg-type]
    misvo.Settings.from_preset("auto", topp=0.9)  # type: ignore[call-arg]
    misvo.Settings.from_preset("auto", greedy="yes")  # type: ignore[arg-type]
    misvo.Settings(rollouts="4")  # type: ignore[arg-type]
    misvo.steered(policy, "a", len)  # type: ignore[attr-defined]
