"""The pictures of a report: reward trajectories, reward against KL, seconds and fluency, KL by position.

No pyplot, no global state.
"""

import io
import math

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from misvo.bench.results import Cell, Results, best_of_n_kl
from misvo.bench.tables import NAMES

COLOURS = (
    *("#c0392b", "#2c6fbb", "#2e8b57", "#8e44ad", "#d68910", "#16a085", "#7f8c8d", "#6b4226", "#e377c2", "#222222"),
    *("#e8988f", "#93bfe6", "#8fcaa5", "#c9a3d8", "#efc37b", "#86d3c3", "#c3c8c9", "#b59a86", "#f3bfe0", "#909090"),
)
PANELS = (("mean", "mean reward within each step"), ("max", "maximum within each step"), ("best", "best so far"))
MOST_TICKS = 8  # on an axis

RETURNED = "returned (filled, ± standard error) and highest reward seen (hollow)"
RAW = "raw_best."  # figures of the response with the highest reward, also where another one was returned


def trajectory(results: Results, model: str, task: str) -> Figure:
    """The paper's trajectory figure: three panels against cumulative generations, shading one std over seeds."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    cells = _coloured(results, model, task)
    shade = 0.15 if len(cells) <= 4 else 0.06  # many bands would hide each other
    for axis, (name, title) in zip(axes, PANELS, strict=True):
        for colour, cell in cells:
            generations, mean, deviation = cell.trajectory(name)
            axis.plot(generations, mean, marker=".", color=colour, label=_label(cell), lw=1.4)
            low, high = zip(*((m - d, m + d) for m, d in zip(mean, deviation, strict=True)), strict=True)
            axis.fill_between(generations, low, high, color=colour, alpha=shade, lw=0)
        axis.set(title=title, xlabel="generations")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("reward")
    _legend(figure, axes)
    figure.suptitle(f"{model} on {task}")
    return figure


def reward_against_kl(results: Results, model: str, task: str) -> Figure:
    """Left: each step's mean reward against the sequence KL of the policy it sampled. Right: where each method ends."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    path, end = figure.subplots(1, 2)
    for colour, cell in _coloured(results, model, task):
        if cell.is_baseline:
            _, mean, _ = cell.trajectory("mean")
            path.axhline(sum(mean) / len(mean), color=colour, ls=":", label="reference")
        else:
            kl, mean = cell.trajectory("kl")[1], cell.trajectory("mean")[1]
            path.plot(kl, mean, marker=".", color=colour, lw=1.2, label=_label(cell))
        reward = cell.over_prompts("reward").mean
        if cell.is_baseline:
            label = f"{_label(cell)}, KL at most log n − (n − 1)/n"
            end.plot(best_of_n_kl(cell.generations), reward, "o", mfc="none", color=colour, label=label)
        elif cell.over_prompts("kl_ref") is not None:
            end.plot(cell.over_prompts("kl_ref").mean, reward, "o", color=colour, label=_label(cell))
    path.set(
        xlabel="sequence KL of the sampled policy (nats)", ylabel="mean reward within the step", title="along the way"
    )
    end.set(xlabel="KL_ref of the final policy (nats)", ylabel="best reward seen", title="at the end")
    for axis in (path, end):
        _from_zero(axis, "x", 0.1)
        axis.grid(alpha=0.3)
    _legend(figure, (path, end))
    figure.suptitle(f"{model} on {task}: reward against KL")
    return figure


def reward_against_seconds(results: Results, model: str, task: str) -> Figure | None:
    """Each step's mean reward and the best so far against the time that a prompt had taken by then."""
    cells = [(colour, cell) for colour, cell in _coloured(results, model, task) if cell.clock() is not None]
    if not cells:
        return None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, (name, title) in zip(axes, (PANELS[0], PANELS[2]), strict=True):
        for colour, cell in cells:
            axis.plot(cell.clock(), cell.trajectory(name)[1], marker=".", color=colour, lw=1.2, label=_label(cell))
        axis.set(xlabel="seconds of a prompt", title=title)
        axis.set_xlim(0, None)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("reward")
    _legend(figure, axes)
    figure.suptitle(f"{model} on {task}: reward against time")
    return figure


def reward_against_fluency(results: Results, model: str, task: str) -> Figure | None:
    """What each method returned (filled) and the highest reward that it saw (hollow): means over prompts."""
    cells = _judged(results, model, task)
    if not cells:
        return None
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axis = figure.subplots()
    _fluency_panel(axis, cells)
    axis.set(
        xlabel=_fluency(results),
        ylabel="reward",
        title=f"{model} on {task}\n{RETURNED}",
    )
    _legend(figure, (axis,))
    return figure


def all_tasks(results: Results, model: str) -> Figure | None:
    """Reward against fluency with a panel for each task, where there are several: all of a sweep in one picture."""
    panels = {task: cells for task in results.tasks if (cells := _judged(results, model, task))}
    if len(panels) < 2:
        return None
    figure = Figure(figsize=(4.2 * len(panels), 4.8), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (task, cells) in zip(axes, panels.items(), strict=True):
        _fluency_panel(axis, cells)
        axis.set(xlabel=_fluency(results), title=task)
    axes[0].set_ylabel("reward")
    _legend(figure, axes)
    figure.suptitle(f"{model}: {RETURNED}")
    return figure


def _judged(results, model, task):
    return [(c, cell) for c, cell in _coloured(results, model, task) if cell.over_prompts("fluency") is not None]


def _fluency(results) -> str:
    return f"fluency: nats per token of {', '.join(sorted(results.judges))}"


def _fluency_panel(axis, cells):
    for colour, cell in cells:
        points = [[cell.over_prompts(f"{where}{name}").mean for name in ("fluency", "reward")] for where in ("", RAW)]
        (x, y), raw = points
        errors = [[_standard_error(cell.over_prompts(name))] for name in ("fluency", "reward")]
        axis.errorbar(x, y, errors[1], errors[0], "o", color=colour, lw=1, label=_label(cell))
        axis.plot(*zip(*points, strict=True), color=colour, lw=0.8, ls=":")
        axis.plot(*raw, "o", mfc="none", color=colour)
    for colour, cell in cells:
        plain = [cell.over_prompts(f"reference.{name}") for name in ("fluency", "reward")]
        if cell.is_baseline and None not in plain:
            axis.plot(plain[0].mean, plain[1].mean, "*", ms=11, color=colour, label="one response of the reference")
            break
    axis.grid(alpha=0.3)


def kl_by_position(results: Results, model: str, task: str) -> Figure | None:
    """Where in the response the policy moved: on reference prefixes (final u) and on the last step's own prefixes."""
    cells = [(c, cell) for c, cell in _coloured(results, model, task) if not cell.is_baseline]
    if not cells:
        return None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    titles = {"kl_ref_per_position": "reference prefixes, final u", "kl_per_position": "own prefixes, last step"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for colour, cell in cells:
            values = cell.positions(name)
            if values is not None:
                axis.plot(range(1, len(values) + 1), values, color=colour, label=_label(cell), lw=1.2)
        axis.set(title=title, xlabel="position", ylabel="KL (nats)")
        _from_zero(axis, "y", 0.01)
        axis.grid(alpha=0.3)
    _legend(figure, axes)
    figure.suptitle(f"{model} on {task}: KL to the reference by position")
    return figure


def _from_zero(axes, which: str, threshold: float):
    """An axis from 0 on, straight up to the threshold and logarithmic beyond, with ticks that can be read."""
    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("symlog", linthresh=threshold)
    getattr(axes, f"set_{which}lim")(0, None)
    axis.set_major_locator(FixedLocator(ticks_from_zero(axis.get_view_interval()[1], threshold)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def ticks_from_zero(top: float, threshold: float) -> list[float]:
    """A few round numbers from 0 to `top`: evenly spaced below the threshold, by 1, 2, 5 or powers of ten beyond."""
    if top < 2 * threshold:
        return [tick for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, top).tolist() if tick <= top]
    powers = range(round(math.log10(threshold)), math.floor(math.log10(top)) + 1)
    for digits, apart in (((1, 2, 5), 1), ((1,), 1), ((1,), 2)):
        marks = [float(f"{digit}e{power}") for power in powers[::apart] for digit in digits]
        ticks = [0.0, *(mark for mark in marks if mark <= top)]
        if len(ticks) <= MOST_TICKS:
            break
    return ticks


def _standard_error(spread) -> float:
    return 0.0 if spread.std is None else spread.std / spread.count**0.5


def png(figure: Figure, dpi: int = 130) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _legend(figure, axes):
    """One legend below all panels, each label once."""
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    ncols = max(2, int(figure.get_figwidth() / 2.2))  # a column for each 2.2 inches: names are not cut at the edges
    figure.legend(found.values(), found, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)


def _coloured(results, model, task) -> list[tuple[str, Cell]]:
    """Cells with a colour each, the same colour for a method in every figure of a report."""
    methods = list(dict.fromkeys(cell.method for cell in results.cells))
    return [(COLOURS[methods.index(cell.method) % len(COLOURS)], cell) for cell in results.of(model, task)]


def _label(cell):
    return NAMES.get(cell.method, cell.method)
