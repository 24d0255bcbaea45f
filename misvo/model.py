"""The frozen model as an engine sees it: a body that turns tokens into hidden states, a linear head, ends of text.

Any causal LM of transformers serves as it is: no hook, flag, seed or thread setting is changed, and at load one small
forward pass checks that `head(body(x))` is what the model itself says.
"""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from misvo import cache as kv
from misvo import footprint
from misvo.adapted import AdaptedModel
from misvo.adapter import AdapterForm
from misvo.decoder_step import DecoderStep
from misvo.errors import MisvoError
from misvo.fields import parse_bytes
from misvo.head import Head
from misvo.int8 import INPUTS, Int8Linear
from misvo.linear import JoinedLinear, PackedLinear
from misvo.row_layer import Common
from misvo.settings import Settings

INT8_STEPS = 4  # of the largest input of a layer: what a few inputs that are one step apart make of all states
# Names under which configs keep a scalar on the logits, and what it multiplies them by.
LOGIT_SCALES = {
    "logits_scaling": lambda x: 1 / x,  # Granite
    "logit_scale": lambda x: x,  # Cohere
    "lm_head_multiplier": lambda x: x,  # Falcon-H1
}


@dataclass(frozen=True)
class Prefix:
    """What has been read: a prompt, or rows that were taken out of a batch; as many tokens in each row."""

    length: int  # tokens of a row
    cache: Cache  # of what comes behind `common`
    hidden: torch.Tensor  # (rows, d), the states that the next tokens are drawn from
    common: Common | None = None  # what all of its rows go on from


class Model:
    """A frozen causal LM of transformers and the tokens that end its responses."""

    def __init__(
        self, model, eos_token: int | None = None, name: str | None = None, written_out: DecoderStep | None = None
    ):
        """`written_out` decodes in the place of the model's body, where it can."""
        if model.training:
            raise MisvoError(
                "the model is in training mode, where dropout changes its answers: call model.eval() first."
            )
        self.model = model
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        self.config = model.config.get_text_config(decoder=True)
        self.body = model.base_model
        self.head = _find_head(model, self.config)
        self.ends = tuple(ends_of(getattr(model, "generation_config", None), eos_token))
        self.eos_tokens = torch.tensor(self.ends, dtype=torch.long)
        self._adapted: dict[AdapterForm, AdaptedModel] = {}
        self._check_head()
        self.written_out = written_out
        if written_out is not None and not self._agrees(written_out):
            self.written_out = None
            warnings.warn(
                f"{self.name} is decoded by transformers itself, which is slower: misvo writes a step of "
                f"{type(self.body).__name__} out for other versions of transformers than {transformers.__version__}.",
                stacklevel=3,
            )

    def decode(self, tokens) -> str:
        """The text of token ids: a matter of tokenizers, which `misvo.Policy` has."""
        raise MisvoError("stop texts need a tokenizer: decode with misvo.Policy(model, tokenizer).")

    @property
    def device(self) -> torch.device:
        return self.body.get_input_embeddings().weight.device

    @property
    def place(self) -> str:
        """The device that the model stands on, or all of them where it is spread."""
        return " + ".join(sorted({str(weight.device) for weight in self.model.parameters()}))

    @property
    def precision(self) -> str:
        """What weights are kept in, by torch's name."""
        quantized = any(isinstance(layer, Int8Linear) for layer in self.body.modules())
        return "int8" if quantized else str(self.model.dtype).removeprefix("torch.")

    @property
    def parameter_count(self) -> int:
        """Numbers in the model, those of layers that hold their weights in an order of their own too."""
        own = [layer for layer in self.body.modules() if isinstance(layer, PackedLinear | JoinedLinear | Int8Linear)]
        return self.model.num_parameters() + sum(layer.in_features * layer.out_features for layer in own)

    @property
    def context_length(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    def check_length(self, prompt_tokens: int, max_new_tokens: int) -> None:
        check_length(self.name, self.context_length, prompt_tokens, max_new_tokens)

    def with_model(self, model) -> "Model":
        """The same head, ends and words on another body."""
        other = copy.copy(self)
        other.model, other.body, other.written_out = model, model.base_model, None
        return other

    def adapted(self, form: AdapterForm) -> AdaptedModel:
        """This model with low-rank layers beside its own, of the same tensors; made once for each form."""
        if form not in self._adapted:
            self._adapted[form] = AdaptedModel(self, form)
        return self._adapted[form]

    @torch.no_grad()
    def prefill(self, tokens, max_new_tokens: int) -> Prefix:
        """Read a prompt once; every rollout of every step begins from what this returns."""
        self.check_length(len(tokens), max_new_tokens)
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([list(tokens)], device=self.device)
        output = self.body(input_ids=ids, past_key_values=cache, use_cache=True)
        return Prefix(len(tokens), output.past_key_values, output.last_hidden_state[:, -1].to(self.head.device))

    @torch.no_grad()
    def extend(self, prompt, prefix: Prefix, tokens) -> Prefix:
        """Read a prompt's beginning of a response, behind what was read of it already where the cache allows it."""
        if any(isinstance(layer, LinearAttentionLayer) for layer in prefix.cache.layers):
            return self.prefill([*prompt, *tokens], 0)  # its states take one token at a time, or all from the first
        ids = torch.tensor([list(tokens)], device=self.device)
        output = self.body(input_ids=ids, past_key_values=copy.deepcopy(prefix.cache), use_cache=True)
        hidden = output.last_hidden_state[:, -1].to(self.head.device)
        return Prefix(prefix.length + len(tokens), output.past_key_values, hidden)

    def read(self, prompt: tuple[int, ...], responses: torch.Tensor) -> torch.Tensor:
        """The states that the tokens of responses (n, T) were drawn from, (n, T, d), all positions at once.

        Rows are padded on the right, which nothing before it can see. Attention reads the prompt once for all rows;
        other layers need not go on from states by many tokens, or have gradients there: with these, every row reads it.
        """
        count, cache = len(responses), DynamicCache(config=self.model.config)
        ids, read = torch.tensor([list(prompt)], device=self.device), responses[:, :-1].to(self.device)
        if not {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}:
            whole = torch.cat([ids.expand(count, -1), read], 1)
            hidden = self.body(input_ids=whole, use_cache=False).last_hidden_state[:, len(prompt) - 1 :]
        else:
            first = self.body(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[:, -1:]
            cache.reorder_cache(torch.zeros(count, dtype=torch.long))
            hidden = first.expand(count, -1, -1)
            if read.shape[1]:  # the last token is read by nobody
                rest = self.body(input_ids=read, past_key_values=cache, use_cache=True).last_hidden_state
                hidden = torch.cat([hidden, rest], 1)
        return hidden.to(self.head.device)

    def body_step(self, tokens, cache, depths: torch.Tensor) -> torch.Tensor:
        """One more token for every row, (B,) -> (B, d); `depths` (B,) says how many tokens each row has read."""
        if cache.slots is not None:  # rows stand in the cache in an order of its own
            order = cache.slots.argsort()
            tokens, depths = tokens[order.to(tokens.device)], depths[order]
        mask = None
        if cache.columns is not None:
            cache.columns.stand_at(depths)
        elif (pads := int(depths.max()) - depths).any():  # rows of one length need no mask
            mask = (torch.arange(int(depths.max()) + 1) >= pads[:, None]).long().to(self.device)
        if self.written_out is not None and self.written_out.serves(cache):
            hidden = self.written_out(tokens, cache, depths)
        else:
            output = self.body(
                input_ids=tokens.to(self.device)[:, None],
                attention_mask=mask,
                position_ids=depths.to(self.device)[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            kv.check_attention(cache)
            hidden = output.last_hidden_state[:, -1].to(self.head.device)
        return hidden if cache.slots is None else hidden[cache.slots.to(hidden.device)]

    def replicate(self, prefix: Prefix, rows: torch.Tensor, room: int, common: Common | None = None):
        """A cache of rows that go on from those that have been read, with room for so many tokens more."""
        aligned = self.aligned_head(prefix) is not None
        return kv.replicate(prefix.cache, rows, room, aligned, common, prefix.length)

    def aligned_head(self, prefix: Prefix) -> int | None:
        """The size of a head where rows of this model begin at one column (`misvo.row_layer`), None elsewhere."""
        if not kv.aligns(prefix.cache, getattr(self.config, "_attn_implementation", None)):
            return None
        return next((layer.keys.shape[-1] for layer in prefix.cache.layers if hasattr(layer, "keys")), None)

    def rows_that_fit(self, prefix: Prefix | None, settings: Settings, prompts: int = 1, longest: int = 0) -> int:
        """How many rows may decode at once within `settings.memory`, or half of what is free now.

        `longest` is the length of the longest of the prompts, where it is another one than `prefix`.
        """
        memory = parse_bytes(settings.memory) if settings.memory else free_memory(self.head.device) // 2
        shape = footprint.Shape.of(self, prefix)
        return footprint.rows_that_fit(shape, settings, max(longest, prefix.length if prefix else 0), prompts, memory)

    @torch.no_grad()
    def _agrees(self, written_out: DecoderStep) -> bool:
        """Compare a step that is written out with the body's own, on two rows behind a few tokens.

        Inputs of int8 layers have 127 steps, and may come out one apart where the last digit of a sum differs. So some
        numbers are off by a step; states as a whole hardly are.
        """
        prefix, rows = self.prefill([1, 2, 3, 4], 1), torch.zeros(2, dtype=torch.long)
        depths, tokens = torch.full((2,), prefix.length), torch.tensor([5, 6]) % self.head.vocab_size
        self.written_out = None
        own = self.body_step(tokens, self.replicate(prefix, rows, 1), depths)
        self.written_out = written_out
        ours = self.body_step(tokens, self.replicate(prefix, rows, 1), depths)
        if self.precision == "int8":
            return bool(torch.linalg.vector_norm(ours - own) <= INT8_STEPS / INPUTS * torch.linalg.vector_norm(own))
        return _close(ours, own)

    @torch.no_grad()
    def _check_head(self):
        """Compare `head(body(x))` with the model's own logits on a few tokens."""
        ids = torch.arange(1, 6, device=self.device).remainder_(self.head.vocab_size)[None]
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        own = self.model(input_ids=ids, use_cache=False).logits.to(self.head.dtype)[0]
        if not _close(self.head.logits(hidden[0]).to(own.device), own, self.head.weight.dtype):
            raise MisvoError(
                f"the logits of {self.name} are not a linear function of its last hidden state; it cannot be steered."
            )


def _close(ours: torch.Tensor, own: torch.Tensor, precision: torch.dtype = torch.float32) -> bool:
    """Whether two arrays are the same but for rounding."""
    allowed = 8 * torch.finfo(precision).eps ** 0.75 * own.abs().max().clamp(min=1e-6)
    return ours.shape == own.shape and bool((ours - own).abs().max() <= allowed)


def _find_head(model, config) -> Head:
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        raise MisvoError(
            f"this model soft-caps its logits (at {cap}), so its head is not linear and cannot be steered."
        )
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise MisvoError(
            f"the head of {type(model).__name__} is {type(layer).__name__}, not a linear layer, and cannot be steered."
        )
    scales = [convert(getattr(config, name)) for name, convert in LOGIT_SCALES.items() if getattr(config, name, None)]
    return Head(layer.weight, layer.bias, scale=scales[0] if scales else 1.0)


def check_length(name: str, limit: int | None, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse what is longer than the context of a model."""
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise MisvoError(
            f"the prompt has {prompt_tokens} tokens and max_new_tokens is {max_new_tokens}, "
            f"but {name} has a context of {limit} tokens."
        )


def ends_of(generation_config, eos_token: int | None) -> list[int]:
    """Every token that ends a response: generation_config may list several, the tokenizer names one."""
    listed = getattr(generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({token for token in [*listed, eos_token] if token is not None})


def free_memory(device: torch.device) -> int:
    """Bytes that could be had now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and Path("/proc/meminfo").exists():
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return 8 * 2**30  # a machine that does not tell: assume a modest one
