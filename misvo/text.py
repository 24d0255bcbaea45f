"""Texts of strangers, cut to measure: models and prompts may say anything, escape sequences too."""

from itertools import accumulate, pairwise


def one_line(text: str, width: int) -> str:
    """At most `width` characters, all of them printable, on one line; what was cut off ends in an ellipsis."""
    line = "".join(letter if letter.isprintable() else "�" for letter in " ".join(text[: 16 * width].split()))
    return line if len(line) <= width and len(text) <= 16 * width else line[: width - 1] + "…"


def before_stop(text: str, stops: tuple[str, ...]) -> str:
    """A text up to the first of the texts that end it, which is not a part of it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]


def cut_at_tokens(text: str, tokens: list[int], decode) -> list[str]:
    """A text in pieces, one for each of its tokens: together they are the text, also where a stop text cut it off."""
    ends = [0, *accumulate(map(len, pieces(tokens, decode)))]
    return [text[start:end] for start, end in pairwise(ends)]


def pieces(tokens: list[int], decode) -> list[str]:
    """What each token adds to the text of those before it. A letter of several tokens comes with the last of them."""
    texts, told = [], ""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        whole = text if count == len(tokens) or not text.endswith("�") else told
        texts.append(whole[len(told) :])
        told = whole
    return texts
