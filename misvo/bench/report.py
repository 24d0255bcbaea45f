"""`misvo report`: read run folders, write tables.md, tables.tex, pictures, figures.json and report.html.

Half-finished runs are reported as far as they are, and the report says what is missing.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from misvo.bench import figures, page, tables
from misvo.bench import results as readers
from misvo.errors import MisvoError
from misvo.lines import write_atomically
from misvo.prompts import as_text


@dataclass(frozen=True)
class Report:
    folder: Path
    files: list[str]
    markdown: str
    figures: dict  # every table as plain data


def make(runs: list[Path], output: Path | None = None) -> Report:
    results = readers.load(runs)
    made = tables.all_tables(results)
    if not made:
        raise MisvoError("there is nothing to report yet: no prompt of these runs is finished.")
    folder = Path(output) if output is not None else Path(runs[0]) / "report"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(results)
    files = []
    for name, _, data in pictures:
        (folder / name).write_bytes(data)
        files.append(name)
    markdown = "\n".join(table.markdown() for table in made) + _missing(results)
    data = {table.name: {"columns": table.columns, "rows": table.rows} for table in made}
    data |= {"missing": results.missing, "errors": results.errors}
    texts = {
        "tables.md": markdown,
        "tables.tex": "\n".join(table.latex() for table in made),
        "figures.json": json.dumps(data, indent=2, ensure_ascii=False) + "\n",
        "report.html": page.html(results, made, [(title, data) for _, title, data in pictures], _prompts(results)),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return Report(folder, [*texts, *files], markdown, data)


def _pictures(results) -> list[tuple[str, str, bytes]]:
    """(file, title, PNG) of every picture."""
    kinds = (
        ("trajectory", "Reward trajectory", figures.trajectory),
        ("reward_kl", "Reward against KL", figures.reward_against_kl),
        ("reward_seconds", "Reward against time", figures.reward_against_seconds),
        ("reward_fluency", "Reward against fluency", figures.reward_against_fluency),
        ("kl_position", "KL by position", figures.kl_by_position),
    )
    made = []
    for task in results.tasks:
        for model in results.models(task):
            for name, title, draw in kinds:
                figure = draw(results, model, task)
                if figure is not None:
                    file = f"{name}-{_safe(model)}-{_safe(task)}.png"
                    made.append((file, f"{title}: {model} on {task}", figures.png(figure)))
    for model in dict.fromkeys(cell.model for cell in results.cells):
        figure = figures.all_tasks(results, model)
        if figure is not None:
            made.append((f"all_tasks-{_safe(model)}.png", f"All tasks: {model}", figures.png(figure)))
    return made


def _prompts(results) -> dict:
    """The text of each prompt by (task, id), for the page."""
    found = {}
    for cell in results.cells:
        for row in cell.rows:
            found[cell.task, row["prompt"]] = as_text(row.get("prompt_text", ""), "\n")
    return found


def _missing(results) -> str:
    lines = [f"- {line}" for line in results.missing]
    lines += [f"- {where}: {message}" for where, message in results.errors[:20]]
    return "\n".join(["", "Missing or failed:", *lines, ""]) if lines else ""


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
