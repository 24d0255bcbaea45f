"""Matrix products on a CPU: oneDNN where it serves, and linear layers that hold their weights packed or in int8.

PyTorch hands fp32 products to MKL. For the 16 to 128 rows that decoding has, oneDNN took 0.5 to 0.7 of its time here,
and 0.55 to 0.75 with weights packed in the order in which it reads them. Rounding differs in the last bit, the product
is the same. `pack` replaces the linear layers of a model that we loaded ourselves; a given model stays as it is.
"""

import torch
from torch import nn
from torch.nn.functional import linear as torch_linear

from misvo.errors import MisvoError

ROWS = 16  # packed weights are laid out for about this many rows at a time
ZERO = 128  # inputs are unsigned, with 128 for zero: oneDNN has no quick kernel for signed ones


def _onednn_serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return plain and torch.backends.mkldnn.is_available() and not differentiated


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b, as `torch.nn.functional.linear`."""
    if _onednn_serves(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch_linear(x, weight, bias)


class PackedLinear(nn.Module):
    """A frozen linear layer in fp32, its weight packed for oneDNN; takes as much memory as the layer it replaces."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    @property
    def weight(self):
        """The weight as it was, for code that asks a layer for its dtype or shape."""
        return self.packed.to_dense()

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class _Inputs:
    """The last input in int8: queries, keys and values read the same one, and so do gates."""

    x = quantized = scales = None

    def of(self, x):
        if x is not self.x:
            scales = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).div_(127).clamp_(min=1e-30)
            self.x, self.scales = x, scales
            self.quantized = (x / scales).round_().add_(ZERO).to(torch.uint8)
        return self.quantized, self.scales


class Int8Linear(nn.Module):
    """A frozen linear layer with int8 weights, one scale for each output, and int8 inputs, one scale for each row.

    The scale of a row depends on that row alone and int32 sums are exact, so what a row becomes cannot depend on its
    batch mates; PyTorch's own dynamic quantization has one scale for the whole batch.
    """

    def __init__(self, layer: nn.Linear, inputs: _Inputs):
        super().__init__()
        self.in_features, self.out_features, self.inputs = layer.in_features, layer.out_features, inputs
        weight = layer.weight.detach()
        self.scales = weight.abs().amax(1).div_(127).clamp_(min=1e-30)
        self.zeros = torch.zeros(len(weight), dtype=torch.int32)
        quantized = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(quantized, [ROWS, self.in_features])
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    @property
    def weight(self):
        """The weight that the layer stands for."""
        return self.packed.to_dense().T.to(torch.float32) * self.scales[:, None]

    def forward(self, x):
        flat = x.reshape(-1, self.in_features)
        quantized, scales = self.inputs.of(x)
        quantized, scales = quantized.view_as(flat), scales.view(-1, 1)
        arguments = (1.0, ZERO, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], "")
        y = torch.ops.onednn.qlinear_pointwise(quantized, *arguments).mul_(scales)
        return (y if self.bias is None else y.add_(self.bias)).view(*x.shape[:-1], self.out_features)


def pack(body: nn.Module) -> None:
    """Pack every fp32 linear layer of a body that stands on a CPU; leave all others as they are."""
    if torch.backends.mkldnn.is_available():
        _replace_linears(body, PackedLinear)


def quantize(body: nn.Module, kind: str) -> None:
    """Turn the linear layers of a body into int8 ones. The head is not part of the body and stays as it is."""
    if kind != "int8":
        raise MisvoError(f"unknown quantization {kind!r}: the one that exists is 'int8'.")
    if not torch.backends.mkldnn.is_available():
        raise MisvoError("int8 needs a build of PyTorch with oneDNN.")
    inputs = _Inputs()
    if not _replace_linears(body, lambda layer: Int8Linear(layer, inputs)):
        raise MisvoError("int8 is for models on a CPU in fp32: load the model with dtype='float32' and device='cpu'.")


def _replace_linears(body: nn.Module, make) -> int:
    """Put `make(layer)` in the place of every fp32 linear layer on a CPU, one at a time, so that memory stays level."""
    replaced = 0
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
                setattr(parent, name, make(child))
                replaced += 1
    return replaced
