"""int8 layers: sums that are exact in whole numbers on every CPU, rounding within half a level, refusals."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import misvo
from misvo import int8
from misvo.int8 import HALF_RANGE, INPUTS, WHOLE_RANGE, ZERO, multiply, prepack, quantize, weight_range


def rounding_error(x, weight, levels):
    """What rounding inputs and weights to half a level may do to Σ x w at most: Σ |x| δw + |w| δx + δw δx.

    And 1 in 10⁵ on top for the fp32 arithmetic around the whole numbers.
    """
    off_x = x.abs().amax(-1, keepdim=True) / INPUTS / 2  # (..., 1)
    off_w = weight.abs().amax(1) / levels / 2  # (out,)
    error = x.abs().sum(-1, keepdim=True) * off_w + off_x * weight.abs().sum(1) + x.shape[-1] * off_x * off_w
    return error * (1 + 1e-5)


def whole_numbers(shape, low, high, seed):
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 5, 16, 70])
@pytest.mark.parametrize("inputs, outputs", [(8, 8), (96, 50), (576, 192), (1536, 64)])
@pytest.mark.parametrize("extreme", [False, True])
def test_sums_are_exact_in_whole_numbers(rows, inputs, outputs, extreme):
    """With the whole range on a CPU without VNNI, pairs of large products are cut off, and this fails."""
    levels = weight_range()
    x = whole_numbers((rows, inputs), ZERO - INPUTS, ZERO + INPUTS, 1)
    weight = whole_numbers((outputs, inputs), -levels, levels, 2)
    if extreme:  # everything as large as it gets, and of one sign
        x[: rows // 2 + 1], weight[: outputs // 2] = ZERO + INPUTS, levels
    product = multiply(x.to(torch.uint8), ZERO, prepack(weight.to(torch.int8)), torch.ones(outputs))
    assert torch.equal(product.double(), ((x - ZERO) @ weight.T).double())  # below 2²⁴: whole numbers in fp32


def test_no_pair_of_products_can_leave_16_bits_with_half_of_the_range():
    assert 2 * (ZERO + INPUTS) * HALF_RANGE <= 2**15 - 1 < 2 * (ZERO + INPUTS) * WHOLE_RANGE


@pytest.mark.parametrize("saturates", [False, True])
def test_the_range_is_chosen_by_what_products_do(monkeypatch, saturates):
    def sixteen_bits(inputs, zero, packed, scales):
        """vpmaddubsw: pairs of products are added in 16 bits and cut off there."""
        pairs = 2 * 255 * WHOLE_RANGE
        return torch.full((len(inputs), len(scales)), 32.0 * (min(pairs, 2**15 - 1) if saturates else pairs))

    monkeypatch.setattr(int8, "multiply", sixteen_bits)
    assert int8.weight_range.__wrapped__() == (HALF_RANGE if saturates else WHOLE_RANGE)


@pytest.mark.parametrize("levels", [HALF_RANGE, WHOLE_RANGE])
def test_a_layer_takes_the_range_that_was_chosen(monkeypatch, levels):
    monkeypatch.setattr(int8, "weight_range", lambda: levels)
    body = nn.Sequential(nn.Linear(24, 10))
    quantize(body, "int8")
    numbers = body[0].packed.to_dense().abs()
    assert numbers.max() == levels


@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_near_and_a_row_does_not_depend_on_its_batch_mates(bias):
    torch.manual_seed(1)
    layer, x = nn.Linear(96, 50, bias=bias), torch.randn(40, 1, 96)
    x[3] *= 1000  # with one scale for the batch, this row would erase the others
    body = nn.Sequential(layer)
    quantize(body, "int8")
    with torch.no_grad():
        whole, exact = body(x), layer(x)
        assert ((whole - exact).abs() <= rounding_error(x, layer.weight, weight_range())).all()
        for rows in ([0], [1, 3, 5], list(range(20, 40))):
            assert torch.equal(body(x[rows].clone()), whole[rows])
    half_a_level = layer.weight.abs().amax(1, keepdim=True) / weight_range() / 2
    assert ((body[0].weight - layer.weight).abs() <= half_a_level * (1 + 1e-5)).all()


def test_inputs_that_layers_share_are_quantized_once_and_new_ones_anew():
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    reference = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for mine, other in zip(layers, reference, strict=True):
        other.load_state_dict(mine.state_dict())
    quantize(layers, "int8")
    with torch.no_grad():
        for x in (torch.randn(2, 8), torch.randn(2, 8)):
            for mine, other in zip(layers, reference, strict=True):
                error = rounding_error(x, other.weight, weight_range())
                assert ((mine(x) - other(x)).abs() <= error).all()


def test_an_input_that_was_changed_in_place_is_quantized_anew():
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    quantize(layers, "int8")
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    layers[0](x)
    assert torch.equal(layers[1](x.copy_(y)), layers[1](y))


def test_another_thread_may_quantize_in_between():
    """A layer that keeps its last input in several places gives one thread the scales of the other."""
    body = nn.Sequential(nn.Linear(16, 8))
    quantize(body, "int8")
    mine, other = (torch.full((2, 16), float(value)) for value in (1, 50))
    wanted = body(mine)
    body(other)  # so that `mine` is quantized anew

    class AnotherThread(TorchFunctionMode):
        came = False

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.round_ and not self.came:
                self.came = True
                with torch.DisableTorchFunction():
                    body(other.clone())
            return function(*args, **(kwargs or {}))

    with AnotherThread() as another:
        assert torch.equal(body(mine), wanted)
    assert another.came


def test_int8_is_refused_where_it_cannot_be():
    with pytest.raises(misvo.MisvoError, match="unknown quantization"):
        quantize(nn.Sequential(nn.Linear(4, 4)), "int4")
    with pytest.raises(misvo.MisvoError, match="float32"):
        quantize(nn.Sequential(nn.Linear(4, 4).bfloat16()), "int8")
