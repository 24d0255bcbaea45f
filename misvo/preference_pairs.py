"""Preference pairs out of a file, in the forms that people have them in. Imports no torch.

    {"prompt": "Why?", "chosen": "Because …", "rejected": "No."}
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": [...]}          as TRL has them
    {"prompt": [messages], "chosen": [{"role": "assistant", …}], "rejected": [...]}
    {"chosen": "\\n\\nHuman: …\\n\\nAssistant: …", "rejected": "…"}                            as HH has them

A line whose two sides answer different prompts, or are the same, says nothing about a preference: it is counted and
left out. One that cannot be read ends in an error that names it.
"""

import gzip
import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from misvo.errors import MisvoError
from misvo.prompts import as_text, is_chat

TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Pair:
    prompt: str  # the last thing that was asked
    chosen: str
    rejected: str
    context: str  # all that was said before: pairs that share it stay together


@dataclass(frozen=True)
class Pairs:
    rows: list[Pair]
    left_out: int  # lines that say nothing about a preference

    def part(self, number: int, of: int) -> "Pairs":
        """One of several disjoint parts, by what was asked: the same prompt is never in two of them."""
        return Pairs([row for row in self.rows if place(row, "part") * of // 1 == number], 0)

    def split(self, share: float) -> tuple[list[Pair], list[Pair]]:
        """(those to fit, those held out), by what was asked."""
        held = [place(row, "held out") < share for row in self.rows]
        fitted = [row for row, out in zip(self.rows, held, strict=True) if not out]
        return fitted, [row for row, out in zip(self.rows, held, strict=True) if out]


def place(pair: Pair, use: str) -> float:
    """A number in [0, 1) that is made of what was asked, so that the same file is split in the same way everywhere."""
    digest = hashlib.sha256(f"{use}\0{pair.context}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def read(path: Path) -> Pairs:
    """All pairs of a JSONL file, which may be compressed (.gz)."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise MisvoError(f"{path} could not be read: {error}.") from error
    rows, left_out = [], 0
    for number, line in lines:
        try:
            pair = _pair(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MisvoError(f"line {number} of {path} is no pair with `chosen` and `rejected`: {error}.") from error
        if pair is None:
            left_out += 1
        else:
            rows.append(pair)
    return Pairs(rows, left_out)


def _pair(row: dict) -> Pair | None:
    (before, chosen), (other, rejected) = (_sides(row, name) for name in ("chosen", "rejected"))
    if before != other or chosen == rejected or not before:
        return None
    return Pair(as_text(before[-1:]), chosen, rejected, json.dumps(before))


def _sides(row: dict, name: str) -> tuple[list[dict], str]:
    """(the messages before, the response)."""
    said, prompt = row[name], row.get("prompt")
    if prompt is not None and not is_chat(prompt):
        prompt = [{"role": "user", "content": _text(prompt)}]
    if is_chat(said):
        messages = [*(prompt or []), *said]
    elif prompt is not None:
        messages = [*prompt, {"role": "assistant", "content": _text(said)}]
    else:
        messages = _turns(_text(said))
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError(f"`{name}` does not end with a response")
    return messages[:-1], as_text(messages[-1:]).strip()


def _turns(text: str) -> list[dict]:
    """A dialogue of HH's form as messages."""
    _, *parts = TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if not parts:
        raise ValueError("a text without a `prompt` is a dialogue of Human: and Assistant:")
    return [{"role": ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


def _text(value) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is neither a text nor messages")
    return value
