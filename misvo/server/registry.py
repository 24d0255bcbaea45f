"""The rewards of a server: those that the operator named at the start, and those that requests may declare."""

import importlib
import json
import operator
import re
import threading
from collections.abc import Mapping

import torch

from misvo.errors import MisvoError
from misvo.rewards import AnyReward, Combined, as_reward
from misvo.rewards.specs import EMBEDDED
from misvo.server.config import Config
from misvo.server.errors import ApiError
from misvo.server.guarded import Guarded, Line
from misvo.server.pinned import PinnedRemote
from misvo.server.terms import DECLARED, LONGEST, RewardBody, Term, terms_of

NAME = re.compile(r"[\w][\w .+-]{0,63}")
MOST_PARTS = 16


class Registry:
    def __init__(self, rewards: Mapping[str, AnyReward], config: Config):
        self.config, self.about = config, {}
        self._guarded: dict[str, Guarded] = {}
        self._lines: dict[str, Line] = {}
        self._similar: SharedEncoder | None = None
        self._lock = threading.Lock()
        for name, given in rewards.items():
            if not NAME.fullmatch(name):
                raise MisvoError(f"a reward cannot be called {name!r}: give letters, digits, blanks and . _ + -.")
            self._guarded[name] = Guarded(as_reward(given), Line(name), config.reward_seconds)
            self.about[name] = given if isinstance(given, str) and given in EMBEDDED else None

    def describe(self) -> dict:
        """What a client may choose from."""
        return {
            "rewards": [
                {"name": name, "about": None if spec is None else EMBEDDED[spec].about}
                for name, spec in self.about.items()
            ],
            "declared": [
                {"kind": kind, "about": EMBEDDED[kind].about, "example": EMBEDDED[kind].example} for kind in DECLARED
            ],
            "url": bool(self.config.reward_hosts),
        }

    def close(self) -> None:
        for line in [*(guarded.line for guarded in self._guarded.values()), *self._lines.values()]:
            line.close()

    def make(self, body: RewardBody):
        """A reward of a request's own; it may take a while, so not in the event loop."""
        terms = self._labelled(body)
        parts = {label: self._part(term) for label, term in terms.items()}
        if len(parts) == 1 and all(term.weight == 1.0 for term in terms.values()):
            reward = next(iter(parts.values()))
            return reward.fresh() if isinstance(reward, Guarded) else reward  # an owner of its own in the session
        return Combined(parts, {label: term.weight for label, term in terms.items()})

    def weights(self, body: RewardBody | None) -> dict[str, float]:
        """What each part of a reward is called, and how much it weighs."""
        return {} if body is None else {label: term.weight for label, term in self._labelled(body).items()}

    def _labelled(self, body: RewardBody) -> dict[str, Term]:
        terms = [_term(term) for term in terms_of(body)]
        if not 1 <= len(terms) <= MOST_PARTS:
            raise ApiError(400, f"a reward has from 1 to {MOST_PARTS} parts.", param="misvo.reward")
        labelled: dict[str, Term] = {}
        for term in terms:
            label = term.label or (term.name if term.kind == "name" else term.kind) or ""
            if not NAME.fullmatch(label):
                raise ApiError(400, "a label has letters, digits, blanks and . _ + - only.", param="misvo.reward")
            label = next(free for free in (label, *(f"{label}_{i}" for i in range(2, 99))) if free not in labelled)
            labelled[label] = term
        return labelled

    def _part(self, term: Term):
        kind, argument = term.kind, term.argument(term.kind)
        if kind == "name":
            if argument not in self._guarded:
                known = ", ".join(self._guarded) or "none"
                raise ApiError(
                    400,
                    f"there is no reward by this name: registered are {known}; declared can be {', '.join(DECLARED)}.",
                    param="misvo.reward",
                    code="unknown_reward",
                )
            return self._guarded[argument]
        if kind == "url":
            remote = PinnedRemote.allowed(argument, self.config.reward_hosts, self.config.reward_seconds)
            with self._lock:  # a line for each host that is allowed
                line = self._lines.setdefault(remote.host, Line(remote.host))
            return Guarded(remote, line, self.config.reward_seconds)
        if kind == "similarity":
            return _Similar(self.encoder(), argument)
        if kind in ("contains", "avoids"):
            entry = EMBEDDED[kind]
            return getattr(importlib.import_module(entry.module), entry.make.partition(".")[0])(argument)
        if kind == "json":
            from misvo.rewards.json_shape import JsonShape

            return JsonShape() if argument is True else JsonShape.from_spec(json.dumps(argument))
        entry = EMBEDDED[kind]
        return operator.attrgetter(entry.make)(importlib.import_module(entry.module))(str(argument))

    def encoder(self) -> "SharedEncoder":
        """Loaded when first asked for, so not in the event loop; MisvoError where it is not installed."""
        with self._lock:
            if self._similar is None:
                self._similar = SharedEncoder()
            return self._similar


def _term(given: str | Term) -> Term:
    """A text is a registered name, or `KIND:ARGUMENT` of a declared kind; it is never loaded as a spec."""
    if isinstance(given, Term):
        return given
    if len(given) > LONGEST:
        raise ApiError(400, "the reward is too long.", param="misvo.reward")
    kind, colon, argument = given.partition(":")
    if not colon or kind not in DECLARED:
        return Term.model_validate({"name": given[:200]})
    if kind == "json":
        return Term.model_validate({"json": _schema(argument) if argument else True})
    if kind in ("contains", "avoids"):
        from misvo.rewards.contains import Contains

        return Term.model_validate({kind: Contains.from_spec(argument).phrases})
    if kind in ("length", "repetition", "overlength"):
        if not re.fullmatch(r"\d{1,6}", argument):
            raise ApiError(400, f"the reward {kind!r} takes a whole number.", param="misvo.reward")
        return Term.model_validate({kind: int(argument)})
    return Term.model_validate({kind: argument})


def _schema(text: str) -> dict:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(400, "the schema of the reward 'json' is not JSON.", param="misvo.reward") from None
    if not isinstance(schema, dict):
        raise ApiError(400, "the schema of the reward 'json' must be an object.", param="misvo.reward")
    return schema


class SharedEncoder:
    """One sentence encoder for all requests; its tokenizer is not made for two threads at once."""

    __name__ = "minilm"

    def __init__(self):
        from misvo.rewards.similarity import SentenceEncoder

        self._encode, self._lock = SentenceEncoder(), threading.Lock()

    def __call__(self, texts: list[str]) -> torch.Tensor:
        with self._lock:
            return self._encode(texts)


class _Similar:
    """`similarity` on the shared encoder."""

    scores_prefixes = True

    def __init__(self, encode: SharedEncoder, text: str):
        self.encode, self.target = encode, encode([text])[0]

    def __call__(self, prompts, completions, **columns):
        from misvo.prompts import as_text

        return (self.encode([as_text(completion) for completion in completions]) @ self.target).tolist()
