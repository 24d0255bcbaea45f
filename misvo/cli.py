"""The command line. `misvo --help` answers at once: nothing here imports torch until a command needs it."""

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from misvo import __version__
from misvo.errors import MisvoError, RewardError
from misvo.settings import COSTS, METHODS, Settings

app = typer.Typer(
    help="Steer a frozen language model toward any reward at test time, and change it as little as possible.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


AISP, RE, MORE = "Options of aisp", "Options of re-control", "More options"  # panels of `misvo steer --help`


class Kind(StrEnum):
    models = "models"
    rewards = "rewards"
    methods = "methods"
    costs = "costs"


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
    prompt: Annotated[str, typer.Argument(help="What to ask the model; `-` reads it from standard input.")],
    reward: Annotated[
        str,
        typer.Option(
            help="What to steer toward: `sentiment`, `similarity:TEXT`, `length:WORDS`, `file.py:function`, `module:f`."
        ),
    ] = "sentiment",
    model: Annotated[str, typer.Option(help="An embedded model, a Hugging Face id or a folder.")] = "smollm2-135m",
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = Settings.method,
    cost: Annotated[
        str, typer.Option(help=f"What the penalty of misvo calls far: {', '.join(COSTS)}.")
    ] = Settings.cost,
    rollouts: Annotated[
        int, typer.Option("--rollouts", "-k", help="Responses sampled per step (K).")
    ] = Settings.rollouts,
    steps: Annotated[int, typer.Option("--steps", "-n", help="Steps (N); K·N responses in all.")] = Settings.steps,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-t", help="Tokens per response (T).")] = 64,
    learning_rate: Annotated[
        float, typer.Option(help="Step size η, in units of reward times head geometry.")
    ] = Settings.learning_rate,
    penalty: Annotated[
        float | None, typer.Option(help="Weight λ of the cost. [default: 1; 0.1 for aisp]", show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = Settings.temperature,
    top_p: Annotated[
        float, typer.Option(help="Nucleus sampling: keep the most probable tokens of this mass.")
    ] = Settings.top_p,
    seed: Annotated[
        int, typer.Option(help="The result is a function of this, the prompt and the settings.")
    ] = Settings.seed,
    explicit_fisher: Annotated[
        bool, typer.Option(help="Form the frozen Fisher matrices (T·d² numbers).", rich_help_panel=MORE)
    ] = False,
    sigma2: Annotated[float, typer.Option(help="Variance of the noise.", rich_help_panel=AISP)] = Settings.sigma2,
    alpha: Annotated[float, typer.Option(help="1 pulls nothing back.", rich_help_panel=AISP)] = Settings.alpha,
    target_ess: Annotated[
        float | None, typer.Option(help="Set λ so that this many responses count.", rich_help_panel=AISP)
    ] = None,
    greedy: Annotated[bool, typer.Option(help="Take the most probable token.", rich_help_panel=AISP)] = False,
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
    given = locals()  # before anything else is defined: the options by their names
    settings = Settings(**{name: given[name] for name in given if name in Settings.__dataclass_fields__}, kl_ref=True)
    _quiet_libraries()
    import misvo
    from misvo import prompts, rewards, view

    prompt = sys.stdin.read() if prompt == "-" else prompt
    prompts.check(prompt)
    score = rewards.load(reward)
    with view.loading(model):
        policy = misvo.Policy.from_pretrained(
            model,
            dtype=dtype,
            device=device,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    try:
        with view.Progress(settings) as progress:
            result = misvo.steer(policy, prompt, score, on_step=progress.update, **settings.to_dict())
    except RewardError as error:
        if save is not None and error.result is not None and error.result.candidates:
            _save(error.result, save)
            raise MisvoError(f"{error} What was done until then is in {save}.") from error
        raise
    if save is not None:
        _save(result, save)
    if plot is not None:
        from misvo.plots import plot_run

        plot_run(result, plot)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
    else:
        view.show(result, reward)


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


@app.command("list")
def list_names(kind: Annotated[Kind, typer.Argument(help="What to list.")]):
    """List what goes by a name: models, rewards, methods, costs."""
    if kind is Kind.models:
        from misvo.embedded import MODELS

        rows = {name: entry.about for name, entry in MODELS.items()} | {"ID or FOLDER": "any causal LM of transformers"}
    elif kind is Kind.rewards:
        from misvo.rewards import EMBEDDED

        rows = {f"{name}:{argument}" if argument else name: about for name, (_, _, argument, about) in EMBEDDED.items()}
        rows |= {
            "file.py:function": "a function of your own",
            "module:function": "a function of an installed module",
        }
    else:
        rows = METHODS if kind is Kind.methods else COSTS
    width = max(map(len, rows))
    for name, about in rows.items():
        typer.echo(f"{name:<{width}}  {about}")


def _save(result, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    if result.steering is not None:
        result.steering.save_pretrained(folder)
    (folder / "result.json").write_text(json.dumps(result.to_dict()) + "\n", encoding="utf-8")


def _quiet_libraries():
    """This process is ours: passive OpenMP threads (before torch is imported), and no chatter of libraries."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main():
    try:
        app()
    except MisvoError as error:
        typer.echo(f"misvo: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("misvo: stopped.", err=True)
        sys.exit(130)
    except OSError as error:  # a folder that cannot be written, a full disk
        typer.echo(f"misvo: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
