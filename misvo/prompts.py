"""Prompts: a string or a list of chat messages, checked once and turned into token ids."""

import unicodedata

from misvo.errors import MisvoError

Prompt = str | list[dict]


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str)


def check(prompt: Prompt) -> None:
    """Refuse what cannot be meant: nothing to say, a malformed chat, control characters."""
    if is_chat(prompt):
        well_formed = isinstance(prompt, list) and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in prompt
        )
        if not well_formed:
            raise MisvoError('a prompt is a string or a list of messages {"role": ..., "content": ...}.')
    texts = [message["content"] for message in as_messages(prompt)]
    if not any(text.strip() for text in texts):
        raise MisvoError("the prompt is empty.")
    for text in texts:
        for index, letter in enumerate(text):
            if letter not in "\n\r\t" and unicodedata.category(letter) == "Cc":
                raise MisvoError(
                    f"the prompt holds the control character U+{ord(letter):04X} at index {index}: remove it."
                )


def render(tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, through the chat template where the tokenizer has one."""
    check(prompt)
    if getattr(tokenizer, "chat_template", None):
        messages = as_messages(prompt)
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    if is_chat(prompt):
        raise MisvoError("this model has no chat template: give the prompt as a string.")
    return tokenizer(prompt)["input_ids"]


def as_completion(prompt: Prompt, text: str) -> str | list[dict]:
    """A response in the form that a reward expects for this kind of prompt (TRL's contract)."""
    return [{"role": "assistant", "content": text}] if is_chat(prompt) else text


def as_messages(prompt: Prompt) -> list[dict]:
    """A prompt as a chat: a string is what the user says."""
    return prompt if is_chat(prompt) else [{"role": "user", "content": prompt}]


def as_text(chat: str | list[dict], between: str = "") -> str:
    """The text of a prompt or completion in either form, the messages of a chat with `between` in between."""
    return between.join(message["content"] for message in chat) if is_chat(chat) else chat
