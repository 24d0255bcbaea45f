"""Linear layers in int8 on a CPU: another model, near to the first one, and the same on every CPU but for its range.

oneDNN multiplies unsigned inputs with signed weights. With VNNI the products are added up in 32 bits. Without it, pairs
of them are first added in 16 bits and cut off there (vpmaddubsw), and 2 · 255 · 127 does not fit: sums of large numbers
come out at half their size, and nothing says so. Where that happens weights take half of their range, ±64, so that no
pair can overflow: 2 · 255 · 64 = 32640 ≤ 32767. What a process really has is not a matter of flags (oneDNN may be told
to leave instructions out), so it is tried once: the largest product, compared with what it should be.
"""

from functools import cache

import torch
from torch import nn

from misvo.errors import MisvoError
from misvo.linear import ROWS, replace_linears, version

ZERO = 128  # inputs are unsigned, with 128 for zero: oneDNN has no quick kernel for signed ones
INPUTS = 127  # inputs are whole numbers from -127 to 127, and so are weights where sums are exact
WHOLE_RANGE, HALF_RANGE = 127, 64


@cache
def weight_range() -> int:
    """How far weights may reach from zero for sums to be exact on this machine."""
    pairs = 32
    weight = torch.full((ROWS, 2 * pairs), WHOLE_RANGE, dtype=torch.int8)
    inputs = torch.full((ROWS, 2 * pairs), 255, dtype=torch.uint8)
    product = multiply(inputs, 0, prepack(weight), torch.ones(ROWS))
    return WHOLE_RANGE if torch.all(product == 2 * pairs * 255 * WHOLE_RANGE) else HALF_RANGE


def prepack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.onednn.qlinear_prepack(weight, [ROWS, weight.shape[1]])


def multiply(inputs: torch.Tensor, zero: int, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(inputs − zero) Wᵀ with one scale for each output, (B, in) uint8 -> (B, out) fp32."""
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    arguments = (1.0, zero, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return torch.ops.onednn.qlinear_pointwise(inputs, *arguments)


class _Inputs:
    """The last input in int8: queries, keys and values read the same one, and so do gates."""

    def __init__(self):
        self.held: tuple | None = None  # an input, how often it was changed, in int8, its scales

    def of(self, x):
        held, changed = self.held, version(x)  # another thread may put its own there meanwhile
        if held is None or held[0] is not x or held[1] != changed:
            scales = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).div_(INPUTS).clamp_(min=1e-30)
            held = self.held = x, changed, (x / scales).round_().add_(ZERO).to(torch.uint8), scales
        return held[2:]


class Int8Linear(nn.Module):
    """A frozen linear layer with int8 weights, one scale for each output, and int8 inputs, one scale for each row.

    The scale of a row depends on that row alone and int32 sums are exact, so what a row becomes cannot depend on its
    batch mates; PyTorch's own dynamic quantization has one scale for the whole batch.
    """

    def __init__(self, layer: nn.Linear, inputs: _Inputs):
        super().__init__()
        self.in_features, self.out_features, self.inputs = layer.in_features, layer.out_features, inputs
        weight = layer.weight.detach()
        self.scales = weight.abs().amax(1).div_(weight_range()).clamp_(min=1e-30)
        self.packed = prepack((weight / self.scales[:, None]).round_().to(torch.int8))
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    @property
    def weight(self):
        """The weight that the layer stands for."""
        return self.packed.to_dense().T.to(torch.float32) * self.scales[:, None]

    def forward(self, x):
        quantized, scales = self.inputs.of(x)
        y = multiply(quantized.view(-1, self.in_features), ZERO, self.packed, self.scales).mul_(scales.view(-1, 1))
        return (y if self.bias is None else y.add_(self.bias)).view(*x.shape[:-1], self.out_features)


def quantize(body: nn.Module, kind: str) -> None:
    """Turn the linear layers of a body into int8 ones. The head is not part of the body and stays as it is."""
    if kind != "int8":
        raise MisvoError(f"unknown quantization {kind!r}: the one that exists is 'int8'.")
    if not torch.backends.mkldnn.is_available():
        raise MisvoError("int8 needs a build of PyTorch with oneDNN.")
    inputs = _Inputs()
    if not replace_linears(body, lambda layer: Int8Linear(layer, inputs)):
        raise MisvoError("int8 is for models on a CPU in fp32: load the model with dtype='float32' and device='cpu'.")
