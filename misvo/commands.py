"""The body of `misvo steer`, so that the command line itself stays thin."""

import json
import sys
from pathlib import Path

import misvo
from misvo import prompts, rewards, view
from misvo.errors import RewardError
from misvo.result import Result
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
    judge: str | None = None,
    held_out: str | None = None,
) -> None:
    prompt = sys.stdin.read() if prompt == "-" else prompt
    prompts.check(prompt)
    score = rewards.load(reward)
    readers = _readers(judge, held_out)
    with view.loading(model):
        policy = misvo.Policy.from_pretrained(model, **load)
    try:
        with view.Progress(settings) as progress:
            result = misvo.steer(policy, prompt, score, settings=settings, on_step=progress.update)
    except (RewardError, KeyboardInterrupt) as error:
        _rescue(getattr(error, "result", None), save)
        raise
    panel = misvo.panel(result, **readers) if readers else None
    if panel is not None:
        result.panel = panel.to_dict()
    if save is not None:
        result.save(save, overwrite=True)
    if plot is not None:
        from misvo.plots import plot_run

        plot_run(result, plot)
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        view.show(result, reward)
        if panel is not None:
            view.print_table(panel)


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


def _rescue(result: Result | None, folder: Path | None) -> None:
    """Keep what was done before something went wrong, and say so; what went wrong is for others to say."""
    if folder is None or result is None or not result.candidates:
        return
    try:
        result.save(folder, overwrite=True)
        print(f"misvo: what was done until then is in {folder}.", file=sys.stderr)
    except OSError as error:
        print(f"misvo: what was done until then could not be saved in {folder}: {error}", file=sys.stderr)
