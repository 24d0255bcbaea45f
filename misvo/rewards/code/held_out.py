"""The held-out tests of one code task: where expected values come from, and how outcomes become scores.

Two kinds with the same face: `calls` is what every program is given, `score(outcomes)` is one number each,
`len(tests)` is how many tests are held out (none when the task's own solution answers none of them: then
there is nothing to score with).
"""

from misvo.rewards.code.compare import right
from misvo.sandbox import Calls, Program
from misvo.sandbox.codec import decode, dumps, encode, loads

_PATIENCE = 8  # the reference solution may take this many times a program's CPU time ...
_SLACK = 4  # ... and a program may take this many times the reference's on top of its own


def load_tests(task, sandbox):
    """The tests of a `CodeTask`, from one run of its reference solution in the sandbox."""
    return CheckTests(task, sandbox) if task.check else CallTests(task, sandbox)


class CallTests:
    """Inputs, the reference's answers and the task's other right ones (MBPP+), without inputs it does not answer."""

    def __init__(self, task, sandbox):
        self.task = task
        calls = loads(task.calls)
        patience = _PATIENCE * sandbox.limits.cpu_seconds
        [outcome] = sandbox.run([Program(task.solution, task.entry_point, Calls.of(calls), patience)])
        answered = [index for index in range(len(calls)) if index in outcome.answers]
        self.calls = Calls.of([calls[index] for index in answered])
        also = loads(task.also) or [[]] * len(calls)
        self.right_answers = [[decode(tree) for tree in (outcome.answers[index], *also[index])] for index in answered]
        self.extra_seconds = _SLACK * sum(outcome.call_seconds.values())

    def __len__(self):
        return self.calls.count

    def score(self, outcomes):
        return [self._score(outcome.answers) for outcome in outcomes]

    def _score(self, answers):
        passed = sum(
            index in answers and any(right(answers[index], value, self.task.atol, self.task.match) for value in values)
            for index, values in enumerate(self.right_answers)
        )
        return passed / len(self.right_answers)


class CheckTests:
    """The assertions of the record's own check (HumanEval), see `humaneval`."""

    def __init__(self, task, sandbox):
        self.task, self.sandbox = task, sandbox
        patience = _PATIENCE * sandbox.limits.cpu_seconds
        [outcome] = sandbox.run([Program(task.check, "_record", Calls.of([encode([])]), patience)])
        self.extra_seconds = _SLACK * sum(outcome.call_seconds.values())
        calls, events = decode(outcome.answers[0]) if 0 in outcome.answers else ([], [])
        trees = [encode(arguments) for arguments in calls]
        self.calls = Calls.of(trees)
        shown = loads(task.shown)
        right_events = [number for number, (_, passed) in enumerate(events) if passed]
        hidden = [n for n in right_events if not all(trees[call] in shown for call in events[n][0])]
        self.held_out = hidden or right_events

    def __len__(self):
        return len(self.held_out)

    def score(self, outcomes):
        jobs = [self._job(outcome.answers) for outcome in outcomes]
        distinct = list(dict.fromkeys(jobs))  # many answers fail, or succeed, alike
        programs = [Program(self.task.check, "_replay", Calls(job, 1), self.extra_seconds) for job in distinct]
        verdicts = dict(zip(distinct, self.sandbox.run(programs), strict=True))
        return [self._score(verdicts[job]) for job in jobs]

    def _job(self, answers):
        """One call of `_replay` with the list of (whether an answer came, the answer)."""
        pairs = []
        for index in range(self.calls.count):
            pairs.append(["t", [index in answers, answers.get(index)]])
        try:
            return dumps([["l", [["l", pairs]]]])
        except RecursionError:  # an answer nested to the brim of what JSON may hold
            return dumps([["l", [["l", []]]]])

    def _score(self, outcome):
        passed = decode(outcome.answers[0]) if 0 in outcome.answers else []
        return sum(passed[number] for number in self.held_out if number < len(passed)) / len(self.held_out)
