"""Products by oneDNN, and packed layers, against those of PyTorch in fp64."""

import pytest
import torch
from conftest import letter_reward, make_model, make_policy, make_tokenizer
from torch import nn

import misvo
from misvo.linear import PackedLinear, linear, pack, quantize


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


def test_what_is_differentiated_stays_with_pytorch():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 8))
    assert linear(x.detach(), weight).grad_fn is None  # and what is not goes the quick way, without `no_grad`


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


@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_near_and_a_row_does_not_depend_on_its_batch_mates(bias):
    torch.manual_seed(1)
    layer, x = nn.Linear(96, 50, bias=bias), torch.randn(40, 1, 96)
    x[3] *= 1000  # with one scale for the batch, this row would erase the others
    body = nn.Sequential(layer)
    quantize(body, "int8")
    with torch.no_grad():
        whole, exact = body(x), layer(x)
        assert ((whole - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.02
        for rows in ([0], [1, 3, 5], list(range(20, 40))):
            assert torch.equal(body(x[rows].clone()), whole[rows])
    torch.testing.assert_close(body[0].weight, layer.weight, rtol=0, atol=layer.weight.abs().max().item() / 127)


def test_inputs_that_layers_share_are_quantized_once_and_new_ones_anew():
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    reference = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for mine, other in zip(layers, reference, strict=True):
        other.load_state_dict(mine.state_dict())
    quantize(layers, "int8")
    with torch.no_grad():
        for x in (torch.randn(2, 8), torch.randn(2, 8)):
            for mine, other in zip(layers, reference, strict=True):
                torch.testing.assert_close(mine(x), other(x), rtol=0.1, atol=0.05)


def test_int8_is_refused_where_it_cannot_be():
    with pytest.raises(misvo.MisvoError, match="unknown quantization"):
        quantize(nn.Sequential(nn.Linear(4, 4)), "int4")
    with pytest.raises(misvo.MisvoError, match="float32"):
        quantize(nn.Sequential(nn.Linear(4, 4).bfloat16()), "int8")


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {}], ids=["int8", "packed"])
def test_a_loaded_model_steers_the_same_alone_and_with_others(tmp_path, options):
    """Everything speaks of the policy as loaded: the replayed tokens have the log-probabilities that were recorded."""
    make_model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    policy = misvo.Policy.from_pretrained(str(tmp_path), **options)
    settings = {"rollouts": 4, "steps": 2, "max_new_tokens": 6, "learning_rate": 0.3}
    alone = misvo.steer(policy, "a b", letter_reward, **settings)
    together = misvo.steer_many(policy, ["a b", "q w e r t y"], letter_reward, **settings)[0]
    assert [c.tokens for c in alone.candidates] == [c.tokens for c in together.candidates]
    first = alone.candidates[0]
    ids = torch.tensor([[*policy.encode("a b"), *first.tokens]])
    with torch.no_grad():
        laws = policy.model(input_ids=ids).logits[0].log_softmax(-1)
    start = len(ids[0]) - len(first.tokens)
    likely = [laws[start + i - 1, token].item() for i, token in enumerate(first.tokens)]
    assert sum(likely) / len(likely) == pytest.approx(first.ref_logprob, abs=1e-3)


@pytest.mark.slow
def test_a_compiled_body_samples_the_same_tokens(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings = {"rollouts": 4, "steps": 2, "max_new_tokens": 6, "learning_rate": 0.3}
    plain, compiled = (misvo.Policy.from_pretrained(str(tmp_path), compile=flag) for flag in (False, True))
    alone = misvo.steer(plain, "a b", letter_reward, **settings)
    for prompts in (["a b"], ["a b", "q w e r t y"]):
        other = misvo.steer_many(compiled, prompts, letter_reward, **settings)[0]
        assert [c.tokens for c in other.candidates] == [c.tokens for c in alone.candidates]
