"""A new user's first hour: words for precisions and devices, names for policies, options of transformers."""

import importlib.util
import os
import platform
import subprocess
import sys
import warnings

import pytest
import torch
from conftest import letter_reward, make_model, make_policy, make_tokenizer

import misvo
from misvo.rewards import RewardModel

QUICK = {"rollouts": 3, "steps": 2, "max_new_tokens": 5, "preset": "paper"}


def refusal(call, *args, **options) -> str:
    with pytest.raises(misvo.MisvoError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("bf16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("FP32", torch.float32),
        (None, torch.float32),  # as it was saved
    ],
)
def test_precisions_by_the_words_of_people(checkpoint, word, dtype):
    policy = misvo.Policy.from_pretrained(checkpoint, dtype=word)
    assert policy.head.weight.dtype == policy.model.dtype == dtype
    result = misvo.steer(policy, "a b", letter_reward, **QUICK)
    assert len(result.candidates) == 6 and torch.isfinite(result.steering.vectors).all()
    assert misvo.Policy.from_pretrained(checkpoint, torch_dtype=word).model.dtype == dtype


@pytest.mark.parametrize("word", ["fp12", "int8", torch.int64, 16, "nn"])
def test_other_words_are_refused(checkpoint, word):
    message = refusal(misvo.Policy.from_pretrained, checkpoint, dtype=word)
    assert message.startswith(f"unknown dtype {str(word)!r}: choose one of auto, float32, bfloat16, float16")
    assert "give one of them" in refusal(misvo.Policy.from_pretrained, checkpoint, dtype="fp16", torch_dtype="bf16")


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta", 99])
@pytest.mark.parametrize("option", ["device", "device_map"])
def test_a_device_that_is_not_there(checkpoint, option, device):
    message = refusal(misvo.Policy.from_pretrained, checkpoint, **{option: device})
    assert message.startswith(f"the device {str(device)!r} cannot be used here (")
    assert ": choose one of cpu" in message


def test_a_place_is_said_once(checkpoint):
    message = refusal(misvo.Policy.from_pretrained, checkpoint, device="cpu", device_map="auto")
    assert "device and device_map exclude each other" in message


def test_reward_models_know_the_same_words(tmp_path):
    from test_reward_model import make_classifier

    model, tokenizer = make_classifier()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert RewardModel.from_pretrained(tmp_path, dtype="bf16").model.dtype == torch.bfloat16
    assert "unknown dtype 'fp12'" in refusal(RewardModel.from_pretrained, tmp_path, dtype="fp12")
    assert "the device 'nonsense' cannot be used" in refusal(RewardModel.from_pretrained, tmp_path, device="nonsense")


def test_a_name_or_a_folder_in_the_place_of_a_policy(checkpoint):
    policy = misvo.Policy.from_pretrained(checkpoint)
    expected = [c.tokens for c in misvo.steer(policy, "a b", letter_reward, **QUICK).candidates]
    for place in (checkpoint, str(checkpoint)):
        assert [c.tokens for c in misvo.steer(place, "a b", letter_reward, **QUICK).candidates] == expected
        assert len(misvo.steer_many(place, ["a", "b"], letter_reward, **QUICK)) == 2
    assert "no model could be loaded from the name 'smol'" in refusal(misvo.steer, "smol", "a", letter_reward, **QUICK)


def test_a_bare_model_is_told_how_to_become_a_policy(checkpoint):
    says = "misvo.Policy(model, tokenizer)"
    assert says in refusal(misvo.steer, make_model("llama"), "a b", letter_reward, **QUICK)
    assert says in refusal(misvo.steer_many, make_model("llama"), ["a b"], letter_reward, **QUICK)
    assert says in refusal(misvo.Policy.from_pretrained, make_model("llama"))
    for thing in (None, make_tokenizer()):
        assert "a policy is a misvo.Policy" in refusal(misvo.steer, thing, "a b", letter_reward, **QUICK)


def test_steering_by_its_folder_or_its_result(tmp_path):
    policy = make_policy()
    result = misvo.steer(policy, "a b", letter_reward, **{**QUICK, "learning_rate": 30.0})
    result.save(tmp_path / "run")
    result.steering.save_pretrained(tmp_path / "steering")
    options = {"samples": 8, "seed": 3}
    expected = policy.generate("a b", steering=result.steering, **options)
    assert expected != policy.generate("a b", max_new_tokens=5, **options)
    for steering in (result, tmp_path / "run", str(tmp_path / "steering")):
        assert policy.generate("a b", steering=steering, **options) == expected
    plain = misvo.steer(policy, "a b", letter_reward, method="best-of-n", **QUICK)
    assert "this result has no steering vectors" in refusal(policy.generate, "a b", steering=plain)
    assert "not Tensor" in refusal(policy.generate, "a b", steering=result.steering.vectors)
    assert "holds no saved steering" in refusal(policy.generate, "a b", steering="nowhere")


def test_the_options_of_transformers_reach_it(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "deep")
    make_tokenizer().save_pretrained(tmp_path / "deep")
    own = make_policy().generate("a", samples=4, max_new_tokens=8)
    policy = misvo.Policy.from_pretrained(
        tmp_path,
        subfolder="deep",
        token="not-needed",
        local_files_only=True,
        force_download=False,
        low_cpu_mem_usage=True,
        device_map="auto",
        max_memory={"cpu": "1GB"},
        offload_folder=tmp_path / "offload",
    )
    assert policy.generate("a", samples=4, max_new_tokens=8) == own
    shallow = misvo.Policy.from_pretrained(tmp_path / "deep", num_hidden_layers=1)  # a value of the config
    assert len(shallow.body.layers) == 1


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_both_kinds_of_attention_decode_the_same(tmp_path, architecture):
    """Prompts of different lengths in one batch: eager attention takes the model's masks, sdpa our own on a CPU."""
    make_model(architecture).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    found, aligned = [], []
    for kind in ("eager", "sdpa"):
        policy = misvo.Policy.from_pretrained(tmp_path, attn_implementation=kind)
        assert policy.config._attn_implementation == kind
        aligned.append(policy.aligned_head(policy.prefill([1, 2], 2)) is not None)
        results = misvo.steer_many(policy, ["a", "b c d e f g h i j k", "l m"], letter_reward, **QUICK)
        found.append([[c.tokens for c in result.candidates] for result in results])
        for result in results:  # each token is one that the model itself, reading all at once, finds as likely as said
            for candidate in result.candidates[:3]:
                with torch.no_grad():
                    logits = policy.model(torch.tensor([[*result.prompt_ids, *candidate.tokens]])).logits[0]
                laws = logits[len(result.prompt_ids) - 1 : -1].double().log_softmax(-1)
                own = laws.gather(-1, torch.tensor(candidate.tokens)[:, None]).mean().item()
                assert candidate.ref_logprob == pytest.approx(own, abs=1e-4)
    assert found[0] == found[1]
    assert aligned == [False, True]  # two ways


def test_an_unknown_option_is_one_sentence(checkpoint):
    load = misvo.Policy.from_pretrained
    assert "no option 'atn_implementation'" in refusal(load, checkpoint, atn_implementation="sdpa")
    assert "did you mean 'attn_implementation'?" in refusal(load, checkpoint, atn_implementation="sdpa")
    assert "no option 'use_fast'" in refusal(load, checkpoint, use_fast=True)
    assert "no option 'output_loading_info'" in refusal(load, checkpoint, output_loading_info=True)
    assert "nonsense" in refusal(load, checkpoint, attn_implementation="nonsense")


def test_a_checkpoint_in_16_bits_on_a_cpu_of_32(tmp_path, monkeypatch):
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(misvo.placement, "multiplies_in", lambda dtype: dtype == torch.float32)
    with pytest.warns(UserWarning, match=r"saved in bfloat16.*--dtype float32"):
        assert misvo.Policy.from_pretrained(tmp_path).head.weight.dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chosen in ("bf16", "fp32"):
            misvo.Policy.from_pretrained(tmp_path, dtype=chosen)
        monkeypatch.setattr(misvo.placement, "multiplies_in", lambda dtype: True)
        misvo.Policy.from_pretrained(tmp_path)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other CPUs have other instructions")
def test_a_cpu_with_avx2_alone_multiplies_in_32_bits():
    say = "import torch; from misvo.placement import multiplies_in as m; print(m(torch.float32), m(torch.bfloat16))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", say], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="it is installed here")
def test_a_quantization_that_is_not_installed_says_what_to_install(checkpoint):
    from transformers import BitsAndBytesConfig

    message = refusal(
        misvo.Policy.from_pretrained, checkpoint, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    assert "no model could be loaded from the folder" in message and "bitsandbytes" in message


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_a_policy_shows_what_it_is(tmp_path, architecture):
    """Every number of the checkpoint is counted, also where layers keep their weights in an order of their own."""
    model = make_model(architecture)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    count = sum(weight.numel() for weight in set(model.parameters()))  # a tied weight once
    for options, precision in (({}, "float32"), ({"dtype": "bf16"}, "bfloat16"), ({"quantize": "int8"}, "int8")):
        policy = misvo.Policy.from_pretrained(tmp_path, **options)
        assert policy.parameter_count == count
        assert repr(policy) == f"Policy({str(tmp_path)!r}, {count / 1000:.3g}K parameters, {precision}, cpu)"
    assert misvo.Policy(model, make_tokenizer()).parameter_count == count


def test_the_embedded_model_shows_its_size(smollm2):
    assert repr(smollm2) == "Policy('smollm2-135m', 135M parameters, float32, cpu)"
