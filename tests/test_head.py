"""The head's algebra against explicit matrices, autograd and fp64."""

import pytest
import torch

from misvo.head import Fisher, Head, centred, softmax, token_kl
from misvo.race import Entries

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_products_match_fp64_in_every_precision(weight, dtype, scale, monkeypatch):
    monkeypatch.setattr("misvo.head.BLOCK_BYTES", 10 * D * 4)  # several blocks
    head = Head(weight.to(dtype), scale=scale)
    W = weight.to(dtype).double() * scale
    u, p = torch.randn(T, D), laws()[0].float()
    torch.testing.assert_close(head.shift(u).double(), u.double() @ W.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.project(p).double(), p.double() @ W, rtol=1e-5, atol=1e-6)
    tokens = torch.randint(V, (T, 9))
    weights = torch.rand(T, 9)
    dense = torch.zeros(T, V, dtype=torch.float64).scatter_add_(1, tokens, weights.double())
    for share in (1, V):  # gathered, and multiplied as usual
        monkeypatch.setattr("misvo.head.GATHER_SHARE", share)
        entries = Entries.where(dense.numpy() > 0, dense.float())
        torch.testing.assert_close(head.project_entries(entries).double(), dense @ W, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.rows(tokens).double(), W[tokens], rtol=1e-6, atol=0)


def test_small_interventions_survive_a_bf16_head(weight):
    """Adding u to a bf16 hidden state would lose it; the shift keeps it."""
    head = Head(weight.to(torch.bfloat16))
    h, u = torch.randn(1, D).to(torch.bfloat16), 1e-3 * torch.randn(1, D)
    exact = u.double() @ head.weight.double().T
    lossy = head.logits(h + u.to(torch.bfloat16)) - head.logits(h)
    assert (head.shift(u) - exact).norm() < 1e-5 * exact.norm()
    assert (lossy - exact).norm() > 0.5 * exact.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fisher_product_is_the_average_of_explicit_matrices(weight, temperature):
    W, p = weight.double(), laws()
    head = Head(W)
    p[2, 2:] = 0.0  # a row that had ended: nothing in p̄, nothing in m, still counted in K
    u = torch.randn(T, D, dtype=torch.float64)
    fisher = Fisher(head, p.mean(0), p @ W, temperature)
    expected = torch.einsum("tde,te->td", explicit_fisher(W, p), u) / temperature**2
    torch.testing.assert_close(fisher.product(u), expected)
    torch.testing.assert_close(fisher.product(u, head.shift(u)), expected)


def test_fisher_is_positive_and_a_constant_shift_is_free(weight):
    W, p = weight.double(), laws()
    W[:, 0] = 1.0  # moving along this axis shifts all logits alike
    fisher = Fisher(Head(W), p.mean(0), p @ W)
    u = torch.randn(50, T, D, dtype=torch.float64)
    assert all((v * fisher.product(v)).sum() > 0 for v in u)
    free = torch.zeros(T, D, dtype=torch.float64)
    free[:, 0] = 7.0
    assert fisher.product(free).abs().max() < 1e-12


def test_token_kl_matches_its_definition_and_its_gradient_is_the_fisher_product(weight):
    W = weight.double()
    head = Head(W)
    z = 2 * torch.randn(3, V, dtype=torch.float64)
    u = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    after, before = (z + u @ W.T).log_softmax(-1), z.log_softmax(-1)
    kl = (after.exp() * (after - before)).sum(-1)
    _, ref_partition = softmax(z)
    probs, partition = softmax((z + u @ W.T).detach())
    torch.testing.assert_close(token_kl(ref_partition, partition, probs, head.shift(u.detach())), kl.detach())
    # Bregman identity: ∇ KL = F(u) u exactly
    (gradient,) = torch.autograd.grad(kl.sum(), u)
    fisher = Fisher(head, probs, (probs @ W)[None])
    torch.testing.assert_close(fisher.product(u.detach()), gradient)


def test_token_kl_keeps_its_small_digits_in_fp32():
    generator = torch.Generator().manual_seed(0)
    z = 5 * torch.randn(20, 5000, generator=generator) + 20
    shift = 1e-3 * torch.randn(20, 5000, generator=generator)
    after, before = (z.double() + shift.double()).log_softmax(-1), z.double().log_softmax(-1)
    exact = (after.exp() * (after - before)).sum(-1)
    z = centred(z)
    _, ref_partition = softmax(z)
    probs, partition = softmax(z + shift)
    assert (token_kl(ref_partition, partition, probs, shift) - exact).abs().max() < 3e-7


def test_fingerprint_knows_the_head_and_not_its_precision(weight):
    coarse = weight.to(torch.bfloat16)
    assert Head(coarse).fingerprint == Head(coarse.float()).fingerprint
    assert Head(coarse).fingerprint != Head(coarse, scale=0.5).fingerprint
    assert Head(coarse).fingerprint != Head(coarse + 1).fingerprint
