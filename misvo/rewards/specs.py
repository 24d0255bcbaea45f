"""What a user types for a reward: a name, a model, an address, a function, or a sum of these.

    sum   = term, then any number of " + term" or " - term"      sentiment + 0.5*length:40
    term  = optional number and "*", then one of
            NAME or NAME:ARGUMENT (the table below)              similarity:a quiet evening
            hf:ID_OR_FOLDER, hf:ID_OR_FOLDER#LABEL               hf:Skywork/Skywork-Reward-V2-Qwen3-0.6B
            http:URL, http:URL#timeout=5&attempts=3              http://localhost:8000/score
            file.py:function, module:function                    (a class is called without arguments first)
            clip(sum, LOW, HIGH), standardise(sum)               clip(sentiment, -inf, 0.5)

The sign between terms stands between spaces, and only counts where what follows reads like a term, so that
`similarity:salt + pepper` is one reward. This file cuts a text into terms and loads what stands alone; `combine.load`
puts them together. Nothing here imports a reward before it is asked for.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

from misvo.errors import MisvoError, short
from misvo.rewards.contract import Reward, adapt

# name -> (module, class, argument, what it rewards)
EMBEDDED = {
    "sentiment": (
        "misvo.rewards.sentiment",
        "Sentiment",
        None,
        "how positive the response is, −1 to 1 (VADER)",
    ),
    "similarity": (
        "misvo.rewards.similarity",
        "Similarity",
        "TEXT",
        "cosine of its meaning to TEXT, −1 to 1 (MiniLM)",
    ),
    "length": ("misvo.rewards.length", "Length", "WORDS", "minus its distance from WORDS words"),
    "overlength": ("misvo.rewards.penalties", "Overlength", "WORDS", "minus its words beyond WORDS"),
    "repetition": (
        "misvo.rewards.penalties",
        "Repetition",
        "N",
        "minus its share of repeated runs of N words, −1 to 0",
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
_TERM = re.compile(rf"{_WEIGHT}|clip\(|standardi[sz]e\(|(?:{'|'.join(EMBEDDED)})(?=[\s:)]|$)|[\w./~-]+:\S")


def terms(spec: str) -> list[tuple[float, str]]:
    """The weights and texts of the terms of a sum, one of weight 1 where it is none."""
    return [_weighted(sign, text) for sign, text in _split(spec)]


def wrapper(term: str) -> tuple[str, str] | None:
    """("clip" or "standardise", what stands in its parentheses) of a term that wraps others, else None."""
    call = _CALL.fullmatch(term)
    return call and (call[1], call[2])


def _split(spec):
    """The signs and texts of the terms: cut at ` + ` and ` - ` outside parentheses, where a term follows."""
    pieces, sign, start, depth = [], 1.0, 0, 0
    for index, letter in enumerate(spec):
        depth = max(0, depth + (letter == "(") - (letter == ")"))
        joint = depth == 0 and re.match(r"\s([+-])\s+", spec[index:])
        if joint and _TERM.match(spec, index + joint.end()):
            pieces.append((sign, spec[start:index].strip()))
            sign, start = -1.0 if joint[1] == "-" else 1.0, index + joint.end()
    return [*pieces, (sign, spec[start:].strip())]


def _weighted(sign, text):
    weight = re.match(_WEIGHT, text)
    if not weight:
        return sign, text
    return sign * float(weight[0].rstrip(" *\t\n")), text[weight.end() :]


def load_single(spec: str) -> Reward:
    """The reward of a term without weight and wrapper: a name, a model, an address or a function."""
    name, colon, rest = spec.partition(":")
    if name in EMBEDDED:
        module, kind, argument, _ = EMBEDDED[name]
        if bool(colon and rest) != bool(argument):
            usage = f"{name}:{argument}" if argument else name
            raise MisvoError(f"write this reward as {usage!r}, not {spec!r}.")
        make = getattr(importlib.import_module(module), kind)
        return make(rest) if argument else make()
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
    if not callable(reward):
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
