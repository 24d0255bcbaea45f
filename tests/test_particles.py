"""Particles and blockwise best-of-k on policies whose every response can be counted: exact sums, no approximations."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import make_policy
from enumerable import EnumerablePolicy
from fakes import FakePolicy
from tolerances import rounding

import misvo
from misvo.engines.torch import TorchEngine
from misvo.methods.blockwise import kl_of_best
from misvo.potential import LearnedValue
from misvo.rewards import Scores
from misvo.rollouts import Rollouts
from misvo.run import Run
from misvo.scoring import Answer
from misvo.theory.tabular import TabularPolicy
from misvo.weights import effective_sample_size, importance_weights, systematic

VOCABULARY, HORIZON, WIDTH = 3, 3, 2
TEXTS = list(itertools.product(range(VOCABULARY), repeat=HORIZON))
STANDARD_ERRORS = 4
# What is counted: every token at every position, and signs that depend on the whole text
FEATURES = [lambda text, t=t, v=v: float(text[t] == v) for t in range(HORIZON) for v in range(VOCABULARY)]
FEATURES += [lambda text, s=s: float(hash((s, *text)) % 2) for s in range(8)]  # of numbers: the same in every process


@pytest.fixture(scope="module")
def tabular():
    return TabularPolicy.random(np.random.default_rng(5), VOCABULARY, HORIZON, WIDTH, spread=0.4)


class Worth:
    """A reward of every text and a word on every beginning, both arbitrary."""

    def __init__(self, seed=3):
        rng = np.random.default_rng(seed)
        self.table = {
            text: 0.5 * float(rng.normal())  # weights stay of one size, so that means of rounds are near to normal
            for length in range(1, HORIZON + 1)
            for text in itertools.product(range(VOCABULARY), repeat=length)
        }

    def __call__(self, rows):
        return [self.table[tuple(row)] for row in rows]


class Words(FakePolicy):
    name, ends = "enumerable", ()


def drive(policy, worth, prompt=(), scores_prefixes=True, **options):
    """A run to its end, by hand: every request decoded, every pause and response scored by a table."""
    settings = misvo.Settings.from_preset("paper", **options)
    run = Run("x", prompt, policy.head, settings, Words(), scores_prefixes)
    engine = TorchEngine(policy, 4096)
    while not run.finished:
        asked = {engine.submit(request) if request.rollouts else None: request for request in run.ask()}
        decoded = [(ticket, None) for ticket in asked if ticket is None]
        while engine.busy:  # all of them side by side
            decoded += engine.advance()
        for ticket, rollouts in decoded:
            request = asked[ticket]
            rollouts = run.gather(request, rollouts)
            responses = run.responses(rollouts)
            scored = Answer(Scores(worth(responses.tokens)), None, 0.0) if run.is_scored(request) else None
            run.tell(request, rollouts, responses, scored)
    return run.result


def exact(tabular):
    """π_ref of every text, by its definition."""
    probs = {}
    for text in TEXTS:
        logs, index = 0.0, 0
        for position, token in enumerate(text):
            logits = tabular.head @ tabular.hidden[position][index] + tabular.bias
            logs += logits[token] - np.log(np.exp(logits).sum())
            index = index * VOCABULARY + token
        probs[text] = math.exp(logs)
    assert sum(probs.values()) == pytest.approx(1)
    return probs


def steps_of(result):
    """Weighted rows of every round that had pauses: its trace row, texts and weights."""
    for row in result.trace:
        if "weights" in row:
            yield row, [tuple(c.tokens) for c in result.candidates if c.step == row["step"]], row["weights"]


@pytest.mark.parametrize("proposal", ["reference", "steered"])
@pytest.mark.parametrize("block", [1, 2])
def test_weighted_rows_estimate_the_tilted_law_without_bias(tabular, proposal, block):
    """E[Ẑ Σ_k w_k f(y_k)] = Σ_y π_ref(y) exp(R(y)/λ) f(y), for whatever beginnings are worth, for every K, and under a
    proposal that learns from round to round."""
    worth, penalty, rounds = Worth(), 0.9, 200
    options = {"method": "particles", "block": block, "penalty": penalty, "proposal": proposal, "kl_budget": 0.1}
    sizes = {"rollouts": 16, "steps": rounds, "max_new_tokens": HORIZON}
    if proposal == "reference":
        del options["kl_budget"]
    result = drive(EnumerablePolicy(tabular), worth, **options, **sizes, seed=1)
    estimates = []  # of every feature, in every round
    for row, texts, weights in steps_of(result):
        seen = np.array([[feature(text) for feature in FEATURES] for text in texts])
        estimates.append(math.exp(row["log_z"]) * (np.array(weights) @ seen))
    estimates, reference = np.array(estimates), exact(tabular)
    target = sum(
        reference[text] * math.exp(worth.table[text] / penalty) * np.array([feature(text) for feature in FEATURES])
        for text in TEXTS
    )
    errors = estimates.std(0, ddof=1) / math.sqrt(len(estimates))
    assert (np.abs(estimates.mean(0) - target) <= STANDARD_ERRORS * errors).all()
    moved = [row["norm"] for row in result.trace[2:]]
    assert (min(moved) > 0) == (proposal == "steered")


@pytest.mark.parametrize("proposal", ["reference", "steered"])
def test_more_particles_come_closer_as_one_over_the_root_of_their_number(tabular, proposal):
    """Mean total variation of a round's weighted rows to q: K times as many rows, √K times as close."""
    worth, penalty, reference = Worth(), 0.9, exact(tabular)
    target = {text: reference[text] * math.exp(worth.table[text] / penalty) for text in TEXTS}
    total = sum(target.values())
    distances = {}
    for count, rounds in ((128, 32), (2048, 8)):
        options = {"method": "particles", "block": 1, "penalty": penalty, "proposal": proposal, "seed": 2}
        result = drive(
            EnumerablePolicy(tabular), worth, **options, rollouts=count, steps=rounds, max_new_tokens=HORIZON
        )
        found = []
        for _, texts, weights in steps_of(result):
            mass = dict.fromkeys(TEXTS, 0.0)
            for text, weight in zip(texts, weights, strict=True):
                mass[text] += weight
            found.append(sum(abs(mass[text] - target[text] / total) for text in TEXTS) / 2)
        distances[count] = (np.mean(found), np.std(found, ddof=1) / math.sqrt(len(found)))
    (few, error), (many, less) = distances[128], distances[2048]
    assert abs(few / 4 - many) <= STANDARD_ERRORS * math.hypot(error / 4, less) + 0.1 * many  # and 1/K terms


def test_what_survivors_teach_is_the_gradient_of_their_likelihood(tabular):
    """E[Ẑ · gradient] = Σ_y π_ref(y) exp(R/λ) ∇_u log π_u(y) at u = 0, by finite sums."""
    from misvo.genealogy import Genealogy

    worth, penalty, rounds = Worth(), 0.9, 200
    policy, found = EnumerablePolicy(tabular), []
    original = Genealogy.gradient

    def kept(self, *args):
        found.append(original(self, *args))
        return torch.zeros_like(found[-1])  # nothing is learned: every round is at u = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Genealogy, "gradient", kept)
        patch.setattr("misvo.methods.misvo.reward_gradient", lambda *a: torch.zeros(HORIZON, WIDTH).double())
        options = {"method": "particles", "block": 1, "penalty": penalty, "proposal": "steered", "seed": 4}
        result = drive(policy, worth, **options, rollouts=12, steps=rounds, max_new_tokens=HORIZON)
    sizes = [math.exp(row["log_z"]) for row in result.trace if "weights" in row]
    estimates = np.array([size * gradient.numpy() for size, gradient in zip(sizes, found, strict=True)])
    reference, target = exact(tabular), np.zeros((HORIZON, WIDTH))
    for text in TEXTS:
        index, mass = 0, reference[text] * math.exp(worth.table[text] / penalty)
        for position, token in enumerate(text):
            logits = tabular.head @ tabular.hidden[position][index] + tabular.bias
            probs = np.exp(logits) / np.exp(logits).sum()
            target[position] += mass * (tabular.head[token] - probs @ tabular.head)
            index = index * VOCABULARY + token
    errors = estimates.std(0, ddof=1) / math.sqrt(len(estimates))
    assert (np.abs(estimates.mean(0) - target) <= STANDARD_ERRORS * errors).all()
    assert (np.abs(target) > 3 * errors).any()  # there is something to see


def test_the_law_of_blockwise_is_its_formula(tabular):
    """P(the best of k is y) = F(≤ y)^k − F(< y)^k at every block, where F counts what promises less."""
    worth, k, rounds = Worth(), 3, 600
    options = {"method": "blockwise", "block": 1, "branches": k, "rollouts": k, "seed": 5}
    result = drive(EnumerablePolicy(tabular), worth, **options, steps=rounds, max_new_tokens=HORIZON)
    counts = dict.fromkeys(TEXTS, 0)
    for step in range(rounds):
        best = max((c for c in result.candidates if c.step == step), key=lambda candidate: candidate.reward)
        counts[tuple(best.tokens)] += 1
    for text in TEXTS:
        expected, index = 1.0, 0
        for position, token in enumerate(text):
            logits = tabular.head @ tabular.hidden[position][index] + tabular.bias
            probs = np.exp(logits) / np.exp(logits).sum()
            own = worth.table[text[: position + 1]]
            values = [worth.table[(*text[:position], other)] for other in range(VOCABULARY)]
            below = sum(p for p, value in zip(probs, values, strict=True) if value < own)
            expected *= (below + probs[token]) ** k - below**k
            index = index * VOCABULARY + token
        error = math.sqrt(expected * (1 - expected) / rounds)
        assert abs(counts[text] / rounds - expected) <= STANDARD_ERRORS * max(error, 1 / rounds), text
    kl = sum(
        count / rounds * math.log(count / rounds / exact(tabular)[text]) for text, count in counts.items() if count
    )
    assert result.trace[0]["kl_bound"] <= HORIZON * kl_of_best(k) + 1e-9 and kl <= HORIZON * kl_of_best(k)


def test_systematic_draws_as_often_as_weights_say():
    weights = torch.tensor([0.5, 0.0, 0.26, 0.24], dtype=torch.float64)
    counts = torch.zeros(4).double()
    grid = (torch.arange(2000) + 0.5) / 2000
    for uniform in grid.tolist():
        drawn = systematic(weights, uniform)
        own = torch.bincount(drawn, minlength=4)
        assert ((own - 4 * weights).abs() < 1).all() and (drawn.diff() >= 0).all()
        counts += own
    assert ((counts / 2000 - 4 * weights).abs() <= 4 / 2000).all()  # a grid of that width
    assert systematic(torch.tensor([0.0, 1.0]), 0.999999).tolist() == [1, 1]


def test_the_temperature_leaves_as_many_rows_as_are_wanted(tabular):
    result = drive(
        EnumerablePolicy(tabular),
        Worth(),
        method="particles",
        block=1,
        rollouts=32,
        steps=3,
        max_new_tokens=3,
        target_ess=20.0,
        seed=0,
    )
    for row in result.trace:
        assert all(size == pytest.approx(20.0, rel=1e-6) or size > 20.0 for size in row["ess_per_pause"])
        assert 1 <= row["ancestors"] <= 32 and row["lambda"] > 0
        assert sum(row["weights"]) == pytest.approx(1.0)


@pytest.mark.parametrize("method", ["particles", "blockwise"])
def test_no_unit_of_the_reward_is_left(tabular, method):
    class Scaled(Worth):
        def __call__(self, rows):
            return [1000 * value + 7 for value in super().__call__(rows)]

    plain, scaled = (
        drive(EnumerablePolicy(tabular), worth, method=method, block=1, rollouts=8, steps=4, max_new_tokens=3)
        for worth in (Worth(), Scaled())
    )
    assert [c.tokens for c in plain.candidates] == [c.tokens for c in scaled.candidates]


def test_a_learned_value_is_the_ridge_line():
    """Against the normal equations, and right about a reward that is a line of the states."""
    generator = torch.Generator().manual_seed(0)
    count, length, width = 40, 6, 4
    hidden = torch.randn(count, length, width, generator=generator)
    slope = torch.tensor([1.0, -2.0, 0.5, 0.0])
    hidden[:] = hidden[:, :1]  # a response keeps its direction
    rewards = (3 + hidden[:, 0] @ slope).double()
    lengths = torch.randint(2, length + 1, (count,), generator=generator)
    empty = torch.zeros(count, length)
    rollouts = Rollouts(empty.long(), lengths, empty, empty, empty, hidden=hidden)
    block = 2
    value = LearnedValue(block)
    value.learn(rollouts, rewards)
    looks = [sorted({*range(block - 1, size, block), size - 1}) for size in lengths.tolist()]
    states = torch.cat([hidden[row, kept] for row, kept in enumerate(looks)]).double()
    sizes = torch.tensor([len(kept) for kept in looks])
    z = (states - states.mean(0)) / states.std(0, unbiased=False)
    y = rewards.repeat_interleave(sizes) - rewards.mean()
    ridge = width * sizes.double().mean()
    expected = torch.linalg.solve(z.T @ z + ridge * torch.eye(width).double(), z.T @ y)
    # conjugate gradients stop at a thousandth of the target
    scale = (z.T @ y).norm() * 1e-3 / ridge
    assert (value.weights - expected).norm() <= scale
    assert np.corrcoef(value.of(rollouts, None), rewards)[0, 1] > 0.99


def test_rows_that_all_have_ended_are_scored_without_decoding():
    """On a real checkpoint with many ends, pauses behind which nobody goes on."""
    policy = make_policy("llama")
    calls = []

    def reward(prompts, completions, **_):
        calls.append(list(completions))
        return [float(len(text)) for text in completions]

    reward.scores_prefixes = True
    sizes = {"rollouts": 4, "steps": 6, "max_new_tokens": 16, "block": 2, "seed": 3}
    for method in ("particles", "blockwise"):
        for proposal in ("reference", "steered"):
            result = misvo.steer(
                policy, "5 6 7", reward, method=method, proposal=proposal, progress=False, temperature=1.0, **sizes
            )
            assert len(result.candidates) == 24 and len(result.trace) == 6
            assert all(row["tokens"] <= 4 * 16 for row in result.trace)
            told = [(c.text, c.reward) for c in result.candidates]
            assert all(value == float(len(text)) for text, value in told)
    assert any(len(set(texts)) < len(texts) for texts in calls)  # rows were forked


@pytest.mark.parametrize("method", ["particles", "blockwise"])
def test_without_a_word_on_beginnings_a_value_is_learned(method):
    """The reward sees whole responses only, and the first round is the reference's own."""
    policy, seen = make_policy("llama"), []

    def reward(prompts, completions, **_):
        seen.append(len(completions))
        return [float(text.count("1")) for text in completions]

    options = {"rollouts": 4, "steps": 3, "max_new_tokens": 12, "block": 4, "seed": 1, "temperature": 1.0}
    result = misvo.steer(policy, "5 6 7", reward, method=method, progress=False, **options)
    plain = misvo.steer(policy, "5 6 7", reward, method="best-of-n", progress=False, **{**options, "block": 8})
    assert seen == [4] * 6
    first = [[c.tokens for c in run.candidates if c.step == 0] for run in (result, plain)]
    assert first[0] == first[1]


def test_importance_weights_have_the_sample_size_that_they_say():
    weights = importance_weights(torch.tensor([0.0, 1.0, float("nan")]).double(), torch.zeros(3).double(), 0.5)
    by_hand = torch.tensor([1.0, math.exp(2.0), 0.0], dtype=torch.float64) / (1 + math.exp(2.0))
    assert ((weights - by_hand).abs() <= rounding(torch.float64, 4)).all()
    assert effective_sample_size(by_hand) == pytest.approx((1 + math.exp(2)) ** 2 / (1 + math.exp(4)))
