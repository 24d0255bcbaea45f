"""The two pictures of docs/concepts/method.md: the loop, and what the Fisher quadratic takes for small.

    python scripts/pictures.py                 # writes docs/pictures/*.svg

The second one is computed, not drawn: a head of eight tokens and two dimensions, its exact KL on a grid.
"""

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
INK, STEERED, PALE = "#263238", "#c2410c", "#eceff1"
TOKENS, LEVELS = 8, (0.05, 0.2, 0.5)  # nats


def loop(path: Path) -> None:
    """Boxes from the prompt to the reward, and the way back to u."""
    figure, axes = plt.subplots(figsize=(9, 3.1))
    axes.set(xlim=(0, 9), ylim=(0, 3.1))
    axes.axis("off")
    boxes = {
        "prompt": (0.1, "prompt and\nwhat was said"),
        "body": (1.75, "body\n(frozen)"),
        "sum": (3.3, "h + u"),
        "head": (4.75, "LM head W\n(frozen)"),
        "tokens": (6.3, "K responses"),
        "reward": (7.75, "reward\n(any function)"),
    }
    for name, (left, text) in boxes.items():
        colour = STEERED if name == "sum" else INK
        axes.add_patch(FancyBboxPatch((left, 1.9), 1.1, 0.8, "round,pad=0.05", facecolor=PALE, edgecolor=colour))
        axes.text(left + 0.55, 2.3, text, ha="center", va="center", color=colour, fontsize=9)
    lefts = [left for left, _ in boxes.values()]
    for before, after in pairwise(lefts):
        axes.add_patch(_arrow((before + 1.18, 2.3), (after - 0.07, 2.3), INK))
    update = (3.3, 0.3, 5.4)
    axes.add_patch(
        FancyBboxPatch(update[:2], update[2] - 0.1, 0.75, "round,pad=0.05", facecolor="white", edgecolor=STEERED)
    )
    text = "u moves toward the head rows of tokens in better responses,\nas far as a budget of nats allows"
    axes.text(update[0] + update[2] / 2, 0.68, text, ha="center", va="center", color=STEERED, fontsize=9)
    axes.add_patch(_arrow((8.3, 1.8), (8.3, 1.15), STEERED))
    axes.add_patch(_arrow((3.85, 1.15), (3.85, 1.8), STEERED))
    _save(figure, path)


def _arrow(start, end, colour):
    return FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour)


def geometry(path: Path) -> None:
    """Exact KL(π_u ‖ π_0) of a head W (V, 2) on a grid of u, beside ½ uᵀFu and a circle of the same area."""
    draws = np.random.default_rng(3)
    head, logits = draws.normal(size=(TOKENS, 2)) * (1.6, 0.6), draws.normal(size=TOKENS)
    own = _softmax(logits)
    fisher = head.T @ (np.diag(own) - np.outer(own, own)) @ head  # eq:fisher-u at u = 0
    x, y = np.meshgrid(np.linspace(-1.6, 1.6, 321), np.linspace(-2.4, 2.4, 321))
    u = np.stack([x, y], -1)  # (…, 2)
    steered = _softmax(logits + u @ head.T)
    exact = (steered * (np.log(steered) - np.log(own))).sum(-1)
    quadratic = 0.5 * np.einsum("...i,ij,...j->...", u, fisher, u)
    figure, axes = plt.subplots(figsize=(5.2, 4.6))
    lines = axes.contour(x, y, exact, levels=LEVELS, colors=INK)
    axes.clabel(lines, fmt="%.2f nats", fontsize=8)
    axes.contour(x, y, quadratic, levels=LEVELS[:1], colors=STEERED, linestyles="--")
    radius = (2 * LEVELS[0] / np.sqrt(np.linalg.det(fisher))) ** 0.5  # as much area as the ellipse
    axes.contour(x, y, np.hypot(x, y), levels=[radius], colors="#78909c", linestyles=":")
    axes.plot([], [], color=INK, label="exact KL")
    axes.plot([], [], color=STEERED, linestyle="--", label=f"½ uᵀFu = {LEVELS[0]}")
    axes.plot([], [], color="#78909c", linestyle=":", label="Euclidean length")
    axes.set(xlabel="first dimension of u", ylabel="second dimension of u", aspect="equal")
    axes.legend(loc="upper right", fontsize=8)
    _save(figure, path)


def _softmax(z):
    shifted = np.exp(z - z.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _save(figure, path):
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})  # the same bytes on every day
    plt.close(figure)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "misvo"
    loop(FOLDER / "method.svg")
    geometry(FOLDER / "fisher.svg")
