"""What TRL's trainers hand to a reward beside prompts, completions and columns, so that a reward finds it here too.

    trainer_state               where the run is: `.global_step`, `.max_steps`
    log_metric(name, value)     a number about these responses
    log_extra(column, values)   something about each of them

What a reward logs is in the trace: numbers as `parts` (their means), texts as `extra` (one for each response).
"""

import math
from dataclasses import dataclass

from misvo.errors import RewardError, short

NAMES = ("trainer_state", "log_metric", "log_extra")  # one of each for a call, not one for each response


@dataclass(frozen=True)
class TrainerState:
    """The step whose responses are scored, from 0, and how many steps there are."""

    global_step: int = 0
    max_steps: int = 1


class Log:
    """What a reward logs in one call on `count` responses."""

    def __init__(self, count: int):
        self.count = count
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list] = {}

    def metric(self, name: str, value) -> None:
        """A number about all responses; of several under one name the trace has the mean."""
        number = as_number(value)
        if number is None:
            raise RewardError(f"log_metric({name!r}, …) takes a number, not {short(value)!r}.")
        self._metrics.setdefault(str(name), []).append(number)

    def extra(self, column: str, values) -> None:
        """A value for each response, all at once or a few at a time."""
        self._columns.setdefault(str(column), []).extend(values)

    def parts(self) -> dict[str, list[float | None]]:
        """What has numbers, with one for each response; None where it is not finite."""
        parts: dict[str, list[float | None]] = {}
        for name, values in self._metrics.items():
            known = [value for value in values if math.isfinite(value)]
            parts[name] = [sum(known) / len(known) if known else None] * self.count
        for name, values in self._whole_columns().items():
            if _numeric(values):
                parts[name] = [_finite(value) for value in values]
        return parts

    def texts(self) -> dict[str, list[str | None]]:
        """The columns that are not numbers."""
        return {
            name: [None if value is None else str(value) for value in values]
            for name, values in self._whole_columns().items()
            if not _numeric(values)
        }

    def _whole_columns(self):
        for name, values in self._columns.items():
            if len(values) != self.count:
                raise RewardError(
                    f"log_extra({name!r}, …) takes a value for each of the {self.count} responses, not {len(values)}."
                )
        return self._columns


def as_number(value) -> float | None:
    """A number of any library as a float; None where it is none."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        return None


def _numeric(values):
    return all(value is None or as_number(value) is not None for value in values)


def _finite(value):
    number = None if value is None else as_number(value)
    return number if number is not None and math.isfinite(number) else None
