"""The linear head of a model that vLLM has loaded, found by asking the model for logits and looking at what it uses."""

from collections.abc import Callable
from typing import Any

import torch

from misvo.errors import MisvoError
from misvo.head import Head
from misvo.sharded import ShardedHead

UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")


@torch.no_grad()
def head_of(model: torch.nn.Module, compute_logits: Callable) -> Head:
    """W, b and the scale of the logits; refuses what is not `scale · (W h + b)` in one sentence."""
    processors = [module for module in model.modules() if type(module).__name__ == "LogitsProcessor"]
    used: list[tuple[Any, Any, torch.Tensor | None]] = []

    def note(processor, arguments, named):
        given = dict(zip(("lm_head", "hidden_states", "embedding_bias"), arguments, strict=False)) | named
        used.append((processor, given["lm_head"], given.get("embedding_bias")))

    hooks = [processor.register_forward_pre_hook(note, with_kwargs=True) for processor in processors]
    probe = _probe(model)
    try:
        own = compute_logits(probe.clone())
    finally:
        for hook in hooks:
            hook.remove()
    name = type(model).__name__
    if len(used) != 1 or own is None:
        raise MisvoError(f"the logits of vLLM's {name} are not made by one linear layer, so it cannot be steered.")
    processor, layer, bias = used[0]
    if processor.soft_cap is not None:
        raise MisvoError(
            f"this model soft-caps its logits (at {processor.soft_cap}), so its head is not linear and cannot be "
            "steered."
        )
    if hasattr(layer, "base_layer"):
        raise MisvoError("the head has a LoRA adapter, which steering does not know of: load the model without LoRA.")
    if type(layer.quant_method).__name__ not in UNQUANTIZED:
        raise MisvoError("the head of this checkpoint is quantized, so its geometry is not known: take another one.")
    head = _own_rows(layer, bias, processor.scale, processor.org_vocab_size)
    ours, own = head.logits(probe), own.to(head.dtype)
    spread, precision = own.abs().max().clamp(min=1e-6), torch.finfo(head.weight.dtype).eps
    if ours.shape != own.shape or (ours - own).abs().max() > 8 * precision**0.75 * spread:
        raise MisvoError(f"the logits of vLLM's {name} are not a linear function of its last hidden state.")
    return head


def _own_rows(layer, bias, scale: float, vocabulary: int) -> Head:
    """The head of this process, without the rows behind the vocabulary, with which weights are padded."""
    if layer.tp_size == 1:
        return Head(layer.weight[:vocabulary], None if bias is None else bias[:vocabulary], scale)
    from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

    start, width = layer.shard_indices.padded_org_vocab_start_index, len(layer.weight)
    rows = min(max(vocabulary - start, 0), width)
    own = Head(layer.weight[:rows], None if bias is None else bias[:rows], scale)
    gather, reduce = tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
    return ShardedHead(own, start // width, width, vocabulary, gather, reduce)


def _probe(model) -> torch.Tensor:
    """A few hidden states that no model has, of the size that states have behind a norm."""
    weight = next(p for p in model.parameters() if p.ndim == 2 and p.is_floating_point())
    size = model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, size, generator=generator).to(weight.device, weight.dtype)
