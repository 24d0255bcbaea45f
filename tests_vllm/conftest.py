"""Tests of the engine on vLLM, in the environment that `make vllm` builds: `make test-vllm` runs them.

vLLM takes seconds to start, so most tests share one that runs in this process; tests of other modes start their own.

With VLLM_USE_V2_MODEL_RUNNER=1 the tests of records run on vLLM's second model runner. Its kernels are Triton's, which
has none for CPUs: Triton's interpreter runs them, and vLLM is told that this is a backend.
"""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, until a test says otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    import types

    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    interpreter = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True), compiler=None)
    triton.backends.backends["cpu"] = interpreter

import gc

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import misvo

VOCAB = 97
ENDS = [2, 3, *range(80, 86)]  # many ends, so that rows end early
SHAPE = {  # heads of 32 numbers: vLLM's CPU kernels take no smaller ones
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
TINY = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=0.5)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=32, final_logit_softcapping=30.0)),
}


def make_tokenizer():
    words = ["<pad>", "<s>", "</s>", "<end>", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"w{i}" for i in range(VOCAB - len(words))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="z"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "z"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=["<end>"], **special)


def save_tiny(architecture: str, folder, dtype=torch.float32) -> str:
    torch.manual_seed(0)
    model = TINY[architecture]().eval().to(dtype)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


class OneAtATime:
    """Policies on vLLM: a new one takes the place of the last, since one process holds one vLLM at a time."""

    def __init__(self):
        self.key, self.policy = None, None

    def __call__(self, folder, **options):
        key = (str(folder), repr(sorted(options.items())))
        if key != self.key:
            self.close()
            usual = {"max_model_len": 256, "max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20}
            self.key, self.policy = key, misvo.Policy.from_pretrained(folder, engine="vllm", **{**usual, **options})
        return self.policy

    def close(self):
        if self.policy is not None:
            self.policy.close()
        self.key = self.policy = None
        gc.collect()


@pytest.fixture(scope="session")
def vllm():
    policies = OneAtATime()
    yield policies
    policies.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders of tiny checkpoints, by architecture."""
    made = {}

    def folder(architecture="llama", dtype=torch.float32):
        key = (architecture, dtype)
        if key not in made:
            made[key] = save_tiny(architecture, tmp_path_factory.mktemp(architecture), dtype)
        return made[key]

    return folder
