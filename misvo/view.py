"""What a result looks like in a terminal; while it comes about, `misvo.progress` tells how far it is."""

import sys
from contextlib import contextmanager
from itertools import zip_longest

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from misvo.story import nats_per_token, story, warmth

BLOCKS = "▁▂▃▄▅▆▇█"
FAINT = 0.05  # the least tint that is shown


def loading(model: str):
    """A spinner on standard error while a model loads; the first load of an embedded model converts it."""
    return Console(stderr=True).status(f"Loading {model} (an embedded model is converted once, in about 20 s)")


@contextmanager
def counting(title: str, total: int):
    """A bar on standard error that steps forward with every call of what this yields."""
    with Bar(*Bar.get_default_columns(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda _: bar.advance(task)


def print_table(table: Table) -> None:
    """A table in the width of the terminal; a file has room for whole lines."""
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def show(result, reward: str) -> None:
    """The answer beside the best of plain sampling, what happened in words, the course of the run, and what moved."""
    console = Console(highlight=False)
    best, plain = result.best, result.unsteered
    pair = Table.grid(expand=True, padding=(0, 1))
    pair.add_column(ratio=1)
    panels = [_panel(tinted(result), f"answer: {reward} {best.reward:.3f}", "green")]
    if plain is not None and plain is not best:
        count = sum(candidate.step == 0 for candidate in result.candidates)
        pair.add_column(ratio=1)
        text = Text(plain.text.strip() or "(empty)")
        panels.append(_panel(text, f"without steering, best of {count}: {plain.reward:.3f}", "dim"))
    pair.add_row(*panels)
    console.print(pair)
    for sentence in story(result):
        console.print(escape(sentence))
    console.print(_course(result))
    if result.moved:
        console.print(_promoted(result.moved))


def tinted(result) -> Text:
    """The answer, each token on a ground that is the warmer the further the model was moved there."""
    text = Text()
    for piece, nats in zip_longest(result.pieces, result.best.token_kl, fillvalue=0.0):
        warm = warmth(nats)
        ground = f"on rgb({round(120 * warm)},{round(60 * warm)},0)" if warm > FAINT else ""
        text.append(piece if isinstance(piece, str) else "", ground)
    return text if text.plain.strip() else Text(result.best.text.strip() or "(empty)")


def _course(result) -> Table:
    """Sparklines of rewards and KL, and what the run took."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, title in (("mean", "mean reward"), ("max", "highest reward"), ("best", "highest so far")):
        values = [row[name] for row in result.trace]
        table.add_row(title, sparkline(values), f"{values[0]:.3f} → {values[-1]:.3f}")
    for part in result.trace[0].get("parts", {}):
        values = [row.get("parts", {}).get(part) for row in result.trace]
        if None not in values:
            table.add_row(f"  {escape(part)}", sparkline(values), f"{values[0]:.3f} → {values[-1]:.3f}")
    kls = [row["kl"] for row in result.trace]
    if any(kls):
        per_token = nats_per_token(result.trace[-1], result.settings.rollouts)
        told = f"{kls[0]:.2f} → {kls[-1]:.2f} nats a response, {per_token:.3f} a token"
        table.add_row("sequence KL", sparkline(kls), told)
    if result.steering is not None:
        table.add_row("vectors", "", f"‖u‖ = {result.steering.norm:.2f}")
    if result.kl_ref is not None:
        table.add_row("KL_ref", "", f"{result.kl_ref.total:.2f} nats on reference prefixes")
    if result.best.changed:
        share = len(result.best.changed) / len(result.best.tokens)
        table.add_row("changed tokens", "", f"{share:.0%} of the answer would be others without steering, same noise")
    seconds = sum(sum(row["seconds"].values()) for row in result.trace)
    tokens = sum(row["tokens"] for row in result.trace)
    table.add_row("work", "", f"{len(result.candidates)} responses, {tokens} tokens, {seconds:.1f} s")
    unscored = sum(row["unscored"] for row in result.trace)
    if unscored:
        table.add_row("not scored", "", f"{unscored} responses")
    return table


def _promoted(moved) -> Table:
    table = Table(title="tokens promoted most, where the model moved most", title_justify="left", box=None)
    for heading in ("position", "KL", "token: probability before → after"):
        table.add_column(heading)
    for entry in moved:
        told = [(text, a, b) for text, a, b in entry.tokens if b - a >= 0.001]  # less is nothing that one could see
        rises = "  ".join(f"{escape(repr(text))} {a:.3f}→{b:.3f}" for text, a, b in told)
        table.add_row(str(entry.position), f"{entry.kl:.3f}", rises)
    return table


def _panel(text, title, style):
    return Panel(text, title=escape(title), border_style=style)


def sparkline(values: list[float]) -> str:
    """A small picture of a series, one block per value."""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)
