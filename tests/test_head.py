"""The head's algebra against explicit matrices, autograd and fp64."""

import pytest
import torch
from memory import allocated_bytes
from tolerances import assert_within, rounding, unit

from misvo.fisher import Fisher
from misvo.head import Head, Shift, centred, softmax, token_kl
from misvo.race import Entries
from misvo.tie import TIES

V, D, T, K = 37, 6, 4, 5


@pytest.fixture
def weight():
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0))


def laws(seed=1):
    return torch.softmax(
        3 * torch.randn(K, T, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), -1
    )


def explicit_fisher(W, p):
    """(1/K) Σ_i Wᵀ (diag p_i − p_i p_iᵀ) W for each position, (T, d, d)."""
    C = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    return (W.T @ C @ W).mean(0)


def fisher_size(W, p, u):
    """What the terms of F̂u add up to without their signs, those of Wᵀ(p̄ ⊙ Wu) and of m (m·u)."""
    p, W, u = p.mean(0), W.abs(), u.abs()
    m, shift = p @ W, u @ W.T
    return ((p * shift) @ W + m * (m * u).sum(-1, keepdim=True)).amax()


def fisher_rounding(W, p, u):
    """The error of F̂u in fp64, by any formula: sums over d, V and K behind each other; two results are compared."""
    return 2 * rounding(torch.float64, D + V + K, fisher_size(W, p, u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_products_match_fp64_in_every_precision(weight, dtype, scale, monkeypatch):
    monkeypatch.setattr("misvo.head.BLOCK_BYTES", 10 * D * 4)  # several blocks
    head = Head(weight.to(dtype), scale=scale)
    W = weight.to(dtype).double() * scale
    u, p = torch.randn(T, D), laws()[0].float()
    assert_within(head.shift(u), u.double() @ W.T, rounding(torch.float32, D + 1, u.abs().double() @ W.T.abs()))
    assert_within(head.project(p), p.double() @ W, rounding(torch.float32, V + 1, p.double() @ W.abs()))
    tokens = torch.randint(V, (T, 9))
    weights = torch.rand(T, 9)
    sparse = torch.zeros(T, V).scatter_add_(1, tokens, weights)
    for share in (1, V):  # gathered, and multiplied as usual
        monkeypatch.setattr("misvo.head.GATHER_SHARE", share)
        got, exact = head.project_entries(Entries.where(sparse.numpy() > 0, sparse)), sparse.double() @ W
        assert_within(got, exact, rounding(torch.float32, V + 1, sparse.double() @ W.abs()))
    moment, size = W.T @ (p[0].double()[:, None] * W), W.abs().T @ (p[0].double()[:, None] * W.abs())
    assert_within(head.part_moment(p[0]), moment, rounding(torch.float32, V + 3, size))  # with p, W, and the scale last
    assert torch.equal(head.rows(tokens).double(), W[tokens])  # both scales are powers of two


@pytest.mark.parametrize("product", ["shift", "project"])
def test_one_raised_block_of_a_16_bit_head_is_there_at_a_time(monkeypatch, product):
    """The next block takes the place of the last, so what a product holds does not grow with W."""
    rows, width = 64, 256
    monkeypatch.setattr("misvo.head.BLOCK_BYTES", block := rows * width * 4)
    head = Head(torch.zeros(8 * rows, width, dtype=torch.bfloat16))
    x = torch.zeros(1, width if product == "shift" else 8 * rows)
    assert block <= allocated_bytes(lambda: getattr(head, product)(x)) < 1.5 * block


def test_small_interventions_survive_a_bf16_head(weight):
    """Adding u to a bf16 hidden state would lose it; the shift keeps it."""
    head = Head(weight.to(torch.bfloat16))
    h, u = torch.randn(1, D).to(torch.bfloat16), 1e-3 * torch.randn(1, D)
    exact = u.double() @ head.weight.double().T
    lossy = head.logits(h + u.to(torch.bfloat16)) - head.logits(h)
    assert_within(head.shift(u), exact, rounding(torch.float32, D, u.double().abs() @ head.weight.double().abs().T))
    assert (lossy - exact).norm() > 0.5 * exact.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fisher_product_is_the_average_of_explicit_matrices(weight, temperature):
    W, p = weight.double(), laws()
    head = Head(W)
    p[2, 2:] = 0.0  # a row that had ended: nothing in p̄, nothing in m, still counted in K
    u = torch.randn(T, D, dtype=torch.float64)
    fisher = Fisher(head, p.mean(0), p @ W, temperature)
    expected = torch.einsum("tde,te->td", explicit_fisher(W, p), u) / temperature**2
    bound = fisher_rounding(W, p, u) / temperature**2
    assert_within(fisher.product(u), expected, bound)
    assert_within(fisher.product(u, head.shift(u)), expected, bound)


def test_fisher_is_positive_and_a_constant_shift_is_free(weight):
    W, p = weight.double(), laws()
    W[:, 0] = 1.0  # moving along this axis shifts all logits alike
    fisher = Fisher(Head(W), p.mean(0), p @ W)
    u = torch.randn(50, T, D, dtype=torch.float64)
    assert all((v * fisher.product(v)).sum() > 0 for v in u)
    free = torch.zeros(T, D, dtype=torch.float64)
    free[:, 0] = 7.0
    assert_within(fisher.product(free), torch.zeros(T, D), fisher_rounding(W, p, free))


def test_token_kl_matches_its_definition_and_its_gradient_is_the_fisher_product(weight):
    W = weight.double()
    head = Head(W)
    z = 2 * torch.randn(3, V, dtype=torch.float64)
    u = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    after, before = (z + u @ W.T).log_softmax(-1), z.log_softmax(-1)
    kl = (after.exp() * (after - before)).sum(-1)
    _, ref_partition = softmax(z)
    probs, partition = softmax((z + u @ W.T).detach())
    shift = head.shift(u.detach())
    # Three numbers of the size of the logits, each after an exponential, a logarithm and sums over d and V.
    bound = rounding(torch.float64, V + D + 4, 3 * (z.abs() + shift.abs()).amax())
    assert_within(token_kl(ref_partition, partition, probs, shift), kl.detach(), bound)
    # Bregman identity: ∇ KL = F(u) u exactly
    (gradient,) = torch.autograd.grad(kl.sum(), u)
    fisher = Fisher(head, probs, (probs @ W)[None])
    # Where logits are off by `bound`, so are the probabilities, relatively, and with them every term.
    terms = (W, probs[None], u.detach())
    assert_within(fisher.product(u.detach()), gradient, fisher_rounding(*terms) + bound * fisher_size(*terms))


def test_token_kl_keeps_its_small_digits_in_fp32():
    """Around 1000 the digits of fp32 are 6e-5 apart: without centring, they would drown KLs of this size."""
    generator = torch.Generator().manual_seed(0)
    size, rows = 50, 200
    z = 2 * torch.randn(rows, size, generator=generator) + 1000
    shift = 0.03 * torch.randn(rows, size, generator=generator)
    after, before = (z.double() + shift.double()).log_softmax(-1), z.double().log_softmax(-1)
    exact = (after.exp() * (after - before)).sum(-1)
    argument = (after.exp() * (z.double().amax(-1, keepdim=True) - z.double())).sum(-1)
    z = centred(z)
    _, ref_partition = softmax(z)
    probs, partition = softmax(z + shift)
    # Two log-partitions, each as far off as, relatively, its sum of exponentials: the sum, an exponential within one
    # unit in the last place (2u), and the rounding of its argument. What ⟨π, δ⟩ adds is smaller by the size of δ.
    bound = 2 * (rounding(torch.float32, size) + unit(torch.float32) * (2 + argument)) * (1 + shift.abs().max())
    assert exact.median() > 20 * bound.max()  # there are digits to keep
    assert_within(token_kl(ref_partition, partition, probs, shift), exact, bound)


def test_fingerprint_knows_the_head_and_not_its_precision(weight):
    coarse = weight.to(torch.bfloat16)
    assert Head(coarse).fingerprint == Head(coarse.float()).fingerprint
    assert Head(coarse).fingerprint != Head(coarse, scale=0.5).fingerprint
    assert Head(coarse).fingerprint != Head(coarse + 1).fingerprint


class Counting(Head):
    """A head that counts products with W."""

    products = 0

    def shift(self, u):
        self.products += 1
        return super().shift(u)


def test_shifts_of_several_prompts_are_made_in_one_product(weight):
    """Rows at two places of one prompt, another prompt behind its last position, and one whose positions share."""
    head, make = Counting(weight), torch.Generator().manual_seed(4)
    lengths = 2 * Shift.POSITIONS + 3, 5
    free = [torch.randn(length, D, generator=make) for length in lengths]
    shifts = [Shift(head, u) for u in free]
    shared = Shift(head, torch.randn(1, D, generator=make), TIES["shared"](9))  # made once, at the beginning
    asked = [(shifts[0], 1), (shifts[0], lengths[0] - 1), (shifts[1], 4), (shifts[1], 5), (shared, 2)]
    before = head.products
    Shift.make(asked)
    Shift.make(asked)
    assert head.products == before + 1
    for number, position in ((0, 1), (0, lengths[0] - 1), (1, 4)):
        exact = weight.double() @ free[number][position].double()
        size = weight.double().abs() @ free[number][position].double().abs()
        assert ((shifts[number][position] - exact).abs() <= D * unit(torch.float32) * size).all()
    assert head.products == before + 1  # what was made is there
