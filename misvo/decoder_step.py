"""One token of a plain decoder, written out: norm, attention, norm, MLP, in as few operations as that takes.

A decoding step of a small model is short, and much of it went to what stands around its products: modules that call
modules, masks, arguments that are looked up, norms and rotations in many small operations. Here the same layers are
called one after another on rows (B, d). It serves models of the families below that we loaded ourselves, on caches in
which rows begin at one column (`misvo.row_layer`). A given model is called as it is, and so is one that somebody hangs
hooks on. When a policy is made, a step is compared with the model's own (`misvo.model`).
"""

import math

import torch
from torch import nn
from transformers.activations import SiLUActivation

from misvo.linear import JoinedLinear, fewest, plus, product, silu_of, times
from misvo.row_attention import attend

SILUS = (nn.SiLU, SiLUActivation)

# What these have in common: RMS norms before attention and before the MLP, rotary positions, a cache of attention alone
FAMILIES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}Model"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}


class DecoderStep:
    """The body of a model of one of the families, for one more token of each row."""

    def __init__(self, body: nn.Module):
        self.body = body
        self.layers = [_Layer(layer) for layer in list(body.layers)[: body.config.num_hidden_layers]]
        self.norm = _Norm(body.norm)
        self.hooks = [
            hooks for module in body.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    @classmethod
    def of(cls, body: nn.Module) -> "DecoderStep | None":
        """For a body that it can stand in for."""
        known = f"{type(body).__module__}.{type(body).__name__}" in FAMILIES
        plain = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in body.parameters())
        return cls(body) if known and plain else None

    def serves(self, cache) -> bool:
        """Whether rows begin at one column, and nobody listens to a module: most are not called here."""
        return cache.columns is not None and not any(self.hooks)

    def __call__(self, tokens: torch.Tensor, cache, depths: torch.Tensor) -> torch.Tensor:
        """One more token for every row, (B,) -> (B, d); `depths` (B,) says how many tokens each row has read.

        Fewer rows than `fewest` are taken several times, but for attention: products of one row round in another order,
        and those of a few more take longer.
        """
        x, count = self.body.embed_tokens(tokens), len(tokens)
        turn = _Rotation(*self.body.rotary_emb(x, depths[:, None]))
        x = _filled(x)
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            x = layer(x, turn, kept, count)
        return self.norm(x)[:count]


class _Rotation:
    """Rotary positions of the rows: the two halves of a head turn into each other."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        """Each (B, 1, size)."""
        half = sin.shape[-1] // 2
        self.cos, self.half = cos, half
        self.sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of heads (B, heads, size)."""
        return (x * self.cos).add_(x.roll(self.half, -1).mul_(self.sin))


class _Layer:
    """One layer of a body, with its modules at hand: looking them up takes longer than what some of them do."""

    def __init__(self, layer: nn.Module):
        attention, mlp = layer.self_attn, layer.mlp
        self.size, self.scaling = attention.head_dim, attention.scaling
        asks = attention.q_proj, attention.k_proj, attention.v_proj
        self.heads, self.groups = (ask.out_features // self.size for ask in asks[:2])
        self.asks = (asks[0].joined,) if isinstance(asks[0], JoinedLinear) else asks
        self.norm, self.out, self.head_norm = _Norm(layer.input_layernorm), attention.o_proj, None
        if hasattr(attention, "q_norm"):  # Qwen3
            self.head_norm = _Norm(attention.q_norm, self.heads, attention.k_norm, self.groups)
        self.mlp, self.mlp_norm = mlp, _Norm(layer.post_attention_layernorm)
        self.gated = (mlp.gate_proj, mlp.up_proj, mlp.down_proj) if isinstance(mlp.act_fn, SILUS) else None

    def __call__(self, x, turn, kept, count):
        """Rows (B, d), the first `count` and what fills them up, once the token of each is in the layer `kept` of the
        cache."""
        seen = self._attention(self.norm(x), turn, kept, count)  # (count, heads * size)
        x = plus(self.out, _filled(seen), x)
        inner = self.mlp_norm(x)
        if self.gated is None:
            return x + self.mlp(inner)
        gate, up, down = self.gated
        return plus(down, times(up, inner, silu_of(gate, inner)), x)

    def _attention(self, x, turn, kept, count):
        asked = [product(ask, x) for ask in self.asks]
        heads = (asked[0] if len(asked) == 1 else torch.cat(asked, -1))[:count].view(count, -1, self.size)
        query_keys, values = heads[:, : self.heads + self.groups], heads[:, self.heads + self.groups :]
        query_keys = turn(query_keys if self.head_norm is None else self.head_norm(query_keys))
        query, keys = query_keys[:, : self.heads], query_keys[:, self.heads :]
        mask, parts = kept.write(keys, values)
        return attend(query[:, :, None], kept.keys, kept.values, mask, parts, self.scaling).reshape(count, -1)


class _Norm:
    """An RMS norm x ∘ w / √(mean(x²) + ε), as √d x ∘ w / √(‖x‖² + d ε): fewer operations than PyTorch's own."""

    def __init__(self, norm: nn.Module, count: int = 1, other: nn.Module | None = None, others: int = 0):
        """Of rows (…, d), or of `count` heads with the weights of one norm and `others` with those of the other."""
        size, weight = len(norm.weight), norm.weight.detach()
        if other is not None:
            weight = torch.cat([weight.expand(count, -1), other.weight.detach().expand(others, -1)])
        self.weight, self.floor = weight * math.sqrt(size), weight.new_tensor(math.sqrt(size * norm.variance_epsilon))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)).mul_(self.weight)


def _filled(x):
    """At least as many rows as products want; the first ones are those of x."""
    return x if len(x) >= fewest() else torch.cat([x] * -(-fewest() // len(x)))[: fewest()]
