"""What a user types for a reward: a name, a model, an address, a function, or a sum of these.

    sum   = term, then any number of " + term" or " - term"      sentiment + 0.5*length:40
    term  = optional number and "*", then one of
            NAME or NAME:ARGUMENT (the table below)              similarity:a quiet evening
            hf:ID_OR_FOLDER, hf:ID_OR_FOLDER#LABEL               hf:Skywork/Skywork-Reward-V2-Qwen3-0.6B
            http:URL, http:URL#timeout=5&attempts=3              http://localhost:8000/score
            file.py:function, module:function                    (a class is called without arguments first)
            clip(sum, LOW, HIGH), standardise(sum)               clip(sentiment, -inf, 0.5)

The sign between terms stands between spaces, and only counts where what follows reads like a term, so that
`similarity:salt + pepper` is one reward; inside parentheses and inside the braces of a schema it never counts. This
file cuts a text into terms and loads what stands alone; `combine.load` puts them together. Nothing here imports a
reward before it is asked for.
"""

import importlib
import importlib.util
import inspect
import json
import operator
import re
import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from misvo.errors import MisvoError, short
from misvo.rewards.contract import Reward, adapt
from misvo.rewards.rubric import is_rubric


@dataclass(frozen=True)
class Embedded:
    """A reward that goes by a name: where it is made, what it rewards, and how to write it."""

    module: str
    make: str  # the class in the module, or what makes one from the argument
    about: str
    example: str
    argument: str | None = None
    optional: bool = False  # the argument may be left out

    def usage(self, name: str) -> str:
        if self.argument is None:
            return name
        return f"{name}[:{self.argument}]" if self.optional else f"{name}:{self.argument}"


EMBEDDED = {
    "sentiment": Embedded(
        "misvo.rewards.sentiment",
        "Sentiment",
        "how positive the response is, −1 to 1 (VADER)",
        "sentiment",
    ),
    "similarity": Embedded(
        "misvo.rewards.similarity",
        "Similarity",
        "cosine of its meaning to TEXT, −1 to 1 (MiniLM)",
        "similarity:a quiet evening",
        "TEXT",
    ),
    "preference": Embedded(
        "misvo.rewards.preference",
        "Preference",
        "log-odds that people prefer it, learned from pairs by `misvo fit-reward`",
        "preference:taste",
        "FOLDER",
    ),
    "words": Embedded(
        "misvo.rewards.words",
        "Words.from_spec",
        "1 if it has so many words, less the further off it is; also 30, 20- and -40",
        "words:20-40",
        "LEAST-MOST",
    ),
    "length": Embedded(
        "misvo.rewards.words",
        "Length",
        "minus its distance from WORDS words",
        "length:30",
        "WORDS",
    ),
    "overlength": Embedded(
        "misvo.rewards.penalties",
        "Overlength",
        "minus its words beyond WORDS",
        "sentiment + 0.05*overlength:80",
        "WORDS",
    ),
    "repetition": Embedded(
        "misvo.rewards.penalties",
        "Repetition",
        "minus its share of repeated runs of N words, −1 to 0",
        "sentiment + repetition:3",
        "N",
    ),
    "contains": Embedded(
        "misvo.rewards.contains",
        "Contains.from_spec",
        "share of these words and phrases that occur in it, 0 to 1",
        "contains:sleep,dark room",
        "A,B,…",
    ),
    "avoids": Embedded(
        "misvo.rewards.contains",
        "Avoids.from_spec",
        "1 less the share of these words and phrases that occur in it",
        "avoids:very,as an AI",
        "A,B,…",
    ),
    "starts": Embedded(
        "misvo.rewards.starts",
        "Starts",
        "1 if it begins with TEXT, else the share of TEXT that its beginning matches",
        "starts:Dear reader",
        "TEXT",
    ),
    "regex": Embedded(
        "misvo.rewards.pattern",
        "Pattern",
        "1 if PATTERN is found in it, else 0",
        r"regex:(?i)\bstep \d",
        "PATTERN",
    ),
    "json": Embedded(
        "misvo.rewards.json_shape",
        "JsonShape.from_spec",
        "1 if it is JSON, or the share of a JSON schema that it meets; less for a beginning",
        'json:{"type": "object", "required": ["name", "age"]}',
        "{SCHEMA}",
        optional=True,
    ),
    "reading-ease": Embedded(
        "misvo.rewards.reading",
        "ReadingEase",
        "Flesch reading ease of its English, −50 to 120; 90 is very easy, 30 hard",
        "reading-ease",
    ),
    "reading-grade": Embedded(
        "misvo.rewards.reading",
        "ReadingGrade",
        "minus the distance of its Flesch–Kincaid school grade from GRADE",
        "reading-grade:6",
        "GRADE",
    ),
}
# The specs that are not names: how each is written -> what it is. The command line lists them under the names.
FORMS = {
    "hf:ID or FOLDER[#LABEL]": "any sequence classifier of transformers: its output, or the probability of LABEL",
    "http:URL": "a scorer that answers POST requests (examples/scorer.py)",
    "file.py:function": "a function of your own",
    "module:function": "a function of an installed module",
    "A + 0.5*B": "a weighted sum; also clip(A, LOW, HIGH) and standardise(A)",
}

_WEIGHT = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*\*\s*"
_CALL = re.compile(r"(clip|standardi[sz]e)\((.*)\)", re.DOTALL)
_NAMED = rf"(?:{'|'.join(EMBEDDED)})(?=:|\s*(?:[),]|[+-]\s|$))"  # with its colon, or alone: not a word in a sentence
_TERM = re.compile(rf"\s+(?:{_WEIGHT}|clip\(|standardi[sz]e\(|{_NAMED}|[\w./~-]+:\S)")
_JOINT = re.compile(r"\s([+-])(?=\s)")
_SCHEMA = re.compile(r"(?<!\w)json:\s*(?=\{)")


def terms(spec: str) -> list[tuple[float, str]]:
    """The weights and texts of the terms of a sum, one of weight 1 where it is none."""
    return [_weighted(sign, text) for sign, text in _split(spec)]


def wrapper(term: str) -> tuple[str, str] | None:
    """("clip" or "standardise", what stands in its parentheses) of a term that wraps others, else None."""
    call = _CALL.fullmatch(term)
    return call and (call[1], call[2])


def _split(spec):
    """The signs and texts of the terms: cut at ` + ` and ` - ` outside brackets, where a term follows."""
    pieces, sign, start = [], 1.0, 0
    outside = _outside(spec)
    for joint in _JOINT.finditer(spec):
        if outside[joint.start()] and _TERM.match(spec, joint.end()):
            pieces.append((sign, spec[start : joint.start()].strip()))
            sign, start = -1.0 if joint[1] == "-" else 1.0, joint.end()
    return [*pieces, (sign, spec[start:].strip())]


def _outside(spec):
    """For each letter, whether it is outside parentheses and schemas.

    A parenthesis without its partner, or after a backslash as in patterns, is a letter like any other.
    """
    steps, opened, index = [0] * (len(spec) + 1), [], 0
    while index < len(spec):
        end = _schema_end(spec, index) if spec[index] == "j" else None
        if end is not None:
            steps[index] += 1
            steps[end] -= 1
            index = end
            continue
        if spec[index] == "(":
            opened.append(index)
        elif spec[index] == ")" and opened:
            steps[opened.pop()] += 1
            steps[index] -= 1
        index += 2 if spec[index] == "\\" else 1
    return [depth == 0 for depth in accumulate(steps)]


def _schema_end(spec, index):
    """The end of the schema of a reward `json:{...}` that begins here, which may hold any sign; None of all else."""
    name = _SCHEMA.match(spec, index)
    try:
        return json.JSONDecoder().raw_decode(spec, name.end())[1] if name else None
    except (ValueError, RecursionError):
        return None  # whoever loads it will say what is wrong


def _weighted(sign, text):
    weight = re.match(_WEIGHT, text)
    if not weight:
        return sign, text
    return sign * float(weight[0].rstrip(" *\t\n")), text[weight.end() :]


def load_single(spec: str) -> Reward:
    """The reward of a term without weight and wrapper: a name, a model, an address or a function."""
    name, colon, rest = spec.partition(":")
    if name in EMBEDDED:
        entry, given = EMBEDDED[name], bool(rest)
        if given != bool(entry.argument) and not (entry.optional and not colon):
            usage = repr(entry.usage(name)) + ("" if entry.example == name else f", as in {entry.example!r}")
            raise MisvoError(f"write this reward as {usage}, not {spec!r}.")
        make = operator.attrgetter(entry.make)(importlib.import_module(entry.module))
        return make(rest) if entry.argument else make()
    if name == "hf" and colon:
        from misvo.rewards.reward_model import RewardModel

        return RewardModel.from_spec(rest)
    if name in ("http", "https") and colon:
        from misvo.rewards.remote import Remote

        return Remote.from_spec(spec)
    if not colon:
        names = ", ".join(EMBEDDED)
        raise MisvoError(
            f"unknown reward {spec!r}: give {names}, hf:ID, http:URL, file.py:function or module:function."
        )
    return _function(spec)


def _function(spec):
    source, _, attribute = spec.rpartition(":")
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    reward = getattr(module, attribute, None)
    if not (callable(reward) or is_rubric(reward)):
        raise MisvoError(f"{source} has no function {attribute!r} to use as a reward.")
    if inspect.isclass(reward):
        try:
            reward = reward()
        except Exception as error:
            raise MisvoError(
                f"{attribute} of {source} could not be made: {type(error).__name__}: {short(error)}"
            ) from error
    return adapt(reward)


def _load_file(source):
    path = Path(source)
    if not path.is_file():
        raise MisvoError(f"there is no file {source} to take a reward from.")
    spec = importlib.util.spec_from_file_location(f"misvo_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise MisvoError(f"{source} could not be loaded: {type(error).__name__}: {short(error)}") from error
    return module


def _load_module(source):
    try:
        return importlib.import_module(source)
    except (ImportError, ValueError, TypeError) as error:  # the last two: names such as "" and ".x"
        raise MisvoError(
            f"unknown reward {source!r}: it is no embedded reward ({', '.join(EMBEDDED)}), no module ({short(error)})."
        ) from error
    except Exception as error:
        raise MisvoError(f"{source} could not be loaded: {type(error).__name__}: {short(error)}") from error
