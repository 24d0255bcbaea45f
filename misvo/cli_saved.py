"""The commands on what `misvo steer --save` wrote: score it again, sample from it again. Imports no torch by itself."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from misvo import cli_options
from misvo.cli_process import import_transformers, quiet_libraries
from misvo.errors import MisvoError

STRENGTH = "--strength"


def rescore(
    folder: Annotated[Path, typer.Argument(help="What `misvo steer --save` wrote.")],
    reward: Annotated[str, typer.Option(help="The reward to judge by; `misvo list rewards` has them all.")],
    columns: Annotated[Path | None, typer.Option(help="JSON file with an object of columns for the reward.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the new rewards as JSON and nothing else.")] = False,
):
    """Score the responses of a saved run again with another reward: was the run's choice good, or good at its reward?

    Example: `misvo rescore run --reward "similarity:sleep well"`
    """
    quiet_libraries()
    from misvo import rescoring, view

    columns = rescoring.read_columns(columns)
    with view.counting("Scoring", None) as count:
        rescored = rescoring.rescore(folder, reward, columns=columns, progress=count)
    if as_json:
        typer.echo(json.dumps({"reward": reward, **rescored.to_dict()}))
    else:
        rescoring.show(rescored, reward)


class SeveralStrengths(TyperCommand):
    """A command that takes `--strength 0 0.5 1`: click's options have a fixed number of values."""

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, spread(args))


def spread(arguments: list[str]) -> list[str]:
    """`--strength` before each of the numbers that follow it."""
    found: list[str] = []
    for argument in arguments:
        if len(found) > 1 and found[-2] == STRENGTH and _is_number(found[-1]) and _is_number(argument):
            found.append(STRENGTH)
        found.append(argument)
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@cli_options.accepts_load_options
def sample(
    folder: Annotated[Path, typer.Argument(help="What `misvo steer --save` wrote, or a steering.")],
    prompt: Annotated[str | None, typer.Argument(help="What to ask. [default: the prompt of the run]")] = None,
    strength: Annotated[
        list[float], typer.Option(STRENGTH, help="Factors of the vectors, such as `0 0.5 1 1.5`.", show_default=False)
    ] = [0.0, 0.5, 1.0, 1.5],  # noqa: B006
    samples: Annotated[int, typer.Option(min=1, help="Responses at each strength.")] = 8,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-t", min=1, help="Tokens per response. [default: as in the run]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise, which is the same at every strength.")] = 0,
    reward: Annotated[str | None, typer.Option(help="What scores the responses. [default: nothing]")] = None,
    column: cli_options.Columns = [],  # noqa: B006
    model: Annotated[str | None, typer.Option(help="The model. [default: the one that the run names]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all responses as JSON and nothing else.")] = False,
    **options,
):
    """Sample with saved vectors at several strengths and the same noise: how much is enough, how much too much?

    Example: `misvo sample run "How can I sleep better?" --strength 0 0.5 1 1.5 --reward length:12`
    """
    load = cli_options.to_load(options)
    columns = cli_options.columns(column)
    quiet_libraries(decoding=True)
    import_transformers()
    from misvo import Policy, rewards, strengths, view

    saved = strengths.read(folder)
    model = model or saved.model
    if model is None:
        raise MisvoError(f"{folder} does not say which model it was made for: give --model.")
    scorer = None if reward is None else rewards.load(reward)
    with view.loading(model):
        policy = Policy.from_pretrained(model, **load)
    how = {"samples": samples, "max_new_tokens": max_new_tokens, "seed": seed}
    with view.counting("Sampling", len(strength)) as count:
        rows = strengths.at_strengths(
            policy, saved, strength, prompt=prompt, reward=scorer, columns=columns, progress=count, **how
        )
    if as_json:
        asked = saved.prompt if prompt is None else prompt
        typer.echo(json.dumps({"model": model, "prompt": asked, "reward": reward, "strengths": list(map(vars, rows))}))
    else:
        view.print_table(strengths.table(rows, reward))


@cli_options.accepts_load_options
def export(
    folder: Annotated[Path, typer.Argument(help="What `misvo steer --save` wrote, or a steering.")],
    vllm: Annotated[
        Path, typer.Option("--vllm", help="Folder to write, such as `steerings/calm`: its name is what requests say.")
    ],
    model: Annotated[str | None, typer.Option(help="The model. [default: the one that the run names]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of what is there.")] = False,
    **options,
):
    """Write saved vectors for a vLLM server, which then steers by their name (docs/vllm.md).

    Example: `misvo export run --vllm steerings/calm`
    """
    load = cli_options.to_load(options)
    quiet_libraries()
    from misvo import Policy, exported, strengths, view

    saved = strengths.read(folder)
    model = model or saved.model
    if model is None:
        raise MisvoError(f"{folder} does not say which model it was made for: give --model.")
    if vllm.exists() and not overwrite:
        raise MisvoError(f"{vllm} is there already: give another name, or --overwrite.")
    with view.loading(model):
        policy = Policy.from_pretrained(model, **load)
    steering = saved.steering
    steering.check(policy)
    about = {"model": model, "head": policy.head.fingerprint}
    exported.export(policy.head, steering.vectors, steering.tie != "position", vllm, about)
    typer.echo(f'{vllm}: start vLLM with MISVO_STEERINGS={vllm.parent} and ask for "misvo": "{vllm.name}".')
