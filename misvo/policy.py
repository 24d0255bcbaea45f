"""A frozen model and its tokenizer, ready to be steered: what users load, sample from and hand to `misvo.steer`."""

from contextlib import nullcontext
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from misvo import embedded, int8, linear
from misvo.engines.torch import TorchEngine
from misvo.errors import MisvoError, first_line
from misvo.footprint import MOST_ROWS
from misvo.interventions import Vectors
from misvo.model import Model
from misvo.own_sampler import OwnSampler
from misvo.prompts import Prompt, render
from misvo.rollouts import Request
from misvo.sampling import sampler_of
from misvo.settings import SAMPLER, Settings
from misvo.text import before_stop


class Policy(Model):
    """A frozen causal LM and its tokenizer."""

    def __init__(self, model, tokenizer, name: str | None = None, own_sampler: OwnSampler | None = None):
        super().__init__(model, getattr(tokenizer, "eos_token_id", None), name)
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
    ) -> "Policy":
        """Load an embedded model by its name, or any causal LM by Hugging Face id or folder.

        `quantize="int8"` makes the linear layers of the body int8, on a CPU: another policy, close to the first one,
        that sampling, scores, Fisher matrices and KLs all speak of. `compile=True` compiles the body, for GPUs: on a
        CPU the layers that are packed without it are quicker (docs/speed.md).
        """
        known = name in embedded.MODELS
        folder = embedded.model_folder(name) if known else name
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            with embedded.quiet() if known else nullcontext():
                tokenizer = AutoTokenizer.from_pretrained(folder, **options)
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device_map, **options)
        except (OSError, ValueError, KeyError, ImportError) as error:
            kind = "folder" if Path(str(name)).is_dir() else "name"
            raise MisvoError(
                f"no model could be loaded from the {kind} {name!r}: give an embedded name "
                f"({', '.join(embedded.MODELS)}), a Hugging Face id or a folder ({first_line(error)})"
            ) from error
        if device is not None:
            model = model.to(device)
        if quantize is not None:
            int8.quantize(model.base_model, quantize)
        elif not compile:  # a compiler makes its own choice of kernels
            linear.pack(model.base_model)
        if compile:
            model.base_model.compile(dynamic=True)
        own_sampler = embedded.MODELS[name].sampler if known else None
        return cls(model.eval(), tokenizer, str(name), own_sampler)

    def __repr__(self):
        return f"Policy({self.name!r}, {self.head.vocab_size} tokens × {self.head.hidden_size})"

    def engine(self, max_rows: int = MOST_ROWS) -> TorchEngine:
        """Something that decodes requests for this policy, so many rows at a time."""
        return TorchEngine(self, max_rows)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a string or of chat messages, through the chat template where the model has one."""
        return render(self.tokenizer, prompt)

    def decode(self, tokens) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def spell(self, token: int) -> str:
        """One token as text, special ones by their names."""
        return self.tokenizer.decode([token])

    def generate(
        self,
        prompt: Prompt,
        steering=None,
        *,
        samples: int | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        strength: float = 1.0,
        **sampler,
    ) -> str | list[str]:
        """Sample from the (steered) policy: one text, or a list of `samples` texts.

        `sampler` is temperature, top_p, top_k, min_p, min_new_tokens and stop; what is not given is as in the run that
        made the steering, else as the model came. `strength` multiplies the vectors. Beyond the steering's length,
        vectors that were tied across positions go on, and others end.
        """
        if max_new_tokens is None:
            max_new_tokens = 512 if steering is None else len(steering.vectors)
        if steering is not None:
            steering.check(self)
            steering = strength * steering
        made_with = {} if steering is None else steering.metadata.get("settings", {})
        sizes = {"method": "best-of-n", "rollouts": samples or 1, "max_new_tokens": max_new_tokens, "seed": seed}
        inherited = {name: made_with[name] for name in SAMPLER if name in made_with}
        settings = Settings.from_preset(**sizes, **{**inherited, **sampler}).for_model(self.own_sampler)
        request = Request(
            prompt=tuple(self.encode(prompt)),
            seed=seed,
            step=0,
            rollouts=range(settings.rollouts),
            max_new_tokens=max_new_tokens,
            sampler=sampler_of(settings, self.ends),
            intervention=None if steering is None else Vectors.by_position(steering.at(max_new_tokens)),
            stop=settings.stop,
        )
        rows = self.rows_that_fit(None, settings, longest=len(request.prompt))
        responses = self.engine(rows).run(request).responses()
        texts = [before_stop(self.decode(tokens), settings.stop) for tokens in responses]
        return texts if samples is not None else texts[0]
