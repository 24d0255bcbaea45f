"""Credit from prefixes: the algebra of the critic, whom it pays, and when prefixes are scored."""

import pytest
import torch
from conftest import letter_reward, make_policy
from tolerances import assert_within, rounding

import misvo
from misvo import credit
from misvo.credit import Critic, cuts
from misvo.methods.misvo import leave_one_out
from misvo.rewards import as_reward

K, T = 12, 40


@pytest.fixture
def additive():
    """Rewards that tokens add up to, and their values at the cuts: (K, T), (K, cuts), (K,)."""
    values = torch.randn(K, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = values.cumsum(1)
    return values, torch.stack([sums[:, cut - 1] for cut in cuts(T)], 1), sums[:, -1]


def test_cuts_are_even_and_few():
    assert cuts(64) == list(range(4, 64, 4)) and cuts(1) == [] and cuts(2) == [1]
    assert len(cuts(512)) == credit.CUTS - 1 and all(len(cuts(length)) < credit.CUTS for length in range(1, 600))


def test_all_credit_of_a_response_is_its_advantage(additive):
    """The segments' V_j − V_{j−1} telescope to R − R̄, with R̄ the mean of the others."""
    _, prefixes, rewards = additive
    advantages = Critic(T).advantages(prefixes, rewards)
    starts = torch.tensor([0, *cuts(T)])
    first = advantages[:, starts]  # one value for each segment
    value, total, allowed = first[:, 0:1] * 0, leave_one_out(rewards)[:, None], 0.0
    # R − R̄ is a sum of K rewards, and what a segment adds is a sum of four such numbers; each division by 1 − ρ
    # enlarges what was wrong before it.
    sizes = rewards.abs().sum() + first.abs().sum(1, keepdim=True)
    for j in range(first.shape[1]):  # A_j = V_j − V_{j−1} + ρ (R − V_j), solved for V_j
        value = (first[:, j : j + 1] + value - credit.RESIDUAL * total) / (1 - credit.RESIDUAL)
        allowed = (allowed + rounding(torch.float64, K + 4, sizes + value.abs())) / (1 - credit.RESIDUAL)
    assert (allowed < 1e-9 * total.abs().max()).all()
    assert_within(value, total, allowed)


def test_prefixes_that_say_nothing_leave_the_paper_s_advantage(monkeypatch):
    rewards = torch.randn(K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    prefixes = torch.zeros(K, len(cuts(T)), dtype=torch.float64)
    advantages = Critic(T).advantages(prefixes, rewards)
    plain = leave_one_out(rewards)
    allowed = 2 * rounding(torch.float64, K + 4, rewards.abs().sum())  # both are sums of K rewards, and a few products
    assert_within(advantages[:, -1], plain, allowed)
    assert_within(advantages[:, 0], credit.RESIDUAL * plain, allowed)
    monkeypatch.setattr(credit, "RESIDUAL", 1.0)
    assert_within(Critic(T).advantages(prefixes, rewards), plain[:, None].expand(K, T), allowed)


def test_no_unit_is_left():
    """To the last bit: sums of few binary digits and means of sixteen are exact, with and without shift and scale."""
    digits = torch.randint(-(2**20), 2**20, (16, T), generator=torch.Generator().manual_seed(0))
    sums = digits.cumsum(1).double() / 2**18
    prefixes, rewards = torch.stack([sums[:, cut - 1] for cut in cuts(T)], 1), sums[:, -1]
    plain, other = Critic(T), Critic(T)
    assert torch.equal(
        other.advantages(1024 * prefixes + 8, 1024 * rewards + 8), 1024 * plain.advantages(prefixes, rewards)
    )
    assert other.explained == plain.explained > 0.1


def test_the_table_of_prefixes_keeps_every_digit():
    """Behind the end of a short response stands its own reward: rounded to fp32, an offset would leave noise there."""
    rewards = [1e9 + 0.125, None]
    table = credit.prefix_rewards([[7] * 5, [7] * T], rewards, T, lambda prefixes: [1e9 + len(row) for row in prefixes])
    asked = [cut for cut in cuts(T) if cut < 5]
    assert table[0].tolist() == [1e9 + cut for cut in asked] + [rewards[0]] * (len(cuts(T)) - len(asked))
    assert table[1].tolist() == [1e9 + cut for cut in cuts(T)]


def test_what_could_not_be_scored_earns_nothing_and_spoils_nothing(additive):
    _, prefixes, rewards = additive
    prefixes, rewards = prefixes.clone(), rewards.clone()
    rewards[3], prefixes[5, 2] = torch.nan, torch.nan
    advantages = Critic(T).advantages(prefixes, rewards)
    assert advantages.isfinite().all() and not advantages[3].any()
    rewards[:] = torch.nan
    assert not Critic(T).advantages(prefixes, rewards).any()


def test_credit_finds_the_tokens_that_earned_it():
    """Of an additive reward, a segment earns what its tokens are worth; a whole response's advantage says less."""
    generator, critic, right, wrong = torch.Generator().manual_seed(1), Critic(T), [], []

    def correlation(advantages, worth):
        return torch.corrcoef(torch.stack([advantages.ravel(), worth.ravel()]))[0, 1]

    for _ in range(20):
        values = torch.randn(K, T, generator=generator, dtype=torch.float64)
        sums = values.cumsum(1)
        prefixes, rewards = torch.stack([sums[:, cut - 1] for cut in cuts(T)], 1), sums[:, -1]
        right.append(correlation(critic.advantages(prefixes, rewards), values - values.mean(0)))
        wrong.append(correlation(leave_one_out(rewards)[:, None].expand(K, T), values - values.mean(0)))
    assert torch.stack(right).mean() > 2.5 * torch.stack(wrong).mean() > 0
    assert 0.3 < critic.explained < 1


class Counting:
    """A reward that counts what it was asked about."""

    def __init__(self, declared):
        self.scores_prefixes, self.asked = declared, 0

    def __call__(self, completions, **_):
        self.asked += len(completions)
        return letter_reward(completions)


SETTINGS = {"rollouts": 4, "steps": 2, "max_new_tokens": 8, "learning_rate": 0.3, "penalty": 0.5}


@pytest.mark.parametrize(
    ("wished", "declared", "scored"),
    [("response", True, False), ("prefix", False, True), ("cheap", True, True), ("cheap", False, False)],
)
def test_prefixes_are_scored_where_that_is_wished(wished, declared, scored):
    reward = Counting(declared)
    result = misvo.steer(make_policy("llama"), "a b c", reward, **SETTINGS, credit=wished, preset="paper")
    assert (reward.asked > 8) == scored and ("credit" in result.trace[0]) == scored
    assert len(result.candidates) == 8  # prefixes are no candidates


def test_other_methods_score_no_prefixes():
    reward = Counting(True)
    misvo.steer(
        make_policy("llama"), "a b c", reward, method="best-of-n", rollouts=4, steps=2, max_new_tokens=8, preset="paper"
    )
    assert reward.asked == 8


@pytest.mark.parametrize("change", [lambda r: 1000 * r, lambda r: r + 1000, lambda r: 1e-6 * r])
def test_auto_with_credit_has_no_unit_left(change):
    """Responses end at different lengths here, so that cuts behind an end are part of it."""

    def changed(completions, **_):
        return [change(value) for value in letter_reward(completions)]

    size = {"preset": "auto", "rollouts": 8, "steps": 5, "max_new_tokens": 24, "seed": 1, "credit": "prefix"}
    policy = make_policy("llama")
    plain, other = (misvo.steer(policy, "a b c", reward, **size) for reward in (letter_reward, changed))
    assert len({len(c.tokens) for c in plain.candidates}) > 3
    assert [c.tokens for c in other.candidates] == [c.tokens for c in plain.candidates]


def test_sums_score_prefixes_when_all_their_parts_do():
    assert as_reward("length:5 + 0.5*repetition:2").scores_prefixes
    function = lambda text: 1.0  # noqa: E731
    assert not getattr(as_reward(function), "scores_prefixes", False)
    function.scores_prefixes = True
    assert as_reward(function).scores_prefixes


def test_an_unknown_credit_is_refused():
    with pytest.raises(misvo.MisvoError, match="credit"):
        misvo.Settings(credit="everything")
