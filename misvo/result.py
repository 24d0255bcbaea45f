"""What a steering run hands back: every response, a trace row per step, the vectors, and how far they moved.

result.save("run"); misvo.Result.load("run")        # the whole of it; `misvo rescore run` reads it too
print(result.summary()); result.to_pandas()         # a notebook shows the best response beside the reference
"""

import warnings
from dataclasses import dataclass, field, fields

from misvo import prompts, result_files, result_view, selection
from misvo.candidate import Candidate, number, numbers, take, wholes
from misvo.errors import MisvoError
from misvo.prompts import Prompt
from misvo.settings import Settings
from misvo.steering import Steering


@dataclass(frozen=True)
class Divergence:
    """A KL to the reference in nats: for each position, and in total."""

    per_position: list[float]

    @property
    def total(self) -> float:
        return sum(self.per_position)


@dataclass(frozen=True)
class Moved:
    """A position that steering moved: its KL_ref, and the tokens whose mean probability rose most there."""

    position: int
    kl: float
    tokens: list[tuple[str, float, float]]  # text, probability before, probability after


@dataclass
class Result:
    """The outcome for one prompt. `trace` has a dict per step; see docs in `misvo.steer`."""

    prompt: Prompt  # as the reward saw it: token ids by their text
    settings: Settings
    candidates: list[Candidate] = field(default_factory=list)
    trace: list[dict] = field(default_factory=list)
    steering: Steering | None = None
    kl_ref: Divergence | None = None  # eq:kl-estimator, where it was asked for
    moved: list[Moved] = field(default_factory=list)  # with kl_ref: the positions that moved most
    reference: Candidate | None = None  # what the model said before any steering, where that was sampled
    value: object = None  # re-control: the value network, ready for save_pretrained
    prefill_seconds: float = 0.0
    pieces: list[str] = field(default_factory=list)  # the texts of the tokens of `best`
    panel: dict | None = None  # what `misvo.panel` made of it, as plain data, where it was asked for
    prompt_ids: list[int] = field(default_factory=list)  # what the model read

    @property
    def best(self) -> Candidate:
        """The candidate with the highest reward, the first of equals; with select="ordinary" among those that could
        have come from the reference policy, so that a reward hack is passed over."""
        scored = [candidate for candidate in self.candidates if candidate.reward is not None]
        if not scored:
            raise MisvoError("no response of this run has a reward.")
        return self._chosen(scored)

    @property
    def highest(self) -> Candidate:
        """The candidate with the highest reward of all, which `best` may have passed over."""
        return max((c for c in self.candidates if c.reward is not None), key=lambda candidate: candidate.reward)

    @property
    def unsteered(self) -> Candidate | None:
        """The best of the first step's responses, chosen as `best` is, where that step sampled the model as it was."""
        first = [candidate for candidate in self.candidates if candidate.step == 0 and candidate.reward is not None]
        return self._chosen(first) if first and self.settings.starts_at_reference else None

    def _chosen(self, scored):
        reference = [candidate for candidate in self.candidates if candidate.step == 0]
        return selection.best(scored, reference if self.settings.select == "ordinary" else [])

    @property
    def text(self) -> str:
        return self.best.text

    @property
    def reward(self) -> float:
        return self.best.reward

    def __repr__(self) -> str:
        return result_view.line(self)

    def _repr_html_(self) -> str:
        return result_view.panel(self)

    def summary(self) -> str:
        """A few lines for a terminal."""
        return result_view.summary(self)

    def to_pandas(self):
        """A DataFrame with a row per response; `tokens` counts them, and KL is in nats."""
        names = ("step", "rollout", "reward", "ref_logprob", "kl")
        columns = {name: [getattr(candidate, name) for candidate in self.candidates] for name in names}
        columns["tokens"] = [len(candidate.tokens) for candidate in self.candidates]
        columns["text"] = [candidate.text for candidate in self.candidates]
        frame = _pandas().DataFrame(columns)
        return frame.astype(dict.fromkeys(("reward", "ref_logprob", "kl"), float))  # None is NaN, also where all are

    def trace_to_pandas(self):
        """A DataFrame with a row per step; what is a dict in a trace row has columns such as `seconds.decode`."""
        return _pandas().json_normalize(self.trace)

    def to_dict(self) -> dict:
        """Plain data for JSON; the vectors stay out (`save` keeps them too)."""
        best = result_view.best_of(self)
        return {
            "prompt": self.prompt,
            "prompt_ids": self.prompt_ids,
            "text": best and best.text,
            "reward": best and best.reward,
            "best": best and {"step": best.step, "rollout": best.rollout},
            "reference": self.reference and vars(self.reference),
            "norm": None if self.steering is None else self.steering.norm,
            "kl_ref": None if self.kl_ref is None else self.kl_ref.total,
            "kl_ref_per_position": None if self.kl_ref is None else self.kl_ref.per_position,
            "moved": [vars(moved) for moved in self.moved],
            "settings": self.settings.to_dict(),
            "value_network": self.value is not None,
            "prefill_seconds": self.prefill_seconds,
            "pieces": self.pieces,
            "panel": self.panel,
            "trace": self.trace,
            "candidates": [vars(candidate) for candidate in self.candidates],
        }

    @classmethod
    def from_dict(cls, plain: dict, steering: Steering | None = None, value=None) -> "Result":
        """What `to_dict` made, also before it knew of all that it has now."""
        try:
            prompts.check_form(plain["prompt"])
            settings = _settings(plain["settings"])
            candidates = [Candidate.from_dict(row) for row in take(plain, "candidates", _is_list)]
            if settings.select == "ordinary" and any(c.ref_logprob is None for c in candidates):
                raise TypeError("'ref_logprob'")
            for row in take(plain, "trace", _is_list):
                for name in ("step", "mean", "max", "best", "kl"):
                    take(row, name, number)
                take(row, "seconds", lambda seconds: all(map(number, seconds.values())))
            spread = plain.get("kl_ref_per_position")
            return cls(
                plain["prompt"],
                settings,
                candidates,
                plain["trace"],
                steering,
                None if spread is None else Divergence(take(plain, "kl_ref_per_position", numbers)),
                [_moved(row) for row in plain.get("moved", [])],
                _reference(plain.get("reference"), candidates),
                value,
                take({"prefill_seconds": 0.0, **plain}, "prefill_seconds", number),
                take({"pieces": [], **plain}, "pieces", _are_texts),
                plain.get("panel"),
                take({"prompt_ids": [], **plain}, "prompt_ids", wholes),
            )
        except MisvoError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MisvoError(f"this is no result of a run: {error} is missing or wrong.") from error

    def save(self, folder, overwrite: bool = False) -> None:
        """Keep everything in a folder, which `load` and `misvo rescore` read; see misvo.result_files."""
        result_files.write(folder, self.to_dict(), self.steering, self.value, overwrite)

    @classmethod
    def load(cls, folder) -> "Result":
        """The result that `save` or `misvo steer --save` wrote."""
        plain, steering, value = result_files.read(folder)
        try:
            return cls.from_dict(plain, steering, value)
        except MisvoError as error:
            raise MisvoError(f"{folder} cannot be loaded: {error}") from error


def _are_texts(value):
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_list(value):
    return isinstance(value, list)


def _settings(plain):
    """Settings of a file; those that only another version knows are named and left out."""
    known = {field.name for field in fields(Settings)}
    strange = [name for name in plain if name not in known]
    if strange:
        warnings.warn(f"the run was made with settings that are unknown here: {', '.join(strange)}.", stacklevel=4)
    return Settings(**{name: value for name, value in plain.items() if name in known})


def _moved(row):
    tokens = [(text, before, after) for text, before, after in row["tokens"]]
    if not all(isinstance(text, str) and number(before) and number(after) for text, before, after in tokens):
        raise TypeError("'moved'")
    return Moved(take(row, "position", number), take(row, "kl", number), tokens)


def _reference(row, candidates):
    """The reference response; of a candidate, or of one beside them, files of old keep text and reward only."""
    if row is None or "step" in row:
        return row and Candidate.from_dict(row)
    alone = Candidate.from_dict({"step": -1, "rollout": 0, "tokens": [], **row})
    return next((c for c in candidates if (c.text, c.reward) == (alone.text, alone.reward)), alone)


def _pandas():
    try:
        import pandas
    except ImportError as error:
        raise MisvoError("data frames need pandas: pip install pandas.") from error
    return pandas
