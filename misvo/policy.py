"""A frozen model and its tokenizer, ready to be steered: what users load, sample from and hand to `misvo.steer`."""

from os import PathLike

from torch import nn

from misvo import embedded, int8, linear, loading
from misvo.decoder_step import DecoderStep
from misvo.engines.adapting import AdaptingEngine
from misvo.errors import MisvoError, cut
from misvo.fields import one_of
from misvo.footprint import MOST_ROWS
from misvo.model import Model
from misvo.names import ENGINES
from misvo.own_sampler import OwnSampler
from misvo.text_policy import TextPolicy


class Policy(TextPolicy, Model):
    """A frozen causal LM and its tokenizer."""

    def __init__(
        self,
        model,
        tokenizer,
        name: str | None = None,
        own_sampler: OwnSampler | None = None,
        written_out: DecoderStep | None = None,
    ):
        super().__init__(model, getattr(tokenizer, "eos_token_id", None), name, written_out)
        self.tokenizer = tokenizer
        self.own_sampler = own_sampler or OwnSampler.of(getattr(model, "generation_config", None))

    @classmethod
    def from_pretrained(
        cls,
        name,
        *,
        dtype="auto",
        device=None,
        device_map=None,
        revision=None,
        trust_remote_code=False,
        quantize=None,
        compile=False,
        engine="torch",
        **options,
    ) -> "Policy":
        """Load an embedded model by its name, or any causal LM by Hugging Face id or folder.

        `quantize="int8"` makes the linear layers of the body int8, on a CPU: another policy, close to the first one,
        that sampling, scores, Fisher matrices and KLs all speak of. `compile=True` compiles the body, for GPUs: on a
        CPU the layers that are packed without it are quicker (docs/speed.md). `options` go to transformers: `token`,
        `subfolder`, `cache_dir`, `local_files_only`, `attn_implementation`, `quantization_config`, `max_memory`, …

        `engine="vllm"` decodes on vLLM (docs/vllm.md); `options` are then vLLM's: `max_model_len`, `max_num_seqs`, …
        """
        one_of("engine", engine, ENGINES)
        if engine == "vllm":
            from misvo.vllm_policy import VllmPolicy

            how = {"dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
            not_there = {"device": device, "device_map": device_map, "quantize": quantize, "compile": compile}
            return VllmPolicy.from_pretrained(name, **how, not_there=not_there, **options)
        options |= {"revision": revision, "trust_remote_code": trust_remote_code}
        model, tokenizer = loading.load(name, dtype=dtype, device=device, device_map=device_map, **options)
        if quantize is not None:
            int8.quantize(model.base_model, quantize)
        elif not compile:  # a compiler makes its own choice of kernels
            linear.pack(model.base_model)
        linear.align(model.get_output_embeddings())
        if compile:
            model.base_model.compile(dynamic=True)
        own_sampler = embedded.MODELS[str(name)].sampler if str(name) in embedded.MODELS else None
        written_out = None if compile else DecoderStep.of(model.base_model)
        return cls(model, tokenizer, str(name), own_sampler, written_out)

    def __repr__(self):
        name, count, place = cut(repr(self.name), 150), _rounded(self.parameter_count), cut(self.place, 60)
        return f"Policy({name}, {count} parameters, {self.precision}, {place})"

    def engine(self, max_rows: int = MOST_ROWS) -> AdaptingEngine:
        """Something that decodes requests for this policy, so many rows at a time."""
        return AdaptingEngine(self, max_rows)


def as_policy(thing) -> Policy:
    """A policy as it is, or by the name or folder that `Policy.from_pretrained` takes."""
    if isinstance(thing, str | PathLike):
        return Policy.from_pretrained(thing)
    if isinstance(thing, nn.Module):
        raise MisvoError(
            f"a {type(thing).__name__} alone cannot be steered: give misvo.Policy(model, tokenizer) in its place."
        )
    if not hasattr(thing, "engine"):
        raise MisvoError(f"a policy is a misvo.Policy, a name or a folder, not {type(thing).__name__}.")
    return thing


def _rounded(count: int) -> str:
    """135M for 134,515,008."""
    size, unit = next(
        (size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")) if count >= 0.9995 * size
    )
    return f"{count / size:.3g}{unit}"
