"""One self-contained HTML page: tables, pictures, what is missing, and responses beside the reference. No scripts."""

import base64
from html import escape

from misvo.bench.results import Results
from misvo.bench.tables import Table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .5em 0 1.5em; font-size: 13px; }
th, td { padding: .3em .7em; border-bottom: 1px solid #ddd; text-align: left; }
th { border-bottom: 2px solid #444; } img { max-width: 100%; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1em; margin-bottom: 1.2em; }
.pair > div { border: 1px solid #ddd; border-radius: 6px; padding: .6em .9em; white-space: pre-wrap; }
.pair > div, .prompt { overflow-wrap: anywhere; font-size: 13px; }
.pair b { display: block; } .up b { color: #2e8b57; }
.prompt { font-style: italic; color: #555; white-space: pre-wrap; }
.warn { background: #fff6dd; border-left: 4px solid #d68910; padding: .5em 1em; }
"""


def html(results: Results, tables: list[Table], pictures: list[tuple[str, bytes]], prompts: dict) -> str:
    parts = [f"<h1>misvo report</h1><p>{escape(_what(results))}</p>"]
    if results.missing or results.errors:
        lines = [*results.missing, *(f"{where}: {message}" for where, message in results.errors[:20])]
        parts.append('<div class="warn"><b>Not everything is here</b><ul>')
        parts += [f"<li>{escape(line)}</li>" for line in lines]
        parts.append("</ul></div>")
    parts += [_table(table) for table in tables]
    for title, data in pictures:
        source = base64.b64encode(data).decode()
        parts.append(f'<h3>{escape(title)}</h3><img alt="{escape(title)}" src="data:image/png;base64,{source}">')
    parts.append(_responses(results, prompts))
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>misvo report</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _what(results):
    sessions = [
        f"misvo {e['misvo']}, torch {e['packages'].get('torch')}, {e['machine']['processor']}"
        for e in results.environments
    ]
    rows = sum(len(cell.rows) for cell in results.cells)
    return f"{rows} finished rows in {len(results.cells)} cells. {'; '.join(dict.fromkeys(sessions))}"


def _table(table):
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    lines = []
    for r, row in enumerate(table.rows):
        cells = (f"<b>{escape(cell)}</b>" if (r, c) in table.best else escape(cell) for c, cell in enumerate(row))
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<h3>{escape(table.caption)}</h3><table><tr>{head}</tr>{''.join(lines)}</table>"


def _responses(results, prompts):
    """For each cell the prompt that gained most and the one that gained least over its reference response."""
    parts = ["<h2>Responses, best and worst gain over the reference</h2>"]
    for cell in results.cells:
        rows = [row for row in cell.rows if row.get("reference")]
        if not rows:
            continue
        ranked = sorted(rows, key=_gain)
        parts.append(f"<h3>{escape(f'{cell.model} × {cell.task} × {cell.method}')}</h3>")
        for name, row in [("largest", ranked[-1]), ("smallest", ranked[0])][: len(ranked)]:
            prompt = prompts.get((cell.task, row["prompt"]), row["prompt"])
            title = f"{name} gain, prompt {row['prompt']}, seed {row['seed']}: {prompt}"
            parts.append(f'<p class="prompt">{escape(title)}</p>')
            parts.append('<div class="pair">')
            parts.append(_response("up", f"best, {row['reward']:.3f}", row["best"]["text"]))
            reference = row["reference"]
            score = "not scored" if reference["reward"] is None else f"{reference['reward']:.3f}"
            parts.append(_response("down", f"reference, {score}", reference["text"]))
            parts.append("</div>")
    return "\n".join(parts)


def _gain(row):
    reference = row["reference"]["reward"]
    return row["reward"] - (row["trace"][0]["mean"] if reference is None else reference)


def _response(kind, title, text):
    return f'<div class="{kind}"><b>{escape(title)}</b>{escape(text.strip()) or "(empty)"}</div>'
