"""`hf:ID_OR_FOLDER`: a sequence classifier of transformers as a reward, read the way its authors trained it.

    RewardModel.from_pretrained("Skywork/Skywork-Reward-V2-Qwen3-0.6B")       one output: its logit
    RewardModel.from_pretrained("some/sentiment-model", label="positive")     several: the probability of a label
    RewardModel(model, tokenizer)                                             objects of yours, never changed

What it reads: with a chat template, the prompt as the user's turn and the response as the assistant's, and nothing
around it, because a template writes its own BOS. Without one, a model with one output reads the tokenizer's pair of
prompt and response, and a classifier with several labels the response alone (`reads=` overrules this).

A probability is a softmax over the labels, or a sigmoid where the config says multi_label_classification.

A text beyond the model's window loses the end of its response, and only where the prompt fills more than half of the
window, first the start of the prompt's longest message. Either way the text is cut before it is rendered: BOS, roles
and the closing token stay. Control tokens that a response spells out are taken apart by a space, so that no response
can end its turn and write the next one; the model sees them as plain text.

A score depends on its own text alone. Rows are padded on the right with the token that the model itself looks for
(`config.pad_token_id`), and a model without one gets its rows one by one.
"""

import inspect
import json
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from misvo import embedded, hub, placement
from misvo.errors import MisvoError, short
from misvo.prompts import as_messages, as_text, is_chat

READS = ("chat", "pair", "response")


class RewardModel:
    """A reward from a classifier. Build it with `from_pretrained`, or from a model and a tokenizer in memory."""

    def __init__(self, model, tokenizer, label=None, *, reads=None, batch_size=16, max_length=None):
        if model.training:
            raise MisvoError("the reward model is in training mode: call model.eval() first.")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.label = _label_index(model.config, label)
        template = getattr(tokenizer, "chat_template", None)
        self.reads = reads or ("chat" if template else "pair" if model.config.num_labels == 1 else "response")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise MisvoError(f"batch_size must be a whole number of at least 1, not {batch_size!r}.")
        if self.reads not in READS:
            raise MisvoError(f"a reward model reads {', '.join(READS)}, not {reads!r}.")
        if self.reads == "chat" and not template:
            raise MisvoError("this reward model has no chat template: let it read 'pair' or 'response'.")
        self.max_length = max_length or _window(model, tokenizer)
        self.pad = model.config.get_text_config().pad_token_id
        self.inputs = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in self.inputs else {}
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.control = sorted(token for token in {*tokenizer.all_special_tokens, *added} if len(token) > 1)

    @classmethod
    def from_pretrained(
        cls, name, label=None, *, dtype=None, device=None, revision=None, trust_remote_code=False, **options
    ) -> "RewardModel":
        """Load by Hugging Face id or folder: on a GPU as it was saved where there is one, else on the CPU in fp32."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        placement.check_device(device)
        dtype = placement.parse_dtype(dtype or (torch.float32 if torch.device(device).type == "cpu" else "auto"))
        source = {"revision": revision, "trust_remote_code": trust_remote_code}
        place = hub.find(name)
        source["local_files_only"] = place.local_files_only
        try:
            with place.reading(), embedded.quiet():
                tokenizer = AutoTokenizer.from_pretrained(name, **source)
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    name, dtype=dtype, output_loading_info=True, **source
                )
        except Exception as error:  # a hub, a disk, a format: each has errors of its own
            reason = place.explain(error)
            raise MisvoError(
                f"no reward model could be loaded from {str(name)!r}: {reason}; give a Hugging Face id or a folder."
            ) from error
        if report["missing_keys"]:  # transformers fills them with random numbers
            missing = short(", ".join(sorted(report["missing_keys"])))
            raise MisvoError(f"{name} is not a trained classifier: its checkpoint lacks {missing}.")
        config, pad = model.config.get_text_config(), tokenizer.pad_token_id
        if config.pad_token_id is None and pad is not None and pad != tokenizer.eos_token_id:
            config.pad_token_id = pad  # our own instance; where padding is EOS, the model would skip a text's own EOS
        return cls(model.to(device).eval(), tokenizer, label, **options)

    @classmethod
    def from_spec(cls, spec: str) -> "RewardModel":
        """`ID_OR_FOLDER` or `ID_OR_FOLDER#LABEL`."""
        name, sign, label = spec.rpartition("#")
        if not sign or Path(spec).is_dir():
            name, label = spec, None
        if not name:
            raise MisvoError("write a reward model as 'hf:ID_OR_FOLDER' or 'hf:ID_OR_FOLDER#LABEL'.")
        return cls.from_pretrained(name, label)

    def __call__(self, prompts, completions, **columns):
        rows = [self._row(prompt, as_text(text)) for prompt, text in zip(prompts, completions, strict=True)]
        keys = [json.dumps(row) for row in rows]
        scores = {}  # a row without a token, such as an empty response without anything around it, has none
        different = [(key, row) for key, row in dict(zip(keys, rows, strict=True)).items() if row["input_ids"]]
        lengths = [len(row["input_ids"]) for _, row in different]
        for picks in of_like_length(lengths, 1 if self.pad is None else self.batch_size):
            batch = dict(different[index] for index in picks)
            scores |= zip(batch, self._scores([*batch.values()]), strict=True)
        return [scores.get(key) for key in keys]

    @torch.no_grad()
    def _scores(self, rows):
        longest = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": self.pad or 0}  # 0 for the mask and the token types
        batch = {
            name: torch.tensor([row[name] + [fill.get(name, 0)] * (longest - len(row[name])) for row in rows])
            for name in rows[0]
        }
        device = next(self.model.parameters()).device
        logits = self.model(**{name: ids.to(device) for name, ids in batch.items()}, **self.options).logits.float()
        if logits.shape != (len(rows), self.model.config.num_labels):
            raise MisvoError(f"the reward model gave outputs of the shape {tuple(logits.shape)} for {len(rows)} texts.")
        if self.model.config.num_labels == 1:
            return logits[:, 0].tolist()
        several = self.model.config.problem_type == "multi_label_classification"
        return (logits.sigmoid() if several else logits.softmax(-1))[:, self.label].tolist()

    def _row(self, prompt, response):
        """What the model reads for one response, cut to its window: names of inputs -> numbers."""
        for token in self.control:
            response = response.replace(token, f"{token[0]} {token[1:]}")
        row, limit = self._encode(prompt, response), self.max_length
        if limit is None or len(row["input_ids"]) <= limit:
            return row

        def size(prompt, response):
            return len(self._encode(prompt, response)["input_ids"])

        if self.reads != "response":
            own = len(row["input_ids"]) - size(prompt, "")  # what the response takes
            prompt = _shortened(prompt, lambda shorter: size(shorter, "") <= max(limit // 2, limit - own))
        kept = _most(len(response), lambda count: size(prompt, response[:count]) <= limit)
        row = self._encode(prompt, response[:kept])
        if len(row["input_ids"]) > limit:
            raise MisvoError(f"the prompt does not fit into the {limit} tokens that the reward model reads.")
        return row

    def _encode(self, prompt, response):
        """The inputs of the model for whole texts."""
        if self.reads == "response":
            encoded = self.tokenizer(response, verbose=False)
        elif self.reads == "pair":
            encoded = self.tokenizer(as_text(prompt, "\n"), response, verbose=False)
        else:
            messages = [*as_messages(prompt), {"role": "assistant", "content": response}]
            try:
                text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception as error:  # a template refuses in its own words
                raise MisvoError(f"the chat template of the reward model refuses this: {short(error)}.") from error
            encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        ids = encoded["input_ids"]
        row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if "token_type_ids" in self.inputs and "token_type_ids" in encoded:
            row["token_type_ids"] = encoded["token_type_ids"]
        return row


def of_like_length(lengths, size):
    """Indices by length, at most `size` together, and only where they differ by at most a fifth: little is padding."""
    batch = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) == size or lengths[index] < 0.8 * lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _most(count, fits):
    """The largest number up to `count` that fits, by halving; 0 where none does."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _shortened(prompt, fits):
    """The prompt without the start of its longest message, and of the next longest where that does not do."""
    if fits(prompt):
        return prompt
    if not is_chat(prompt):
        return prompt[len(prompt) - _most(len(prompt), lambda count: fits(prompt[len(prompt) - count :])) :]
    messages = as_messages(prompt)
    for message in sorted(messages, key=lambda message: -len(message["content"])):
        content = message["content"]

        def fits_with(count, message=message, content=content):
            message["content"] = content[len(content) - count :]
            return fits(messages)

        if fits_with(_most(len(content), fits_with)):
            break
    return messages


def _window(model, tokenizer):
    """How many tokens the model can read, as far as its config and tokenizer say; None where they say nothing."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if positions and getattr(table, "padding_idx", None) is not None:  # RoBERTa counts from behind its padding
        positions -= table.padding_idx + 1
    known = [n for n in (positions, tokenizer.model_max_length) if n and 0 < n < 1e9]
    return min(known, default=None)


def _label_index(config, label):
    """The index of a label given by name (case does not matter where it is clear) or by number."""
    names = [str(config.id2label[index]) for index in range(config.num_labels)]
    if label is None:
        if len(names) == 1:
            return 0
        example = f"hf:NAME#{names[0]}"
        raise MisvoError(f"this classifier has the labels {short(', '.join(names))}: name one, as in {example!r}.")
    alike = [index for index, name in enumerate(names) if name.casefold() == str(label).casefold()]
    if str(label) in names:
        return names.index(str(label))
    if len(alike) == 1:
        return alike[0]
    if str(label).isdecimal() and int(label) < len(names):
        return int(label)
    raise MisvoError(f"this classifier has no label {label!r}, only {short(', '.join(names))}.")
