"""Fluency: how likely a response is to a causal LM that took no part in making it.

    judge = misvo.Judge.from_pretrained("gemma3-270m")          # an embedded name, a Hugging Face id or a folder
    judge.fluency([prompt], ["Go to bed at the same time."])    # [-2.9]: nats per token, higher is more fluent

The judge reads the prompt through its chat template, or as plain text with an empty line behind it where it has none,
and then the response as text: another tokenizer than the steered model's, so what that one's tokens looked like plays
no part. The end of a response is not judged, because most are cut at max_new_tokens.

Per token is the default: it is the log of a perplexity, and one judge cuts the same text into the same tokens whoever
wrote it. Two judges cut it differently, so figures of different judges are comparable per byte of UTF-8 only
(`per="byte"`). A loop ("love love love") is very likely to any language model, so more is not always better: read
fluency beside diversity, and against the reference's own responses.
"""

import inspect
from dataclasses import dataclass

import torch

from misvo import linear, loading
from misvo.errors import MisvoError
from misvo.prompts import Prompt, as_messages, as_text
from misvo.rewards.reward_model import of_like_length

PER = ("token", "byte")
BATCH = 16
MOST_LOGITS = 2**26  # held at once, 256 MB in fp32: a vocabulary of 262,144 would else take gigabytes


class Judge:
    """A causal LM and its tokenizer. Build it with `from_pretrained`, or from objects of yours, which stay as they are.

    A text beyond the model's window loses the start of its prompt, and only where that is not enough the end of its
    response.
    """

    def __init__(self, model, tokenizer, name: str | None = None):
        if model.training:
            raise MisvoError("the judge is in training mode, where dropout changes its figures: call model.eval().")
        self.model, self.tokenizer = model, tokenizer
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        config = model.config.get_text_config(decoder=True)
        self.window = getattr(config, "max_position_embeddings", None)
        self.vocab_size = config.vocab_size
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def from_pretrained(cls, name, *, dtype=None, device=None) -> "Judge":
        """Load by embedded name, Hugging Face id or folder: on a GPU as it was saved where there is one, else in fp32.

        Most CPUs have no arithmetic for bf16, and are slower with it.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else "auto")
        model, tokenizer = loading.load(name, dtype=dtype, device=device)
        linear.pack(model.base_model)
        return cls(model, tokenizer, str(name))

    def __repr__(self):
        return f"Judge({self.name!r})"

    def fluency(self, prompts: list[Prompt], responses: list[str], per: str = "token") -> list[float | None]:
        """The mean log-likelihood of each response given its prompt, in nats per token of the judge or per byte.

        None where a response is empty or blank: there is nothing to judge.
        """
        if per not in PER:
            raise MisvoError(f"fluency is per {' or '.join(PER)}, not {per!r}.")
        pairs = zip(prompts, responses, strict=True)
        texts = {index: self._encode(prompt, text) for index, (prompt, text) in enumerate(pairs) if text.strip()}
        order, found = list(texts), {}
        for picks in of_like_length([texts[index].length for index in order], BATCH):
            for group in self._groups([order[pick] for pick in picks], texts):
                found |= zip(group, self._logprobs([texts[index] for index in group]), strict=True)
        sizes = {index: len(text.tokens) if per == "token" else text.bytes for index, text in texts.items()}
        return [found[index] / sizes[index] if index in found else None for index in range(len(responses))]

    def _encode(self, prompt, response) -> "_Text":
        tokenizer = self.tokenizer
        if getattr(tokenizer, "chat_template", None):
            context = tokenizer.apply_chat_template(
                as_messages(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            context = tokenizer(as_text(prompt, "\n") + "\n\n", verbose=False)["input_ids"]
        # Control tokens that a response spells out are words like others: none of them ends its turn.
        tokens = tokenizer(response, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        read = response
        if self.window is not None and len(tokens) > self.window - 1:
            tokens = tokens[: self.window - 1]
            read = tokenizer.decode(tokens)
        if self.window is not None and len(context) + len(tokens) > self.window:
            room = self.window - len(tokens)  # the first token stays: models are lost without their BOS
            context = [*context[:1], *context[len(context) - room + 1 :]]
        return _Text(context, tokens, len(read.encode()))

    def _groups(self, indices, texts):
        """A batch in pieces whose logits fit; a single text always does."""
        group: list[int] = []
        for index in indices:
            longer = [*group, index]
            first = min(len(texts[i].context) for i in longer) if self._keeps else 0
            columns = max(texts[i].length for i in longer) - first
            if group and len(longer) * columns * self.vocab_size > MOST_LOGITS:
                yield group
                longer = [index]
            group = longer
        if group:
            yield group

    @torch.no_grad()
    def _logprobs(self, texts) -> list[float]:
        """The log-likelihood of each response, in nats."""
        longest = max(text.length for text in texts)
        # Padding stands behind the text, where a causal model does not look: there is nothing to mask.
        ids = [[*text.context, *text.tokens, *[0] * (longest - text.length)] for text in texts]
        ids = torch.tensor(ids, device=self.model.get_input_embeddings().weight.device)
        first = min(len(text.context) for text in texts) - 1  # the column that predicts the first response token
        options = {"logits_to_keep": torch.arange(first, longest - 1, device=ids.device)} if self._keeps else {}
        logits = self.model(input_ids=ids, use_cache=False, **options).logits
        if not self._keeps:
            logits = logits[:, first : longest - 1]
        logits = logits.float()
        chosen = logits.gather(-1, ids[:, first + 1 :, None].to(logits.device))[..., 0]
        logprobs = (chosen - logits.logsumexp(-1)).double()  # (rows, columns)
        starts = [len(text.context) - 1 - first for text in texts]
        return [
            row[start : start + len(text.tokens)].sum().item()
            for row, start, text in zip(logprobs, starts, texts, strict=True)
        ]


@dataclass(frozen=True)
class _Text:
    """What a judge reads: the tokens of the prompt and of the response, and how many bytes the latter are."""

    context: list[int]
    tokens: list[int]
    bytes: int

    @property
    def length(self) -> int:
        return len(self.context) + len(self.tokens)
