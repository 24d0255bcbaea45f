"""Plain data on the wire between the verifier and a program: JSON trees with a tag for every type JSON lacks.

Both sides use this file: the verifier writes inputs and reads answers, the program's process does the
reverse. Only data of built-in types travels, never code, classes or methods, so an object whose `__eq__`
lies arrives as the data it holds. A subclass (Counter, namedtuple, IntEnum) travels as its base type, read
with the base type's own methods. A match object of `re` travels as the bare fact that something matched.

Left out on purpose: everything without a literal form (generators, functions, instances of user classes,
arrays). Standard library only, and no import of misvo: the sandbox loads this file by itself.
"""

import json
import re

_SMALL = 1 << 53  # larger integers travel in hexadecimal: linear to parse, and beyond JSON readers' precision
_SEQUENCES = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_MATCH = re.match("", "")  # what every match object arrives as
_BUILD = {"l": list, "t": tuple, "s": set, "z": frozenset}


class NotPlain(ValueError):
    """A value that is not plain data, or a tree that no value encodes to."""


def encode(value):
    """A JSON-ready tree for `value`; NotPlain when it holds anything but built-in data."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else ["i", hex(value)]
    if kind is float:
        return ["f", value.hex()]
    tag = _SEQUENCES.get(kind)
    if tag:
        return [tag, [encode(item) for item in value]]
    if kind is dict:
        return ["d", [[encode(key), encode(item)] for key, item in value.items()]]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["b", value.hex()]
    if kind is re.Match:
        return ["m"]
    return encode(_base_value(value))


def _base_value(value):
    """The data of a built-in subclass's instance or a NumPy scalar, with no help from the instance itself."""
    kinds = type(value).__mro__
    if int in kinds:
        return int.__pos__(value)
    if float in kinds:
        return float.__pos__(value)
    if str in kinds:
        return str.__getitem__(value, slice(None))
    for base in (list, tuple, set, frozenset):
        if base in kinds:
            return base(base.__iter__(value))
    if dict in kinds:
        return dict(dict.items(value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        plain = value.item()
        if type(plain) in (bool, int, float, complex, str):
            return plain
    raise NotPlain(f"{type(value).__name__} is not plain data")


def decode(tree):
    """The value of a tree; NotPlain for anything `encode` does not produce."""
    if tree is None or type(tree) in (bool, str, int):
        return tree
    if type(tree) is not list or not tree or type(tree[0]) is not str:
        raise NotPlain("not a tree")
    tag, *parts = tree
    try:
        if tag in _BUILD:
            (items,) = parts
            return _BUILD[tag]([decode(item) for item in _checked(items)])
        if tag == "d":
            (pairs,) = parts
            return {decode(key): decode(item) for key, item in _checked(pairs)}
        return decode_scalar(tag, parts)
    except (TypeError, ValueError) as error:  # an unhashable element, too few parts
        raise NotPlain("not a tree") from error


def _checked(items):
    if type(items) is not list:
        raise NotPlain("not a tree")
    return items


def decode_scalar(tag, parts):
    """A tagged number, bytes or match; NotPlain for any other tag."""
    try:
        if tag == "i":
            return int(*_texts(parts), 16)
        if tag == "f":
            return float.fromhex(*_texts(parts))
        if tag == "c":
            real, imaginary = _texts(parts)
            return complex(float.fromhex(real), float.fromhex(imaginary))
        if tag == "b":
            return bytes.fromhex(*_texts(parts))
        if tag == "m" and not parts:
            return _MATCH
    except (TypeError, ValueError, OverflowError) as error:  # too few parts, a bad digit
        raise NotPlain("not a tree") from error
    raise NotPlain("not a tree")


def _texts(parts):
    if not all(type(part) is str for part in parts):
        raise NotPlain("not a tree")
    return parts


def dumps(tree):
    """One line of ASCII JSON."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def _refuse(token):
    raise NotPlain(f"{token} is not a tree")


def loads(text):
    """A JSON tree from text that may be hostile; NotPlain when it is none (too deep, too long a number)."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotPlain("not JSON") from error
