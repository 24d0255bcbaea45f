"""A model on vLLM with its tokenizer: what `Policy.from_pretrained(name, engine="vllm")` gives.

This process holds the tokenizer and the LM head, of which updates are made; the model is with vLLM. Where vLLM has
died, the next engine starts it again.
"""

from os import PathLike
from weakref import finalize

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from misvo import embedded, hub, placement
from misvo.engines import vllm_loading
from misvo.engines.vllm import VllmEngine, VllmHost
from misvo.errors import MisvoError, cut
from misvo.footprint import MOST_ROWS
from misvo.model import check_length, ends_of
from misvo.own_sampler import OwnSampler
from misvo.settings import Settings
from misvo.text_policy import TextPolicy


class VllmPolicy(TextPolicy):
    def __init__(self, name: str, tokenizer, own_sampler: OwnSampler, ends: tuple[int, ...], options: dict):
        self.name, self.tokenizer, self.own_sampler, self.ends = name, tokenizer, own_sampler, ends
        self.options = options  # that vLLM is started with
        self._start()

    @classmethod
    def from_pretrained(
        cls, name, *, dtype="auto", revision=None, trust_remote_code=False, not_there: dict | None = None, **options
    ) -> "VllmPolicy":
        """Start vLLM on an embedded model, a Hugging Face id or a folder. `options` are those of vLLM's EngineArgs."""
        for option, value in (not_there or {}).items():
            if value:
                raise MisvoError(f"{option} is not an option of engine='vllm': vLLM decides it by options of its own.")
        vllm_loading.check(options)
        vllm_loading.check_version()
        if not isinstance(name, str | PathLike):
            raise MisvoError(f"engine='vllm' takes a name or a folder, not {type(name).__name__}.")
        dtype = placement.parse_dtype(dtype)
        known = str(name) in embedded.MODELS
        folder = str(embedded.model_folder(str(name)) if known else name)
        source, files = hub.find(folder), {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            with source.reading():
                tokenizer = AutoTokenizer.from_pretrained(folder, **files)
                config = AutoConfig.from_pretrained(folder, **files)
                generation = _generation_config(folder, config, files)
        except Exception as error:  # a hub, a disk, a format: each has errors of its own
            raise MisvoError(f"no model could be loaded from {str(name)!r}: {source.explain(error)}.") from error
        text = config.get_text_config(decoder=True)
        if getattr(text, "final_logit_softcapping", None) is not None:
            raise MisvoError(
                f"this model soft-caps its logits (at {text.final_logit_softcapping}), so its head is not linear and "
                "cannot be steered."
            )
        if dtype == "auto":  # as it was saved; vLLM itself would halve fp32
            dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
        started_with = {
            "model": folder,
            "dtype": str(dtype).removeprefix("torch."),
            "trust_remote_code": trust_remote_code,
            **({"revision": revision} if revision else {}),
            **options,
        }
        own_sampler = embedded.MODELS[str(name)].sampler if known else None
        ends = tuple(ends_of(generation, getattr(tokenizer, "eos_token_id", None)))
        return cls(str(name), tokenizer, own_sampler or OwnSampler.of(generation), ends, started_with)

    def __repr__(self):
        return f"VllmPolicy({cut(repr(self.name), 150)}, {self.precision}, {cut(self.place, 60)})"

    @property
    def host(self) -> VllmHost:
        """The vLLM that decodes, started again where it has died."""
        if self._host.dead is not None:
            self._start()
        return self._host

    def engine(self, max_rows: int = MOST_ROWS) -> VllmEngine:
        host = self.host
        return VllmEngine(host, min(max_rows, host.max_rows))

    @property
    def device(self) -> torch.device:
        """Where updates are made; the model is with vLLM."""
        return self.head.device

    @property
    def place(self) -> str:
        return "vLLM"

    @property
    def precision(self) -> str:
        return self.options["dtype"]

    @property
    def context_length(self) -> int:
        return self._host.context_length

    def check_length(self, prompt_tokens: int, max_new_tokens: int) -> None:
        check_length(self.name, self.context_length, prompt_tokens, max_new_tokens)

    def rows_that_fit(self, prefix, settings: Settings, prompts: int = 1, longest: int = 0) -> int:
        """As many as vLLM runs at once: it keeps account of its memory itself, and lets rows wait."""
        return self.host.max_rows

    def close(self) -> None:
        """End vLLM and its processes; letting go of the policy does so too. Whoever uses it again starts it again."""
        self._host.close()

    def _start(self):
        self._host = VllmHost(self.options, self.ends, self.tokenizer)
        self.head = self._host.head
        finalize(self, self._host.close)


def _generation_config(folder, config, files):
    try:
        return GenerationConfig.from_pretrained(folder, **files)
    except OSError:  # a checkpoint without one
        return GenerationConfig.from_model_config(config)
