"""What a result looks like: in one line, in a few lines, and as a panel in a notebook. `misvo.view` has the terminal's.

Prompts and responses are the words of strangers. Here they are cut to printable lines, or escaped; nothing of them
becomes markup, a formula (notebooks typeset what stands between dollars) or an escape sequence. The words of the answer
are tinted by how far the model was moved at each of them, and bars beneath it show the same.
"""

import math
from html import escape

from misvo.prompts import as_messages, as_text
from misvo.story import story, warmth
from misvo.text import one_line

MEAN, BEST, KL = "#8a8a8a", "#2e8b57", "#b5651d"  # colours that go with light and dark pages
BOX = "border:1px solid rgba(127,127,127,.4);border-radius:6px;padding:.5em .8em;text-align:left;vertical-align:top"
TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;max-height:24em;overflow:auto"


def line(result) -> str:
    """Under 300 characters, whatever the texts are."""
    best = best_of(result)
    parts = [f"'{one_line(_prompt(result), 60)}'", f"reward={_figure(best and best.reward)}"]
    if best is not None:
        parts.append(f"best='{one_line(best.text, 80)}'")
    parts += [f"{len(result.candidates)} responses", f"{len(result.trace)} steps"]
    if result.trace:
        parts.append(f"KL={_figure(result.trace[-1]['kl'])}")
    return f"Result({', '.join(parts)})"


def summary(result) -> str:
    """The best response and the reference, how rewards went, how far the model moved, and what that took."""
    from misvo.view import sparkline

    trace, rows = result.trace, [("prompt", one_line(_prompt(result), 90))]
    for name, candidate in (("answer", best_of(result)), ("unsteered", _plain(result))):
        if candidate is not None:
            rows.append((name, f"{_scores(candidate)}: {one_line(candidate.text, 90)}"))
    for name, title in (("mean", "mean reward"), ("best", "highest"), ("kl", "sequence KL")):
        values = [row[name] for row in trace]
        if values:
            curve = sparkline(values) if math.isfinite(sum(map(abs, values))) else ""
            rows.append((title, f"{curve} {_figure(values[0])} → {_figure(values[-1])}"))
    if result.steering is not None:
        rows.append(("vectors", f"‖u‖ = {_figure(result.steering.norm)}"))
    if result.kl_ref is not None:
        rows.append(("KL_ref", f"{_figure(result.kl_ref.total)} nats on reference prefixes"))
    tokens = sum(len(candidate.tokens) for candidate in result.candidates)
    seconds = result.prefill_seconds + sum(sum(row["seconds"].values()) for row in trace)
    work = f"{len(result.candidates)} responses in {len(trace)} steps, {tokens} tokens, {seconds:.1f} s"
    rows.append((result.settings.method, work))
    return "\n".join([*(f"{title:<12} {text}" for title, text in rows), *story(result)])


def panel(result) -> str:
    """Self-contained HTML without scripts: both responses, the course of the reward, the KL at each token."""
    best, cells = best_of(result), []
    for title, colour, candidate in (("answer", BEST, best), ("without steering", MEAN, _plain(result))):
        if candidate is not None:
            heading = f'<b style="color:{colour}">{title}: {_scores(candidate)}</b>'
            words = _tinted(result) if candidate is best and result.pieces else _words(candidate.text)
            cells.append(f'<td style="{BOX};width:50%">{heading}{words}</td>')
    pictures = [
        _picture("reward by step: mean (grey) and best (green)", _curves(result.trace)),
        _picture("KL at each token of the best response", _bars(best.token_kl if best is not None else [])),
    ]
    facts = [f"{len(result.candidates)} responses", f"{len(result.trace)} steps"]
    if result.trace:
        facts.append(f"sequence KL {_figure(result.trace[-1]['kl'])} nats")
    if result.steering is not None:
        facts.append(f"‖u‖ = {_figure(result.steering.norm)}")
    return (
        '<div class="tex2jax_ignore mathjax_ignore" style="max-width:60em">'
        f'<div style="font-style:italic">{_words(_prompt(result))}</div>'
        f'<table style="width:100%;border-spacing:.4em;border-collapse:separate"><tr>{"".join(cells)}</tr></table>'
        f"<div>{escape(' '.join(story(result)))}</div>"
        f"<div>{''.join(pictures)}</div><div>{escape(result.settings.method)}: {', '.join(facts)}</div></div>"
    )


def best_of(result):
    """The best response, or None where nothing has a reward."""
    return result.best if any(candidate.reward is not None for candidate in result.candidates) else None


def _plain(result):
    """The best response of plain sampling, or the one that was sampled for comparison."""
    return result.unsteered or result.reference


def _tinted(result) -> str:
    """The answer, each token on a ground that is the warmer the further the model was moved there."""
    spans = [
        f'<span style="background:rgba(255,140,0,{warmth(nats):.2f})" title="{nats:.3f} nats">{escape(piece)}</span>'
        for piece, nats in zip(result.pieces, result.best.token_kl, strict=False)
    ]
    return f'<div style="{TEXT}"><bdi>{"".join(spans)}</bdi></div>'


def _prompt(result) -> str:
    """A prompt's text; of a chat the last message."""
    return as_text(as_messages(result.prompt)[-1:])


def _figure(value) -> str:
    return "None" if value is None else f"{value:.4g}"


def _scores(candidate) -> str:
    reward = "not scored" if candidate.reward is None else f"reward {_figure(candidate.reward)}"
    return reward if candidate.kl is None else f"{reward}, KL {_figure(candidate.kl)} nats"


def _words(text) -> str:
    return f'<div style="{TEXT}"><bdi>{escape(text.strip()) or "(empty)"}</bdi></div>'


def _picture(title, drawing) -> str:
    size = 'width="240" height="48" viewBox="-4 -4 248 56"'
    if not drawing:
        return ""
    return f'<svg {size} role="img" style="margin-right:1em"><title>{escape(title)}</title>{drawing}</svg>'


def _curves(trace) -> str:
    """Mean and best reward by step, on one scale, with a dot at the last step."""
    series = {colour: [row[name] for row in trace] for name, colour in (("mean", MEAN), ("best", BEST))}
    values = [value for row in series.values() for value in row] or [math.nan]
    low, height = min(values), max(values) - min(values) or 1.0
    if not all(map(math.isfinite, (*values, height))):
        return ""
    drawing = []
    for colour, row in series.items():
        places = [(240 * i / max(1, len(row) - 1), 48 - 48 * ((value - low) / height)) for i, value in enumerate(row)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawing.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        drawing.append(f'<circle cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="2.5" fill="{colour}"/>')
    return "".join(drawing)


def _bars(nats) -> str:
    """A bar for each token, the highest one as high as the picture."""
    highest = max(nats, default=0.0)
    if not (0 < highest < math.inf) or not all(map(math.isfinite, nats)):
        return ""
    width = 240 / len(nats)
    heights = (48 * max(0.0, value / highest) for value in nats)  # rounding may leave a KL of nothing below zero
    bars = "".join(f"M{width * (i + 0.5):.1f} 48V{48 - height:.1f}" for i, height in enumerate(heights))
    return f'<path d="{bars}" stroke="{KL}" stroke-width="{0.8 * width:.2f}"/>'
