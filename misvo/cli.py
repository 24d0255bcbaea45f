"""The command line. `misvo --help` answers at once: nothing here imports torch until a command needs it."""

import json
import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from misvo import __version__, cli_fit, cli_help, cli_options, cli_saved, cli_serve
from misvo.cli_process import import_transformers, plain_warnings, quiet_libraries
from misvo.errors import MisvoError, cut
from misvo.names import COSTS, ENGINES, METHODS
from misvo.settings import Settings


class _Stopped(Exception):
    """Ctrl-C, under a name that typer does not know: it would end the process without a word."""


class _Commands(TyperGroup):
    def invoke(self, context):
        try:
            return super().invoke(context)
        except KeyboardInterrupt as interrupt:
            raise _Stopped from interrupt


app = typer.Typer(
    cls=_Commands,
    help="Steer a frozen language model toward any reward at test time, and change it as little as possible.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


class Kind(StrEnum):
    models = "models"
    rewards = "rewards"
    methods = "methods"
    costs = "costs"
    tasks = "tasks"
    engines = "engines"


def _version(wanted: bool):
    if wanted:
        typer.echo(f"misvo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
):
    pass


@app.command(cls=cli_help.BriefHelp)
@cli_options.accepts_settings
def steer(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask the model; `-` reads it from standard input.")
    ] = None,
    reward: Annotated[
        str,
        typer.Option(
            help="What to steer toward: `sentiment`, `length:WORDS`, `hf:MODEL`, `http:URL`, `file.py:function`, or a "
            "sum such as `sentiment + 0.1*length:40`; `misvo list rewards` has them all."
        ),
    ] = "sentiment",
    model: Annotated[str, typer.Option(help="An embedded model, a Hugging Face id or a folder.")] = "smollm2-135m",
    preset: Annotated[
        str, typer.Option(help="auto: no tuning needed. paper: Algorithm 1 as printed. Other options win over it.")
    ] = "auto",
    save: Annotated[Path | None, typer.Option(help="Folder for the steering vectors and all responses.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the run: reward by generations, KL by position.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Many prompts in place of PROMPT: a line each, or JSONL with `prompt`, perhaps `id`, and columns."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSONL file for the results of `--file`; the same command goes on where it was stopped."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result (of `--file`: a summary) as JSON and nothing else.")
    ] = False,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", callback=cli_help.show_all, is_eager=True, help="Show all options, sorted by method."
        ),
    ] = False,
    messages: Annotated[
        Path | None, typer.Option(help="JSON file with a list of chat messages, in place of PROMPT.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    column: cli_options.Columns = [],  # noqa: B006
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Let `--save` or `--out` take the place of another run.")
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Of `--file`: do prompts again that failed before.")
    ] = False,
    judge: Annotated[
        str | None, typer.Option(help="A model that reads the responses: fluency, as `gemma3-270m`.")
    ] = None,
    held_out: Annotated[str | None, typer.Option(help="A reward that is measured and not steered toward.")] = None,
    **options,
):
    """Sample, score and steer, then show the best response beside the reference.

    Example: `misvo steer "Give me one tip for sleeping better." --reward length:12 -k 16 -n 8 -t 40`

    Many prompts: `misvo steer --file prompts.jsonl --out results.jsonl --reward length:12`
    """
    load = cli_options.to_load(options)
    _check_one_of({"PROMPT": prompt, "--messages": messages, "--file": file})
    columns = cli_options.columns(column)
    settings = Settings.from_preset(preset, **cli_options.given(options), kl_ref=file is None)
    if file is not None:
        _check_file(out, {"--save": save, "--plot": plot, "--judge": judge, "--held-out": held_out})
        quiet_libraries(decoding=True)
        import_transformers()
        from misvo import many

        how = {"reward": reward, "model": model, "load": load, "settings": settings, "as_json": as_json}
        resume = {"overwrite": overwrite, "retry_errors": retry_errors}
        return many.steer_file(file, out, system=system, columns=columns, **how, **resume)
    if out is not None or retry_errors:
        raise MisvoError(f"{'--out' if out is not None else '--retry-errors'} goes with --file: --save keeps a run.")
    quiet_libraries(decoding=True)
    import_transformers()
    from misvo import commands

    asked = commands.read_prompt(prompt, messages, system)
    commands.steer(asked, reward, model, load, settings, save, plot, as_json, overwrite, judge, held_out, columns)


def _check_one_of(sources: dict):
    given = [name for name, value in sources.items() if value is not None]
    if not given:
        raise MisvoError("there is nothing to steer: give a prompt, --messages FILE or --file FILE --out FILE.")
    if len(given) > 1:
        raise MisvoError(f"{' and '.join(given)} exclude each other: give one of them.")


def _check_file(out: Path | None, of_one_prompt: dict):
    if out is None:
        raise MisvoError("--file needs a file for its results: give --out RESULTS.jsonl.")
    for name, value in of_one_prompt.items():
        if value is not None:
            raise MisvoError(f"{name} is for a single prompt: with --file, results go to --out alone.")


@app.command()
def theory(
    policies: Annotated[int, typer.Option(help="Random policies to check each claim on.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the random policies.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON and nothing else.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Picture of the observed orders in ‖u‖, on log-log axes.")] = None,
):
    """Check every claim of the paper on policies small enough to enumerate; exit code 1 if one fails."""
    from misvo import theory, view

    with view.counting("Checking claims", len(theory.CHECKS)) as count:
        checks = theory.run(policies, seed, progress=count)
    if plot is not None:
        theory.plot_orders(checks, plot)
    if as_json:
        typer.echo(theory.to_json(checks))
    else:
        view.print_table(theory.table(checks))
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


OUTPUT = ("--output", "--out")  # other commands call theirs --out
DataFiles = Annotated[
    list[str], typer.Option("--data", help="File of prompts: `FILE` for the first task, `TASK=FILE` for a named one.")
]


@app.command()
def bench(
    config: Annotated[Path, typer.Argument(help="A sweep in TOML, such as `configs/quick.toml`.")],
    output: Annotated[Path | None, typer.Option(*OUTPUT, help="Folder of the run. [default: runs/NAME]")] = None,
    data: DataFiles = [],  # noqa: B006
    ray: Annotated[bool, typer.Option("--ray", help="Work on Ray: one actor per GPU or per worker's cores.")] = False,
    ray_address: Annotated[str | None, typer.Option(help="A running Ray cluster, such as `auto`.")] = None,
    workers: Annotated[int | None, typer.Option(help="Actors on Ray. [default: what the cluster has]")] = None,
    cpus_per_worker: Annotated[int, typer.Option(help="Cores of each actor where there is no GPU.")] = 1,
    report_to: Annotated[list[str], typer.Option(help="Also log to tensorboard, wandb or trackio.")] = [],  # noqa: B006
    retry_errors: Annotated[bool, typer.Option(help="Do prompts again that failed before.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Do this method, task or seed now, and leave others for later.")
    ] = None,
    require_sandbox: Annotated[
        bool, typer.Option("--require-sandbox", help="Refuse to run model-written code that cannot be isolated fully.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")] = False,
):
    """Run models × tasks × methods × seeds; killed or stopped, the same command goes on where it was.

    Example: `misvo bench configs/quick.toml --data shp=prompts.jsonl --output runs/quick`
    """
    quiet_libraries()
    if require_sandbox:
        from misvo.rewards.code import REQUIRE_SANDBOX

        os.environ[REQUIRE_SANDBOX] = "1"  # for this process and for the workers that it starts
    from misvo.bench import commands

    commands.bench(
        config, output, data, ray, ray_address, workers, cpus_per_worker, report_to, retry_errors, only or [], as_json
    )


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `misvo bench` and `misvo profile`.")],
    output: Annotated[Path | None, typer.Option(*OUTPUT, help="Folder for the report. [default: RUN/report]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
):
    """Tables (Markdown, LaTeX), figures and one HTML page from finished or half-finished runs."""
    quiet_libraries()
    from misvo.bench import commands

    commands.report(runs, output, as_json)


@app.command()
def profile(
    config: Annotated[Path | None, typer.Argument(help="A sweep in TOML; without one, a small built-in one.")] = None,
    output: Annotated[
        Path | None, typer.Option(*OUTPUT, help="Folder for the figures, which `misvo report` takes.")
    ] = None,
    data: DataFiles = [],  # noqa: B006
    warmup: Annotated[int | None, typer.Option(help="Prompts that run first and do not count.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts that are timed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
):
    """Time, tokens per second and peak memory of each method, one prompt at a time."""
    quiet_libraries()
    from misvo.bench import commands

    commands.profile(config, output, data, warmup, prompts, as_json)


app.command()(cli_saved.rescore)
app.command()(cli_saved.export)
app.command(cls=cli_saved.SeveralStrengths)(cli_saved.sample)
app.command()(cli_fit.fit_reward)
app.command()(cli_serve.serve)
app.command()(cli_serve.studio)


@app.command()
def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete the converted models; they can be made again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the models as JSON and nothing else.")] = False,
):
    """Show where the embedded models are that were converted on this machine, and how large they are."""
    from misvo import converted
    from misvo.embedded import cache_folder

    models = converted.models()
    total = sum(model.size for model in models)
    if as_json:
        shown = [{**vars(model), "folder": str(model.folder)} for model in models]
        typer.echo(json.dumps({"folder": str(cache_folder()), "bytes": total, "models": shown}))
    else:
        typer.echo(f"{cache_folder()}: {converted.shown_size(total) if models else 'no converted models'}")
        for model in models:
            half = "" if model.whole else ", half-made"
            typer.echo(f"  {model.name}  {converted.shown_size(model.size)}  {model.folder.name}{half}")
    if clear and models:
        if not yes:
            typer.confirm(f"Delete {converted.shown_size(total)}?", abort=True, err=True)
        for model in models:
            converted.remove(model)
        typer.echo(f"misvo: deleted {converted.shown_size(total)}.", err=True)


@app.command("list")
def list_names(kind: Annotated[Kind, typer.Argument(help="What to list.")]):
    """List what goes by a name: models, rewards, methods, costs, tasks, engines."""
    examples: dict[str, str] = {}
    if kind is Kind.models:
        from misvo.embedded import MODELS

        rows = {name: entry.about for name, entry in MODELS.items()} | {"ID or FOLDER": "any causal LM of transformers"}
    elif kind is Kind.rewards:
        from misvo.rewards.specs import EMBEDDED, FORMS

        rows = {entry.usage(name): entry.about for name, entry in EMBEDDED.items()} | FORMS
        examples = {entry.usage(name): f"--reward {shlex.quote(entry.example)}" for name, entry in EMBEDDED.items()}
    elif kind is Kind.tasks:
        from misvo.tasks import TASKS

        rows = {name: about for name, (_, about) in TASKS.items()}
    else:
        rows = {Kind.methods: METHODS, Kind.costs: COSTS, Kind.engines: ENGINES}[kind]
    width = max(map(len, rows))
    for name, about in rows.items():
        typer.echo(f"{name:<{width}}  {about}")
        if name in examples:
            typer.echo(f"{'':<{width}}  {examples[name]}")


def main():
    plain_warnings()
    try:
        app()
    except MisvoError as error:
        typer.echo(f"misvo: {cut(str(error), 1000)}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, _Stopped):
        typer.echo("misvo: stopped.", err=True)
        sys.exit(130)
    except OSError as error:  # a folder that cannot be written, a full disk
        typer.echo(f"misvo: {cut(str(error), 1000)}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
