"""Two helps for a command with many options: `--help` shows those that people need first, `--help-all` all of them."""

import copy

import typer
from typer.core import TyperCommand

# Of `misvo steer`, by the names of its parameters.
FIRST = (
    "prompt",
    "reward",
    "model",
    "preset",
    "file",
    "out",
    "save",
    "plot",
    "as_json",
    "help_all",
    "rollouts",
    "steps",
    "max_new_tokens",
    "temperature",
    "seed",
)


class BriefHelp(TyperCommand):
    """A command whose `--help` shows FIRST."""

    def format_help(self, ctx, formatter):
        brief = copy.copy(self)  # parsing still knows them all
        brief.params = [parameter for parameter in self.params if parameter.name in FIRST]
        TyperCommand.format_help(brief, ctx, formatter)


def show_all(context: typer.Context, wanted: bool):
    """The callback of `--help-all`."""
    if wanted:
        TyperCommand.format_help(context.command, context, context.make_formatter())
        raise typer.Exit
