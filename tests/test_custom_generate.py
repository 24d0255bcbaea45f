"""`model.generate(custom_generate=...)` gives the tokens of `misvo.steer`: as a callable and as a folder of the hub."""

from pathlib import Path

import pytest
import torch
from conftest import letter_reward, make_model, make_tokenizer
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import misvo
from misvo.integrations.transformers import FILLED_IN, Steered

HUB = Path(__file__).parent.parent / "hub"
SIZES = {"rollouts": 4, "steps": 3}
PROMPTS = ["a b c d", "e"]


@pytest.fixture
def model():
    return make_model("llama")


def inputs(*texts):
    tokenizer = make_tokenizer()
    return tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)


def steered_alone(model, prompt, **options):
    tokenizer = make_tokenizer()
    return misvo.steer(misvo.Policy(model, tokenizer), tokenizer(prompt)["input_ids"], letter_reward, **options)


def behind(sequence, prompt_tokens):
    """The response in a row of `generate`, without what it is padded with."""
    response = sequence[prompt_tokens:].tolist()
    while response and response[-1] == 0:
        response.pop()
    return response


def test_a_callable_gives_the_tokens_of_steer(model):
    given = inputs("a b c d")
    steered = Steered(make_tokenizer(), letter_reward, **SIZES)
    tokens = model.generate(**given, max_new_tokens=6, custom_generate=steered)
    alone = steered_alone(model, "a b c d", max_new_tokens=6, **SIZES)
    assert tokens[0].tolist() == [*given["input_ids"][0].tolist(), *alone.best.tokens]
    (result,) = steered.results
    assert [c.tokens for c in result.candidates] == [c.tokens for c in alone.candidates]
    assert torch.equal(result.steering.vectors, alone.steering.vectors)


@pytest.mark.parametrize("as_folder", [False, True])
def test_prompts_that_are_padded_have_what_they_have_alone(model, as_folder):
    given = inputs(*PROMPTS)
    assert (given["attention_mask"][1] == 0).any()
    if as_folder:
        own = {"tokenizer": make_tokenizer(), "reward": letter_reward, **SIZES}
        tokens = model.generate(**given, max_new_tokens=6, custom_generate=str(HUB), trust_remote_code=True, **own)
    else:
        tokens = model.generate(
            **given, max_new_tokens=6, custom_generate=Steered(make_tokenizer(), letter_reward, **SIZES)
        )
    length = given["input_ids"].shape[1]
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        assert behind(row, length) == steered_alone(model, prompt, max_new_tokens=6, **SIZES).best.tokens


def test_the_folder_is_not_run_without_consent(model):
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**inputs("a"), custom_generate=str(HUB), tokenizer=make_tokenizer(), reward=letter_reward)


def test_the_folder_says_what_it_lacks(model):
    with pytest.raises(misvo.MisvoError, match="reward"):
        model.generate(**inputs("a"), custom_generate=str(HUB), trust_remote_code=True, tokenizer=make_tokenizer())


def test_what_generate_is_told_of_the_sampler_counts(model):
    told = {"do_sample": True, "temperature": 0.4, "top_k": 7, "max_new_tokens": 5}
    steered = Steered(make_tokenizer(), letter_reward, **SIZES)
    model.generate(**inputs("a b"), **told, custom_generate=steered)
    settings = steered.results[0].settings
    assert (settings.temperature, settings.top_k, settings.max_new_tokens) == (0.4, 7, 5)
    again = Steered(make_tokenizer(), letter_reward, temperature=0.9, **SIZES)  # what misvo is told comes first
    model.generate(**inputs("a b"), **told, custom_generate=again)
    assert again.results[0].settings.temperature == 0.9


def test_what_generate_fills_in_is_not_asked_for(model):
    """Else a model without a sampler of its own would be sampled at temperature 1 here and at 0.7 by `misvo.steer`."""
    prepared = model._prepare_generation_config(None)[0]
    assert {name: getattr(prepared, name) for name in FILLED_IN} == FILLED_IN
    steered = Steered(make_tokenizer(), letter_reward, **SIZES)
    model.generate(**inputs("a b"), max_new_tokens=5, custom_generate=steered)
    alone = steered_alone(model, "a b", max_new_tokens=5, **SIZES)
    assert steered.results[0].settings == alone.settings and alone.settings.temperature == 0.7


def test_a_dict_where_one_is_asked_for(model):
    config = GenerationConfig(max_new_tokens=5, return_dict_in_generate=True, pad_token_id=0, eos_token_id=2)
    steered = Steered(make_tokenizer(), letter_reward, **SIZES)
    output = model.generate(**inputs("a b"), generation_config=config, custom_generate=steered)
    assert output.sequences[0, 2:].tolist() == steered.results[0].best.tokens


class Ban(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, "one response"),
        ({"num_beams": 2}, "beams"),
        ({"logits_processor": LogitsProcessorList([Ban()])}, "Ban"),
    ],
)
def test_what_cannot_be_steered_is_refused(model, more, word):
    with pytest.raises(misvo.MisvoError, match=word):
        model.generate(
            **inputs("a b"), max_new_tokens=5, custom_generate=Steered(make_tokenizer(), letter_reward), **more
        )
