"""Steering behind `model.generate(..., custom_generate=...)` of transformers.

    steered = Steered(tokenizer, reward="sentiment", rollouts=8, steps=4)
    tokens = model.generate(**inputs, max_new_tokens=40, custom_generate=steered)
    steered.results[0].reward                      # what misvo.steer returns for each prompt of the last call

The same as a folder in the hub's layout is `hub/` of misvo's repository, which `generate_from_folder` serves:

    model.generate(**inputs, custom_generate="hub", trust_remote_code=True, tokenizer=tokenizer, reward="sentiment")

Tokens are those of `misvo.steer(misvo.Policy(model, tokenizer), prompt_ids, reward, ...)`. The sampler is the model's
own, as there; what `generate` is told of it takes its place. What steering cannot express (beams, several answers for
a prompt, processors of your own) is refused.
"""

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from misvo.calls import steer_many
from misvo.errors import MisvoError
from misvo.options import SettingsOptions
from misvo.own_sampler import OwnSampler
from misvo.policy import Policy
from misvo.result import Result
from misvo.settings import SAMPLER

# What `generate` puts where neither a model nor a caller says anything: not something that was asked for.
FILLED_IN = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
# `generate` turns its configuration into these, which the sampler already stands for.
OF_TRANSFORMERS = (logits_process.__name__, stopping_criteria.__name__)


class Steered:
    """A decoding method for `model.generate(custom_generate=...)`: steers every prompt of the batch.

    `reward` and `options` are those of `misvo.steer`; `columns` has a dict for each prompt. `results` holds the
    `misvo.Result`s of the last call, in the order of its prompts.
    """

    def __init__(self, tokenizer, reward, *, columns: list[dict] | None = None, **options):
        self.tokenizer, self.reward, self.columns, self.options = tokenizer, reward, columns, options
        self.results: list[Result] = []
        self._policy: Policy | None = None

    def __call__(
        self,
        model,
        input_ids,  # (prompts, tokens), padded on the left
        generation_config: GenerationConfig,
        logits_processor=(),
        stopping_criteria=(),
        **forward,  # for forward passes: of these only the mask says something of the prompts
    ):
        _refuse(generation_config, [*logits_processor, *stopping_criteria])
        if self._policy is None or self._policy.model is not model:
            self._policy = Policy(model, self.tokenizer)
        told = {**_sampler(generation_config, model.generation_config), **self.options}
        room = generation_config.max_new_tokens or generation_config.max_length - input_ids.shape[1]
        told.setdefault("max_new_tokens", room)
        mask = forward.get("attention_mask")
        kept = torch.ones_like(input_ids) if mask is None else mask
        prompts = [row[own.bool()].tolist() for row, own in zip(input_ids, kept, strict=True)]
        self.results = steer_many(self._policy, prompts, self.reward, columns=self.columns, **told)
        answers = [torch.tensor(result.best.tokens) for result in self.results]
        pad = next(end for end in (generation_config.pad_token_id, *self._policy.ends, 0) if end is not None)
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=pad)
        sequences = torch.cat([input_ids, padded.to(input_ids.device)], dim=1)
        return (
            GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences
        )


def generate_from_folder(model, inputs=None, *, tokenizer=None, reward=None, columns=None, preset="auto", **arguments):
    """What `hub/custom_generate/generate.py` calls: settings of misvo are told from arguments of `generate` by name."""
    if tokenizer is None or reward is None:
        raise MisvoError("custom_generate of misvo needs tokenizer=... and reward=... beside the inputs.")
    settings = {name: arguments.pop(name) for name in SettingsOptions.__annotations__ if name in arguments}
    if "max_new_tokens" in settings:  # `generate` too wants to know, and warns where it does not
        arguments["max_new_tokens"] = settings["max_new_tokens"]
    steered = Steered(tokenizer, reward, columns=columns, preset=preset, **settings)
    return model.generate(inputs, custom_generate=steered, **arguments)


def _sampler(told: GenerationConfig, own: GenerationConfig) -> dict:
    """What of the sampler `generate` was told: neither the model's own value nor one that `generate` fills in."""
    here, there = (
        {**{name: getattr(config, name, None) for name in SAMPLER}, "stop": config.stop_strings}
        for config in (told, own)
    )
    asked = {
        name: value for name, value in here.items() if value not in (None, there[name]) and value != FILLED_IN.get(name)
    }
    return {**asked, "stop": OwnSampler.of(told).stop} if "stop" in asked else asked


def _refuse(config: GenerationConfig, processors: list) -> None:
    """Say what cannot be had, before anything is sampled."""
    if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
        raise MisvoError("steering returns one response for a prompt, without beams: leave num_beams and others at 1.")
    for thing in processors:
        if type(thing).__module__ not in OF_TRANSFORMERS:
            raise MisvoError(f"a {type(thing).__name__} of your own cannot be part of the policy that is steered.")
