"""A step that is written out gives the states of a model that reads everything, for every family and kind of row."""

import dataclasses
import warnings

import pytest
import torch
from conftest import SHAPE, make_model, make_policy, make_tokenizer
from test_continued import by_reading, whole_request
from test_row_attention import LONG
from tolerances import room
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from misvo import Policy, decoder_step
from misvo.decoder_step import DecoderStep
from misvo.engines import batch
from misvo.engines.torch import TorchEngine
from misvo.int8 import quantize
from misvo.linear import pack
from misvo.row_layer import TOGETHER

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 8}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama, biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama, yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **SLIDING)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),  # heads that are wider than the states
}


def written_out(model) -> Policy:
    step = DecoderStep.of(model.base_model)
    assert step is not None
    return Policy(model, make_tokenizer(), written_out=step)


def family(name):
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:  # ones and zeros would hide a mistake
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in parameter_name else 0.0, std=0.3)
    return model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("least", [TOGETHER, 1000], ids=["prompt kept once", "prompt copied"])
def test_states_are_those_of_a_model_that_reads_everything(name, least, packed, monkeypatch):
    """Two prompts of different lengths in one batch, one of them beyond the windows; then one row alone. Packed layers
    have their queries, keys and values in one product."""
    whole, model = family(name), family(name)
    if packed:
        pack(model.base_model)
    policy = written_out(model)
    short = whole_request(policy)
    long = dataclasses.replace(short, prompt=LONG, rollouts=range(TOGETHER))
    alone = dataclasses.replace(long, rollouts=range(1))
    monkeypatch.setattr(batch, "TOGETHER", least)
    found = [*TorchEngine(policy, 32).run_many([short, long]), *TorchEngine(policy, 32).run_many([alone])]
    for request, rollouts in zip((short, long, alone), found, strict=True):
        expected = by_reading(request, rollouts.responses(), "hidden")
        error = (rollouts.hidden[rollouts.alive] - expected(whole)).norm()
        assert error <= 2 * room(expected, whole)


def test_the_body_itself_is_not_asked(monkeypatch):
    policy = written_out(family("llama"))
    asked, forward = [], policy.body.forward
    monkeypatch.setattr(policy.body, "forward", lambda **given: asked.append(given) or forward(**given))
    TorchEngine(policy, 32).run_many([whole_request(policy)])
    assert len(asked) == 1  # for the prompt


@pytest.mark.parametrize("pick", ["layers.1", "layers.0.self_attn", "norm", ""])
def test_who_listens_to_a_module_hears_every_step(pick):
    policy, heard = written_out(family("llama")), []
    request = whole_request(policy)
    plain = TorchEngine(policy, 32).run_many([request])[0]
    policy.body.get_submodule(pick).register_forward_hook(lambda *_: heard.append(1))
    hooked = TorchEngine(policy, 32).run_many([request])[0]
    assert len(heard) == request.max_new_tokens and torch.equal(hooked.tokens, plain.tokens)


@pytest.mark.parametrize("fewest", [2, 6])
def test_rows_have_the_same_bits_in_any_company(fewest, monkeypatch):
    """Packed layers, as in models that are loaded by name; alone a row has products of two or of six."""
    monkeypatch.setattr(decoder_step, "fewest", lambda: fewest)
    policy = family("llama")
    pack(policy.base_model)
    policy = written_out(policy)
    request = whole_request(policy)
    other = dataclasses.replace(request, prompt=LONG)
    one = dataclasses.replace(request, rollouts=range(2, 3))
    engine = TorchEngine(policy, 64)
    by_itself, together = engine.run_many([request])[0], engine.run_many([other, request])[1]
    assert torch.equal(by_itself.hidden, together.hidden)
    alone, beside = engine.run_many([one])[0], engine.run_many([one, other])[0]
    assert torch.equal(alone.hidden, beside.hidden)


@pytest.mark.parametrize("architecture", ["gemma3", "phi3", "granite", "cohere", "lfm2", "gptj-bias"])
def test_other_families_are_left_alone(architecture):
    assert DecoderStep.of(make_model(architecture).base_model) is None


def test_a_given_model_and_other_precisions_are_called_as_they_are():
    assert make_policy("llama").written_out is None
    assert DecoderStep.of(make_model("llama").to(torch.bfloat16).base_model) is None
    policy = written_out(family("llama"))
    assert policy.with_model(policy.model).written_out is None


@pytest.mark.parametrize("mistake", ["no norms", "sharper attention"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_a_step_that_does_not_agree_with_the_model_is_not_used(int8, mistake, monkeypatch):
    """As with a version of transformers in which a family is something else. An int8 layer may round an input the other
    way where a sum before it has another last digit: that alone does not make another step of it."""

    def made(name):
        model = family(name)
        if int8:
            quantize(model.base_model, "int8")
        return written_out(model)

    if mistake == "no norms":
        monkeypatch.setattr(decoder_step._Norm, "__call__", lambda norm, x: x)
    else:
        attend = decoder_step.attend
        monkeypatch.setattr(decoder_step, "attend", lambda *given: attend(*given[:-1], 2 * given[-1]))
    with pytest.warns(UserWarning, match="decoded by transformers itself"):
        policy = made("llama")
    monkeypatch.undo()
    assert policy.written_out is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(made(name).written_out is not None for name in FAMILIES)
