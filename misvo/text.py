"""Text of strangers in a line of a terminal: models and prompts may say anything, escape sequences too."""


def one_line(text: str, width: int) -> str:
    """At most `width` characters, all of them printable, on one line; what was cut off ends in an ellipsis."""
    line = "".join(letter if letter.isprintable() else "�" for letter in " ".join(text[: 16 * width].split()))
    return line if len(line) <= width and len(text) <= 16 * width else line[: width - 1] + "…"
