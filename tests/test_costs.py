"""Every cost against exact sums over an enumerable policy, and against literal matrices on a real architecture."""

import numpy as np
import pytest
import torch
from conftest import letter_reward, make_policy
from enumerable import EnumerablePolicy
from literal import replay
from tolerances import assert_near, room, rounding

import misvo
from misvo import cost as cost_module
from misvo.cost import COSTS, suffix_term
from misvo.engines.torch import TorchEngine
from misvo.fisher import Fisher
from misvo.interventions import Vectors
from misvo.methods.misvo import reward_gradient
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.theory import Formulas, TabularPolicy
from misvo.tie import Tie

K, GROUPS = 6, 400


@pytest.fixture(scope="module")
def tabular():
    return TabularPolicy.random(np.random.default_rng(4), vocabulary=4, horizon=3, width=2, spread=1.2)


@pytest.fixture(scope="module")
def u(tabular):
    return torch.tensor(0.8 * np.random.default_rng(5).normal(size=tabular.zero.shape))


def sample(policy, u, groups, keep_fisher):
    """`groups` independent batches of K rollouts under u, through the real engine."""
    engine = TorchEngine(policy, max_rows=K)  # one request after the other
    keep, vectors = Keep(scores=True, fisher=keep_fisher), Vectors.by_position(u)
    tickets = [
        engine.submit(Request((7,), 1, n, range(K), len(u), intervention=vectors, keep=keep)) for n in range(groups)
    ]
    batches = {}
    while engine.busy:
        batches |= dict(engine.advance())
    return [batches[ticket] for ticket in tickets]


def within_four_standard_errors(estimates, exact):
    estimates = torch.stack(estimates)
    error = estimates.mean(0) - torch.as_tensor(exact)
    standard = estimates.std(0) / len(estimates) ** 0.5
    assert (standard > 0).any()  # there is noise to average
    # Where a component has no noise, what is left is the rounding of the mean.
    noiseless = rounding(torch.float64, len(estimates), estimates.abs().max())
    assert (error.abs() <= 4 * standard + noiseless).all(), (error / standard).abs().max()
    # And the check has teeth: the exact value is more than eight standard errors from zero.
    assert (torch.as_tensor(exact).abs() > 8 * standard + noiseless).any()


def exact_gradients(tabular, u):
    formulas, array = Formulas(), u.numpy()

    def times_u(matrices):
        return np.einsum("tde,te->td", np.stack(matrices), array)

    return {
        "frozen-fisher": times_u(formulas.frozen_fisher(tabular)),
        "prefix-fisher": times_u(formulas.prefix_fisher(tabular, array)),
        "iterate-fisher": times_u(formulas.iterate_fisher(tabular, array)),
        "sequence-kl": formulas.sequence_kl_gradient(tabular, array),
    }


@pytest.mark.parametrize("name", ["frozen-fisher", "prefix-fisher", "iterate-fisher", "sequence-kl"])
def test_estimators_meet_the_exact_gradients(tabular, u, name):
    policy = EnumerablePolicy(tabular)
    cost = COSTS[name](policy.head, Sampler(), Tie(3))
    law = cost.needs_fisher(0)
    # The frozen Fisher looks at reference rollouts, the others at steered ones.
    sampled = torch.zeros_like(u) if name == "frozen-fisher" else u
    estimates = []
    for batch in sample(policy, sampled, GROUPS, law):
        cost.observe(0, batch)
        estimates.append(cost.gradient(u))
    within_four_standard_errors(estimates, exact_gradients(tabular, u)[name])


def test_the_four_gradients_differ(tabular, u):
    """Otherwise the test above could not tell one cost from another."""
    gradients = list(exact_gradients(tabular, u).values())
    for i, one in enumerate(gradients):
        assert all(np.abs(one - other).max() > 0.02 for other in gradients[:i])


def test_suffix_term_alone_meets_theorem_1(tabular, u):
    policy = EnumerablePolicy(tabular)
    batches = sample(policy, u, 3 * GROUPS, None)
    exact = Formulas().suffix_term(tabular, u.numpy())
    within_four_standard_errors([suffix_term(policy.head, batch, Sampler()) for batch in batches], exact)
    # The exact token KLs in place of log-ratios estimate the same thing with less noise.
    smooth = [suffix_term(policy.head, batch, Sampler(top_p=0.999999)) for batch in batches]
    within_four_standard_errors(smooth, exact)


def test_reward_gradient_is_unbiased(tabular, u):
    policy = EnumerablePolicy(tabular)
    values = np.random.default_rng(6).normal(size=tabular.sequences)
    law, scores = tabular.sequence_law(u.numpy()), Formulas().scores(tabular, u.numpy())
    exact = np.einsum("y,y,ytd->td", law, values, scores)
    powers = tabular.vocabulary ** np.arange(tabular.horizon - 1, -1, -1)
    estimates = []
    for batch in sample(policy, u, 2 * GROUPS, None):
        rewards = torch.tensor(values[(batch.tokens.numpy() * powers).sum(-1)])
        estimates.append(reward_gradient(policy.head, batch, rewards, 1.0))
    within_four_standard_errors(estimates, exact)


def test_sequence_kl_of_decoding_is_unbiased(tabular, u):
    totals = [batch.kl.sum(1).mean()[None] for batch in sample(EnumerablePolicy(tabular), u, GROUPS, None)]
    within_four_standard_errors(totals, [float(tabular.sequence_kl(u.numpy()))])


@pytest.mark.parametrize("sampler", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["plain", "tempered-nucleus"])
@pytest.mark.parametrize("name", ["prefix-fisher", "iterate-fisher", "sequence-kl"])
def test_replay_on_a_real_architecture(name, sampler):
    """Algorithm 1 with the step's own Fisher matrices and suffix term, from candidates alone."""
    policy = make_policy("llama")
    settings = {"rollouts": 5, "steps": 4, "max_new_tokens": 8, "learning_rate": 0.3, "penalty": 0.5, "seed": 4}
    result = misvo.steer(policy, "a b c d", letter_reward, cost=name, **settings, **sampler, preset="paper")
    tokens = policy.encode("a b c d")
    expected = replay(policy.model, tokens, result)
    allowed = room(lambda model: replay(model, tokens, result), policy.model)
    # Rounding must not hide an error of the algorithm, nor decide whether a token belongs to a nucleus.
    assert allowed < 1e-4 * expected.norm()
    assert_near(result.steering.vectors, expected, allowed)


@pytest.mark.parametrize(
    "length, step, columns, formed",
    [(8, "dual", 32, 1), (7, "dual", 32, 0), (8, "euler", 16, 0), (8, "euler", 32, 1)],
)
def test_the_matrix_of_a_shared_vector_is_formed_once_where_that_is_less_and_quicker(
    length, step, columns, formed, monkeypatch
):
    """d is 32, and K·T is 32 or 28. Three Euler steps make two products of vectors that are not 0, natural ones many
    more. What later steps collect anew is never formed."""
    made, form = [], Fisher.formed
    monkeypatch.setattr(Fisher, "formed", lambda fisher: made.append(fisher) or form(fisher))
    monkeypatch.setattr(cost_module, "COLUMNS", columns)
    sizes = {"rollouts": 4, "steps": 3, "max_new_tokens": length, "tie": "shared", "step": step}
    sizes |= {"kl_budget": 1.0} if step == "dual" else {}
    for cost, count in (("frozen-fisher", formed), ("prefix-fisher", 0)):
        made.clear()
        misvo.steer(make_policy("llama"), "a b", letter_reward, cost=cost, **sizes, preset="paper")
        assert len(made) == count


def test_explicit_matrices_give_the_same_vectors():
    policy = make_policy("granite")
    settings = {"rollouts": 4, "steps": 4, "max_new_tokens": 7, "learning_rate": 0.3, "temperature": 0.8}
    lean = misvo.steer(policy, "a b c", letter_reward, **settings, preset="paper")
    formed = misvo.steer(policy, "a b c", letter_reward, explicit_fisher=True, **settings, preset="paper")
    allowed = room(lambda model: replay(model, policy.encode("a b c"), lean), policy.model)
    assert_near(formed.steering.vectors, lean.steering.vectors, allowed)
