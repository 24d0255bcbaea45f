"""One token of a plain decoder, written out: norm, attention, norm, MLP, in as few operations as that takes.

A decoding step of a small model is short, and much of it went to what stands around its products: modules that call
modules, masks, arguments that are looked up, norms and rotations in many small operations. Here the same layers are
called one after another on rows (B, d). It serves models of the families below that we loaded ourselves, on caches in
which rows begin at one column (`misvo.row_layer`). A given model is called as it is, and so is one that somebody hangs
hooks on. When a policy is made, a step is compared with the model's own (`misvo.model`).
"""

import torch
from torch import nn
from torch.nn.functional import rms_norm

from misvo.row_attention import attend

# What these have in common: RMS norms before attention and before the MLP, rotary positions, a cache of attention alone
FAMILIES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}Model"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}


class DecoderStep:
    """The body of a model of one of the families, for one more token of each row."""

    def __init__(self, body: nn.Module):
        self.body = body
        self.layers = list(body.layers)[: body.config.num_hidden_layers]
        called = {module for layer in self.layers for part in (layer.mlp, layer.self_attn) for module in part.modules()}
        called -= {layer.self_attn for layer in self.layers}
        self.passed_over = [module for module in body.modules() if module not in called]

    @classmethod
    def of(cls, body: nn.Module) -> "DecoderStep | None":
        """For a body that it can stand in for."""
        known = f"{type(body).__module__}.{type(body).__name__}" in FAMILIES
        plain = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in body.parameters())
        return cls(body) if known and plain else None

    def serves(self, cache) -> bool:
        """Whether rows begin at one column, and nobody listens to a module that is not called here."""
        heard = any(module._forward_hooks or module._forward_pre_hooks for module in self.passed_over)
        return cache.columns is not None and not heard

    def __call__(self, tokens: torch.Tensor, cache, depths: torch.Tensor) -> torch.Tensor:
        """One more token for every row, (B,) -> (B, d); `depths` (B,) says how many tokens each row has read.

        A single row is taken twice, but for attention: products of one row round in another order (`misvo.linear`).
        """
        x, count = self.body.embed_tokens(tokens), len(tokens)
        turn = _Rotation(*self.body.rotary_emb(x, depths[:, None]))
        x = x if count > 1 else x.repeat(2, 1)
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            attention = layer.self_attn
            seen = _attention(attention, _norm(layer.input_layernorm, x), turn, kept, count)  # (B, heads * size)
            x = x + attention.o_proj(seen if count > 1 else seen.expand(2, -1))
            x = x + layer.mlp(_norm(layer.post_attention_layernorm, x))
        return _norm(self.body.norm, x)[:count]


class _Rotation:
    """Rotary positions of the rows: the two halves of a head turn into each other."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        """Each (B, 1, size)."""
        half = sin.shape[-1] // 2
        self.cos, self.half = cos, half
        self.sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of heads (B, heads, size)."""
        return x * self.cos + x.roll(self.half, -1) * self.sin


def _attention(attention, x, turn, kept, count):
    """What each row sees, (B, heads * size), once its token is written into the layer `kept` of the cache."""
    query, keys, values = (
        layer(x)[:count].view(count, -1, attention.head_dim)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):  # Qwen3
        query, keys = _norm(attention.q_norm, query), _norm(attention.k_norm, keys)
    heads = query.shape[1]
    query, keys = turn(torch.cat([query, keys], 1)).split([heads, keys.shape[1]], 1)
    mask, parts = kept.write(keys, values)
    return attend(query[:, :, None], kept.keys, kept.values, mask, parts, attention.scaling).reshape(count, -1)


def _norm(norm, x):
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
