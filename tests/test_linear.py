"""Products by oneDNN, and packed layers, against those of PyTorch in fp64."""

import subprocess
import sys
import warnings

import pytest
import torch
from conftest import letter_reward, make_model, make_policy, make_tokenizer
from tolerances import assert_near, assert_within, room, rounding
from torch import nn

import misvo
from misvo import loading
from misvo.int8 import INPUTS, Int8Linear
from misvo.linear import CACHE_LINE, Joined, JoinedLinear, PackedLinear, align, linear, pack


def product_error(x, weight):
    """How far a sum of n products may be off in fp32, in whatever order it is added up: n · 2⁻²⁴ · Σ|x||w| (Higham)."""
    return x.shape[-1] * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)


@pytest.mark.parametrize("rows", [1, 7, 16, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(rows, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 50, bias=bias), torch.randn(rows, 1, 96)
    with torch.no_grad():
        exact = layer.double()(x.double())
        packed = PackedLinear(layer.float())
        allowed = product_error(x, layer.weight) + 2.0**-24 * exact.abs()  # the bias is one addition more
        assert ((packed(x) - exact).abs() <= allowed).all()
        assert ((linear(x, layer.weight, layer.bias) - exact).abs() <= allowed).all()
        assert packed(x).shape == linear(x, layer.weight, layer.bias).shape == exact.shape
    assert torch.equal(packed.weight, layer.weight)


def joined_layers(bias=False):
    torch.manual_seed(1)
    layers = [nn.Linear(96, outputs, bias=bias) for outputs in (48, 16, 16)]
    joined = Joined(layers)
    return layers, [JoinedLinear(layer, joined, number) for number, layer in enumerate(layers)]


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_joined_layers_are_the_layers(rows, bias):
    layers, parts = joined_layers(bias)
    x = torch.randn(rows, 1, 96)
    with torch.no_grad():
        for layer, part in zip(layers, parts, strict=True):
            exact = layer.double()(x.double())
            allowed = product_error(x, layer.weight) + 2.0**-24 * exact.abs()
            assert ((part(x) - exact).abs() <= allowed).all()
            assert torch.equal(part.weight, layer.weight.float())
            assert part.bias is None if not bias else torch.equal(part.bias, layer.bias.float())


def test_joined_layers_answer_each_input_alone_in_any_order():
    """What was made for one input must not be given for another, nor for one that changed hands in between."""
    layers, parts = joined_layers()
    one, other = torch.randn(2, 3, 96)
    calls = [(0, one), (0, other), (1, one), (2, other), (1, other), (2, one), (0, one), (1, one), (2, one), (1, one)]
    with torch.no_grad():
        for number, x in calls:
            exact = x.double() @ layers[number].weight.double().T
            assert ((parts[number](x) - exact).abs() <= product_error(x, layers[number].weight)).all()
        parts[2](one)
    assert parts[0].joined.held is None  # nothing is kept once the last has asked


def test_joined_layers_see_that_an_input_has_changed():
    """In place, or because gradients are wanted now."""
    _, parts = joined_layers()
    x, y = torch.randn(2, 3, 96)
    with torch.no_grad():
        parts[0](x)
        x.copy_(y)
        assert torch.equal(parts[1](x), parts[1](y))
    x.requires_grad_()
    with torch.no_grad():
        parts[0](x)
    assert parts[1](x).requires_grad
    with torch.inference_mode():
        assert torch.equal(parts[0](torch.ones(3, 96)), parts[0](torch.ones(3, 96)))


def test_models_are_loaded_whatever_the_default_dtype_is():
    code = "import torch; torch.set_default_dtype(torch.float64); from misvo.linear import fewest; print(fewest())"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() in "26"
    )


def test_gradients_go_through_joined_layers():
    layers, parts = joined_layers()
    x = torch.randn(5, 96, requires_grad=True)
    sum(part(x).square().sum() for part in parts).backward()
    exact = x.detach().double().requires_grad_()
    sum(layer.double()(exact).square().sum() for layer in layers).backward()
    # Outputs are sums of 96 products, the gradient one of 80 of these: the errors of both add up.
    weight = torch.cat([layer.weight for layer in layers]).abs()
    allowed = 2 * (96 + 80) * 2.0**-24 * (exact.detach().abs() @ weight.T) @ weight
    assert ((x.grad - exact.grad).abs() <= allowed).all()


def test_products_with_a_transposed_weight():
    x, weight = torch.randn(5, 700), torch.randn(700, 24)
    with torch.no_grad():
        exact = x.double() @ weight.double()
        assert ((linear(x, weight.T) - exact).abs() <= product_error(x, weight.T)).all()


@pytest.mark.parametrize("inputs, outputs", [(576, 192), (1536, 576), (576, 20000), (64, 2**14 + 1)])
def test_a_row_has_one_product_whatever_rows_are_with_it(inputs, outputs):
    """A single row has a routine of its own in oneDNN: without its company this fails on some machines."""
    torch.manual_seed(2)
    weight, x = torch.randn(outputs, inputs), torch.randn(40, inputs)
    layer = nn.Linear(inputs, outputs, bias=False)
    packed = PackedLinear(layer)
    with torch.no_grad():
        if torch.equal(torch.ops.mkldnn._linear_pointwise(x[:2], weight, None, "none", [], ""), linear(x, weight)[:2]):
            for rows in (1, 2, 3, 15, 16, 17):  # with many outputs, up to sixteen go the other way round, in pieces
                assert torch.equal(linear(x[:rows], weight), linear(x, weight)[:rows])
                assert torch.equal(packed(x[:rows]), packed(x)[:rows])
        else:
            pytest.skip("products of this machine depend on how many rows they have")


def test_a_head_that_is_mapped_from_a_file_begins_at_a_cache_line(tmp_path):
    make_model("llama-tied").save_pretrained(tmp_path)  # its embeddings are its head
    make_tokenizer().save_pretrained(tmp_path)
    assert loading.load(tmp_path)[0].get_output_embeddings().weight.data_ptr() % CACHE_LINE  # it would not by itself
    model = misvo.Policy.from_pretrained(tmp_path).model
    head = model.get_output_embeddings().weight
    assert head.data_ptr() % CACHE_LINE == 0
    assert head is model.get_input_embeddings().weight


def test_a_weight_that_moves_stays_the_same_numbers():
    layer = nn.Linear(24, 50, bias=False)
    numbers = layer.weight.detach().clone()
    layer.weight.data = torch.cat([torch.zeros(10), numbers.flatten()])[10:].view(50, 24)  # 40 bytes behind a line
    assert layer.weight.data_ptr() % CACHE_LINE
    align(layer)
    assert layer.weight.data_ptr() % CACHE_LINE == 0
    assert torch.equal(layer.weight, numbers)
    stood = layer.weight.data_ptr()
    align(layer)
    assert layer.weight.data_ptr() == stood  # it has no reason to move again


class OwnLinear(nn.Linear):
    pass


@pytest.mark.parametrize("layer", [nn.Linear(24, 50, dtype=torch.bfloat16), OwnLinear(24, 50)])
def test_what_is_not_plain_fp32_stays_where_it_is(layer):
    numbers = layer.weight.detach()
    layer.weight.data = torch.cat([numbers.new_zeros(10), numbers.flatten()])[10:].view(50, 24)
    stood = layer.weight.data_ptr()
    assert stood % CACHE_LINE
    align(layer)
    align(None)  # a model without a head
    assert layer.weight.data_ptr() == stood


def test_what_is_differentiated_stays_with_pytorch():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    linear(x, weight).sum().backward()
    # Sums of four numbers on both sides.
    assert_within(x.grad, weight.sum(0).expand(3, 8), 2 * rounding(torch.float32, 4, weight.abs().sum(0)))
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

    def logits(model):
        with torch.no_grad():
            return model(input_ids=ids).logits

    before, allowed = logits(policy.model), room(logits, policy.model)
    pack(policy.body)
    assert allowed < 1e-4 * before.norm()  # so that a wrong layer cannot hide behind it
    assert_near(logits(policy.model), before, allowed)
    kinds = {type(module) for module in policy.body.modules() if hasattr(module, "out_features")}
    assert kinds == {PackedLinear, JoinedLinear}


def test_a_model_that_was_given_stays_as_it_is():
    policy = make_policy("llama")
    assert not any(isinstance(module, PackedLinear) for module in policy.model.modules())


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {}], ids=["int8", "packed"])
def test_a_loaded_model_steers_the_same_alone_and_with_others(tmp_path, options):
    """Everything speaks of the policy as loaded: the replayed tokens have the log-probabilities that were recorded."""
    make_model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a step that is written out is one of this model, int8 or not
        policy = misvo.Policy.from_pretrained(str(tmp_path), **options)
    settings = {"rollouts": 4, "steps": 2, "max_new_tokens": 6, "learning_rate": 0.3}
    alone = misvo.steer(policy, "a b", letter_reward, **settings, preset="paper")
    together = misvo.steer_many(policy, ["a b", "q w e r t y"], letter_reward, **settings, preset="paper")[0]
    assert [c.tokens for c in alone.candidates] == [c.tokens for c in together.candidates]
    longest = max(alone.candidates, key=lambda c: len(c.tokens))
    tokens, prompt = longest.tokens, policy.encode("a b")
    ids = torch.tensor([[*prompt, *tokens]])

    @torch.no_grad()
    def likely(model):
        laws = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return laws.gather(1, torch.tensor(tokens)[:, None]).mean().item()

    plain, allowed = make_model("llama"), room(likely, make_model("llama"))
    if options:
        allowed += what_other_roundings_do(likely, policy.model)
        assert allowed < abs(likely(plain) - likely(policy.model))  # so that it cannot be the plain model that spoke
    assert abs(likely(policy.model) - longest.ref_logprob) <= allowed


def what_other_roundings_do(figure, model, copies=16):
    """How far a figure of an int8 model moves when some inputs round the other way, as they may where a sum before them
    has another last digit: one entry of one row of three layers by a whole step. A sum is off by about 10⁻⁶ of the
    row's largest entry and a step is 1/127 of it, so of the 2,000 inputs of a response 0.5 are that near to the middle
    between two numbers, and more than three with a chance of 0.002."""
    generator = torch.Generator().manual_seed(0)

    def nudge(_, inputs):
        moved = inputs[0].clone()
        rows = moved.view(-1, moved.shape[-1])
        row, entry = (int(torch.randint(size, (1,), generator=generator)) for size in rows.shape)
        rows[row, entry] -= rows[row].abs().max() / INPUTS * rows[row, entry].sign()  # towards zero: the scale stays
        return (moved,)

    before, layers, changes = figure(model), [m for m in model.modules() if isinstance(m, Int8Linear)], []
    for _ in range(copies):
        picked = torch.randperm(len(layers), generator=generator)[:3].tolist()
        hooks = [layers[index].register_forward_pre_hook(nudge) for index in picked]
        changes.append(abs(figure(model) - before))
        for hook in hooks:
            hook.remove()
    return max(changes)


@pytest.mark.slow
def test_a_compiled_body_samples_the_same_tokens(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings = {"rollouts": 4, "steps": 2, "max_new_tokens": 6, "learning_rate": 0.3}
    plain, compiled = (misvo.Policy.from_pretrained(str(tmp_path), compile=flag) for flag in (False, True))
    alone = misvo.steer(plain, "a b", letter_reward, **settings, preset="paper")
    for prompts in (["a b"], ["a b", "q w e r t y"]):
        other = misvo.steer_many(compiled, prompts, letter_reward, **settings, preset="paper")[0]
        assert [c.tokens for c in other.candidates] == [c.tokens for c in alone.candidates]
