"""One reward from several: weighted sums, clipping, standardisation. Each hands back its parts beside its values.

    quality = Standardised("hf:Skywork/Skywork-Reward-V2-Qwen3-0.6B")
    reward = Combined({"quality": quality, "brief": "overlength:80"}, {"brief": 0.05})

The trace then has, step by step, the means of `quality`, `quality/raw` (before standardisation) and `brief`, each
before its weight. A response that one part could not score (None) is not scored at all. Penalties on length and
repetition are rewards of their own (`penalties.py`) and enter a sum like any other.

A part may be a text that a user types, and such a text may be a sum: so what turns one into a reward is here too, and
what makes a sum of the list of rewards that TRL's users give.
"""

import functools
import json
import math
import statistics
from collections.abc import Sequence
from contextlib import contextmanager

from misvo.errors import MisvoError, RewardError
from misvo.rewards import specs
from misvo.rewards.contract import AnyReward, Composite, Reward, Scores, adapt, begin


def as_reward(reward: AnyReward, weights: Sequence[float] | None = None) -> Reward:
    """A reward from a spec such as "sentiment", from a callable (`contract.adapt`), or from a list of such.

    A list is a sum with `weights`, 1 where none are given; its parts have the names of the functions and may abstain.
    """
    if isinstance(reward, list | tuple):
        weights = [1.0] * len(reward) if weights is None else weights
        if not isinstance(weights, list | tuple) or len(weights) != len(reward):
            raise MisvoError(f"reward_weights must be a list of {len(reward)} numbers, one for each reward.")
        names = _names(reward)
        return Combined(dict(zip(names, reward, strict=True)), dict(zip(names, weights, strict=True)), may_abstain=True)
    if weights is not None:
        raise MisvoError("reward_weights goes with a list of rewards, such as reward=[f, g].")
    return load(reward) if isinstance(reward, str) else adapt(reward)


def _names(rewards) -> list[str]:
    """What each reward is called; the second of a name is `name_2`."""
    names: list[str] = []
    for reward in rewards:
        plain = reward.func if isinstance(reward, functools.partial) else reward
        name = plain if isinstance(plain, str) else getattr(plain, "__name__", type(plain).__name__)
        numbered = (f"{name}_{number}" for number in range(2, len(rewards) + 2))
        names.append(next(free for free in (name, *numbered) if free not in names))
    return names


def load(spec: str) -> Reward:
    """A reward from `sentiment`, `hf:ID`, `http:URL`, `file.py:function`, `module:function` or a sum of such."""
    terms = specs.terms(spec)
    if len(terms) == 1 and terms[0][0] == 1.0:
        return _load_term(terms[0][1])
    parts = {}
    for _, text in terms:
        if text in parts:
            raise MisvoError(f"the reward {spec!r} names {text!r} twice: give it once, with one weight.")
        parts[text] = _load_term(text)
    return Combined(parts, {text: weight for weight, text in terms})


def _load_term(term):
    wrapped = specs.wrapper(term)
    if wrapped is None:
        return specs.load_single(term)
    name, inside = wrapped
    if name != "clip":
        return Standardised(load(inside))
    try:
        inner, low, high = inside.rsplit(",", 2)
        low, high = float(low), float(high)
    except ValueError:
        raise MisvoError(f"write this reward as 'clip(REWARD, LOW, HIGH)', not {term!r}.") from None
    return Clipped(load(inner), low, high)


class Combined(Composite):
    """Σ weight × part. `parts` maps names to rewards or specs, `weights` names to numbers (1 where none is given).

    With `may_abstain`, a part that gives None for all responses is left out: in TRL's lists it is for another task.
    """

    def __init__(self, parts: dict, weights: dict[str, float] | None = None, may_abstain: bool = False):
        if not parts:
            raise MisvoError("a combined reward needs at least one part.")
        weights = weights or {}
        for name in weights:
            if name not in parts:
                raise MisvoError(f"there is a weight for {name!r}, but the parts are {', '.join(parts)}.")
        for name, weight in weights.items():
            _finite(f"the weight of {name!r}", weight)
        self.parts = {name: as_reward(part) for name, part in parts.items()}
        self.weights = {name: float(weights.get(name, 1.0)) for name in parts}
        self.may_abstain = may_abstain

    @property
    def scores_prefixes(self) -> bool:
        return all(getattr(part, "scores_prefixes", False) for part in self.parts.values())

    def fresh(self) -> "Combined":
        return Combined(self.parts, self.weights, self.may_abstain)

    def over(self, change) -> "Combined":
        return Combined({name: change(part) for name, part in self.parts.items()}, self.weights, self.may_abstain)

    def begin(self, prompts, completions, **columns):
        pending = {}
        for name, part in self.parts.items():
            with _named(name):
                pending[name] = begin(part, prompts, completions, **columns)
        return lambda: self._sum(pending, len(completions))

    def _sum(self, pending, count):
        total, abstained = Scores([0.0] * count), 0
        for name, finish in pending.items():
            with _named(name):
                values = finish()
            total.parts[name] = list(values)
            total.parts |= {f"{name}/{inner}": inner_values for inner, inner_values in values.parts.items()}
            total.extra |= {f"{name}/{inner}": texts for inner, texts in values.extra.items()}
            if values.failure is not None and total.failure is None:
                total.failure = _in_part(name, values.failure)
            if self.may_abstain and values.failure is None and not any(value is not None for value in values):
                abstained += 1
                continue
            weight = self.weights[name]
            total[:] = [
                None if so_far is None or value is None else so_far + weight * value
                for so_far, value in zip(total, values, strict=True)
            ]
        if abstained == len(pending):
            total[:] = [None] * count
        return total


@contextmanager
def _named(name):
    try:
        yield
    except RewardError as error:
        raise _in_part(name, error) from error


def _in_part(name, error):
    return RewardError(f"in the part {name!r}, {error}")


class _Mapped(Composite):
    """A reward whose values go through a function; the values before it are the part `raw`."""

    def __init__(self, reward):
        self.reward = as_reward(reward)

    def begin(self, prompts, completions, **columns):
        pending = begin(self.reward, prompts, completions, **columns)

        def finish():
            raw = pending()
            parts, extra = ({f"raw/{name}": row for name, row in table.items()} for table in (raw.parts, raw.extra))
            return Scores(self.map(prompts, raw), {"raw": [*raw], **parts}, extra, raw.failure)

        return finish


class Clipped(_Mapped):
    """A reward kept between `low` and `high`: what lies beyond earns no more, so it is not worth chasing."""

    def __init__(self, reward, low: float = -math.inf, high: float = math.inf):
        super().__init__(reward)
        for bound in (low, high):
            if isinstance(bound, bool) or not isinstance(bound, int | float) or math.isnan(bound):
                raise MisvoError(f"clipping takes two numbers, not {bound!r}.")
        if low > high:
            raise MisvoError(f"clipping takes a lower and a higher bound, but {low} is above {high}.")
        self.low, self.high = float(low), float(high)

    def fresh(self) -> "Clipped":
        return Clipped(self.reward, self.low, self.high)

    def over(self, change) -> "Clipped":
        return Clipped(change(self.reward), self.low, self.high)

    def map(self, prompts, raw):
        return [None if value is None else min(max(value, self.low), self.high) for value in raw]


class Standardised(_Mapped):
    """(reward − mean) / std, so that parts of different scales weigh alike.

    Mean and std are yours, or those of the first responses scored for a prompt: with steering that is the first
    step, where the policy is still the reference. They stay for the rest of the run. Standardising every step by
    itself would hide all progress and make rewards of different steps, hence the best response, incomparable.
    Where the first responses are all equal, or there is only one, the std is 1. A new run starts afresh.
    """

    def __init__(self, reward, mean: float | None = None, std: float | None = None):
        super().__init__(reward)
        if (mean is None) != (std is None):
            raise MisvoError("standardising takes a mean and a std, or neither.")
        if mean is not None:
            _finite("the mean", mean)
            _finite("the std", std)
            if std <= 0:
                raise MisvoError(f"the std must be above 0, not {std!r}.")
        self.given = None if mean is None else (float(mean), float(std))
        self.first = {}  # prompt -> its mean and std

    def fresh(self) -> "Standardised":
        return Standardised(self.reward, *(self.given or ()))

    def over(self, change) -> "Standardised":
        return Standardised(change(self.reward), *(self.given or ()))

    def map(self, prompts, raw):
        keys = [json.dumps(prompt, sort_keys=True) for prompt in prompts]
        if self.given is None:
            for key in dict.fromkeys(keys):
                known = [value for other, value in zip(keys, raw, strict=True) if other == key and value is not None]
                if known and key not in self.first:
                    std = statistics.stdev(known) if len(known) > 1 else 0.0
                    negligible = std <= 1e-9 * max(map(abs, known), default=0.0)
                    self.first[key] = (statistics.fmean(known), 1.0 if negligible else std)
        scales = [self.given or self.first.get(key) for key in keys]
        return [
            None if value is None else (value - scale[0]) / scale[1] for value, scale in zip(raw, scales, strict=True)
        ]


def _finite(what, number):
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise MisvoError(f"{what} must be a finite number, not {number!r}.")
