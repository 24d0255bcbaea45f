"""The tables of a report from a `Results`, each once as rows of text; Markdown and LaTeX only differ in dress.

The paper's five: SHP and MBPP+ (any task: reward, diversity, coherence, ± over seeds, difference to best-of-n), policy
deviation (± over prompts), regularizer ablation, profile. What a reader sees, each figure against best-of-n. What each
method holds. Where a sweep has best-of-n more than once, as with more samples for an equal time, there are differences
to each of them. Where it has several tasks, one table puts all of them together.
"""

from dataclasses import dataclass

from misvo.bench.overall import standings
from misvo.bench.results import READINGS, Cell, Results, against_baseline
from misvo.metrics import Spread, spread

NAMES = {
    "misvo": "MISVO",
    "aisp": "AISP",
    "re-control": "RE-Control",
    "best-of-n": "BoN",
    "lora": "LoRA",
}  # else: as it is
TITLES = {"shp": "SHP", "mbpp-plus": "MBPP+", "humaneval": "HumanEval", "prompts": "Prompts"}
REGULARIZERS = {
    "frozen-fisher": "off-policy rollouts, off-policy Fisher (frozen-fisher)",
    "prefix-fisher": "on-policy rollouts, off-policy Fisher (prefix-fisher)",
    "iterate-fisher": "on-policy rollouts, on-policy Fisher (iterate-fisher)",
    "sequence-kl": "direct KL (sequence-kl)",
    "euclidean": "hidden-space l2 (euclidean)",
    "none": "none (unregularized)",
}
ABSENT = "n/a"


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    columns: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]]  # (row, column) in bold

    def markdown(self) -> str:
        lines = [f"**{self.caption}**", "", _bar(self.columns), _bar(["---"] * len(self.columns))]
        for r, row in enumerate(self.rows):
            lines.append(_bar([f"**{cell}**" if (r, c) in self.best else cell for c, cell in enumerate(row)]))
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        body = [" & ".join(map(_tex, self.columns)) + r" \\", r"\midrule"]
        for r, row in enumerate(self.rows):
            cells = [rf"\textbf{{{_tex(cell)}}}" if (r, c) in self.best else _tex(cell) for c, cell in enumerate(row)]
            body.append(" & ".join(cells) + r" \\")
        head = [r"\begin{table}[t]", r"\centering", rf"\caption{{{_tex(self.caption)}}}", rf"\label{{tab:{self.name}}}"]
        tabular = [rf"\begin{{tabular}}{{ll{'c' * (len(self.columns) - 2)}}}", r"\toprule", *body, r"\bottomrule"]
        return "\n".join([*head, *tabular, r"\end{tabular}", r"\end{table}"]) + "\n"


def all_tables(results: Results) -> list[Table]:
    made = [task_table(results, label) for label in results.tasks]
    made += reader_tables(results)
    made += [overall_table(results, label) for label in results.baselines(results.cells)[:1]]
    made += [deviation_table(results), ablation_table(results), held_table(results), profile_table(results)]
    return [table for table in made if table.rows]


def task_table(results: Results, label: str) -> Table:
    """Tables 1 and 2 of the paper: reward, diversity and coherence of the best response, mean ± std over seeds."""
    task = results.tasks[label]
    code = task["reward"] == "code"
    columns = ["Model", "Method", "Pass rate ↑" if code else "Reward ↑", "Diversity ↑", "Coherence ↑"]
    baselines = results.baselines([cell for cell in results.cells if cell.task == label])
    columns += [*(f"vs {NAMES.get(name, name)} [95 % interval]" for name in baselines), "prompts × seeds"]
    rows, best = [], set()
    for model in results.models(label):
        cells, first = results.of(model, label), len(rows)
        for cell in cells:
            seeds = len({row["seed"] for row in cell.rows})
            rows.append(
                [
                    model,
                    method_name(cell),
                    pm(cell.over_seeds("reward"), 3),
                    pm(cell.over_seeds("diversity"), 3),
                    pm(cell.over_seeds("coherence"), 3),
                    *(interval(against_baseline(results, cell, name)) for name in baselines),
                    f"{len({row['prompt'] for row in cell.rows})} × {seeds}",
                ]
            )
        best |= _highest([round(cell.over_seeds("reward").mean, 3) for cell in cells], first, 2)
    encoder = ", ".join(sorted(results.encoders))
    caption = (
        f"{TITLES.get(label, label)} ({task['source']}, reward {task['reward']}, coherence by {encoder}): "
        "best response of K·N, mean ± std over seeds"
    )
    return Table(label, caption, columns, rows, best)


def reader_tables(results: Results) -> list[Table]:
    """What a reader sees of everything, against the first best-of-n; then of what ran beside each other one."""
    shown = [cell for cell in results.cells if cell.rows and cell.by_prompt("kl_per_token")]  # not of runs of old
    first, *others = results.baselines(shown) or ["best-of-n"]
    made = [reader_table(results, shown, first, "reader")]
    for number, label in enumerate(others, start=2):
        beside = [cell for cell in shown if results.baseline(cell.model, cell.task, label)]
        made.append(reader_table(results, beside, label, f"reader-{number}"))
    return made


def reader_table(results: Results, shown: list[Cell], baseline: str, table: str) -> Table:
    """What a reader sees of each method: means over prompts, and what they differ by from a best-of-n."""
    names = [name for name in READINGS if any(name in results.readings(cell) for cell in shown)]
    rows = []
    for cell in shown:
        readings, figures = results.readings(cell), []
        for name in names:
            mean = f"{spread(readings[name].values()).mean:.3f}" if name in readings else ABSENT
            difference = against_baseline(results, cell, baseline, name)
            figures.append(mean if difference is None else f"{mean}: {interval(difference)}")
        rows.append([cell.model, cell.task, method_name(cell), *figures])
    readers = [f"fluency in nats per token of {name}" for name in sorted(results.judges)]
    readers += [f"coherence by {name}" for name in sorted(results.encoders - {"none"})]
    readers += [f"held-out reward {spec}" for spec in sorted(results.held_out)]
    caption = (
        f"What a reader sees: mean over prompts, and the paired difference from {baseline} [95 % bootstrap interval]"
    )
    caption += f" ({', '.join([*readers, 'KL of the policy that sampled the last step, in nats'])})"
    return Table(table, caption, ["Model", "Task", "Method", *(READINGS[name] for name in names)], rows, set())


def overall_table(results: Results, baseline: str) -> Table:
    """Every method over all tasks that it ran on, where there are several."""
    columns = ["Model", "Method", "Best seen, SDs", "Returned, SDs", "Last step's mean, SDs", "Fluency", "KL per token"]
    columns += ["Nats of choosing", "CPU time", "prompts"]
    rows = []
    for model in dict.fromkeys(cell.model for cell in results.cells if len(results.tasks) > 1):
        for one in standings(results, model, baseline):
            name = NAMES.get(one.method, one.method)
            differences = [interval(one.best), interval(one.returned), _number(one.gain), interval(one.fluency)]
            figures = [*differences, _number(one.kl_per_token), _number(one.choosing), _number(one.cpu)]
            rows.append([model, name, *figures, f"{one.prompts} in {one.tasks} tasks"])
    caption = (
        f"All tasks together: paired differences from {baseline} [95 % bootstrap interval], rewards in standard "
        "deviations of the reference's on the same prompt; CPU time as a multiple of best-of-n's; nats a response by "
        "which particles and blocks choose among rows"
    )
    return Table("overall", caption, columns, rows, set())


def deviation_table(results: Results) -> Table:
    """Table 3: how far each method moved the policy; ± over prompts."""
    columns = ["Model", "Task", "Method / regularizer", "Reward ↑", "Final ‖u‖", "KL_ref ↓", "Sequence KL, last step ↓"]
    rows = []
    for cell in results.cells:
        if not cell.rows or not any(c.over_prompts("kl_ref") for c in results.of(cell.model, cell.task)):
            continue
        figures = [pm(cell.over_prompts("reward"), 3)]
        for name, digits in (("norm", 2), ("kl_ref", 3), ("kl", 3)):
            figures.append(ABSENT if cell.is_baseline else pm(cell.over_prompts(name), digits))
        rows.append([cell.model, cell.task, method_name(cell), *figures])
    return Table("measured-kl", "Measured policy deviation, ± over prompts (nats a response)", columns, rows, set())


def ablation_table(results: Results) -> Table:
    """Table 4: the regularizers of MISVO against each other."""
    rows, best = [], set()
    for label in results.tasks:
        for model in results.models(label):
            cells = [cell for cell in results.of(model, label) if cell.settings["method"] == "misvo"]
            if len({cell.settings["cost"] for cell in cells}) < 2:
                continue
            best |= _highest([round(cell.over_seeds("reward").mean, 3) for cell in cells], len(rows), 3)
            for cell in cells:
                figures = [pm(cell.over_seeds(name), 3) for name in ("reward", "diversity", "coherence")]
                rows.append([model, label, REGULARIZERS[cell.settings["cost"]], *figures])
    columns = ["Model", "Task", "Regularizer", "Reward ↑", "Diversity ↑", "Coherence ↑"]
    return Table("reg-ablation", "Regularizer ablation of MISVO, mean ± std over seeds", columns, rows, best)


def held_table(results: Results) -> Table:
    """What a prompt's policy takes to keep, and what the process took while it was made."""
    rows = []
    for cell in results.cells:
        state, peak = (cell.over_prompts(name) for name in ("state_bytes", "peak_memory"))
        if state is not None and peak is not None:
            clocks = [f"{cell.over_prompts(f'seconds.{name}').mean:.1f}" for name in ("wall", "cpu")]
            kept = f"{state.mean / 1024:,.1f}"
            rows.append([cell.model, cell.task, method_name(cell), kept, gigabytes(peak.mean), *clocks])
    columns = ["Model", "Task", "Method", "State (KiB) ↓", "Peak (GB) ↓", "Seconds ↓", "CPU seconds ↓"]
    caption = (
        "What is kept to sample from a prompt's policy again, the peak memory of the process (of prompts that shared a "
        "batch, model and libraries included) and a prompt's share of the time"
    )
    return Table("held", caption, columns, rows, set())


def profile_table(results: Results) -> Table:
    """Table 5: time, tokens per second and peak memory of each method, one prompt at a time."""
    columns = [
        "Model",
        "Method",
        "Hyperparams",
        "Time (s)",
        "Tok/s",
        "Peak (GB)",
        "prefill / decode / reward / update (s)",
    ]
    rows, best, captions = [], set(), []
    for profile in results.profiles:
        for model in dict.fromkeys(entry["model"] for entry in profile["methods"]):
            entries, first = [e for e in profile["methods"] if e["model"] == model], len(rows)
            for entry in entries:
                stages = " / ".join(f"{entry['stages'][s]:.2f}" for s in ("prefill", "decode", "reward", "update"))
                figures = [
                    f"{entry['seconds']:.1f}",
                    f"{entry['tokens_per_second']:.0f}",
                    gigabytes(entry["peak_memory"]),
                ]
                name = NAMES.get(entry["label"], entry["label"])
                rows.append([model, name, f"K={entry['rollouts']}, N={entry['steps']}", *figures, stages])
            for column, sign in (("seconds", -1), ("tokens_per_second", 1), ("peak_memory", -1)):
                place = {"seconds": 3, "tokens_per_second": 4, "peak_memory": 5}[column]
                best |= _highest([sign * entry[column] for entry in entries], first, place)
        captions.append(f"{profile['prompts']} timed prompts after {profile['warmup']}, T={profile['max_new_tokens']}")
    where = "; ".join(dict.fromkeys(captions))
    return Table("profile", f"Runtime and peak memory, one prompt at a time ({where})", columns, rows, best)


def method_name(cell) -> str:
    return (
        f"{NAMES.get(cell.method, cell.method)} (N={cell.generations})"
        if cell.method == "best-of-n"
        else NAMES.get(cell.method, cell.method)
    )


def pm(value: Spread | None, digits: int) -> str:
    if value is None:
        return ABSENT
    return f"{value.mean:.{digits}f}" + ("" if value.std is None else f" ± {value.std:.{digits}f}")


def interval(difference) -> str:
    if difference is None:
        return "–"
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f}"


def _highest(values, first, column):
    return {(first + index, column) for index, value in enumerate(values) if value == max(values)}


def _bar(cells):
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


TEX = {
    "±": r"$\pm$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "×": r"$\times$",
    "‖u‖": r"$\|u\|$",
    "λ": r"$\lambda$",
    "–": "--",
}


def _tex(text: str) -> str:
    for special in "\\&%#_{}$~^":
        text = text.replace(special, "\\" + special if special not in "\\~^" else rf"\char`\{special} ")
    for letter, command in TEX.items():
        text = text.replace(letter, command)
    return text.replace("·", r"$\cdot$")
