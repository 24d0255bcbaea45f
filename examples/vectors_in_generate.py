"""Steering where misvo cannot be installed: vectors from `misvo serve`, added in `generate` of transformers.

misvo serve          # in misvo's own environment; here, one is started where no address is given
python examples/vectors_in_generate.py http://127.0.0.1:8000

Of misvo this file imports nothing until it is run as a script, so it works with older transformers too. Both sides must
hold the same weights. W(h + u) = Wh + Wu, so adding Wu to the logits is adding u to the hidden state, whatever samples
from them afterwards; `examples/aisteer360_control.py` uses it in AISteer360.
"""

import json
import struct
import time
import urllib.error
import urllib.request

import torch
from safetensors.torch import load
from transformers import LogitsProcessor


class SteeredLogits(LogitsProcessor):
    """Adds W u_t to the logits of the t-th new token, for every prompt of a batch."""

    def __init__(self, model, prompt_length: int, steerings: list[tuple[torch.Tensor, bool]], strength: float = 1.0):
        self.weight = model.get_output_embeddings().weight  # (V, d)
        self.prompt_length, self.steerings, self.strength = prompt_length, steerings, strength
        widths = {vectors.shape[1] for vectors, _ in steerings}
        if widths != {self.weight.shape[1]}:
            raise ValueError(
                f"these vectors have {widths} numbers, and this model's hidden states another: not its own."
            )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # (rows, tokens), (rows, V)
        position = input_ids.shape[1] - self.prompt_length
        each = len(scores) // len(self.steerings)  # rows of a prompt, which stand together
        u = torch.stack([_at(*steering, position) for steering in self.steerings]).repeat_interleave(each, 0)
        # Rounded to the head's type u keeps all but its last digits, which it would not if it were added to h first.
        shift = torch.nn.functional.linear(u.to(self.weight), self.weight)
        return scores + self.strength * shift.to(scores)


def _at(vectors: torch.Tensor, goes_on: bool, position: int) -> torch.Tensor:
    """u of a position: behind the last one a shared vector goes on, and one that is a position's own ends."""
    return vectors[min(position, len(vectors) - 1)] * float(position < len(vectors) or goes_on)


def learn(server: str, tokenizer, prompt_ids: list[int], reward, **options) -> tuple[torch.Tensor, bool]:
    """Let a server learn vectors for a prompt: (T, d), and whether they go on beyond T; `options` are its settings."""
    body = {"prompt": _text_of(tokenizer, prompt_ids), "raw": True, "reward": reward, **options}
    run = json.loads(_ask(f"{server}/misvo/v1/runs", body))
    address = f"{server}/misvo/v1/runs/{run['id']}"
    while run["state"] in ("queued", "in_progress"):
        time.sleep(0.2)
        run = json.loads(_ask(address))
    if run["state"] != "completed":
        raise RuntimeError(f"the run on {server} has {run['state']}: {(run['error'] or {}).get('message')}")
    content = _ask(f"{address}/safetensors")
    (size,) = struct.unpack("<Q", content[:8])  # of the header, which names how vectors are tied
    tie = json.loads(content[8 : 8 + size])["__metadata__"]["tie"]
    return load(content)["vectors"], tie != "position"


def _text_of(tokenizer, ids: list[int]) -> str:
    """The text whose tokens these are, with the special ones that the tokenizer does not add itself."""
    texts = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)
    for text in texts:
        if tokenizer(text)["input_ids"] == ids:
            return text
    raise ValueError("no text has exactly these tokens, so a server cannot be asked about them.")


def _ask(address: str, body: dict | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{address} says {error.code}: {error.read().decode()[:300]}") from error


def main(server: str, model, tokenizer) -> dict[str, str]:
    chat = [{"role": "user", "content": "Give me one tip for sleeping better."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    steering = learn(
        server,
        tokenizer,
        inputs["input_ids"][0].tolist(),
        {"words": "4-8"},
        rollouts=4,
        steps=2,
        max_new_tokens=16,
        seed=1,
    )
    texts = {}
    for strength in (0.0, 1.0):
        torch.manual_seed(0)
        processors = [SteeredLogits(model, length, [steering], strength)]
        tokens = model.generate(**inputs, max_new_tokens=16, do_sample=True, logits_processor=processors)
        texts[f"strength {strength}"] = tokenizer.decode(tokens[0, length:], skip_special_tokens=True)
    return texts


if __name__ == "__main__":
    import sys

    import misvo

    policy = misvo.Policy.from_pretrained("smollm2-135m")  # yours come from AutoModelForCausalLM and AutoTokenizer
    if len(sys.argv) > 1:
        texts = main(sys.argv[1], policy.model, policy.tokenizer)
    else:
        from pathlib import Path

        sys.path.insert(0, str(Path(__file__).parent))
        from server_client import served

        with served() as address:
            texts = main(address.removesuffix("/v1"), policy.model, policy.tokenizer)
    for strength, text in texts.items():
        print(f"{strength}: {text!r}")
