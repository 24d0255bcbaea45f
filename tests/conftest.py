"""Tiny checkpoints of real architectures, built in milliseconds and saved by the tests themselves."""

import os

from misvo.threads import use_free_cores

use_free_cores()  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a hub

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPTJConfig,
    GPTJForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import misvo

VOCAB = 61
ENDS = [2, 3, 4, *range(45, 55)]  # many ends, so that rows end early
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
# A window that is shorter than prompt and response together, so that sliding layers really slide.
GEMMA = {
    **SHAPE,
    "initializer_range": 0.15,
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "gemma3-multimodal": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=GEMMA,
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=60,
            boi_token_index=59,
            eoi_token_index=58,
        )
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE, tie_word_embeddings=False, sliding_window=8)),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=2.5)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "gptj-bias": lambda: GPTJForCausalLM(
        GPTJConfig(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=128,
            rotary_dim=4,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
}


def make_model(architecture: str, seed: int = 0):
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture]().eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    model.generation_config.eos_token_id = ENDS
    return model


def make_tokenizer(chat: bool = False):
    words = ["<pad>", "<s>", "</s>", "<end>", "<stop>", *"abcdefghijklmnopqrstuvwxyz"]
    words += ["<user>", "<assistant>", "<system>"]
    words += [f"w{i}" for i in range(VOCAB - len(words))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="z"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "z"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=["<end>", "<stop>"], **special
    )
    if chat:
        tokenizer.chat_template = CHAT
    return tokenizer


def make_policy(architecture: str = "llama", chat: bool = False, seed: int = 0) -> misvo.Policy:
    return misvo.Policy(make_model(architecture, seed), make_tokenizer(chat))


def letter_reward(completions, **_):
    """A deterministic reward with a spread: weighted letters, minus a little for every word."""
    return [sum(0.3 * (ord(w[-1]) % 7) for w in text.split()) - 0.1 * len(text.split()) for text in completions]


@pytest.fixture(scope="session")
def smollm2():
    return misvo.Policy.from_pretrained("smollm2-135m")


@pytest.fixture
def policy():
    return make_policy()


__all__ = [
    "ARCHITECTURES",
    "ENDS",
    "VOCAB",
    "Gemma2Config",
    "Gemma2ForCausalLM",
    "letter_reward",
    "make_model",
    "make_policy",
    "make_tokenizer",
]
