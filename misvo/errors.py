"""What misvo raises, and how it quotes: a message is one sentence that names what was wrong and what to do about it."""


class MisvoError(ValueError):
    """Bad input or an unusable model, reward or file; the command line prints it and exits with code 2."""


class RewardError(MisvoError):
    """A reward failed; `result` keeps what the run had until then (None when nothing was decoded yet)."""

    result = None


def said(error: BaseException) -> str:
    """What an error of another library says, or what it is where it says nothing."""
    return str(error).strip() or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of that: other libraries write paragraphs."""
    return said(error).splitlines()[0]


def short(thing, width: int = 80) -> str:
    """Anything in one line of at most `width` characters."""
    return cut(" ".join(str(thing).split()), width)


def cut(text: str, width: int) -> str:
    """At most `width` characters of a text, the last of them an ellipsis where some are missing."""
    return text if len(text) <= width else text[: width - 1] + "…"
