"""Run in a process of its own by test_memory.py: prints the peak memory of a run above its starting point, in bytes."""

import sys
from pathlib import Path

import torch
from conftest import letter_reward, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import misvo


def status(field):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


if __name__ == "__main__":
    vocab, rollouts, length, options = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=vocab - 1,
    )
    model = LlamaForCausalLM(config).eval()
    policy = misvo.Policy(model, make_tokenizer())
    misvo.steer(
        policy, "a b", letter_reward, rollouts=2, steps=1, max_new_tokens=2, preset="paper"
    )  # imports and thread pools
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the high-water mark starts again from here
    before = status("VmRSS")
    misvo.steer(
        policy, "a b c", letter_reward, rollouts=rollouts, steps=2, max_new_tokens=length, **options, preset="paper"
    )
    print(status("VmHWM") - before, torch.__version__)
