"""The invasiveness panel of a finished run: what steering bought, and what it did to the responses on the way.

    panel = misvo.panel(result, judge="gemma3-270m", held_out="length:40")
    print(panel); panel["fluency"].difference; panel.to_dict()

Each measure has a value for the returned response, a mean over the last step's responses and a mean over the
reference's own (the first step, of methods that start at the reference). The difference of the two means has a 95 %
interval by Welch's t: the steps draw from different random numbers, so they are two independent samples, and a
bootstrap of 16 responses would be too sure of itself. KL and changed tokens are sums over a step's responses divided
by their tokens; their interval is that of a ratio of means (delta method).
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from misvo import metrics
from misvo.candidate import Candidate
from misvo.errors import MisvoError
from misvo.judge import Judge
from misvo.result import Result
from misvo.rewards import as_reward, score

Values = list[float | None]  # one for each of some responses; their mean is the measure of all of them


@dataclass(frozen=True)
class Difference:
    """A difference of means with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Measure:
    """A row of the panel; None where something is not known."""

    name: str
    about: str
    returned: float | None  # of the response that was returned
    last: float | None  # mean of the last step's responses
    reference: float | None  # mean of the reference's own
    difference: Difference | None  # last − reference


@dataclass(frozen=True)
class Panel:
    measures: list[Measure]

    def __iter__(self) -> Iterator[Measure]:
        return iter(self.measures)

    def __getitem__(self, name: str) -> Measure:
        for measure in self.measures:
            if measure.name == name:
                return measure
        known = ", ".join(measure.name for measure in self.measures)
        raise MisvoError(f"this panel has no measure {name!r}, only {known}.")

    def to_dict(self) -> dict:
        """Plain data for JSON: the measures by name."""
        return {measure.name: {k: v for k, v in asdict(measure).items() if k != "name"} for measure in self.measures}

    def __rich__(self):
        from rich.table import Table

        table = Table(title="what steering did to the responses", title_justify="left", box=None)
        headings = ("", "returned", "last step", "reference", "last − reference [95 %]")
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place else "left")
        for measure in self.measures:
            means = (measure.returned, measure.last, measure.reference)
            table.add_row(_plain(measure.about), *map(_figure, means), _interval(measure.difference))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, highlight=False)
        with console.capture() as text:
            console.print(self)
        return text.get().rstrip("\n")


def panel(result: Result, judge=None, held_out=None, encoder=None, columns: dict | None = None) -> Panel:
    """Measure a result. What is not asked for and what the run does not know has no row.

    judge: a `misvo.Judge`, or the name or folder of a causal LM. held_out: a reward or its spec; `columns` is what
    `misvo.steer` was given for rewards. encoder: a name (`minilm`, `simcse`, `none`) or a callable that turns texts
    into unit vectors; None is `minilm` where it is installed.
    """
    prompt, last = result.prompt, max(candidate.step for candidate in result.candidates)
    groups = {"returned": [result.best], "last": [c for c in result.candidates if c.step == last], "reference": []}
    if result.reference is not None and result.reference.step == 0:
        groups["reference"] = [c for c in result.candidates if c.step == 0]
    rows: list[tuple[str, str, Callable[[list[Candidate]], Values]]] = [
        ("reward", "reward", lambda group: [c.reward for c in group]),
        ("kl_per_token", "KL per token, nats", lambda group: _per_token(group, lambda c: c.kl)),
        ("own_likelihood", "own likelihood, nats per token", lambda group: [c.ref_logprob for c in group]),
    ]
    if judge is not None:
        judge = judge if isinstance(judge, Judge) else Judge.from_pretrained(judge)
        about = f"fluency under {judge.name}, nats per token"
        rows.append(("fluency", about, lambda group: judge.fluency([prompt] * len(group), [c.text for c in group])))
    name, encode = _encoder(encoder)
    if encode is not None:
        about = f"coherence with the prompt ({name})"
        rows.append(("coherence", about, lambda group: [metrics.coherence(encode, prompt, c.text) for c in group]))
    rows.append(("diversity", "diversity", lambda group: [metrics.diversity(c.text) for c in group]))
    about = "share of tokens that steering changed"
    rows.append(("changed", about, lambda group: _per_token(group, _changed)))
    if held_out is not None:
        about = f"held-out reward {held_out}" if isinstance(held_out, str) else "held-out reward"
        reward = as_reward(held_out)
        rows.append(("held_out", about, lambda group: _scored(reward, prompt, group, columns or {})))
    made = (_measure(name, about, values, groups, last > 0) for name, about, values in rows)
    return Panel([measure for measure in made if measure.returned is not None or measure.last is not None])


def _measure(name, about, values_of, groups, steered) -> Measure:
    values = {group: [v for v in values_of(members) if v is not None] for group, members in groups.items()}
    means = {group: statistics.fmean(known) if known else None for group, known in values.items()}
    difference = welch(values["last"], values["reference"]) if steered else None
    return Measure(name, about, means["returned"], means["last"], means["reference"], difference)


def welch(ours: list[float], theirs: list[float], level: float = 0.95) -> Difference | None:
    """The difference of two means with Welch's interval; None where one of them has fewer than two values."""
    from scipy.stats import t

    if min(len(ours), len(theirs)) < 2:
        return None
    mean = statistics.fmean(ours) - statistics.fmean(theirs)
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (ours, theirs)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return Difference(mean, mean, mean)
    freedom = total**2 / sum(part**2 / count for part, count in parts)
    reach = float(t.ppf((1 + level) / 2, freedom)) * math.sqrt(total)
    return Difference(mean, mean - reach, mean + reach)


def _per_token(group: list[Candidate], total_of) -> Values:
    """Values whose mean is Σ totals / Σ tokens, and whose spread is that of this ratio."""
    known = [(total, len(c.tokens)) for c in group if (total := total_of(c)) is not None and c.tokens]
    if not known:
        return []
    length = statistics.fmean(count for _, count in known)
    ratio = sum(total for total, _ in known) / sum(count for _, count in known)
    return [ratio + (total - ratio * count) / length for total, count in known]


def _changed(candidate: Candidate) -> int | None:
    return None if candidate.changed is None else len(candidate.changed)


def _scored(reward, prompt, group, columns) -> Values:
    return list(score(reward, prompt, [c.text for c in group], [c.tokens for c in group], columns)) if group else []


def _encoder(encoder):
    if callable(encoder):
        return getattr(encoder, "__name__", type(encoder).__name__), encoder
    if encoder is not None:
        return metrics.load_encoder(encoder)
    try:
        return metrics.load_encoder("minilm")
    except MisvoError:  # not installed: there is no such row
        return "none", None


def _plain(text: str):
    from rich.text import Text

    return Text(text)


def _figure(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"


def _interval(difference: Difference | None) -> str:
    if difference is None:
        return "—"
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
