"""The KL that decoding measures, and KL_ref, against literal sums over full distributions."""

import pytest
import torch
from conftest import ENDS, letter_reward, make_policy
from literal import Literal
from tolerances import assert_near, room, rounding

import misvo
from misvo.engines.torch import TorchEngine
from misvo.interventions import Vectors
from misvo.rollouts import Request
from misvo.sampling import Sampler

PROMPT, T, K = "a b c d e", 9, 6
HELD_BACK = Sampler(0.8, top_k=20, min_p=0.02, min_new_tokens=4, ends=tuple(ENDS))


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, 0.9), HELD_BACK])
@pytest.mark.parametrize("architecture", ["llama", "granite"])
def test_decoding_measures_the_exact_token_kl(architecture, sampler):
    policy = make_policy(architecture)
    u = 0.4 * torch.randn(T, 32, generator=torch.Generator().manual_seed(1))
    request = Request(tuple(policy.encode(PROMPT)), 0, 0, range(K), T, sampler, Vectors.by_position(u))
    rollouts = TorchEngine(policy, K).run(request)
    responses, alive = rollouts.responses(), rollouts.alive

    def exact(figure, u):
        def compute(model):
            early = {"held_back": sampler.min_new_tokens, "ends": sampler.ends}
            literal = Literal(model, policy.encode(PROMPT), T, sampler.temperature, **early)
            return torch.cat([getattr(literal, figure)(tokens, u) for tokens in responses])

        return compute

    for measured, compute in (
        (rollouts.kl, exact("kl", u.double())),
        (rollouts.logprobs, exact("logprobs", u.double())),
        (rollouts.ref_logprobs, exact("logprobs", 0 * u.double())),
    ):
        allowed = room(compute, policy.model)
        assert allowed < 1e-4 * compute(policy.model).norm()  # rounding must not hide an error of the formula
        assert_near(measured[alive], compute(policy.model), allowed)


def test_trace_and_kl_ref_are_the_literal_averages(monkeypatch):
    monkeypatch.setattr("misvo.fisher.BLOCK_BYTES", 61 * 4 * K * 4)  # several blocks of positions
    policy = make_policy("llama")
    settings = {
        "rollouts": K,
        "steps": 3,
        "max_new_tokens": T,
        "learning_rate": 0.4,
        "penalty": 0.2,
        "temperature": 0.9,
    }
    result = misvo.steer(policy, PROMPT, letter_reward, kl_ref=True, **settings, preset="paper")

    def average(step, u):
        """The literal mean over a step's responses of the KL at each position, as a function of the model."""

        def compute(model):
            literal, total = Literal(model, policy.encode(PROMPT), T, 0.9), torch.zeros(T, dtype=torch.float64)
            for c in (c for c in result.candidates if c.step == step):
                total[: len(c.tokens)] += literal.kl(c.tokens, u) / K
            return total

        return compute

    def check(per_position, total, compute):
        expected, allowed = compute(policy.model), room(compute, policy.model)
        assert expected.sum() > 0.01 and allowed < 1e-4 * expected.norm()
        assert_near(torch.tensor(per_position), expected, allowed)
        assert total == pytest.approx(expected.sum().item(), abs=T**0.5 * allowed)  # |Σ x_t| ≤ √T ‖x‖

    check(result.kl_ref.per_position, result.kl_ref.total, average(0, result.steering.vectors.double()))
    # The last step was sampled from the vectors that two updates had made.
    earlier = misvo.steer(
        policy, PROMPT, letter_reward, **{**settings, "steps": 2}, preset="paper"
    ).steering.vectors.double()
    row = result.trace[2]
    check(row["kl_per_position"], row["kl"], average(2, earlier))
    assert row["norm"] == pytest.approx(earlier.norm().item(), rel=rounding(torch.float32, earlier.numel()))


def test_moved_positions_name_the_tokens_that_rose():
    policy = make_policy("llama")
    result = misvo.steer(
        policy,
        PROMPT,
        letter_reward,
        kl_ref=True,
        rollouts=K,
        steps=3,
        max_new_tokens=T,
        learning_rate=0.4,
        penalty=0.2,
        preset="paper",
    )
    top = result.moved[0]
    assert top.position == max(range(T), key=lambda t: result.kl_ref.per_position[t])
    rows = [c for c in result.candidates if c.step == 0 and len(c.tokens) > top.position]
    u = result.steering.vectors[top.position].double()

    def rise(model):
        """How much more probable steering made each token, on average over the prefixes."""
        literal = Literal(model, policy.encode(PROMPT), T)
        z = torch.stack([literal.logits(c.tokens)[top.position] for c in rows])
        return (torch.softmax(z + literal.W @ u, -1) - torch.softmax(z, -1)).mean(0)

    expected, allowed = rise(policy.model), room(rise, policy.model)
    text, before, after = top.tokens[0]
    assert text == policy.tokenizer.decode([int(expected.argmax())])
    assert expected.max() > 1000 * allowed and after - before == pytest.approx(expected.max().item(), abs=allowed)
