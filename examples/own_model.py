"""A model of your own: a folder, an object in memory, or an id on a hub.

    python examples/own_model.py FOLDER

Without a folder this makes one: a tiny Llama with random weights, which says nothing sensible but shows the way.
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import misvo


def make_folder(folder: str) -> None:
    """Weights and a tokenizer, as `save_pretrained` writes them and fine-tuning leaves them."""
    tokenizer = misvo.Policy.from_pretrained("smollm2-135m").tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: str) -> misvo.Result:
    policy = misvo.Policy.from_pretrained(folder)  # dtype=, device=, revision=, … as transformers has them
    print(policy)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()  # or what you hold in memory already
    same = misvo.Policy(model, AutoTokenizer.from_pretrained(folder))
    sizes = {"rollouts": 4, "steps": 2, "max_new_tokens": 8}
    result = misvo.steer(policy, "Hello", len, **sizes)
    assert result.text == misvo.steer(same, "Hello", len, **sizes).text
    return result


if __name__ == "__main__":
    if len(sys.argv) > 1:
        result = main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_folder(folder)
            result = main(folder)
    print(f"{result.reward} letters: {result.text!r}")
