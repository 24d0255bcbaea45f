"""Products by oneDNN, and packed layers, against those of PyTorch in fp64."""

import pytest
import torch
from conftest import make_policy
from torch import nn

from misvo.linear import PackedLinear, linear, pack


@pytest.mark.parametrize("rows", [1, 7, 16, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(rows, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 50, bias=bias), torch.randn(rows, 1, 96)
    with torch.no_grad():
        exact = layer.double()(x.double())
        packed = PackedLinear(layer.float())
        torch.testing.assert_close(packed(x).double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(linear(x, layer.weight, layer.bias).double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.weight, layer.weight)


def test_products_with_a_transposed_weight():
    x, weight = torch.randn(5, 700), torch.randn(700, 24)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight.T), x @ weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_stay_with_pytorch(dtype):
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(4, 8).to(dtype)
    assert torch.equal(linear(x, weight), nn.functional.linear(x, weight))
    body = nn.Sequential(nn.Linear(4, 4).to(dtype))
    pack(body)
    assert type(body[0]) is nn.Linear


def test_a_packed_model_says_what_it_said():
    policy, ids = make_policy("llama"), torch.arange(3, 12)[None]
    with torch.no_grad():
        before = policy.model(input_ids=ids).logits
        pack(policy.body)
        torch.testing.assert_close(policy.model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)
    kinds = {type(module) for module in policy.body.modules() if hasattr(module, "out_features")}
    assert kinds == {PackedLinear}


def test_a_model_that_was_given_stays_as_it_is():
    policy = make_policy("llama")
    assert not any(isinstance(module, PackedLinear) for module in policy.model.modules())
