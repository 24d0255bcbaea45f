"""The body of `misvo steer`, so that the command line itself stays thin."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import misvo
from misvo import prompts, rewards, view
from misvo.cli_process import second_ctrl_c_ends
from misvo.errors import MisvoError
from misvo.outputs import Outputs
from misvo.prompts import Prompt
from misvo.settings import Settings


def steer(
    prompt: Prompt,
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
    columns: dict,
) -> None:
    prompts.check(prompt)
    outputs = Outputs(save, plot, as_json, overwrite)
    outputs.check()
    score = rewards.load(reward)
    outputs = replace(outputs, readers=_readers(judge, held_out, columns))
    with view.loading(model):
        policy = misvo.Policy.from_pretrained(model, **load)
    try:
        with second_ctrl_c_ends():
            result = misvo.steer(policy, prompt, score, settings=settings, columns=columns, progress=True)
    except (MisvoError, KeyboardInterrupt) as error:
        _rescue(outputs, error, reward)
        raise
    problems = outputs.deliver(result, reward)
    if problems:
        raise MisvoError("; ".join(problems))


def read_prompt(text: str | None, messages: Path | None, system: str | None) -> Prompt:
    """What `misvo steer` asks: a text, one from standard input, or the chat in a file; perhaps behind a system message.

    One of `text` and `messages` is given.
    """
    prompt: Prompt = (sys.stdin.read() if text == "-" else text) if messages is None else _read_messages(messages)
    prompts.check(prompt)
    return prompts.with_system(prompt, system)


def _read_messages(path: Path) -> list[dict]:
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MisvoError(f"{path} could not be read: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise MisvoError(f'{path} must hold a JSON list of messages, such as [{{"role": "user", "content": "Hi"}}].')
    return messages


def _readers(judge: str | None, held_out: str | None, columns: dict) -> dict:
    """What reads the responses when the run is done, loaded before it: what is missing is said at once."""
    readers: dict = {}
    if judge is not None:
        with view.loading(judge):
            readers["judge"] = misvo.Judge.from_pretrained(judge)
    if held_out is not None:
        rewards.load(held_out)
        readers |= {"held_out": held_out, "columns": columns}
    return readers


def _rescue(outputs: Outputs, error: BaseException, reward: str) -> None:
    """Hand over what was done before something went wrong; what went wrong is for others to say."""
    result = getattr(error, "result", None)
    for problem in [] if result is None else outputs.deliver(result, reward, stopped=True):
        print(f"misvo: {problem}", file=sys.stderr)
