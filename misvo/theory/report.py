"""How checks are shown: a table for people, JSON for machines, a log-log figure of the orders.

rich and matplotlib are imported where they are used, so that `import misvo.theory` needs numpy alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .check import Check

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = 3  # panels in a row of the figure


def table(checks: Sequence[Check]) -> Table:
    """A row per check: claim, where in the paper, quantity, measured, bound or order, verdict."""
    from rich.table import Table
    from rich.text import Text

    failed = sum(not check.passed for check in checks)
    title = f"{len(checks)} claims checked, {failed} failed" if failed else f"{len(checks)} claims checked, all hold"
    shown = Table(title=title)
    for heading in ("claim", "in the paper", "quantity"):
        shown.add_column(heading)
    for heading in ("measured", "bound or order"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    for check in checks:
        verdict = Text("holds", style="green") if check.passed else Text("FAILS", style="bold red")
        words = [Text(word) for word in (check.claim, check.where, check.quantity)]
        shown.add_row(*words, measured(check), limit(check), verdict)
    return shown


def measured(check: Check) -> str:
    return f"{check.measured:.3f}" if check.kind == "order" else f"{check.measured:.3g}"


def limit(check: Check) -> str:
    """The limit in words that fit its kind: tolerance, bound, or order."""
    if check.kind == "order":
        return f"order {check.order:g} ({check.relation} {check.limit:.3g})"
    return f"{check.relation} {check.limit:.3g}"


def to_json(checks: Sequence[Check]) -> str:
    """A JSON object with `passed` and a list `checks`; a measured number that is not finite is null."""
    rows = []
    for check in checks:
        row = asdict(check) | {"passed": check.passed}
        row["measured"] = finite(check.measured)
        row["curves"] = [
            {"sizes": list(curve.sizes), "errors": [finite(value) for value in curve.errors]} for curve in check.curves
        ]
        rows.append(row)
    document = {"passed": all(check.passed for check in checks), "checks": rows}
    return json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def plot_orders(checks: Sequence[Check], path: str | Path) -> None:
    """A panel for each order claim: a thin line per policy, the median in bold, the claimed slope dashed."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    shown = [check for check in checks if check.kind == "order" and check.curves]
    rows = max(1, math.ceil(len(shown) / COLUMNS))
    figure = Figure(figsize=(4 * COLUMNS, 3.4 * rows), layout="constrained")
    for axis, check in zip(figure.subplots(rows, COLUMNS, squeeze=False).flat, shown, strict=False):
        sizes = np.array(check.curves[0].sizes)
        errors = np.array([curve.errors for curve in check.curves])  # (policies, sizes)
        axis.loglog(sizes, errors.T, color="tab:blue", alpha=0.25, linewidth=0.8)
        median = np.median(errors, axis=0)
        axis.loglog(sizes, median, color="tab:blue", linewidth=2, marker="o", markersize=3, label="median policy")
        reference = 0.4 * median[-1] * (sizes / sizes[-1]) ** check.order
        axis.loglog(sizes, reference, "k--", linewidth=1, label=f"slope {check.order:g}")
        axis.set_title(f"{check.claim}\nleast slope {check.measured:.3f}", fontsize=9)
        axis.set_xlabel("σ_max(W) · ‖u‖")
        axis.set_ylabel("error")
        axis.legend(fontsize=7)
    for axis in list(figure.axes)[len(shown) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=150)
