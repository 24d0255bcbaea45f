"""Recompute a report's figures from candidates.jsonl alone, without misvo (see test_report)."""

import json
import pathlib
import statistics as st
import sys


def diversity(text):
    words, product = text.split(), 1.0
    for n in (2, 3, 4):
        grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
        product *= len(set(grams)) / len(grams) if grams else 1.0
    return product


runs = {}  # (model, task, method) -> seed -> prompt -> candidates
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    c = json.loads(line)
    cell = runs.setdefault((c["model"], c["task"], c["method"]), {})
    cell.setdefault(c["seed"], {}).setdefault(c["prompt"], []).append(c)
table = {}
for (model, task, method), seeds in runs.items():
    best = {s: [max(cs, key=lambda c: c["reward"]) for cs in by.values()] for s, by in seeds.items()}
    for name, figure in (("reward", lambda c: c["reward"]), ("diversity", lambda c: diversity(c["text"]))):
        means = [st.mean(figure(c) for c in found) for found in best.values()]
        text = f"{st.mean(means):.3f}" + (f" ± {st.stdev(means):.3f}" if len(means) > 1 else "")
        table.setdefault(f"{model}|{task}|{method}", {})[name] = text
    steps = sorted({c["step"] for by in seeds.values() for cs in by.values() for c in cs})
    for name, pick, so_far in (("mean", st.mean, False), ("max", max, False), ("best", max, True)):
        curve = []
        for step in steps:
            within = [
                [
                    pick([c["reward"] for c in cs if c["step"] == step or (so_far and c["step"] < step)])
                    for cs in by.values()
                ]
                for by in seeds.values()
            ]
            curve.append(st.mean(st.mean(values) for values in within))
        table[f"{model}|{task}|{method}"][name] = curve
print(json.dumps(table))
