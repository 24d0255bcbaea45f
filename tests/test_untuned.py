"""Tied vectors, four kinds of steps, the KL budget and early stops, against dense algebra and measurements."""

import math

import numpy as np
import pytest
import torch
from conftest import letter_reward, make_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import Literal, replay
from tolerances import assert_near, assert_within, room, rounding

import misvo
import misvo.result
from misvo.budget import KLBudget, _largest
from misvo.engines.torch import TorchEngine
from misvo.fisher import Fisher
from misvo.head import Head
from misvo.rollouts import Keep, Request
from misvo.sampling import RandomStream
from misvo.selection import ordinary
from misvo.settings import SAMPLER, Settings
from misvo.tie import TIES
from misvo.updates import Dual, conjugate_gradients, natural, proximal

T, D, V, K = 11, 4, 23, 5


def dense_fisher(W, p):
    """F̂_t as explicit matrices, (T, d, d)."""
    C = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    return (W.T @ C @ W).mean(0)


def laws(seed=0):
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(V, D, generator=generator, dtype=torch.float64)
    p = torch.softmax(2 * torch.randn(K, T, V, generator=generator, dtype=torch.float64), -1)
    return W, p


@pytest.mark.parametrize("name", TIES)
def test_the_tied_fisher_is_the_dense_one_between_two_bases(name):
    W, p = laws()
    tie = TIES[name](T)
    B = torch.eye(T, dtype=torch.float64) if tie.basis is None else tie.basis.double()
    mean = p.mean(0) if tie.pool is None else tie.pool.double().T @ p.mean(0)  # what decoding pools as it goes
    fisher = Fisher(Head(W), mean, p @ W, 0.8, tie)
    c = torch.randn(tie.size, D, dtype=torch.float64)
    expected = torch.einsum("tj,tde,tk,ke->jd", B, dense_fisher(W, p), B, c) / 0.64
    # Sums over r, d, V, K and T behind each other, of terms whose sizes add up to this.
    size = ((p.mean(0) * (B.abs() @ c.abs() @ W.T.abs())) @ W.abs() / 0.64).sum(0).amax()
    bound = rounding(torch.float64, tie.size + D + V + K + T, 4 * size)  # two parts, two ways
    assert_within(fisher.product(c), expected, bound)
    assert_within(fisher.product(c, fisher.head.shift(c)), expected, bound)
    if name != "smooth":  # whose knots share matrices
        # Each entry of a matrix is a sum over V and one over K and T, times c and summed over d: sizes add up as above.
        assert_within(fisher.formed().product(c), expected, bound)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 64])
def test_bases(length):
    for name, make in TIES.items():
        tie = make(length)
        basis = torch.eye(length) if tie.basis is None else tie.basis
        assert_within(basis.sum(1), torch.ones(length), rounding(torch.float32, 2))  # a constant u is within reach
        c, g = torch.randn(tie.size, 3, dtype=torch.float64), torch.randn(length, 3, dtype=torch.float64)
        u = basis.double() @ c
        assert_within(tie.spread(c), u, 2 * rounding(torch.float64, tie.size, basis.double() @ c.abs()))
        size = (g.abs() * (basis.double() @ c.abs())).sum()
        adjoint = 2 * rounding(torch.float64, length + tie.size + 3, size)
        assert_within((tie.gather(g) * c).sum(), (g * u).sum(), adjoint)
        assert tie.size == {"position": length, "shared": 1}.get(name, tie.size)
    assert TIES["smooth"](64).size == 8
    first, second, *_ = TIES["smooth"](64).basis
    assert first[0] == 1 and second[1] == 1  # the first positions are free of each other


@pytest.mark.parametrize("tie", ["shared", "smooth"])
def test_decoding_pools_what_the_tie_needs_and_the_vectors_replay(tie):
    """A run with tied vectors equals the literal gradient, gathered: euler steps with the frozen Fisher."""
    policy = make_policy("llama")
    options = {
        "rollouts": 5,
        "steps": 4,
        "max_new_tokens": T,
        "learning_rate": 0.05,
        "penalty": 0.5,
        "temperature": 0.9,
    }
    result = misvo.steer(policy, "a b c", letter_reward, tie=tie, **options, preset="paper")
    tokens, basis = policy.encode("a b c"), TIES[tie](T).basis
    expected = replay(policy.model, tokens, result, basis)
    allowed = room(lambda model: replay(model, tokens, result, basis), policy.model)
    assert allowed < 1e-4 * expected.norm()  # rounding must not hide an error of the algorithm
    assert_near(result.steering.vectors, expected, allowed)


CG_TOLERANCE = 1e-3  # the residual, relative to the target, at which a step stops to solve for its direction


def conjugate_drift(A, x):
    """How far the residual that conjugate gradients carry along leaves the true one: some roundings of A x a step."""
    return rounding(A.dtype, 4 * len(A), torch.linalg.matrix_norm(A, 2) * x.norm()).item()


def least_cosine(A):
    """Between the solution of A x = b and one with a residual of CG_TOLERANCE: off by κ times that at most."""
    return 1 - (torch.linalg.cond(A).item() * CG_TOLERANCE) ** 2 / 2


def test_conjugate_gradients_solve():
    A = torch.randn(12, 12, dtype=torch.float64)
    A = A @ A.T + torch.eye(12)
    b = torch.randn(3, 4, dtype=torch.float64)
    x = conjugate_gradients(lambda v: (A @ v.flatten()).view(3, 4), b, iterations=50, tolerance=1e-10)
    assert (A @ x.flatten() - b.flatten()).norm() <= 1e-10 * b.norm() + conjugate_drift(A, x)


def dense_problem(seed=0):
    A = torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    F = A @ A.T
    c, g = torch.randn(2, 1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    return F, c, g, lambda x: x @ F


def test_a_proximal_step_solves_its_equation():
    F, c, g, product = dense_problem()
    options = Settings(learning_rate=7.0, penalty=3.0)
    moved = proximal(c, g, product(c), product, options)
    target = c + 7.0 * g
    assert (moved + 21.0 * moved @ F - target).norm() <= CG_TOLERANCE * target.norm()
    extra = torch.ones_like(c)  # what of the penalty is not F c stays explicit
    moved = proximal(c, g, product(c) + extra, product, options)
    target = c + 7.0 * g - 21.0 * extra
    assert (moved + 21.0 * moved @ F - target).norm() <= CG_TOLERANCE * target.norm()


def nats(F, step):
    """½ sᵀFs, and how far two ways to sum it may be apart."""
    size = 0.5 * (step.abs() @ F.abs() @ step.abs().T).item()
    return (0.5 * step @ F @ step.T).item(), 2 * rounding(torch.float64, 2 * D, size)


def test_a_natural_step_spends_its_nats_in_the_natural_direction():
    F, c, g, product = dense_problem()
    options = Settings(step="natural", damping=0.1, penalty=0.0)
    step = natural(c, g, torch.zeros_like(g), product, options, 0.3) - c
    moved, bound = nats(F, step)
    assert moved == pytest.approx(0.3, abs=bound)
    damping = 0.1 * (g @ F @ g.T).item() / g.square().sum().item()
    ideal = torch.linalg.solve(F + damping * torch.eye(D), g[0])
    assert torch.cosine_similarity(step[0], ideal, dim=0) >= least_cosine(F + damping * torch.eye(D)) > 0.999
    assert torch.equal(natural(c, 0 * g, 0 * g, product, options, 0.3), c)


def test_a_dual_step_follows_the_sum_of_all_gradients():
    F, c, first, product = dense_problem()
    options, none = Settings(step="dual", damping=0.1, penalty=0.5), torch.zeros_like(first)
    second, cost = dense_problem(5)[1:3]
    step = Dual()
    assert torch.equal(step(c, none, none, product, options, 0.3), none)  # nothing was learnt yet
    step(c, first, none, product, options, 0.3)
    moved = step(c, second, cost, product, options, 0.3)
    spent, bound = nats(F, moved)
    assert spent == pytest.approx(3 * 0.3, abs=bound)
    total = first + second - 0.5 * cost
    damping = 0.1 * (total @ F @ total.T).item() / total.square().sum().item()
    ideal = torch.linalg.solve(F + damping * torch.eye(D), total[0])
    assert torch.cosine_similarity(moved[0], ideal, dim=0) >= least_cosine(F + damping * torch.eye(D)) > 0.999


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(["proximal", "natural", "dual"]),
    st.floats(-6, 6),
    st.floats(-6, 6),
    st.floats(-6, 6),
    st.integers(0, 10**6),
)
def test_no_setting_diverges(step, rate, penalty, scale, seed):
    """Forty noisy steps on a quadratic, with every unit over twelve orders of magnitude."""
    _, c, _, product = dense_problem(seed)
    options = Settings(step=step, learning_rate=10**rate, penalty=10**penalty)
    generator = torch.Generator().manual_seed(seed)
    c = torch.zeros_like(c)
    move = {"proximal": proximal, "natural": natural, "dual": Dual()}[step]
    for _ in range(40):
        gradient = 10**scale * torch.randn(1, D, generator=generator, dtype=torch.float64)
        c = move(c, gradient, product(c), product, options, 0.5)
    assert torch.isfinite(c).all()
    if step == "dual":
        assert 0.5 * (c * product(c)).sum() <= 40 * 0.5 * 1.01
    elif step == "natural":  # forty steps of half a nat: at most the length of their sum in the Fisher norm
        assert 0.5 * (c * product(c)).sum() <= 40**2 * 0.5 * 1.01
    else:  # bounded by what the gradients alone add up to
        assert c.norm() <= 40 * 10**rate * 10**scale * 8


AUTO = {"tie": "shared", "step": "dual", "standardize": True, "cost": "iterate-fisher"}
QUICK = {"rollouts": 6, "steps": 6, "max_new_tokens": 10, "seed": 1}


def test_the_reward_has_no_unit_left(policy):
    plain = misvo.steer(policy, "a b c", letter_reward, **AUTO, **QUICK, kl_budget=4.0, preset="paper")
    for change in (lambda r: 1000 * r, lambda r: r + 1000, lambda r: 1e-6 * r):
        other = misvo.steer(
            policy,
            "a b c",
            lambda completions, f=change: [f(r) for r in letter_reward(completions)],
            **AUTO,
            **QUICK,
            kl_budget=4.0,
            preset="paper",
        )
        assert [c.tokens for c in other.candidates] == [c.tokens for c in plain.candidates]


@pytest.mark.parametrize("step", ["natural", "dual"])
@pytest.mark.parametrize("tie", ["position", "shared", "smooth"])
def test_the_budget_holds_on_the_measured_kl(policy, tie, step):
    options = {**AUTO, **QUICK, "tie": tie, "step": step, "steps": 8, "rollouts": 16, "step_nats": 2.0}
    free = misvo.steer(policy, "a b c", letter_reward, **options, penalty=0.0, preset="paper")
    held = misvo.steer(policy, "a b c", letter_reward, **options, kl_budget=3.0, preset="paper")
    assert max(row["kl"] for row in free.trace) > 6  # without it the run would have gone further
    assert max(row["kl"] for row in held.trace) < 6  # a prediction from a few prefixes, measured on 16 responses
    assert all(row["kl_predicted"] <= 3.0 for row in held.trace)
    assert any(row["shrunk"] < 1 for row in held.trace)


def test_a_shared_vector_works_at_any_length(policy, tmp_path):
    result = misvo.steer(policy, "a b c", letter_reward, **AUTO, **QUICK, kl_budget=4.0, preset="paper")
    result.steering.save_pretrained(tmp_path)
    steering = misvo.Steering.from_pretrained(tmp_path)
    assert steering.tie == "shared" and torch.equal(steering.at(30)[29], steering.vectors[0])
    assert torch.equal(misvo.Steering(torch.ones(2, 3)).at(4)[2:], torch.zeros(2, 3))
    # Position 30 is steered like the first: a vector that leaves nothing but its token is obeyed to the end.
    loud = misvo.Steering(100 * policy.head.rows(torch.tensor([20])), tie="shared")
    word = policy.tokenizer.decode([20])
    assert policy.generate("a b", steering=loud, max_new_tokens=40).split() == [word] * 40


@pytest.mark.parametrize(
    ("options", "steps", "says"),
    [
        ({"stop_reward": -100.0}, 1, "the best reward has reached -100"),
        ({"patience": 2}, None, "no better response for 2 steps"),
        ({"token_budget": 30}, None, "tokens were sampled"),
        ({"seconds_budget": 0.0}, 1, "stopped after"),
    ],
)
def test_early_stops_say_why(policy, options, steps, says):
    result = misvo.steer(policy, "a b c", letter_reward, **{**QUICK, "steps": 30}, **options, preset="paper")
    assert len(result.trace) < 30 and says in result.trace[-1]["note"]
    assert steps is None or len(result.trace) == steps
    assert len(result.candidates) == 6 * len(result.trace)
    # What is returned is what a run of so many steps returns.
    whole = misvo.steer(policy, "a b c", letter_reward, **{**QUICK, "steps": len(result.trace)}, preset="paper")
    assert torch.equal(result.steering.vectors, whole.steering.vectors)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kl_budget": 3.0, "penalty": 1.0}, "penalty and kl_budget exclude each other"),
        ({"kl_budget": -1.0}, "kl_budget must be a number above 0"),
        ({"step": "natural", "cost": "none"}, "a natural step needs a metric"),
        ({"tie": "loose"}, "unknown tie 'loose'"),
        ({"step": "giant"}, "unknown step 'giant'"),
        ({"explicit_fisher": True, "tie": "shared"}, "explicit_fisher forms a matrix for each position"),
    ],
)
def test_bad_settings(policy, options, says):
    with pytest.raises(misvo.MisvoError, match=says):
        misvo.steer(policy, "a b", letter_reward, **{**QUICK, **options}, preset="paper")


def test_presets():
    paper, auto = Settings.from_preset("paper"), Settings.from_preset(rollouts=4)
    assert paper == Settings() and auto == Settings.from_preset("auto", rollouts=4)
    assert (auto.tie, auto.step, auto.kl_budget_per_token, auto.penalty) == ("shared", "dual", 0.1, 0.0)
    assert Settings.from_preset("auto", penalty=0.5).kl_budget_per_token is None
    assert Settings.from_preset("auto", kl_budget=7.0).kl_budget_per_token is None
    assert Settings.from_preset("auto", top_p=1.0, tie="smooth").tie == "smooth"
    other = Settings.from_preset("auto", method="best-of-n")
    assert other == Settings("best-of-n", **dict.fromkeys(SAMPLER))
    with pytest.raises(misvo.MisvoError, match="unknown preset 'magic'"):
        Settings.from_preset("magic")


def test_ordinary_selection_passes_over_what_the_reference_would_never_say(policy):
    result = misvo.steer(policy, "a b c", letter_reward, select="ordinary", **{**QUICK, "steps": 1}, preset="paper")

    def exact(model):
        literal = Literal(model, policy.encode("a b c"), 10)
        return torch.stack([literal.logprobs(c.tokens, torch.zeros(10, 32).double()).mean() for c in result.candidates])

    measured = torch.tensor([c.ref_logprob for c in result.candidates])
    assert_near(measured, exact(policy.model), room(exact, policy.model))
    likely = sorted(c.ref_logprob for c in result.candidates)
    usual = next(c for c in result.candidates if c.ref_logprob == likely[len(likely) // 2] and c.distinct == 1)
    own, tokens = usual.ref_logprob, usual.tokens
    babble = misvo.result.Candidate(1, 0, tokens, "babble", 1e9, ref_logprob=own - 50)
    loop = misvo.result.Candidate(1, 1, tokens, "loop", 1e9, ref_logprob=own + 50)
    stutter = misvo.result.Candidate(1, 2, [5] * 200, "stutter", 1e9, ref_logprob=own)
    honest = misvo.result.Candidate(1, 3, tokens, "honest", 1e8, ref_logprob=own)
    result.candidates += [babble, loop, stutter, honest]
    assert result.best is honest
    assert misvo.Result("p", Settings(), result.candidates).best is babble
    # Where nothing is ordinary, the best is better than nothing.
    assert ordinary([babble, loop], result.candidates[:6]) == [babble, loop]


def test_a_word_said_three_times_in_a_row_is_not_ordinary():
    own = [
        misvo.result.Candidate(0, k, [*range(30), *range(2 * k)], "", 0.0, ref_logprob=-2.0 - 0.1 * k)
        for k in range(8)  # repeated pairs are nothing unusual here
    ]
    great = misvo.result.Candidate(1, 0, [*range(20), 7, 7, 7, *range(20, 30)], "great great great", 1.0, -2.3)
    twice = misvo.result.Candidate(1, 1, [*range(29), 28, *range(29, 34)], "very very", 0.9, -2.3)
    assert great.stutter > 0 and twice.stutter == 0 and great.distinct > min(c.distinct for c in own)
    assert ordinary([great, twice], own) == [twice]


@pytest.mark.parametrize("tie", ["shared", "smooth"])
def test_tied_noise_of_aisp(policy, tie):
    """A response has one ε (r, d), B ε steers all of its tokens, and the vectors are B times the weighted noise."""
    options = {"rollouts": 6, "steps": 3, "max_new_tokens": T, "seed": 1, "penalty": 0.3, "alpha": 0.9, "sigma2": 0.2}
    result = misvo.steer(policy, "a b c", letter_reward, method="aisp", tie=tie, **options, preset="paper")
    tokens, basis = policy.encode("a b c"), TIES[tie](T).basis.double()
    c, stream = torch.zeros(basis.shape[1], 32, dtype=torch.float64), RandomStream(1, tokens)
    for row in result.trace:
        rows = [x for x in result.candidates if x.step == row["step"]]
        noise = [stream.generator(row["step"], x.rollout).standard_normal((len(c), 32), dtype="float32") for x in rows]
        noise = 0.2**0.5 * torch.tensor(np.stack(noise)).double()  # (K, r, d)
        own, spread = [x.tokens for x in rows], basis @ (c + noise)  # (K, T, d)

        def kl(model, own=own, spread=spread):
            literal = Literal(model, tokens, T)
            kls = [literal.kl(response, u) for response, u in zip(own, spread, strict=True)]
            return torch.nn.utils.rnn.pad_sequence([*kls, torch.zeros(T)], batch_first=True).sum(0) / len(own)

        assert_near(torch.tensor(row["kl_per_position"]), kl(policy.model), room(kl, policy.model))
        rewards = torch.tensor([x.reward for x in rows], dtype=torch.float64)
        weights = torch.softmax(rewards / 0.3 - (1 - 0.9) / 0.2 * (c * noise).sum((1, 2)), 0)
        c = c + (weights[:, None, None] * noise).sum(0)
    # Each step adds K weighted vectors; the weights, in exponents of the size of c·ε/2, were summed in fp32 too.
    exponent = 1 + 0.5 * (c.abs() * noise.abs()).sum((1, 2)).amax()
    bound = rounding(torch.float32, 3 * (6 + 1) + c.numel(), exponent * noise.abs().amax() * 3)
    assert_within(result.steering.vectors, basis @ c, bound)


def test_a_budget_per_token_is_a_budget_per_response_of_that_length(policy):
    options = {**AUTO, **QUICK, "steps": 5, "rollouts": 16, "step_nats": 2.0}
    options.pop("kl_budget", None)
    result = misvo.steer(policy, "a b c", letter_reward, **options, kl_budget_per_token=0.1, preset="paper")
    for row in result.trace:
        assert row["kl_budget"] == pytest.approx(0.1 * row["tokens"] / 16)
        assert row["kl_predicted"] <= row["kl_budget"]
    for wrong in ({"kl_budget": 3.0}, {"penalty": 1.0}):
        with pytest.raises(misvo.MisvoError, match="exclude"):
            misvo.Settings(kl_budget_per_token=0.1, **wrong)


@pytest.mark.parametrize(
    "nats",
    [
        lambda a: 50 * a**2,
        lambda a: 30 * a**6,  # rare tokens: far above the quadratic
        lambda a: math.expm1(8 * a),
        lambda a: 200 * -math.expm1(-9 * a**2),  # and saturated, where the vectors are much too long
        lambda a: 1e6 * a**2,
        lambda a: 40 * a,
    ],
)
def test_the_budget_is_used_whatever_the_shape_of_the_kl(nats):
    factor, predicted = _largest(nats, 9.0, nats(1.0))
    assert predicted == nats(factor) and 0.95 * 9.0 <= predicted <= 9.0


def test_one_unlucky_step_does_not_starve_the_next():
    """A budget that believed each measurement would halve the nats after a step that measured twice of them."""
    policy = make_policy("llama")
    head, generator = policy.head, torch.Generator().manual_seed(0)
    budget = KLBudget(head, nats=5.0)
    u = torch.randn(1, head.hidden_size, generator=generator).expand(12, -1)
    rollouts = TorchEngine(policy, 8).run(Request((5, 6, 7), 0, 0, range(8), 12, keep=Keep(hidden=True)))
    factors = []
    for luck in (1.0, 1.0, 1.0, 1.0, 2.0, 1.0):
        factors.append(budget.shrink(rollouts, 10 * u))
        rollouts.kl = luck * budget.predicted / 12 * torch.ones_like(rollouts.kl)
    assert 0.8 < factors[5] / factors[4] < 1
