"""The command line. `misvo --help` answers at once: nothing here imports torch until a command needs it."""

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from misvo import __version__
from misvo.errors import MisvoError
from misvo.settings import COSTS, CREDITS, LOAD_OPTIONS, METHODS, STEPS, TIES, Settings
from misvo.threads import wait_briefly


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


# Panels of `misvo steer --help`
MISVO, STOP, MORE = "Options of misvo", "When to stop early", "More options"
AISP, RE = "Options of aisp", "Options of re-control"


class Kind(StrEnum):
    models = "models"
    rewards = "rewards"
    methods = "methods"
    costs = "costs"
    tasks = "tasks"


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


@app.command()
def steer(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to ask the model; `-` reads it from standard input.")],
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
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = Settings.method,
    rollouts: Annotated[
        int, typer.Option("--rollouts", "-k", help="Responses sampled per step (K).")
    ] = Settings.rollouts,
    steps: Annotated[int, typer.Option("--steps", "-n", help="Steps (N); K·N responses in all.")] = Settings.steps,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-t", help="Tokens per response (T).")] = 64,
    kl_budget: Annotated[
        float | None, typer.Option(help="Nats per response that the model may move. [default: 10; paper: no limit]")
    ] = None,
    kl_budget_per_token: Annotated[
        float | None, typer.Option(help="The same in nats per token, in place of it.", rich_help_panel=MISVO)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = Settings.temperature,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the most probable tokens of this mass. [default: 0.95; paper: 1]")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="The result is a function of this, the prompt and the settings.")
    ] = Settings.seed,
    cost: Annotated[
        str | None, typer.Option(help=f"What misvo calls far: {', '.join(COSTS)}.", rich_help_panel=MISVO)
    ] = None,
    tie: Annotated[
        str | None, typer.Option(help=f"Vectors by position: {', '.join(TIES)}; aisp too.", rich_help_panel=MISVO)
    ] = None,
    step: Annotated[str | None, typer.Option(help=f"One of {', '.join(STEPS)}.", rich_help_panel=MISVO)] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="η of euler and proximal steps, in units of reward times head geometry.", rich_help_panel=MISVO
        ),
    ] = None,
    penalty: Annotated[
        float | None, typer.Option(help="λ, instead of a budget. [paper: 1; aisp: 0.1]", rich_help_panel=MISVO)
    ] = None,
    step_nats: Annotated[
        float | None, typer.Option(help="Size of a natural or dual step.", rich_help_panel=MISVO)
    ] = None,
    damping: Annotated[
        float | None, typer.Option(help="Of those steps: larger trusts fewer directions.", rich_help_panel=MISVO)
    ] = None,
    credit: Annotated[
        str | None, typer.Option(help=f"What tokens earn: {', '.join(CREDITS)}.", rich_help_panel=MISVO)
    ] = None,
    standardize: Annotated[
        bool, typer.Option("--standardize", help="Advantages in standard deviations.", rich_help_panel=MISVO)
    ] = False,
    select: Annotated[
        str | None, typer.Option(help="Return the best response, or the best ordinary one.", rich_help_panel=MISVO)
    ] = None,
    stop_reward: Annotated[
        float | None, typer.Option(help="Stop when a response earns this.", rich_help_panel=STOP)
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many steps without a better one.", rich_help_panel=STOP)
    ] = None,
    token_budget: Annotated[
        int | None, typer.Option(help="Stop when so many tokens were sampled.", rich_help_panel=STOP)
    ] = None,
    seconds_budget: Annotated[
        float | None, typer.Option(help="Stop after so many seconds.", rich_help_panel=STOP)
    ] = None,
    explicit_fisher: Annotated[
        bool, typer.Option(help="Form the frozen Fisher matrices (T·d² numbers).", rich_help_panel=MORE)
    ] = False,
    sigma2: Annotated[float, typer.Option(help="Variance of the noise.", rich_help_panel=AISP)] = Settings.sigma2,
    alpha: Annotated[float, typer.Option(help="1 pulls nothing back.", rich_help_panel=AISP)] = Settings.alpha,
    target_ess: Annotated[
        float | None, typer.Option(help="Set λ so that this many responses count.", rich_help_panel=AISP)
    ] = None,
    greedy: Annotated[
        bool, typer.Option(help="Take the most probable token; re-control too.", rich_help_panel=AISP)
    ] = False,
    mask_after_eos: Annotated[bool, typer.Option(help="Ignore noise behind the end.", rich_help_panel=AISP)] = False,
    window: Annotated[int | None, typer.Option(help="Steer the first so many positions.", rich_help_panel=AISP)] = None,
    value: Annotated[
        str | None, typer.Option(help="Folder of a fitted value network; else one is fitted.", rich_help_panel=RE)
    ] = None,
    value_steps: Annotated[
        int | None, typer.Option(help="Steps that collect for the network. [default: half]", rich_help_panel=RE)
    ] = None,
    value_target: Annotated[
        str, typer.Option(help="State that carries the reward: last or first.", rich_help_panel=RE)
    ] = Settings.value_target,
    value_iterations: Annotated[
        int, typer.Option(help="Gradient steps per token.", rich_help_panel=RE)
    ] = Settings.value_iterations,
    value_step_size: Annotated[
        float, typer.Option(help="Size of each gradient step.", rich_help_panel=RE)
    ] = Settings.value_step_size,
    max_rows: Annotated[
        int | None, typer.Option(help="Rows decoded at once. [default: what fits memory]", rich_help_panel=MORE)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="What decoding may take, such as 8GB. [default: half of what is free]", rich_help_panel=MORE),
    ] = None,
    law_dtype: Annotated[
        str, typer.Option(help="Mean laws of tie=position: float32, or bfloat16 at half of it.", rich_help_panel=MORE)
    ] = Settings.law_dtype,
    quantize: Annotated[
        str | None, typer.Option(help="`int8`: quicker on a CPU, and another model.", rich_help_panel=MORE)
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the body, for GPUs; minutes, once.", rich_help_panel=MORE)
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Folder for the steering vectors and all responses.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the run: reward by generations, KL by position.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON and nothing else.")] = False,
    dtype: Annotated[str, typer.Option(help="Precision of the weights: auto, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Where the model runs, such as `cpu` or `cuda:0`.")] = None,
    device_map: Annotated[str | None, typer.Option(help="Spread a large model, such as `auto`.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the checkpoint.")] = False,
):
    """Sample, score and steer, then show the best response beside the reference.

    Example: `misvo steer "Give me one tip for sleeping better." --reward length:12 -k 16 -n 8 -t 40`
    """
    given = {
        name: value
        for name, value in context.params.items()
        if name in Settings.__dataclass_fields__ and context.get_parameter_source(name).name != "DEFAULT"
    }
    settings = Settings.from_preset(preset, **{"max_new_tokens": max_new_tokens, **given}, kl_ref=True)
    _quiet_libraries()
    from misvo import commands

    load = {name: context.params[name] for name in LOAD_OPTIONS}
    commands.steer(prompt, reward, model, load, settings, save, plot, as_json)


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


DataFiles = Annotated[
    list[str], typer.Option("--data", help="File of prompts: `FILE` for the first task, `TASK=FILE` for a named one.")
]


@app.command()
def bench(
    config: Annotated[Path, typer.Argument(help="A sweep in TOML, such as `configs/quick.toml`.")],
    output: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/NAME]")] = None,
    data: DataFiles = [],  # noqa: B006
    ray: Annotated[bool, typer.Option("--ray", help="Work on Ray: one actor per GPU or per worker's cores.")] = False,
    ray_address: Annotated[str | None, typer.Option(help="A running Ray cluster, such as `auto`.")] = None,
    workers: Annotated[int | None, typer.Option(help="Actors on Ray. [default: what the cluster has]")] = None,
    cpus_per_worker: Annotated[int, typer.Option(help="Cores of each actor where there is no GPU.")] = 1,
    report_to: Annotated[list[str], typer.Option(help="Also log to tensorboard, wandb or trackio.")] = [],  # noqa: B006
    retry_errors: Annotated[bool, typer.Option(help="Do prompts again that failed before.")] = False,
    require_sandbox: Annotated[
        bool, typer.Option("--require-sandbox", help="Refuse to run model-written code that cannot be isolated fully.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")] = False,
):
    """Run models × tasks × methods × seeds; killed or stopped, the same command goes on where it was.

    Example: `misvo bench configs/quick.toml --data shp=prompts.jsonl --output runs/quick`
    """
    _quiet_libraries()
    if require_sandbox:
        from misvo.rewards.code import REQUIRE_SANDBOX

        os.environ[REQUIRE_SANDBOX] = "1"  # for this process and for the workers that it starts
    from misvo.bench import commands

    commands.bench(config, output, data, ray, ray_address, workers, cpus_per_worker, report_to, retry_errors, as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `misvo bench` and `misvo profile`.")],
    output: Annotated[Path | None, typer.Option(help="Folder for the report. [default: RUN/report]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
):
    """Tables (Markdown, LaTeX), figures and one HTML page from finished or half-finished runs."""
    _quiet_libraries()
    from misvo.bench import commands

    commands.report(runs, output, as_json)


@app.command()
def profile(
    config: Annotated[Path | None, typer.Argument(help="A sweep in TOML; without one, a small built-in one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the figures, which `misvo report` takes.")] = None,
    data: DataFiles = [],  # noqa: B006
    warmup: Annotated[int | None, typer.Option(help="Prompts that run first and do not count.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts that are timed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
):
    """Time, tokens per second and peak memory of each method, one prompt at a time."""
    _quiet_libraries()
    from misvo.bench import commands

    commands.profile(config, output, data, warmup, prompts, as_json)


@app.command()
def rescore(
    folder: Annotated[Path, typer.Argument(help="What `misvo steer --save` wrote.")],
    reward: Annotated[str, typer.Option(help="The reward to judge by; `misvo list rewards` has them all.")],
    columns: Annotated[Path | None, typer.Option(help="JSON file with an object of columns for the reward.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the new rewards as JSON and nothing else.")] = False,
):
    """Score the responses of a saved run again with another reward: was the run's choice good, or good at its reward?

    Example: `misvo rescore run --reward "similarity:sleep well"`
    """
    _quiet_libraries()
    from misvo import rescoring, view

    columns = rescoring.read_columns(columns)
    with view.counting("Scoring", None) as count:
        rescored = rescoring.rescore(folder, reward, columns=columns, progress=count)
    if as_json:
        typer.echo(json.dumps({"reward": reward, **rescored.to_dict()}))
    else:
        rescoring.show(rescored, reward)


@app.command("list")
def list_names(kind: Annotated[Kind, typer.Argument(help="What to list.")]):
    """List what goes by a name: models, rewards, methods, costs, tasks."""
    if kind is Kind.models:
        from misvo.embedded import MODELS

        rows = {name: entry.about for name, entry in MODELS.items()} | {"ID or FOLDER": "any causal LM of transformers"}
    elif kind is Kind.rewards:
        from misvo.rewards.specs import EMBEDDED, FORMS

        rows = {f"{name}:{argument}" if argument else name: about for name, (_, _, argument, about) in EMBEDDED.items()}
        rows |= FORMS
    elif kind is Kind.tasks:
        from misvo.tasks import TASKS

        rows = {name: about for name, (_, about) in TASKS.items()}
    else:
        rows = METHODS if kind is Kind.methods else COSTS
    width = max(map(len, rows))
    for name, about in rows.items():
        typer.echo(f"{name:<{width}}  {about}")


def _quiet_libraries():
    """This process is ours: threads wait as suits us (before torch is imported), and libraries do not chatter."""
    wait_briefly()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main():
    try:
        app()
    except MisvoError as error:
        typer.echo(f"misvo: {error}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, _Stopped):
        typer.echo("misvo: stopped.", err=True)
        sys.exit(130)
    except OSError as error:  # a folder that cannot be written, a full disk
        typer.echo(f"misvo: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
