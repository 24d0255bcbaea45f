"""What would be wrong on vLLM is refused in one sentence, before or while it is loaded."""

import dataclasses
import multiprocessing
import types

import pytest
import torch
from jobs import request

import misvo
from misvo.engines import vllm_loading
from misvo.engines.vllm_head import head_of

OPTIONS = {
    "pipeline_parallel_size": (2, "pipeline_parallel_size=2 is not supported"),
    "data_parallel_size": (2, "data_parallel_size=2 is not supported"),
    "distributed_executor_backend": ("ray", "distributed_executor_backend='ray' is not supported"),
    "speculative_config": ({"method": "ngram", "num_speculative_tokens": 2}, "draws each of them in turn"),
    "enable_lora": (True, "adapters change the model"),
    "logits_processors": (["a:B"], "drawn already"),
    "worker_extension_cls": ("a.B", "one of its own"),
    "quantize": ("int8", "quantize is not an option of engine='vllm'"),
    "device": ("cpu", "device is not an option of engine='vllm'"),
    "compile": (True, "compile is not an option of engine='vllm'"),
    "max_modle_len": (64, "no such option: .*max_modle_len"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, tiny):
    value, sentence = OPTIONS[option]
    with pytest.raises(misvo.MisvoError, match=sentence) as caught:
        misvo.Policy.from_pretrained(tiny(), engine="vllm", **{option: value})
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_cache_that_holds_no_sequence(tiny):
    """In which a row would wait for ever: vLLM looks by itself."""
    with pytest.raises(
        misvo.MisvoError, match=r"vLLM could not load .*at least one request .*max seq len \(512\)"
    ) as caught:
        misvo.Policy.from_pretrained(tiny(), engine="vllm", num_gpu_blocks_override=2)
    assert "\n" not in str(caught.value)


def test_soft_capped_logits(tiny):
    with pytest.raises(misvo.MisvoError, match=r"soft-caps its logits \(at 30.0\)"):
        misvo.Policy.from_pretrained(tiny("gemma2"), engine="vllm")


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0", "0.9.2+cpu"])
def test_versions(version, tiny, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(misvo.MisvoError, match=r"pip install 'vllm>=0.32,<0.33'"):
        misvo.Policy.from_pretrained(tiny(), engine="vllm")


def test_a_script_that_its_own_children_run_again(tiny, monkeypatch):
    """As multiprocessing marks a process while that reads the script of its parent."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(misvo.MisvoError, match='`if __name__ == "__main__":`'):
        misvo.Policy.from_pretrained(tiny(), engine="vllm", own_process=True)


def test_versions_that_are_known():
    vllm_loading.check_version()


def test_names():
    with pytest.raises(misvo.MisvoError, match="unknown engine 'vlm': choose one of torch, vllm"):
        misvo.Policy.from_pretrained("smollm2-135m", engine="vlm")
    with pytest.raises(misvo.MisvoError, match="no model could be loaded from 'nowhere/at-all'"):
        misvo.Policy.from_pretrained("nowhere/at-all", engine="vllm")


class LogitsProcessor(torch.nn.Module):
    """What vLLM's class of this name does."""

    def __init__(self, soft_cap=None, scale=1.0):
        super().__init__()
        self.soft_cap, self.scale, self.org_vocab_size = soft_cap, scale, 11

    def forward(self, lm_head, hidden_states, embedding_bias=None):
        logits = self.scale * torch.nn.functional.linear(hidden_states, lm_head.weight, embedding_bias)[:, :11]
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


class UnquantizedEmbeddingMethod:
    pass


class Fp8LinearMethod:
    pass


class Made(torch.nn.Module):
    """A model with a head as vLLM's models have it."""

    def __init__(self, method=UnquantizedEmbeddingMethod, bend=None, **processor):
        super().__init__()
        self.config = types.SimpleNamespace(get_text_config=lambda: types.SimpleNamespace(hidden_size=8))
        self.lm_head, self.logits_processor, self.bend = torch.nn.Linear(8, 16), LogitsProcessor(**processor), bend
        self.lm_head.quant_method, self.lm_head.tp_size = method(), 1

    def compute_logits(self, hidden):
        logits = self.logits_processor(self.lm_head, hidden, self.lm_head.bias)
        return logits if self.bend is None else self.bend(logits)


def test_heads_that_are_linear():
    model = Made(scale=2.5)
    head = head_of(model, model.compute_logits)
    states = torch.randn(3, 8)
    assert head.vocab_size == 11 and torch.allclose(head.logits(states), model.compute_logits(states), atol=1e-6)


HEADS = {
    "soft-caps": {"soft_cap": 30.0},
    "is quantized": {"method": Fp8LinearMethod},
    "not a linear function": {"bend": lambda logits: logits + 0.1 * logits**2},
}


@pytest.mark.parametrize("sentence", HEADS)
def test_heads(sentence):
    model = Made(**HEADS[sentence])
    with pytest.raises(misvo.MisvoError, match=sentence):
        head_of(model, model.compute_logits)


def test_an_adapter_on_the_head():
    model = Made()
    model.lm_head.base_layer = None
    with pytest.raises(misvo.MisvoError, match="LoRA"):
        head_of(model, model.compute_logits)


@dataclasses.dataclass
class OfTheBody:
    """An intervention that is none of the head's."""


def test_interventions_of_the_body(vllm, tiny):
    policy = vllm(tiny())
    with pytest.raises(misvo.MisvoError, match=r"OfTheBody changes the body of the model.*engine='torch'"):
        policy.engine().submit(request(policy, [5, 6, 7], how=OfTheBody()))


def test_methods_of_the_body(vllm, tiny):
    with pytest.raises(misvo.MisvoError, match="method='lora' runs on the one of transformers"):
        misvo.steer(
            vllm(tiny()), "a b", lambda completions, **_: [1.0] * len(completions), method="lora", max_new_tokens=8
        )
