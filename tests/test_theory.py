"""The checks of the paper's claims pass, and what they rest on is right: the enumerable policy against loops
and torch autograd, the derivatives against known ones, the verdicts against NaN and emptiness."""

import io
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from tolerances import rounding

from misvo import theory
from misvo.errors import MisvoError
from misvo.theory.check import ROUNDING, Curve, Statement, ratio
from misvo.theory.derivatives import REAL_STEP, hessian, jacobian
from misvo.theory.inputs import CERTAIN, PROBE_SIZES, extreme_policies

WORDS = Statement("name", "claim", "where")


@pytest.fixture
def policy():
    return theory.TabularPolicy.random(np.random.default_rng(5), vocabulary=3, horizon=3, width=2)


@pytest.fixture
def steering(policy):
    return np.random.default_rng(6).normal(size=policy.zero.shape)


@pytest.fixture(scope="module")
def checks():
    return theory.run(policies=4, seed=11)


# -- the claims -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policies", "seed"), [*(pytest.param(*one, marks=pytest.mark.slow) for one in ((20, 0), (8, 2))), (8, 1), (1, 3)]
)
def test_every_claim_holds(policies, seed):
    checks = theory.run(policies, seed)
    assert [check.name for check in checks] == list(theory.CHECKS)
    assert [check.name for check in checks if not check.passed] == []


def test_a_check_does_not_depend_on_the_others(checks):
    names = ["loo-unbiased", "chain-rule"]
    alone = {check.name: check.measured for check in theory.run(4, 11, only=names)}
    together = {check.name: check.measured for check in checks}
    assert alone == {name: together[name] for name in names}


def test_the_worst_cases_reach_the_constants_that_were_derived_for_them(checks):
    """A fair coin has ‖C_p‖ = 1/2; the remainder on a skewed one is a third of its cumulant, √2³·√3/18.

    Limits for small steerings, seen at the smallest: off by its size where a law is skewed, by its square where fair.
    """
    measured = {check.name: check.measured for check in checks}
    remainder = np.sqrt(2) ** 3 * np.sqrt(3) / 18 / 3
    size = min(PROBE_SIZES)
    assert measured["covariance-norm"] == pytest.approx(0.5, abs=ROUNDING + rounding(torch.float64, terms=8))
    assert measured["kl-global-bound"] == pytest.approx(0.5, rel=2 * size**2)
    assert measured["token-kl-remainder"] == pytest.approx(remainder, rel=size)
    assert measured["fisher-bound"] == pytest.approx(remainder, rel=size)
    assert measured["trajectory-bound"] == pytest.approx(0.5, rel=2 * size**2)
    assert measured["drift-bound"] == pytest.approx(0.125, rel=2 * size**2)


def test_bad_arguments_are_refused_in_one_sentence():
    for arguments in ({"policies": 0}, {"seed": -1}, {"only": ["nonsense"]}):
        with pytest.raises(MisvoError) as refusal:
            theory.run(**arguments)
        assert "\n" not in str(refusal.value)


# -- the policy -------------------------------------------------------------------------------------------


def literal_log_law(policy, u, tokens):
    """log π_u(y) of one sequence in torch, token by token, the prefix looked up by its place in a list."""
    total = torch.zeros((), dtype=torch.float64)
    head, bias = torch.tensor(policy.head), torch.tensor(policy.bias)
    for t, token in enumerate(tokens):
        prefixes = list(itertools.product(range(policy.vocabulary), repeat=t))
        state = torch.tensor(policy.hidden[t][prefixes.index(tuple(tokens[:t]))])
        total = total + torch.log_softmax(head @ (state + u[t]) + bias, dim=0)[token]
    return total


def literal_sequence_kl(policy, u):
    total = torch.zeros((), dtype=torch.float64)
    for tokens in itertools.product(range(policy.vocabulary), repeat=policy.horizon):
        log_law = literal_log_law(policy, u, tokens)
        total = total + log_law.exp() * (log_law - literal_log_law(policy, torch.zeros_like(u), tokens))
    return total


def law_rounding(policy, u, order=0):
    """Of a sequence's log-law, of the KL, or of its derivatives of some order, computed in two ways in fp64.

    A log-law is a sum over T tokens of logits (d products) less a logarithm of V exponentials; a KL is a sum over all
    sequences on top; every derivative brings a score, W less its mean, at each position.
    """
    terms = policy.horizon * (policy.head.shape[1] + policy.vocabulary + 4) + policy.sequences
    states = np.concatenate([np.abs(h) + np.abs(v) for h, v in zip(policy.hidden, u, strict=True)])
    size = 2 * policy.horizon * (states @ np.abs(policy.head.T) + np.abs(policy.bias)).max()
    return 2 * rounding(torch.float64, terms, size * (2 * policy.horizon * np.abs(policy.head).max()) ** order)


def test_sequence_law_agrees_with_a_loop_over_tokens(policy, steering):
    u = torch.tensor(steering)
    literal = [literal_log_law(policy, u, tokens) for tokens in policy.tokens().tolist()]
    bound = law_rounding(policy, steering)
    np.testing.assert_allclose(policy.sequence_log_law(steering), torch.stack(literal), rtol=0, atol=bound)


def test_kl_gradient_and_hessian_agree_with_autograd(policy, steering):
    """Autograd shares nothing with the complex step nor with Theorem 1; all three must meet."""
    u = torch.tensor(steering, requires_grad=True)
    value = literal_sequence_kl(policy, u)
    (gradient,) = torch.autograd.grad(value, u)
    assert policy.sequence_kl(steering) == pytest.approx(value.item(), abs=law_rounding(policy, steering))
    for found in (jacobian(policy.sequence_kl, steering), theory.Formulas().sequence_kl_gradient(policy, steering)):
        np.testing.assert_allclose(found, gradient, rtol=0, atol=law_rounding(policy, steering, order=1))
    zero = torch.zeros_like(u)
    second = torch.autograd.functional.hessian(lambda v: literal_sequence_kl(policy, v), zero)
    bound = law_rounding(policy, policy.zero, order=2)
    np.testing.assert_allclose(
        theory.Formulas().block_hessian(policy), second.reshape(u.numel(), -1), rtol=0, atol=bound
    )


def test_prefix_laws_are_products_of_token_laws(policy, steering):
    laws = policy.token_laws(steering)
    relative = law_rounding(policy, steering)  # what a logarithm is off, its exponential is off relatively
    expected = np.ones(1)
    for t, law in enumerate(policy.prefix_laws(steering)):
        np.testing.assert_allclose(law, expected, rtol=relative)
        expected = (expected[:, None] * laws[t]).ravel()
    np.testing.assert_allclose(policy.sequence_law(steering), expected, rtol=relative)


def test_samples_follow_the_sequence_law(policy, steering):
    count = 20_000
    rollouts = policy.sample(steering, count, np.random.default_rng(0))
    places = rollouts @ policy.vocabulary ** np.arange(policy.horizon)[::-1]
    law = policy.sequence_law(steering)
    frequencies = np.bincount(places, minlength=policy.sequences) / count
    assert np.all(np.abs(frequencies - law) <= 4 * np.sqrt(law * (1 - law) / count))  # standard errors, a fixed seed


def test_coins_are_what_they_say():
    fair, skewed, fork = extreme_policies()[3:6]  # those of width 1
    assert np.linalg.norm(fair.head, 2) == pytest.approx(1)
    np.testing.assert_allclose(fair.sequence_law(fair.zero), np.full(4, 0.25))
    np.testing.assert_allclose(skewed.token_laws(skewed.zero)[0][0, 0], (3 - np.sqrt(3)) / 6)
    np.testing.assert_allclose(fork.sequence_law(fork.zero), [0.25, 0.25, 0.5, 0], atol=np.exp(-CERTAIN))


# -- derivatives and verdicts -----------------------------------------------------------------------------


def test_derivatives_of_a_known_function():
    x = np.array([0.3, -1.2])
    np.testing.assert_allclose(jacobian(lambda v: np.sin(v) * v[..., :1], x)[1], [np.sin(-1.2), 0.3 * np.cos(-1.2)])
    known = [[np.exp(0.3) * 1.44, np.exp(0.3) * -2.4], [np.exp(0.3) * -2.4, 2 * np.exp(0.3)]]
    # A central difference: h²/6 of the fourth derivative, and the roundings of the first over h.
    differences = REAL_STEP**2 + rounding(torch.float64, terms=8) / REAL_STEP
    np.testing.assert_allclose(hessian(lambda v: np.exp(v[..., 0]) * v[..., 1] ** 2, x), known, rtol=differences)


def test_nothing_measured_or_not_a_number_is_a_failure():
    for verdict in (WORDS.identity("q", []), WORDS.bound("q", [0.1, np.nan]), WORDS.order("q", 2, [])):
        assert not verdict.passed
    assert not WORDS.order("q", 1, [Curve((0.1, 1.0), (0.0, 1.0))]).passed


def test_slopes_and_ratios_are_judged_by_the_worst():
    sizes = (0.01, 0.1, 1.0)
    square, line = (Curve(sizes, tuple(3 * s**order for s in sizes)) for order in (2, 1))
    assert WORDS.order("q", 2, [square]).passed
    assert WORDS.order("q", 2, [square, line]).measured == pytest.approx(1)
    assert ratio(np.array([1.0, 3.0]), np.array([2.0, 2.0])) == pytest.approx(1.5)
    assert ratio(np.array([0.0, 1e-3]), np.zeros(2)) == np.inf
    assert ratio(np.zeros(2), np.zeros(2)) == 0


# -- the report -------------------------------------------------------------------------------------------


def broken(checks):
    """The same checks with one formula wrong, so that reports have a failure to show."""
    wrong = type("Wrong", (theory.Formulas,), {"covariance_norm_bound": lambda self: np.nan})()
    return checks[:4] + theory.run(2, only=["covariance-norm"], formulas=wrong)


def test_table_has_a_row_and_a_verdict_for_each_check(checks):
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(theory.table(checks))
    console.print(theory.table(broken(checks)))
    text = console.export_text()
    assert text.count(" holds ") == len(checks) + 4
    assert text.count("FAILS") == 1
    assert all(check.where in text for check in checks)


def test_json_says_what_the_checks_say(checks):
    document = json.loads(theory.to_json(checks))
    assert document["passed"] is True
    for row, check in zip(document["checks"], checks, strict=True):
        assert (row["name"], row["measured"], row["passed"]) == (check.name, check.measured, check.passed)
        assert len(row["curves"]) == (4 if check.kind == "order" else 0)
    document = json.loads(theory.to_json(broken(checks)))
    assert document["passed"] is False
    assert document["checks"][-1]["measured"] is None  # NaN is not JSON


def test_figure_of_the_orders(checks, tmp_path):
    theory.plot_orders(checks, tmp_path / "orders.svg")
    drawing = (tmp_path / "orders.svg").read_text()
    panels = [check for check in checks if check.kind == "order"]
    assert len(panels) == 6
    assert all(f"least slope {check.measured:.3f}" in drawing for check in panels)


def test_import_is_light():
    """numpy alone: what `import misvo` itself brings is not this package's doing."""
    heavy = {"torch", "transformers", "matplotlib", "rich", "scipy"}
    program = (
        "import sys, misvo; before = set(sys.modules); import misvo.theory; "
        f"print(sorted({heavy!r} & (set(sys.modules) - before)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
