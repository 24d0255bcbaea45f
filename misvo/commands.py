"""The body of `misvo steer`, so that the command line itself stays thin."""

import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import misvo
from misvo import prompts, rewards, view
from misvo.errors import MisvoError
from misvo.outputs import Outputs
from misvo.settings import Settings


def steer(
    prompt: str,
    reward: str,
    model: str,
    load: dict,
    settings: Settings,
    save: Path | None,
    plot: Path | None,
    as_json: bool,
    overwrite: bool,
    judge: str | None,
    held_out: str | None,
) -> None:
    prompt = sys.stdin.read() if prompt == "-" else prompt
    prompts.check(prompt)
    outputs = Outputs(save, plot, as_json, overwrite)
    outputs.check()
    score = rewards.load(reward)
    outputs = replace(outputs, readers=_readers(judge, held_out))
    with view.loading(model):
        policy = misvo.Policy.from_pretrained(model, **load)
    try:
        with _second_ctrl_c_ends():
            result = misvo.steer(policy, prompt, score, settings=settings, progress=True)
    except (MisvoError, KeyboardInterrupt) as error:
        _rescue(outputs, error, reward)
        raise
    problems = outputs.deliver(result, reward)
    if problems:
        raise MisvoError("; ".join(problems))


def _readers(judge: str | None, held_out: str | None) -> dict:
    """What reads the responses when the run is done, loaded before it: what is missing is said at once."""
    readers: dict = {}
    if judge is not None:
        with view.loading(judge):
            readers["judge"] = misvo.Judge.from_pretrained(judge)
    if held_out is not None:
        rewards.load(held_out)
        readers["held_out"] = held_out
    return readers


def _rescue(outputs: Outputs, error: BaseException, reward: str) -> None:
    """Hand over what was done before something went wrong; what went wrong is for others to say."""
    result = getattr(error, "result", None)
    for problem in [] if result is None else outputs.deliver(result, reward, stopped=True):
        print(f"misvo: {problem}", file=sys.stderr)


@contextmanager
def _second_ctrl_c_ends():
    """The first Ctrl-C ends the run, which hands over what it has; whoever presses again does not want to wait."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # such as a job that was started with Ctrl-C ignored
        yield
        return

    def first(*_):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, before)
