"""`json` and `json:{SCHEMA}`: whether a response is JSON, and how much of a JSON schema it meets.

`json` is 1 for JSON (`json_text.py` says what that is). With a schema it is the share of the schema's requirements that
are met, and 1 exactly where the package `jsonschema` finds the response valid. A beginning that can still become JSON
earns half of what it would earn with its brackets closed; a text that breaks earns that, times the share of it before
the break. So every step towards the shape counts, and `json + json:{SCHEMA}` rewards JSON of the wrong shape too.

Requirements are the keywords of a schema: one for each name in `required`, for each of `properties` that is there or
required, for `items`, for each of `allOf` (these in part, by their own share) and for every other keyword (met or not).
A value of the wrong `type` meets none.

A schema may come from strangers as the responses do: nothing is fetched, patterns are bounded (`pattern.py`), and a
response that takes too long or nests too deeply is not scored (None).
"""

import json
import math
import time
from contextvars import ContextVar
from urllib.parse import unquote

from misvo.errors import MisvoError, first_line, short
from misvo.prompts import as_text
from misvo.rewards import json_text
from misvo.rewards.pattern import compiled, found

SECONDS = 1.0  # to compare a response with a schema
CALL_SECONDS = 10.0  # for all responses of a call
DEPTH = 64  # of brackets; a schema that refers to itself is walked as deep
_BELOW_ONE = math.nextafter(1.0, 0.0)
_DEADLINE: ContextVar[float] = ContextVar("deadline")
_UNSAFE = ("$schema", "$dynamicRef", "$recursiveRef", "patternProperties")
_OF_NAMES = ("properties", "$defs", "definitions", "dependentSchemas")  # keywords with a schema for each name
_OF_DATA = ("const", "enum", "default", "examples")  # keywords whose values are no schemas


class JsonShape:
    scores_prefixes = True

    def __init__(self, schema: dict | None = None):
        self.checker = None if schema is None else _checker(schema)

    @classmethod
    def from_spec(cls, text: str) -> "JsonShape":
        """A schema as JSON, or nothing."""
        if not text:
            return cls()
        try:
            schema = json.loads(text, parse_constant=_no_constant)
        except RecursionError:
            raise MisvoError("the schema of the reward 'json' is nested too deeply.") from None
        except ValueError as error:
            raise MisvoError(f"the schema in 'json:{short(text)}' is not JSON: {first_line(error)}.") from error
        return cls(schema)

    def __call__(self, prompts, completions, **columns):
        end = time.monotonic() + CALL_SECONDS
        return [self._score(as_text(completion), end) for completion in completions]

    def _score(self, text, end):
        reading = json_text.read(text)
        if reading.valid == 0:
            return 0.0
        share = 1.0 if self.checker is None else self._share(reading, end)
        if reading.complete or share is None:
            return share
        return share / 2 * reading.valid / reading.length

    def _share(self, reading, end):
        if not reading.closed:
            return 0.0  # nothing that a requirement could speak of
        if reading.depth > DEPTH:
            return None
        _DEADLINE.set(min(end, time.monotonic() + SECONDS))
        try:
            return _share(self.checker, self.checker.schema, json.loads(reading.closed))
        except (TimeoutError, RecursionError, OverflowError, ValueError):  # the last two: numbers beyond all measure
            return None


def _no_constant(name):
    raise ValueError(f"{name} is no JSON")


def _checker(schema):
    """A validator of the dialect that the schema names, bounded in time; refuses what cannot be checked safely."""
    try:
        from jsonschema import SchemaError, validators
        from referencing import Registry
    except ImportError as error:
        raise MisvoError("the reward 'json' with a schema needs jsonschema: pip install 'misvo[embedded]'") from error
    if not isinstance(schema, dict) or not isinstance(schema.get("$schema", ""), str):
        raise MisvoError(f"a schema of the reward 'json' is an object in braces, not {short(schema)!r}.")
    dialect = validators.validator_for(schema, default=validators.Draft202012Validator)
    schema = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}  # else it undoes `extend`
    if dialect is validators.Draft3Validator:
        raise MisvoError("the reward 'json' takes schemas of draft 4 or later: leave out '$schema'.")
    try:
        _refuse_unsafe(schema, dialect, schema, {"#"})
        dialect.check_schema(schema, format_checker=None)  # formats are patterns: `compiled` has seen to them
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top"
        raise MisvoError(f"the schema of the reward 'json' is wrong at {where}: {short(error.message)}.") from error
    except RecursionError:
        raise MisvoError("the schema of the reward 'json' is nested too deeply.") from None
    keywords = {name: _timed(check) for name, check in dialect.VALIDATORS.items()}
    bounded = validators.extend(dialect, keywords | {"pattern": _timed(_pattern), "uniqueItems": _timed(_unique)})
    return bounded(schema, registry=Registry())  # an empty registry, which fetches nothing


def _refuse_unsafe(part, dialect, root, seen):
    """Refuse what would be fetched or run unbounded, wherever it stands; what `$ref` names is a schema, wherever."""
    if isinstance(part, list):
        for item in part:
            _refuse_unsafe(item, dialect, root, seen)
    if not isinstance(part, dict):
        return
    for keyword, value in part.items():
        nested_id = keyword in ("$id", "id") and isinstance(value, str) and part is not root
        if keyword in _UNSAFE or nested_id:
            raise MisvoError(f"the reward 'json' takes no schema with {keyword!r} inside: leave it out.")
        if keyword == "$ref":
            named = lookup(root, value)
            if value not in seen:
                seen.add(value)
                _refuse_unsafe(named, dialect, root, seen)
                dialect.check_schema(named, format_checker=None)
        elif keyword == "pattern" and isinstance(value, str):
            compiled(value)
        elif keyword in _OF_NAMES and isinstance(value, dict):
            for inner in value.values():
                _refuse_unsafe(inner, dialect, root, seen)
        elif keyword not in _OF_DATA:
            _refuse_unsafe(value, dialect, root, seen)


def lookup(root: dict, reference: str):
    """The part of a schema that a reference such as `#/$defs/name` names."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise MisvoError(f"a schema may refer to its own parts alone, as in '#/$defs/x', not to {short(reference)!r}.")
    part = root
    try:
        for step in unquote(reference).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            part = part[int(step)] if isinstance(part, list) else part[step]
    except (LookupError, TypeError, ValueError):
        raise MisvoError(f"the schema of the reward 'json' has no part {short(reference)!r}.") from None
    return part


def _timed(check):
    """A keyword of jsonschema that looks at the clock first: every loop and recursion passes through one."""

    def bounded(validator, value, instance, schema):
        _left()
        yield from check(validator, value, instance, schema) or ()

    return bounded


def _left():
    left = _DEADLINE.get() - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _pattern(validator, pattern, instance, schema):
    from jsonschema import ValidationError

    if isinstance(instance, str) and not found(compiled(pattern), instance, _left()):
        yield ValidationError("the pattern is not found")


def _unique(validator, wished, instance, schema):
    """jsonschema compares all pairs of what cannot be sorted; here each item is written down and looked up."""
    from jsonschema import ValidationError

    if wished and isinstance(instance, list):
        written = {json.dumps(_plain(item), sort_keys=True) for item in instance}
        if len(written) < len(instance):
            yield ValidationError("an item is there twice")


def _plain(item):
    """1.0 and 1 are the same number in JSON."""
    if isinstance(item, float) and item.is_integer():
        return int(item)
    if isinstance(item, list):
        return [_plain(inner) for inner in item]
    return {name: _plain(inner) for name, inner in item.items()} if isinstance(item, dict) else item


def _share(checker, schema, value):
    """The share of the requirements of a schema that a value meets: 1 exactly where it is valid."""
    _left()
    if isinstance(schema, bool):
        return float(schema)
    if "$ref" in schema and "/draft-0" in checker.META_SCHEMA["$schema"]:
        schema = {"$ref": schema["$ref"]}  # up to draft 7, what stands beside a reference is not read
    validator = checker.evolve(schema=schema)

    def met(keyword):
        return next(checker.VALIDATORS[keyword](validator, schema[keyword], value, schema), None) is None

    if "type" in schema and not met("type"):
        return 0.0
    parts = []
    for keyword, wish in schema.items():
        if keyword not in checker.VALIDATORS:
            continue
        split = _IN_PARTS.get(keyword)
        shares = split and split(checker, schema, wish, value)
        parts += [float(met(keyword))] if shares is None else shares
    share = math.fsum(parts) / len(parts) if parts else 1.0
    return share if all(part == 1.0 for part in parts) else min(share, _BELOW_ONE)


def _required(checker, schema, names, value):
    return [float(name in value) for name in names] if isinstance(value, dict) else None


def _properties(checker, schema, properties, value):
    if not isinstance(value, dict):
        return None
    there = [_share(checker, inner, value[name]) for name, inner in properties.items() if name in value]
    return there + [0.0 for name in properties if name not in value and name in schema.get("required", ())]


def _items(checker, schema, inner, value):
    if not isinstance(value, list) or isinstance(inner, list):
        return None
    first = len(schema.get("prefixItems", ())) if "prefixItems" in checker.VALIDATORS else 0
    shares = [_share(checker, inner, item) for item in value[first:]]
    return [min(math.fsum(shares) / len(shares), 1.0 if min(shares) == 1.0 else _BELOW_ONE)] if shares else [1.0]


def _all_of(checker, schema, choices, value):
    return [_share(checker, choice, value) for choice in choices]


def _any_of(checker, schema, choices, value):
    return [max(_share(checker, choice, value) for choice in choices)]


def _one_of(checker, schema, choices, value):
    shares = [_share(checker, choice, value) for choice in choices]
    valid = shares.count(1.0)
    return [max(shares) if valid < 2 else 0.0]


def _reference(checker, schema, reference, value):
    return [_share(checker, lookup(checker.schema, reference), value)]


# Keywords that can be met in part: (checker, schema, wish, value) -> shares, None where it is met or not as a whole.
_IN_PARTS = {
    "required": _required,
    "properties": _properties,
    "items": _items,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "$ref": _reference,
}
