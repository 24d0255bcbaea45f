"""Matrix products on a CPU: oneDNN where it serves, and linear layers that hold their weights packed for it.

PyTorch hands fp32 products to MKL. For the 16 to 128 rows that decoding has, oneDNN took 0.5 to 0.7 of its time here,
and 0.55 to 0.75 with weights packed in the order in which it reads them. Rounding differs in the last bit, the product
is the same. `pack` replaces the linear layers of a model that we loaded ourselves; a given model stays as it is.
"""

import math
import time
from functools import cache
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

_product = torch.ops.mkldnn._linear_pointwise  # by the name of an overload: choosing one takes up to 30 µs a call
ROWS = 16  # packed weights are laid out for about this many rows at a time
TURNED = 16  # rows up to which the product with a large weight that is not packed is quicker the other way round
PIECE = 2**14  # rows of a weight that are multiplied that way at once
READ_THE_SAME = ("q_proj", "k_proj", "v_proj")  # what attention calls its layers for queries, keys and values
LARGE = 64  # times as many rows as x has: what a weight has that is large beside it
CACHE_LINE = 64  # bytes


@cache
def fewest() -> int:
    """How many rows are multiplied together at least: two, or six where these are much quicker, as on some CPUs with
    AVX-512 (0.6 of the time; on others 1.2). It is tried once; what becomes of a row is the same."""
    if not torch.backends.mkldnn.is_available():
        return 2
    plain = {"dtype": torch.float32, "device": "cpu"}  # whatever the user's defaults are
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(1536, 576, **plain), ROWS)  # as of a small model
    times = {2: math.inf, 6: math.inf}
    for _ in range(12):
        for rows in times:
            x, started = torch.ones(rows, 576, **plain), time.perf_counter()
            _product.default(x, packed, None, "none", [], "")
            times[rows] = min(times[rows], time.perf_counter() - started)
    return 6 if times[6] < 0.75 * times[2] else 2


def _onednn_serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return plain and torch.backends.mkldnn.is_available() and not differentiated


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b, as `torch.nn.functional.linear`."""
    if not _onednn_serves(x, weight):
        return torch_linear(x, weight, bias)
    rows = x.numel() // max(1, x.shape[-1])
    if bias is None and 0 < rows <= TURNED and len(weight) > LARGE * rows and weight.is_contiguous():
        return _turned(x, weight)
    return _by_onednn(x, weight, bias)


def _turned(x, weight):
    """x Wᵀ as (W xᵀ)ᵀ, for a few rows and a large W that is not packed, such as a head. Each number is the same sum in
    the same order; but oneDNN, which reads its second factor turned round, turns the small one now. In pieces of W, so
    that what is turned back still lies in a cache."""
    shape, x = (*x.shape[:-1], len(weight)), x.reshape(-1, x.shape[-1])
    company = x if len(x) > 1 else x.repeat(2, 1)  # as below: one row is multiplied by another routine
    out, pieces = x.new_empty(len(x), len(weight)), -(-len(weight) // PIECE)
    for piece, place in zip(weight.tensor_split(pieces), out.tensor_split(pieces, 1), strict=True):
        place.copy_(_product.default(piece, company, None, "none", [], "").T[: len(x)])
    return out.view(shape)


def _by_onednn(x, weight, bias):
    """A row's product has the same bits whatever rows are multiplied with it, but for one: it has a routine of its own,
    which rounds in another order. So a single row goes in company."""
    if x.numel() == x.shape[-1]:
        return _by_onednn(x.reshape(1, -1).expand(2, -1), weight, bias)[:1].view(*x.shape[:-1], -1)
    return _product.default(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """The product with a packed weight, for gradients of what comes before the layer: it has none of its own."""

    @staticmethod
    def forward(ctx, x, packed, bias):
        ctx.packed = packed
        return _by_onednn(x, packed, bias)

    @staticmethod
    def backward(ctx, gradient):
        return linear(gradient, ctx.packed.to_dense().T), None, None


class PackedLinear(nn.Linear):
    """A frozen linear layer in fp32, its weight packed for oneDNN; takes as much memory as the layer it replaces."""

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)  # the weight is no parameter here
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    @property
    def weight(self):
        """The weight as it was, for code that asks a layer for its dtype or shape."""
        return self.packed.to_dense()

    def forward(self, x):
        if torch.is_grad_enabled() and x.requires_grad:
            return _Product.apply(x, self.packed, self.bias)
        return _by_onednn(x, self.packed, self.bias)


def version(x: torch.Tensor) -> int | None:
    """How often x was changed in place; nobody counts where nobody may ask for gradients."""
    return None if x.is_inference() else x._version


class Joined(nn.Module):
    """Frozen linear layers that read the same input, packed as one: one product where there were three small ones.

    What a model calls are their `JoinedLinear`s, one after another: the first has the product made for all of them.
    """

    def __init__(self, layers: list[nn.Linear]):
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(
            torch.cat([layer.weight.detach() for layer in layers]), ROWS
        )
        self.bias = None
        if layers[0].bias is not None:
            self.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
        self.held: tuple | None = None  # the last input, how it stood, and what the layers make of it

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """What one of the layers makes of x, (..., in) -> (..., out)."""
        held = self.held  # another thread may put its own there meanwhile
        stands = torch.is_grad_enabled() and x.requires_grad, version(x)
        if held is None or held[0] is not x or held[1] != stands:
            whole = _Product.apply if stands[0] else _by_onednn
            held = self.held = x, stands, whole(x, self.packed, self.bias).split(self.sizes, -1)
        if number == len(self.sizes) - 1:
            self.held = None
        return held[2][number].contiguous()


class JoinedLinear(nn.Linear):
    """One of the layers of a `Joined`."""

    def __init__(self, layer: nn.Linear, joined: Joined, number: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.joined, self.number = joined, number

    @property
    def packed(self):
        """With those of the others."""
        return self.joined.packed

    @property
    def weight(self):
        """As of a `PackedLinear`."""
        return self.packed.to_dense().split(self.joined.sizes)[self.number]

    @property
    def bias(self):
        return None if self.joined.bias is None else self.joined.bias.split(self.joined.sizes)[self.number]

    def forward(self, x):
        return self.joined.part(self.number, x)


def product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """layer(x) for rows x (B, in), B > 1, without gradients; of a `Joined` all outputs side by side."""
    if isinstance(layer, PackedLinear | Joined):
        return _product.default(x, layer.packed, layer.bias, "none", [], "")
    return layer(x)


def silu_of(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """silu(layer(x)), as `product`: one operation where the layer is packed.

    PyTorch's own takes the last numbers of an array by another routine, so they depend on how many there are.
    """
    if isinstance(layer, PackedLinear):
        return _product.default(x, layer.packed, layer.bias, "swish", [], "")
    return silu(layer(x), inplace=True)


def times(layer: nn.Module, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """layer(x) ∘ other, as `product`."""
    if isinstance(layer, PackedLinear):
        return _product.binary(x, other, layer.packed, layer.bias, "mul")
    return layer(x) * other


def plus(layer: nn.Module, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """layer(x) + other, as `product`."""
    if isinstance(layer, PackedLinear):
        return _product.binary(x, other, layer.packed, layer.bias, "add")
    return layer(x) + other


def pack(body: nn.Module) -> None:
    """Pack every fp32 linear layer of a body that stands on a CPU; leave all others as they are."""
    if not torch.backends.mkldnn.is_available():
        return
    for parent in list(body.modules()):
        layers = [getattr(parent, name, None) for name in READ_THE_SAME]
        if all(map(_is_plain, layers)) and len({(layer.in_features, layer.bias is None) for layer in layers}) == 1:
            joined = Joined(layers)
            for number, name in enumerate(READ_THE_SAME):
                setattr(parent, name, JoinedLinear(layers[number], joined, number))
    replace_linears(body, PackedLinear)


def align(layer: nn.Module | None) -> None:
    """Move the fp32 weight of a layer on a CPU to where a cache line begins. One that is mapped from a file stands
    anywhere, and oneDNN takes up to twice the time for Wᵀp then; the numbers are the same. What moved is memory of
    this process, and no longer the file's pages, which processes share."""
    if torch.backends.mkldnn.is_available() and _is_plain(layer) and layer.weight.data_ptr() % CACHE_LINE:
        layer.weight.data = layer.weight.data.clone()  # tied embeddings are this very parameter


def replace_linears(body: nn.Module, make) -> int:
    """Put `make(layer)` in the place of every fp32 linear layer on a CPU, one at a time, so that memory stays level."""
    replaced = 0
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if _is_plain(child):
                setattr(parent, name, make(child))
                replaced += 1
    return replaced


def _is_plain(layer) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32
