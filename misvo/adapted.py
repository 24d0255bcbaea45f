"""A model with low-rank adapters (peft), made of the model's own tensors: the model itself is never touched.

peft puts its layers into a copy of the module tree whose parameters and buffers are the model's, so the copy takes no
memory for weights, and what happens to it (an error, Ctrl-C) cannot happen to the model. Prompts take turns: `wear`
puts an adapter on, and takes off the one before it.
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from misvo.adapter import Adapter, AdapterForm, Pair
from misvo.errors import MisvoError
from misvo.int8 import Int8Linear
from misvo.linear import JoinedLinear, PackedLinear
from misvo.rollouts import Rollouts
from misvo.sampling import RandomStream
from misvo.settings import Settings

NAME = "misvo"  # of the adapter, as peft calls it
READ = 2048  # tokens that are read at a time where nothing but their last states is kept
LEARN = 256  # tokens that a gradient is taken of at a time, or those of one response: it keeps what all layers made


class AdaptedModel:
    """What wears adapters of one form: `model` is the given `misvo.model.Model` with low-rank layers in it."""

    def __init__(self, model, form: AdapterForm):
        _check(model)
        peft, tree = _peft(), _copy_of_same_tensors(model.model)
        names = _linear_layers(tree, form.targets)
        config = peft.LoraConfig(r=form.rank, lora_alpha=form.alpha, target_modules=names, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # it sees by itself how a layer's weight lies
            peft.inject_adapter_in_model(config, tree, NAME, low_cpu_mem_usage=True)  # weights come with adapters
        self.form, self.model = form, model.with_model(tree)
        self._layers: dict[str, Any] = {name: tree.get_submodule(name) for name in names}
        self._worn: Adapter | None = None

    @property
    def adapter_bytes(self) -> int:
        """What one adapter takes."""
        sizes = sum(layer.in_features + layer.out_features for layer in self._layers.values())
        return self.form.rank * sizes * self.model.head.dtype.itemsize

    def fresh(self, seed: int, prompt: tuple[int, ...]) -> Adapter:
        """An adapter that changes nothing yet; its random half is a function of seed and prompt."""
        generator, head = RandomStream(seed, prompt).generator(0, 0), self.model.head
        pairs = {
            name: Pair.fresh(self.form.rank, layer.in_features, layer.out_features, generator)
            for name, layer in self._layers.items()
        }
        places = {name: _device(layer.get_base_layer()) for name, layer in self._layers.items()}
        # as all arithmetic of steering, in fp32 or finer
        return Adapter(self.form, {name: pair.to(places[name], head.dtype) for name, pair in pairs.items()})

    def wear(self, adapter: Adapter) -> list[nn.Parameter]:
        """Put an adapter on; gives its weights in the order of `Adapter.tensors`."""
        if adapter is not self._worn:
            for name, pair in adapter.pairs.items():
                self._layers[name].lora_A[NAME].weight = nn.Parameter(pair.down, requires_grad=False)
                self._layers[name].lora_B[NAME].weight = nn.Parameter(pair.up, requires_grad=False)
            self._worn = adapter
        layers = self._layers.values()
        return [part[NAME].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]

    @torch.no_grad()
    def states(self, adapter: Adapter, prompt: tuple[int, ...], rollouts: Rollouts) -> torch.Tensor:
        """The states (K, T, d) that the adapted model has where the tokens of rollouts were drawn."""
        self.wear(adapter)
        return states(self.model, prompt, rollouts)

    def gradient(self, adapter: Adapter, prompt: tuple[int, ...], rollouts: Rollouts, pull: torch.Tensor) -> Adapter:
        """∇ of Σ pull·h over the states h (K, T, d) that tokens were drawn from, for all weights of an adapter."""
        weights = self.wear(adapter)
        total = [torch.zeros_like(weight) for weight in weights]
        for weight in weights:
            weight.requires_grad_(True)
        try:
            for rows, length in _groups(prompt, rollouts, LEARN):
                with torch.enable_grad():
                    hidden = self.model.read(prompt, rollouts.tokens[rows, :length])
                pulled = pull[rows, :length].to(hidden.dtype)
                parts = torch.autograd.grad(hidden, weights, pulled, materialize_grads=True)
                total = [whole.add_(part) for whole, part in zip(total, parts, strict=True)]
        finally:
            for weight in weights:
                weight.requires_grad_(False)
        return adapter.with_tensors(total)


def adapted_model(policy, engine, settings: Settings) -> AdaptedModel:
    """What trains adapters for a policy whose requests this engine decodes; None is the one that the policy makes."""
    if not hasattr(policy, "adapted") or not (engine is None or getattr(engine, "adapts", False)):
        raise MisvoError("this engine cannot decode with adapters: method='lora' runs on the one of transformers.")
    return policy.adapted(AdapterForm(settings.lora_rank, settings.lora_alpha, settings.lora_targets))


@torch.no_grad()
def states(model, prompt: tuple[int, ...], rollouts: Rollouts) -> torch.Tensor:
    """The states (K, T, d) that a model has where the tokens of rollouts were drawn; zero behind their ends."""
    head, shape = model.head, rollouts.tokens.shape
    found = torch.zeros(*shape, head.hidden_size, dtype=head.weight.dtype, device=head.device)
    for rows, length in _groups(prompt, rollouts, READ):
        found[rows, :length] = model.read(prompt, rollouts.tokens[rows, :length])
    return found.mul_(rollouts.alive[..., None])


def _groups(prompt, rollouts, tokens) -> Iterator[tuple[torch.Tensor, int]]:
    """Rows of rollouts to be read together, the longest first, and how long the longest of them is."""
    order = rollouts.lengths.argsort(descending=True, stable=True)
    while len(order):
        length = int(rollouts.lengths[order[0]])
        count = max(1, (tokens - len(prompt)) // length)
        yield order[:count], length
        order = order[count:]


def _copy_of_same_tensors(model: nn.Module) -> nn.Module:
    """New modules that hold the model's tensors; as parameters of their own, whose flags are not the model's."""
    same: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for tensor in held.values():
                if isinstance(tensor, nn.Parameter):
                    same[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
                elif isinstance(tensor, torch.Tensor):
                    same[id(tensor)] = tensor
    return copy.deepcopy(model, same)


def _linear_layers(tree, targets) -> list[str]:
    """The names of the linear layers of the decoder, those of `targets` or all of them."""
    decoder = tree.get_decoder()
    inside = {id(module) for module in decoder.modules() if isinstance(module, nn.Linear | Conv1D)}
    names = [name for name, module in tree.named_modules() if id(module) in inside]
    for target in targets or ():
        if not any(_ends_with(name, target) for name in names):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
            raise MisvoError(f"lora_targets names {target!r}, but the linear layers of this model are {known}.")
    return [name for name in names if targets is None or any(_ends_with(name, target) for target in targets)]


def _ends_with(name, target):
    return f".{name}".endswith(f".{target}")


def _device(layer):
    return (layer.packed if isinstance(layer, PackedLinear | JoinedLinear) else layer.weight).device


def _check(model):
    """Refuse bodies that cannot be adapted."""
    if any(isinstance(layer, Int8Linear) for layer in model.body.modules()):
        raise MisvoError("int8 layers have no gradient: load the model without quantize='int8' for method='lora'.")
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.model.modules()):
        raise MisvoError("a compiled body cannot be adapted: load the model without compile=True for method='lora'.")


def _peft():
    try:
        import peft
    except ImportError as error:
        raise MisvoError("method='lora' needs peft: pip install 'misvo[lora]'") from error
    return peft
