"""Prompts: a string, a list of chat messages or a list of token ids, checked once and turned into token ids.

A string is what the user says, and goes through the chat template where the model has one (`raw=True`: as it is). A
chat whose last message is the assistant's is continued: the response is what follows. Contents may be parts of text,
as OpenAI's API has them. Token ids go to the model as they are.

A reward sees what TRL would show it: strings for strings, messages for chats, and for token ids their text. Of an
answer that the prompt began, it sees the whole.
"""

import json
import unicodedata
from collections.abc import Callable, Mapping

from misvo.errors import MisvoError, said, short

Prompt = str | list[dict] | list[int]

FORMS = 'a prompt is a string or a list of messages {"role": ..., "content": ...}, or a list of token ids'
# What `render` itself says to `apply_chat_template`, and what would make it return something other than token ids.
RESERVED = (
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)


def is_ids(prompt) -> bool:
    """Whether a prompt is a list of token ids."""
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def is_chat(prompt) -> bool:
    return not isinstance(prompt, str) and not is_ids(prompt)


def is_many(prompt) -> bool:
    """Whether this is a list of prompts: of strings and lists alone. One prompt is a list of dicts or of numbers."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, str | list) for one in prompt)


def is_continued(prompt) -> bool:
    """Whether the response goes on with an answer that the prompt begins."""
    return is_chat(prompt) and bool(prompt) and prompt[-1]["role"] == "assistant"


def check(prompt) -> None:
    """Refuse what cannot be meant: nothing to say, a malformed chat, control characters."""
    check_form(prompt)
    if is_ids(prompt):
        return
    texts = [message["content"] for message in as_messages(prompt)]
    if not any(text.strip() for text in texts):
        raise MisvoError("the prompt is empty.")
    if is_continued(prompt) and not texts[-1].strip():
        raise MisvoError("the last message is the assistant's and empty: leave it out, or begin the answer in it.")
    for text in texts:
        for index, letter in enumerate(text):
            kind = unicodedata.category(letter)
            if kind == "Cs":
                raise MisvoError(f"the prompt holds U+{ord(letter):04X} at index {index}: it is not text in UTF-8.")
            if letter not in "\n\r\t" and kind == "Cc":
                raise MisvoError(
                    f"the prompt holds the control character U+{ord(letter):04X} at index {index}: remove it."
                )


def check_form(prompt) -> None:
    """Refuse what is no prompt at all."""
    if isinstance(prompt, str):
        return
    if is_ids(prompt):
        if min(prompt) < 0:
            raise MisvoError(f"the prompt holds the token id {min(prompt)}: token ids are 0 or above.")
        return
    if not isinstance(prompt, list):
        raise MisvoError(f"{FORMS}, not {type(prompt).__name__}.")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MisvoError(f"{FORMS}.")
        if not isinstance(message.get("content"), str):
            _check_parts(message.get("content"))


def _check_parts(parts) -> None:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise MisvoError(f"{FORMS}.")
    for part in parts:
        if part.get("type") != "text":
            raise MisvoError(
                f"a message holds a part of the type {short(part.get('type'))!r}: only text can be read, "
                'as in {"type": "text", "text": ...}.'
            )
        if not isinstance(part.get("text"), str):
            raise MisvoError('a part of a message is written as {"type": "text", "text": ...}.')


def check_template(raw: bool, chat_template_kwargs: Mapping | None) -> None:
    """Refuse options of a chat template that cannot be handed to it or be saved."""
    if not chat_template_kwargs:
        return
    if not isinstance(chat_template_kwargs, dict) or not all(isinstance(name, str) for name in chat_template_kwargs):
        raise MisvoError(
            "chat_template_kwargs must be a dict of what the chat template knows, such as {'enable_thinking': False}, "
            f"not {short(chat_template_kwargs)!r}."
        )
    if raw:
        raise MisvoError("raw=True uses no chat template: leave chat_template_kwargs out, or raw.")
    for name in chat_template_kwargs:
        if name in RESERVED:
            raise MisvoError(f"chat_template_kwargs may not hold {name!r}, which is decided by the prompt.")
    try:
        json.dumps(chat_template_kwargs)
    except (TypeError, ValueError) as error:
        raise MisvoError(f"chat_template_kwargs must hold plain data, which can be saved as JSON: {error}.") from error


def render(tokenizer, prompt: Prompt, *, raw: bool = False, chat_template_kwargs: Mapping | None = None) -> list[int]:
    """Token ids of a prompt, through the chat template where the tokenizer has one and `raw` does not forbid it."""
    check(prompt)
    check_template(raw, chat_template_kwargs)
    templated = getattr(tokenizer, "chat_template", None) and not raw and not is_ids(prompt)
    if templated:
        return _through_template(tokenizer, prompt, chat_template_kwargs or {})
    if chat_template_kwargs:
        what = "token ids go to the model as they are" if is_ids(prompt) else "this model has no chat template"
        raise MisvoError(f"{what}: leave chat_template_kwargs out.")
    if is_chat(prompt):
        what = "raw=True uses no chat template" if raw else "this model has no chat template"
        raise MisvoError(f"{what}: give the prompt as a string.")
    return list(prompt) if is_ids(prompt) else tokenizer(prompt)["input_ids"]


def _through_template(tokenizer, prompt, options):
    continued = is_continued(prompt)
    try:
        return tokenizer.apply_chat_template(
            as_messages(prompt),
            add_generation_prompt=not continued,
            continue_final_message=continued,
            tokenize=True,
            return_dict=False,
            **options,
        )
    except Exception as error:  # a template refuses in its own words
        reason = short(said(error), 200).rstrip(".")
        raise MisvoError(f"the chat template of this model refuses the prompt: {reason}.") from error


def shown(prompt: Prompt, decode: Callable[[list[int]], str]) -> str | list[dict]:
    """A prompt as people and rewards see it: of token ids the text, of parts of text their sum."""
    if is_ids(prompt):
        return decode(prompt)
    return as_messages(prompt) if is_chat(prompt) else prompt


def to_reward(prompt: str | list[dict], texts: list[str]) -> tuple[str | list[dict], list]:
    """A prompt and its responses in the form that a reward expects (TRL's contract)."""
    if not is_chat(prompt):
        return prompt, texts
    messages = as_messages(prompt)
    begun = messages.pop()["content"] if is_continued(prompt) else ""
    return messages, [[{"role": "assistant", "content": begun + text}] for text in texts]


def as_messages(prompt: str | list[dict]) -> list[dict]:
    """A prompt as a chat whose contents are strings: a string is what the user says."""
    if not is_chat(prompt):
        return [{"role": "user", "content": prompt}]
    return [{**message, "content": _content(message)} for message in prompt]


def with_system(prompt: Prompt, system: str | None) -> Prompt:
    """A prompt behind a system message: a chat, whatever it was before."""
    if system is None:
        return prompt
    if is_ids(prompt):
        raise MisvoError("token ids go to the model as they are: leave the system message out.")
    check_form(prompt)
    messages = as_messages(prompt)
    if any(message["role"] == "system" for message in messages):
        raise MisvoError("the messages have a system message already: leave one of the two out.")
    return [{"role": "system", "content": system}, *messages]


def as_text(chat: str | list[dict], between: str = "") -> str:
    """The text of a prompt or completion in either form, the messages of a chat with `between` in between."""
    return between.join(_content(message) for message in chat) if is_chat(chat) else chat


def _content(message) -> str:
    """What a message says; parts of text are lines of it, as vLLM reads them."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
