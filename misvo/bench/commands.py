"""The bodies of `misvo bench`, `misvo report` and `misvo profile`, so that the command line itself stays thin."""

import json
import sys
from pathlib import Path

from misvo.bench import config as configs
from misvo.errors import MisvoError
from misvo.view import print_table


def bench(
    path: Path,
    output: Path | None,
    data: list[str],
    use_ray: bool,
    ray_address: str | None,
    workers: int | None,
    cpus_per_worker: int,
    report_to: list[str],
    retry_errors: bool,
    only: list[str],
    as_json: bool,
) -> None:
    config = configs.read(path, data_files(data))
    folder = output or Path("runs") / config.name
    from misvo.bench import sweep

    pool = None
    if use_ray or ray_address:
        from misvo.bench.pool import RayPool

        pool = RayPool(ray_address, workers, cpus_per_worker, max(model.gpus for model in config.models))
    try:
        done = sweep.run(config, folder, pool=pool, report_to=report_to, retry_errors=retry_errors, only=only)
    except KeyboardInterrupt:
        print(f"misvo: what is finished is safe in {folder}; the same command goes on from there.", file=sys.stderr)
        raise
    summary = sweep.summarise(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "rows": done.rows, "fresh": done.fresh, **summary}))
        return
    from rich.table import Table

    print(f"{done.rows} of {done.total} prompts in {folder}, {done.fresh} of them now")
    table = Table()
    for name in ("cell", "prompts", "failed", "best reward", "tokens", "seconds"):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for name, cell in summary["cells"].items():
        reward = "" if cell["reward"] is None else f"{cell['reward']:.3f}"
        counts = (f"{cell['finished']}/{cell['expected']}", str(cell["failed"]), reward)
        table.add_row(name, *counts, str(cell["tokens"]), f"{cell['seconds']:.1f}")
    print_table(table)
    if done.failed:
        print(f"{len(done.failed)} prompts failed, the first with: {done.failed[0]}")
    print(f"Next: misvo report {folder}")


def report(runs: list[Path], output: Path | None, as_json: bool) -> None:
    from misvo.bench import report as reports

    made = reports.make(runs, output)
    if as_json:
        print(json.dumps(made.figures))
        return
    print(made.markdown)
    print(f"Written to {made.folder}: {', '.join(made.files)}")


def profile(
    path: Path | None, output: Path | None, data: list[str], warmup: int | None, prompts: int | None, as_json: bool
) -> None:
    from misvo.bench import profile as profiles

    config = profiles.DEFAULT if path is None else configs.read(path, data_files(data))
    if path is None and data:
        raise MisvoError("--data needs a config whose tasks it names.")
    measured = profiles.run(config, warmup, prompts)
    if output is not None:
        profiles.save(measured, output)
    if as_json:
        print(json.dumps(measured))
    else:
        print_table(profiles.table(measured))


def data_files(given: list[str]) -> dict[str, str]:
    """`FILE` is for the first task of the config, `TASK=FILE` for the one with that label."""
    files = {}
    for entry in given:
        label, equals, path = entry.partition("=")
        files[label if equals else ""] = path if equals else entry
    return files
