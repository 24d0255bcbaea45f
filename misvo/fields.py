"""A field of `misvo.settings.Settings`: its purpose, the values that it takes, and how a value is held to that."""

import dataclasses
import math
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike

from misvo.errors import MisvoError, short


@dataclass(frozen=True)
class Limit:
    """The values that a number may take."""

    wish: str  # as in "must be a number {wish}"
    least: float = -math.inf
    most: float = math.inf
    open: bool = False  # whether `least` itself is out

    def admits(self, value) -> bool:
        return (value > self.least if self.open else value >= self.least) and value <= self.most


ANY = Limit("that is finite")
POSITIVE = Limit("above 0", 0, open=True)
NOT_NEGATIVE = Limit("0 or above", 0)
HEAT = Limit("above 0, at least 0.001", 1e-3)  # below, quotients of logits overflow, and nothing is sampled any more
SHARE = Limit("above 0 and at most 1", 0, 1, open=True)
FROM_0_TO_1 = Limit("from 0 to 1", 0, 1)
COUNT = Limit("at least 1", 1)
INDEX = Limit("at least 0", 0)

LARGEST = 2**63 - 1  # of whole numbers


def option(
    default,
    about: str,
    limit: Limit | None = None,
    *,
    names: Mapping | None = None,
    methods: tuple[str, ...] | None = None,
    short: str | None = None,
    hash: bool | None = None,
):
    """A field: its default, what it is for, the numbers or names that it may be, and the methods that have it.

    `short` is its letter on the command line. `hash=False` is for what has no hash; it is compared all the same.
    """
    about_it = {"about": about, "limit": limit, "names": names, "methods": methods, "short": short}
    return dataclasses.field(default=default, hash=hash, metadata=about_it)


def parse_bytes(text: str) -> int:
    """A size such as "8GB", "512 MiB" or "1e9", in bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", str(text).lower())
    number = 0.0
    if match is not None:
        with suppress(ValueError):  # such as "1.2.3"
            number = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    if not 1 <= number < math.inf:
        raise MisvoError(f"memory must be a size such as '8GB' or '512MiB', not {short(text)!r}.")
    return int(number)


def check(field, value):
    """Hold a value against what its field says of it."""
    limit, names = field.metadata["limit"], field.metadata["names"]
    if names is not None:
        one_of(field.name, value, names)
    if field.type is bool and not isinstance(value, bool):
        raise MisvoError(f"{field.name} must be True or False, not {short(repr(value))}.")
    if field.name == "value" and not isinstance(value, str | PathLike | None):
        raise MisvoError(f"value must be the folder of a value network, not {short(repr(value))}.")
    if limit is None or (value is None and "None" in str(field.type)):
        return
    whole = "int" in str(field.type)
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not -math.inf < value < math.inf:
        admitted = False
    else:
        admitted = limit.admits(value)
    if not admitted:
        kind = "a whole number of" if whole else "a number"
        raise MisvoError(f"{field.name} must be {kind} {limit.wish}, not {short(repr(value))}.")
    if abs(value) > (LARGEST if whole else sys.float_info.max):
        raise MisvoError(f"{field.name} is larger than any number that can be computed with: give a smaller one.")


def texts(name, value) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) and text for text in given):
        raise MisvoError(f"{name} must be a text or a list of texts, not {value!r}.")
    for text in given:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of a shell that are no UTF-8 arrive as lone surrogates
            raise MisvoError(f"{name} holds {short(ascii(text))}, which is no text: give it in UTF-8.") from error
    return tuple(given)


def one_of(name, value, known):
    if not isinstance(value, str) or value not in known:
        raise MisvoError(f"unknown {name} {short(repr(value))}: choose one of {', '.join(known)}.")
