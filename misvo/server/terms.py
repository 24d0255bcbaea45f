"""Rewards as a request names them: a registered name, or one of a few kinds that are safe by construction.

    "sentiment"                                        a name that the operator registered
    "contains:sleep,dark room"                         a kind with its argument, as on the command line
    {"name": "sentiment", "weight": 2}                 the same with a weight
    {"contains": ["sleep"]}, {"avoids": ["very"]}, {"starts": "Dear"}, {"similarity": "a quiet evening"},
    {"words": "20-40"}, {"length": 30}, {"regex": "(?i)step"}, {"json": {...} or true}, {"url": "https://host/score"}
    [term, term, ...]                                  their weighted sum

No text of a request reaches what loads functions, files or models.
"""

from typing import Any, Union

from pydantic import Field, model_validator

from misvo.server.strict import Strict

# The kinds whose rewards are made of plain data, compute nothing but numbers about a text, and end in bounded time.
DECLARED = (
    "contains",
    "avoids",
    "starts",
    "words",
    "length",
    "regex",
    "json",
    "similarity",
    "repetition",
    "overlength",
)
LONGEST = 4096  # characters of an argument


class Term(Strict):
    """One part of a reward: exactly one kind, perhaps a weight and a label."""

    name: str | None = Field(None, max_length=200, description="A reward that is registered at the server.")
    contains: list[str] | None = Field(None, max_length=256, description="Share of these phrases that occur.")
    avoids: list[str] | None = Field(None, max_length=256, description="1 less the share of these that occur.")
    starts: str | None = Field(None, max_length=LONGEST, description="How much of this text it begins with.")
    words: str | None = Field(None, max_length=32, description="A range of numbers of words, such as 20-40.")
    length: int | None = Field(None, ge=0, le=10**6, description="Minus the distance from so many words.")
    regex: str | None = Field(None, max_length=1024, description="1 where this pattern is found.")
    json_schema: dict[str, Any] | bool | None = Field(
        None, alias="json", description="How much of a JSON schema it meets; true: whether it is JSON."
    )
    similarity: str | None = Field(None, max_length=LONGEST, description="Cosine of its meaning to this text.")
    repetition: int | None = Field(None, ge=1, le=64, description="Minus the share of repeated runs of N words.")
    overlength: int | None = Field(None, ge=0, le=10**6, description="Minus the words beyond so many.")
    url: str | None = Field(None, max_length=2000, description="A scorer, at a host that the operator allows.")
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    label: str | None = Field(None, max_length=64, description="What this part is called in traces.")

    @model_validator(mode="after")
    def _one_kind(self) -> "Term":
        kinds = [kind for kind in ("name", *DECLARED, "url") if self.argument(kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of name, {', '.join(DECLARED)} and url in each part of a reward")
        return self

    def argument(self, kind: str) -> Any:
        return getattr(self, "json_schema" if kind == "json" else kind)

    @property
    def kind(self) -> str:
        return next(kind for kind in ("name", *DECLARED, "url") if self.argument(kind) is not None)


RewardBody = Union[str, Term, list[Union[str, Term]]]  # noqa: UP007, pydantic shows it so


def terms_of(reward: RewardBody) -> list[str | Term]:
    return list(reward) if isinstance(reward, list) else [reward]
