"""A prompt's result depends on nothing but itself: not on batch mates, row limits or the reference it started from."""

import time

import pytest
import torch
from conftest import ARCHITECTURES, letter_reward, make_policy
from literal import replay
from tolerances import assert_near, assert_within, room, rounding

import misvo
from misvo.engines.torch import TorchEngine
from misvo.interventions import Vectors
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler

A, B, C = "a b c", "q w e r t y u i o p a s d f", "m"
SETTINGS = {
    "rollouts": 4,
    "steps": 3,
    "max_new_tokens": 10,
    "learning_rate": 0.3,
    "penalty": 0.5,
    "seed": 8,  # one with no token at the edge of a nucleus, where rounding would decide
    "top_p": 0.95,
}


def same(policy, one, other):
    """Equal but for the order of sums, which a batch decides: vectors are as near as rounding lets them be."""
    assert [c.tokens for c in one.candidates] == [c.tokens for c in other.candidates]
    assert [c.reward for c in one.candidates] == [c.reward for c in other.candidates]
    allowed = room(lambda model: replay(model, policy.encode(one.prompt), one), policy.model, copies=1)
    assert allowed < 1e-4 * one.steering.norm  # rounding must not hide a difference, nor make one
    assert_near(other.steering.vectors, one.steering.vectors, allowed)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steer_many_gives_each_prompt_its_own_result(architecture):
    policy = make_policy(architecture)
    together = misvo.steer_many(policy, [A, B, C], letter_reward, **SETTINGS, preset="paper")
    for prompt, result in zip([A, B, C], together, strict=True):
        same(policy, result, misvo.steer(policy, prompt, letter_reward, **SETTINGS, preset="paper"))


@pytest.mark.parametrize("max_rows", [1, 3, 4, 6, 9])
def test_row_limits_change_nothing(policy, max_rows):
    """Rollouts split over time, prompts that wait, rows that join others in mid-flight."""
    whole = misvo.steer_many(policy, [A, B, C], letter_reward, **SETTINGS, preset="paper")
    limited = misvo.steer_many(policy, [A, B, C], letter_reward, **SETTINGS, max_rows=max_rows, preset="paper")
    for one, other in zip(whole, limited, strict=True):
        same(policy, one, other)


def decode(policy, u=None, keep=None):
    vectors = None if u is None else Vectors.by_position(u)
    request = Request(tuple(policy.encode(B)), 2, 0, range(8), 12, Sampler(0.8, 0.9), vectors, keep or Keep())
    return TorchEngine(policy, max_rows=8).run(request)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])
def test_zero_vectors_sample_token_for_token_like_the_reference(architecture):
    policy = make_policy(architecture)
    reference, steered = decode(policy), decode(policy, torch.zeros(12, 32))
    assert torch.equal(reference.tokens, steered.tokens)
    assert steered.kl.abs().max() == 0


def test_best_of_n_and_the_first_step_of_misvo_sample_the_same_responses(policy):
    sampling = {name: SETTINGS[name] for name in ("rollouts", "steps", "max_new_tokens", "seed", "top_p")}
    best_of_n = misvo.steer(policy, A, letter_reward, method="best-of-n", **sampling, preset="paper")
    steered = misvo.steer(policy, A, letter_reward, **SETTINGS, preset="paper")
    assert [c.tokens for c in best_of_n.candidates[:4]] == [c.tokens for c in steered.candidates[:4]]
    assert len(best_of_n.candidates) == 12 and best_of_n.steering is None
    assert best_of_n.reward == max(c.reward for c in best_of_n.candidates)
    assert [row["best"] for row in best_of_n.trace] == [
        max(c.reward for c in best_of_n.candidates if c.step <= n) for n in range(3)
    ]


def test_rollouts_hold_nothing_after_the_end(policy):
    rollouts = decode(policy, torch.randn(12, 32), Keep(scores=True, fisher="steered", hidden=True))
    dead = ~rollouts.alive
    assert dead.any()
    for values in (
        rollouts.kl,
        rollouts.logprobs,
        rollouts.score_rows,
        rollouts.fisher_rows,
        rollouts.hidden,
    ):
        assert values[dead].abs().sum() == 0
    mass = rollouts.mean_probs.sum(-1)
    V, K = policy.head.vocab_size, len(rollouts.tokens)
    assert_within(mass, rollouts.alive.double().mean(0), rounding(torch.float32, 2 * V + K))  # softmax, mean, this sum


def test_the_model_is_left_as_it_was(policy):
    model = policy.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [(p.requires_grad, p.grad) for p in model.parameters()]
    torch.manual_seed(11)
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    misvo.steer(policy, A, letter_reward, **SETTINGS, preset="paper")
    assert torch.equal(rng, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert flags == [(p.requires_grad, p.grad) for p in model.parameters()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_scoring_runs_beside_decoding_and_changes_nothing(policy):
    """While one prompt's responses are scored, tokens of the others are drawn; rewards are never called at once."""
    inside, overlapped, decoding = [], [], []
    advance = TorchEngine.advance

    def watched(self):
        decoding.append(1)
        return advance(self)

    def slow(completions, **_):
        assert not inside
        inside.append(1)
        before = len(decoding)
        time.sleep(0.05)
        overlapped.append(len(decoding) - before)
        inside.clear()
        return letter_reward(completions)

    expected = misvo.steer_many(policy, [A, B, C], letter_reward, **SETTINGS, preset="paper")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "advance", watched)
        results = misvo.steer_many(policy, [A, B, C], slow, **SETTINGS, max_rows=8, preset="paper")
    assert sum(overlapped) > 0
    for one, other in zip(expected, results, strict=True):
        same(policy, one, other)


def test_a_failing_reward_among_many_prompts_keeps_the_finished_ones(policy):
    def picky(prompts, completions, **_):
        if prompts[0] == B:
            raise RuntimeError("not this one")
        return letter_reward(completions)

    with pytest.raises(misvo.RewardError, match="not this one") as caught:
        misvo.steer_many(policy, [A, B, C], picky, **{**SETTINGS, "steps": 1}, max_rows=4, preset="paper")
    assert caught.value.result.prompt == B
    first, failed, last = caught.value.results
    same(policy, first, misvo.steer(policy, A, letter_reward, **{**SETTINGS, "steps": 1}, preset="paper"))
    assert failed is None  # and C, which was scored after it, ends as it does alone
    same(policy, last, misvo.steer(policy, C, letter_reward, **{**SETTINGS, "steps": 1}, preset="paper"))
