"""`misvo profile`: time, tokens per second and peak memory of each method, as the paper's profile table.

One prompt at a time, no cross-prompt batching, no KL meter. The first prompts warm up and do not count. Times are wall
clock around the whole call (prefill, decoding, scoring, updates); on a GPU the device is waited for first.
"""

import json
import time
from dataclasses import replace
from pathlib import Path

from misvo.bench import config as configs
from misvo.bench.environment import PeakMemory, environment
from misvo.bench.plan import load_task
from misvo.bench.work import stage_seconds
from misvo.errors import MisvoError
from misvo.lines import write_atomically
from misvo.view import counting

DEFAULT = configs.from_dict(
    {
        "name": "profile",
        "warmup": 1,
        "settings": {"preset": "paper", "rollouts": 8, "steps": 4, "max_new_tokens": 32},
        "models": [{"path": "smollm2-135m"}],
        "tasks": [{"name": "prompts", "prompts": 2}],
        "methods": [{"method": "best-of-n"}, {"method": "aisp"}, {"method": "misvo"}],
    }
)


def run(config: configs.Config, warmup: int | None = None, prompts: int | None = None) -> dict:
    """Measure every cell of the config on its first seed."""
    warmup = config.warmup if warmup is None else warmup
    cells = config.cells()
    loaded = {entry.label: load_task(replace(entry, prompts=None), config.models[0])[0] for entry in config.tasks}
    policies, measured = {}, []
    counts = {}
    for entry in config.tasks:
        count = prompts or entry.prompts or 10
        if len(loaded[entry.label].rows) < warmup + 1:
            raise MisvoError(f"the task {entry.label} has too few prompts for {warmup} to warm up and one to time.")
        task = loaded[entry.label].sample(min(warmup + count, len(loaded[entry.label].rows)), entry.sample_seed)
        loaded[entry.label], counts[entry.label] = task, len(task.rows) - warmup
    with counting("Timing", sum(warmup + counts[cell.task.label] for cell in cells)) as count:
        for cell in cells:
            if cell.model.label not in policies:
                policies.clear()  # one model at a time
                policies[cell.model.label] = cell.model.load()
            policy, task = policies[cell.model.label], loaded[cell.task.label]
            measured.append(_measure(policy, task, cell, config.seeds[0], warmup, count))
    return {
        "format": "misvo-profile-1",
        "prompts": min(counts.values()),
        "warmup": warmup,
        "max_new_tokens": max(cell.settings.max_new_tokens for cell in cells),
        "environment": environment(),
        "methods": measured,
    }


def _measure(policy, task, cell, seed, warmup, count) -> dict:
    from misvo.calls import steer

    settings = replace(cell.settings, seed=seed, kl_ref=False)
    seconds, tokens, stages, lengths = [], [], [], []
    for row in task.rows[:warmup]:
        steer(policy, row.prompt, task.reward, columns=row.columns, settings=settings, progress=False)
        count(None)
    with PeakMemory(policy.device) as peak:
        for row in task.rows[warmup:]:
            _wait(policy.device)
            started = time.perf_counter()
            result = steer(policy, row.prompt, task.reward, columns=row.columns, settings=settings, progress=False)
            _wait(policy.device)
            seconds.append(time.perf_counter() - started)
            tokens.append(sum(step["tokens"] for step in result.trace))
            lengths.append(len(result.prompt_ids))
            stages.append(stage_seconds(result))
            count(None)
    return {
        "model": cell.model.label,
        "task": cell.task.label,
        "label": cell.method.label,
        "method": settings.method,
        "rollouts": settings.rollouts,
        "steps": settings.steps,
        "seconds": _mean(seconds),
        "tokens": _mean(tokens),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "prompt_tokens": _mean(lengths),
        "peak_memory": peak.bytes,
        "stages": {name: _mean([stage[name] for stage in stages]) for name in stages[0]},
        "per_prompt": [{"seconds": s, "tokens": t} for s, t in zip(seconds, tokens, strict=True)],
    }


def table(measured: dict):
    """A rich table for the terminal."""
    from rich.table import Table

    longest = measured["max_new_tokens"]
    title = f"{measured['prompts']} prompts after {measured['warmup']} to warm up, {longest} new tokens at most"
    made = Table(title=title, title_justify="left")
    for name in (
        "model",
        "task",
        "method",
        "K × N",
        "seconds",
        "tok/s",
        "peak GB",
        "prefill",
        "decode",
        "reward",
        "update",
    ):
        made.add_column(name, justify="left" if name in ("model", "task", "method") else "right")
    for entry in measured["methods"]:
        figures = [f"{entry['seconds']:.2f}", f"{entry['tokens_per_second']:.1f}", f"{entry['peak_memory'] / 1e9:.2f}"]
        stages = [f"{entry['stages'][stage]:.2f}" for stage in ("prefill", "decode", "reward", "update")]
        names = [entry["model"], entry["task"], entry["label"], f"{entry['rollouts']} × {entry['steps']}"]
        made.add_row(*names, *figures, *stages)
    return made


def save(measured: dict, folder: Path) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "profile.json", json.dumps(measured, indent=2) + "\n")


def _wait(device):
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _mean(values):
    return sum(values) / len(values)
