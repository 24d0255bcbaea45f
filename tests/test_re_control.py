"""RE-Control: the loss, the climb, the fit, files, and the method end to end."""

import pytest
import torch
from conftest import letter_reward, make_policy
from tolerances import assert_near, assert_within, room, unit

import misvo
from misvo.value import Episode, ValueNetwork, bellman_loss

SETTINGS = {"rollouts": 6, "steps": 4, "max_new_tokens": 8, "seed": 2}


def test_the_loss_is_its_definition():
    values = torch.tensor([[1.0, 4.0, 2.0], [3.0, 1.0, 9.0]])
    alive = torch.tensor([[True, True, True], [True, True, False]])
    rewards = torch.tensor([5.0, 2.0])
    last = ((1 - 4) ** 2 + (4 - 2) ** 2 + (2 - 5) ** 2 + (3 - 1) ** 2 + (1 - 2) ** 2) / 2
    first = ((1 - 4) ** 2 + (4 - 2) ** 2 + (1 - 5) ** 2 + (3 - 1) ** 2 + (3 - 2) ** 2) / 2
    assert bellman_loss(values, alive, torch.tensor([2, 1]), rewards).item() == pytest.approx(last)
    assert bellman_loss(values, alive, torch.tensor([0, 0]), rewards).item() == pytest.approx(first)


def test_the_climb_follows_finite_differences():
    torch.manual_seed(0)
    network = ValueNetwork(5).double()
    h = torch.randn(3, 5, dtype=torch.float64)
    state, width = h.clone(), 1e-5
    for _ in range(2):
        gradient = torch.zeros_like(state)
        for j in range(5):
            step = torch.zeros(5, dtype=torch.float64)
            step[j] = width
            gradient[:, j] = (network(state + step) - network(state - step)) / (2 * width)
        state = state + 0.7 * gradient
    # A central difference is off by h² f‴/6 and by the roundings of f over h. Two steps of 0.7 along a network whose
    # derivatives are below 1, as its weights are.
    bound = 2 * 0.7 * (width**2 / 6 + unit(torch.float64) * 256 / width)
    assert_within(network.climb(h, 2, 0.7), state - h, bound)
    assert network.climb(h, 0, 0.7).abs().max() == 0


def episodes(count=60, seed=0, scale=1.0):
    """States whose last one tells the reward: 3 times its first coordinate."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        start = torch.randn(1, 6, generator=generator)
        states = start + 0.05 * torch.randn(5, 6, generator=generator)
        made.append(Episode(states, scale * 3 * states[-1, 0].item()))
    return made


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_fit_predicts_rewards_it_has_not_seen(scale):
    network = ValueNetwork.fit(episodes(scale=scale), seed=1)
    held_out = episodes(40, seed=9, scale=scale)
    states, rewards = torch.stack([e.hidden[-1] for e in held_out]), torch.tensor([e.reward for e in held_out])
    error = (network(states) - rewards).square().mean() / rewards.var()
    assert error < 0.2
    # Climbing it raises the true reward.
    assert (3 * scale * network.climb(states, 5, 0.02 / scale)[:, 0]).min() > 0


def test_the_fit_is_reproducible_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = ValueNetwork.fit(episodes(10), epochs=5), ValueNetwork.fit(episodes(10), epochs=5)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    other = ValueNetwork.fit(episodes(10), seed=1, epochs=5)
    assert not torch.equal(one.layers[0].weight, other.layers[0].weight)


def test_steer_collects_fits_and_steers_within_its_budget(policy):
    result = misvo.steer(policy, "a b c", letter_reward, method="re-control", kl_ref=True, **SETTINGS, preset="paper")
    assert [row["phase"] for row in result.trace] == ["collect", "fit", "steer", "steer"]
    assert len(result.candidates) == 24 and result.value.budget == {"responses": 12}
    assert [row["kl"] > 0 for row in result.trace] == [False, False, True, True]
    assert result.trace[2]["norm"] > 0 and result.kl_ref.total > 0 and result.steering is None
    plain = misvo.steer(policy, "a b c", letter_reward, method="best-of-n", **SETTINGS, preset="paper")
    assert [c.tokens for c in plain.candidates[:12]] == [c.tokens for c in result.candidates[:12]]


def test_a_fitted_network_travels(policy, tmp_path):
    network = misvo.train_value(policy, ["a b c", "d e"], letter_reward, rollouts=8, max_new_tokens=8)
    assert callable(misvo.train_value)  # still the function, after its module was imported
    assert network.budget["responses"] == 16 and network.budget["tokens"] > 16
    network.save_pretrained(tmp_path / "v")
    options = {"method": "re-control", "value": str(tmp_path / "v"), "value_iterations": 3, **SETTINGS}
    result = misvo.steer(policy, "a b c", letter_reward, kl_ref=True, **options, preset="paper")
    assert [row["phase"] for row in result.trace] == ["steer"] * 4
    again = ValueNetwork.from_pretrained(tmp_path / "v")
    states = torch.randn(4, 32)
    assert_near(again(states), network(states), room(lambda fitted: fitted(states.double()), network))
    with pytest.raises(misvo.MisvoError, match="another LM head"):
        misvo.steer(make_policy("llama", seed=1), "a b", letter_reward, **options, preset="paper")
    with pytest.raises(misvo.MisvoError, match="holds no value network"):
        misvo.steer(policy, "a b", letter_reward, **{**options, "value": str(tmp_path)}, preset="paper")


def test_training_samples_as_it_is_told_and_takes_no_option_that_it_has_not(policy):
    """What it scores is what best-of-n samples under the same sampler; what it cannot use is not swallowed."""
    seen = []

    def watched(completions, **_):
        seen.extend(completions)
        return letter_reward(completions)

    sampler = {"temperature": 0.6, "top_p": 0.8, "seed": 3, "max_new_tokens": 8}
    misvo.train_value(policy, ["a b c"], watched, rollouts=6, **sampler)
    options = {"method": "best-of-n", "rollouts": 6, "steps": 1, **sampler}
    plain = misvo.steer(policy, "a b c", letter_reward, **options, preset="paper")
    assert seen == [c.text for c in plain.candidates]
    with pytest.raises(misvo.MisvoError, match="kl_budget is no option of re-control"):
        misvo.train_value(policy, ["a b c"], letter_reward, kl_budget=3.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 1}, "at least 2 steps"),
        ({"value_steps": 4}, "must leave a step to steer"),
    ],
)
def test_bad_settings(policy, options, says):
    with pytest.raises(misvo.MisvoError, match=says):
        misvo.steer(policy, "a b", letter_reward, method="re-control", **{**SETTINGS, **options}, preset="paper")
