"""The code reward: the fraction of held-out tests that the program in an answer passes, in [0, 1].

    reward = CodeReward()
    columns = mbpp_plus_columns(record)          # or humaneval_columns(record)
    reward(prompts=[p], completions=[text], **{name: [value] for name, value in columns.items()})   # [0.97]

A program runs in a sandbox and sees only inputs; expected values come from the task's reference solution,
run in a sandbox of its own, and are compared here (MBPP+) or by the record's own check in a third one
(HumanEval). So nothing that a program does to its own process can make a wrong answer right. Time limits
are CPU time, hash seeds and random seeds are fixed: a score depends on the answer alone. Programs of one
call run side by side, and the same program on the same task runs once.

None ("could not score") means that the task's own solution passes none of its tests here. An answer without
a program, with a syntax error or that exceeds a limit scores what it passed, mostly 0.
"""

import os
import threading
from dataclasses import dataclass

from misvo.errors import MisvoError
from misvo.prompts import as_text, is_chat
from misvo.rewards.code.compare import MATCHES
from misvo.rewards.code.extract import extract_code, put_before
from misvo.rewards.code.held_out import load_tests
from misvo.rewards.code.humaneval import preamble
from misvo.sandbox import Limits, Program, Sandbox

REQUIRE_SANDBOX = "MISVO_REQUIRE_SANDBOX"
_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class CodeTask:
    """One row's columns; it is tested by `calls` (trees, as JSON) with `atol`, `match` and `also`, or by `check`."""

    entry_point: str
    solution: str
    task_id: str = ""
    calls: str | None = None
    atol: float = 0.0
    match: str = "equal"
    also: str = "[]"  # for each call the trees of right answers beside the reference's; empty when there are none
    check: str | None = None
    shown: str = "[]"
    prompt_code: str = ""

    def __post_init__(self):
        if (self.calls is None) == (self.check is None):
            raise MisvoError(f"The code task {self.task_id!r} needs one of the columns calls and check.")
        if self.match not in MATCHES:
            raise MisvoError(f"The column match must be one of {', '.join(MATCHES)}, not {self.match!r}.")


class CodeReward:
    """A reward in TRL's form; a row's columns come from `mbpp_plus_columns` or `humaneval_columns`."""

    def __init__(self, require_sandbox=None, workers=None, cpu_seconds=4, memory=512 << 20, **limits):
        if require_sandbox is None:  # how `--require-sandbox` reaches rewards that workers make
            require_sandbox = bool(os.environ.get(REQUIRE_SANDBOX))
        limits |= {"cpu_seconds": cpu_seconds, "memory": memory}
        self._settings = {"require_sandbox": require_sandbox, "workers": workers, **limits}
        self.sandbox = Sandbox(Limits(**limits), workers, require_sandbox)
        self.__name__ = "code"  # TRL logs a reward under its name
        self._lock = threading.Lock()
        self._tests, self._scores = {}, {}

    def __reduce__(self):
        return _rebuild, (self._settings,)

    def close(self):
        self.sandbox.close()

    def __call__(self, prompts, completions, **columns):
        """One score a completion: a float in [0, 1], or None where the task itself cannot be scored."""
        names = [name for name in CodeTask.__dataclass_fields__ if columns.get(name) is not None]
        for name in {"entry_point", "solution"}.difference(names):
            raise MisvoError(f"The code reward needs the column {name}: see mbpp_plus_columns and humaneval_columns.")
        for name in names:
            if len(columns[name]) != len(completions):
                count = f"{len(columns[name])} rows for {len(completions)} completions"
                raise MisvoError(f"The column {name} has {count}.")
        rows = []
        for index, completion in enumerate(completions):
            row = {name: columns[name][index] for name in names}
            task = CodeTask(**{name: value for name, value in row.items() if value is not None})
            rows.append((task, _program(task, _answer(completion))))
        with self._lock:
            self._score([row for row in dict.fromkeys(rows) if row not in self._scores])
            scores = [self._scores[row] for row in rows]
            if len(self._scores) > _REMEMBERED:
                self._scores.clear()
        return scores

    def _score(self, rows):
        """Fill in the scores of these rows, all programs side by side."""
        by_task = {}
        for task, source in rows:
            if task not in self._tests:
                self._tests[task] = load_tests(task, self.sandbox)
            if len(self._tests[task]) == 0:
                self._scores[task, source] = None
            elif source is None:
                self._scores[task, source] = 0.0
            else:
                by_task.setdefault(task, []).append(source)
        programs = [
            Program(source, task.entry_point, self._tests[task].calls, self._tests[task].extra_seconds)
            for task, sources in by_task.items()
            for source in sources
        ]
        outcomes = iter(self.sandbox.run(programs))
        for task, sources in by_task.items():
            scores = self._tests[task].score([next(outcomes) for _ in sources])
            for source, score in zip(sources, scores, strict=True):
                self._scores[task, source] = score


def _rebuild(settings):
    return CodeReward(**settings)


def _answer(completion):
    """The text that holds the program: of a completion of several messages, the last."""
    try:
        return as_text([completion[-1]] if is_chat(completion) else completion)
    except (TypeError, KeyError, IndexError):
        raise MisvoError(
            'A completion must be a string or a list of messages like {"role": "assistant", "content": "..."}.'
        ) from None


def _program(task, text):
    """The source to run for an answer, or None when the answer holds no program."""
    code = extract_code(text, task.entry_point, task.prompt_code)
    if code is None or not task.prompt_code:
        return code
    return put_before(preamble(task.prompt_code, task.entry_point), code)
