"""Pictures of a run. Figures are made without pyplot, so no global state of matplotlib is touched."""

from pathlib import Path

from matplotlib.figure import Figure

from misvo.errors import MisvoError, first_line
from misvo.result import Result


def plot_run(result: Result, path: Path) -> None:
    """Reward (mean, max, best) against cumulative generations, and KL by position."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    reward, kl = figure.subplots(1, 2)
    generations = [(row["step"] + 1) * result.settings.rollouts for row in result.trace]
    for name, style in (("best", "-"), ("max", "--"), ("mean", "-")):
        reward.plot(generations, [row[name] for row in result.trace], style, marker=".", label=name)
    reward.set(
        xlabel="generations",
        ylabel="reward",
        title=f"{result.settings.method}: reward of {result.settings.rollouts} rollouts a step",
    )
    reward.legend()

    last = result.trace[-1]
    positions = range(1, len(last["kl_per_position"]) + 1)
    kl.plot(positions, last["kl_per_position"], label=f"steered prefixes, last step: {last['kl']:.2f} nats")
    if result.kl_ref is not None:
        kl.plot(
            positions,
            result.kl_ref.per_position,
            label=f"reference prefixes, final u: {result.kl_ref.total:.2f} nats",
        )
    kl.set(xlabel="position", ylabel="KL to the reference (nats)", title="how far the model moved, and where")
    kl.legend()
    for axes in (reward, kl):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # a file type that matplotlib does not write
        raise MisvoError(f"cannot draw {path}: {first_line(error)}") from error
