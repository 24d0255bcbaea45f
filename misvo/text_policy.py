"""What every policy does with prompts and texts, whatever decodes for it: templates, sampling, steering by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from misvo.errors import MisvoError
from misvo.head import Head
from misvo.interventions import Vectors
from misvo.own_sampler import OwnSampler
from misvo.prompts import Prompt, is_many, render
from misvo.rollouts import Request, Rollouts
from misvo.sampling import sampler_of
from misvo.settings import SAMPLER, Settings
from misvo.steering import Steering, as_steering
from misvo.text import before_stop


@dataclass(frozen=True)
class Samples:
    """Texts that were sampled, and what is known of their tokens."""

    texts: list[str]
    rollouts: Rollouts


class TextPolicy:
    """A tokenizer, a head and something that decodes.

    `misvo.Policy` and `VllmPolicy` add what decodes: `engine(max_rows)`, `rows_that_fit(...)` and `check_length(...)`.
    """

    name: str
    head: Head
    ends: tuple[int, ...]  # the tokens that end its responses
    tokenizer: Any
    own_sampler: OwnSampler

    def close(self) -> None:
        """End what decodes where that is a process of its own, as with vLLM; `with policy:` does so at its end."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def encode(self, prompt: Prompt, *, raw: bool = False, chat_template_kwargs: Mapping | None = None) -> list[int]:
        """Token ids of a string or of chat messages, through the chat template where the model has one.

        `raw=True` leaves the template out; `chat_template_kwargs` are handed to it, as in {"enable_thinking": False}.
        """
        tokens = render(self.tokenizer, prompt, raw=raw, chat_template_kwargs=chat_template_kwargs)
        if max(tokens, default=0) >= self.head.vocab_size:
            raise MisvoError(
                f"the prompt holds the token id {max(tokens)}, but {self.name} has {self.head.vocab_size} tokens."
            )
        return tokens

    def decode(self, tokens) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def spell(self, token: int) -> str:
        """One token as text, special ones by their names."""
        return self.tokenizer.decode([token])

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        steering=None,
        *,
        samples: int | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        strength: float = 1.0,
        raw: bool = False,
        chat_template_kwargs: Mapping | None = None,
        **sampler,
    ) -> str | list[str] | list[list[str]]:
        """Sample from the (steered) policy: one text, or a list of `samples` texts.

        A list of strings, of chats or of lists of token ids is many prompts, which are decoded together: what comes
        back is a list, with what each prompt has alone. A list of messages or of token ids is one prompt.

        `steering` is a `Steering`, the folder of one, or a `Result`; `strength` multiplies its vectors. Beyond its
        length, vectors that were tied across positions go on, and others end. `sampler` is temperature, top_p, top_k,
        min_p, min_new_tokens and stop; what is not given is as in the run that made the steering, else as the model
        came. `raw` and `chat_template_kwargs` are those of `encode`.
        """
        sampled = self.sample(
            prompt,
            steering,
            samples=samples or 1,
            max_new_tokens=max_new_tokens,
            seed=seed,
            strength=strength,
            raw=raw,
            chat_template_kwargs=chat_template_kwargs,
            **sampler,
        )
        if isinstance(sampled, list):
            return [one.texts if samples is not None else one.texts[0] for one in sampled]
        return sampled.texts if samples is not None else sampled.texts[0]

    def sample(
        self,
        prompt: Prompt | Sequence[Prompt],
        steering=None,
        *,
        samples: int = 1,
        max_new_tokens: int | None = None,
        seed: int = 0,
        strength: float = 1.0,
        raw: bool = False,
        chat_template_kwargs: Mapping | None = None,
        **sampler,
    ) -> Samples | list[Samples]:
        """What `generate` does, with the tokens, their KL to the reference and where steering changed them."""
        steering = None if steering is None else as_steering(steering)
        if max_new_tokens is None:
            max_new_tokens = 512 if steering is None else len(steering.vectors)
        if steering is not None:
            steering.check(self)
            steering = strength * steering
        sizes = {"rollouts": samples, "max_new_tokens": max_new_tokens, "seed": seed}
        settings = sample_settings(steering, **sizes, **sampler).for_model(self.own_sampler)
        many, template = is_many(prompt), {"raw": raw, "chat_template_kwargs": chat_template_kwargs}
        prompts = [tuple(self.encode(one, **template)) for one in (prompt if many else [prompt])]
        for tokens in prompts:
            self.check_length(len(tokens), max_new_tokens)
        requests = {  # the same prompt twice has the same answer
            tokens: Request(
                prompt=tokens,
                seed=seed,
                step=0,
                rollouts=range(settings.rollouts),
                max_new_tokens=max_new_tokens,
                sampler=sampler_of(settings, self.ends),
                intervention=None if steering is None else Vectors.by_position(steering.at(max_new_tokens)),
                stop=settings.stop,
            )
            for tokens in prompts
        }
        rows = self.rows_that_fit(None, settings, len(requests), longest=max(map(len, requests)))
        decoded = dict(zip(requests, self.engine(rows).run_many(list(requests.values())), strict=True))
        sampled = [self._samples(decoded[tokens], settings.stop) for tokens in prompts]
        return sampled if many else sampled[0]

    def _samples(self, rollouts, stop):
        return Samples([before_stop(self.decode(tokens), stop) for tokens in rollouts.responses()], rollouts)


def sample_settings(steering: Steering | None, **options) -> Settings:
    """Settings of samples: a sampler that is not given is that of the run that made the steering, or the model's."""
    made_with = {} if steering is None else steering.metadata.get("settings", {})
    inherited = {name: made_with[name] for name in SAMPLER if name in made_with}
    return Settings.from_preset(method="best-of-n", **{**inherited, **options})
