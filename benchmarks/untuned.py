"""Steering without tuning: `preset="auto"` against best-of-n, AISP and `preset="paper"`, three rewards, one setting.

    python benchmarks/untuned.py run --data PROMPTS.jsonl --first 40 --count 60 --out runs/untuned.jsonl
    python benchmarks/untuned.py report --out runs/untuned.jsonl --of auto

Rewards of different scale: VADER's sentiment in [-1, 1], cosine similarity to a topic, Flesch reading ease in the tens.
All methods sample from top-p 0.95. Best-of-n does not look at rewards, so its samples are scored by all three. Every
finished (prompt, method, reward) is a line of the file: a run that was stopped goes on where it was.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from measure import write_json

import misvo
from misvo.metrics import diversity, paired_bootstrap
from misvo.rewards import as_reward, score

METHODS = {
    "auto": {"preset": "auto"},
    "auto-response": {"preset": "auto", "credit": "response"},  # as many scores as best-of-n: one for each response
    "best-of-n": {"preset": "paper", "method": "best-of-n", "top_p": 0.95},
    "aisp": {"preset": "paper", "method": "aisp", "top_p": 0.95},
    "paper": {"preset": "paper", "top_p": 0.95},
}


REWARDS = {"sentiment": "sentiment", "similarity": "similarity:cats and dogs", "reading ease": "reading-ease"}


def run(arguments):
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    prompts = [json.loads(line)["history"] for line in Path(arguments.data).read_text().splitlines()]
    short = [place for place, text in enumerate(prompts) if len(policy.encode(text)) <= arguments.longest]
    places = [place for place in short if place >= arguments.first][: arguments.count]
    done = {(row["prompt"], row["method"], row["reward"]) for row in rows_of(arguments.out)}
    rewards = {name: as_reward(spec) for name, spec in REWARDS.items() if name in arguments.rewards}
    size = {"rollouts": arguments.rollouts, "steps": arguments.steps, "max_new_tokens": arguments.max_new_tokens}
    changes = json.loads(arguments.options)
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(places), arguments.batch):
        batch = places[start : start + arguments.batch]
        for method in arguments.methods:
            options = METHODS[method] | size | (changes if method.startswith("auto") else {})
            for name, reward in rewards.items():
                todo = [place for place in batch if (place, method, name) not in done]
                if not todo:
                    continue
                started = time.perf_counter()
                results = misvo.steer_many(policy, [prompts[place] for place in todo], reward, seed=42, **options)
                elapsed = (time.perf_counter() - started) / len(todo)
                with open(arguments.out, "a") as file:
                    for place, result in zip(todo, results, strict=True):
                        shared = rewards if method == "best-of-n" else {name: reward}
                        for other, scorer in shared.items():
                            row = described(result, scorer, other == name)
                            row |= {"prompt": place, "method": method, "reward": other, "seconds": elapsed}
                            done.add((place, method, other))
                            file.write(json.dumps(row) + "\n")
                print(f"{batch[0]}-{batch[-1]} {method:10} {name:13} {elapsed:6.1f} s a prompt", flush=True)


def described(result, reward, own):
    """What the report needs of a run; `own` says whether the run was scored by this reward."""
    texts = [candidate.text for candidate in result.candidates]
    values = [candidate.reward for candidate in result.candidates]
    if not own:
        tokens = [candidate.tokens for candidate in result.candidates]
        values = list(score(reward, result.prompt, texts, tokens, {}))
    count, steps = result.settings.rollouts, len(result.trace)
    by_step = [values[step * count : (step + 1) * count] for step in range(steps)]
    return {
        "rewards": [[round(value, 5) for value in step] for step in by_step],
        "kl": [row["kl"] for row in result.trace],
        "diversity": [statistics.mean(map(diversity, texts[s * count : (s + 1) * count])) for s in (0, steps - 1)],
        "diversity_best": diversity(texts[max(range(len(values)), key=values.__getitem__)]),
        "returned": [round(result.best.reward, 5), diversity(result.best.text)] if own else None,
    }


def rows_of(path):
    path = Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(arguments):
    rows, told = {}, {}
    for row in rows_of(arguments.out):
        rows.setdefault((row["method"], row["reward"]), {})[row["prompt"]] = row
    for name in REWARDS:
        auto, plain = rows.get((arguments.of, name), {}), rows.get(("best-of-n", name), {})
        places = sorted(set(auto) & set(plain))
        if not places:
            continue
        gains = [gain(auto[place], plain[place]) for place in places]
        nats = [auto[place]["kl"][-1] for place in places]
        reach = [samples_to_reach(auto[p]["rewards"], max(map(max, plain[p]["rewards"]))) for p in places]
        told[name] = {
            "prompts": len(places),
            "gain in reference SDs": [statistics.mean(gains), statistics.median(gains), min(gains)],
            "first mean": statistics.mean(statistics.mean(auto[p]["rewards"][0]) for p in places),
            "last mean": statistics.mean(statistics.mean(auto[p]["rewards"][-1]) for p in places),
            "room to the best reward seen, in the same": statistics.mean(room(auto[p], plain[p]) for p in places),
            "gains of 1.5": sum(value >= 1.5 for value in gains),
            "nats at the end": [statistics.mean(nats), max(nats)],
            "ends within 10 nats": sum(value <= 10 for value in nats),
            "diversity of the last step": statistics.mean(auto[p]["diversity"][1] for p in places),
            "diversity of best-of-n": statistics.mean(plain[p]["diversity"][1] for p in places),
            "reached best-of-n within 64 samples": sum(count is not None and count <= 64 for count in reach),
            "reached it at all": sum(count is not None for count in reach),
        }
        for method in METHODS:
            if method != arguments.of and (method, name) in rows:
                theirs = best(rows[method, name])
                told[name][f"best of {arguments.of} - {method}"] = compared(best(auto), theirs)
        returned = {place: row["returned"] for place, row in auto.items() if row.get("returned")}
        if returned:
            told[name]["diversity of what was returned"] = statistics.mean(varied for _, varied in returned.values())
            chosen = {place: value for place, (value, _) in returned.items()}
            told[name]["returned - best of best-of-n"] = compared(chosen, best(plain))
    print(json.dumps(told, indent=2))
    write_json(arguments.json, {"report": told})


def best(table):
    """The highest reward of each prompt."""
    return {place: max(map(max, row["rewards"])) for place, row in table.items()}


def compared(ours, theirs):
    """Mean difference on the prompts that both have, its 95 % interval, and how many prompts that are."""
    both = sorted(set(ours) & set(theirs))
    difference = paired_bootstrap({p: ours[p] for p in both}, {p: theirs[p] for p in both})
    return [difference.mean, difference.low, difference.high, len(both)]


def gain(steered, reference):
    """Last step's mean less the reference mean, in standard deviations of the reference."""
    return in_deviations(statistics.mean(steered["rewards"][-1]), reference)


def room(steered, reference):
    """How far the reference mean is from the best reward that any response had, in the same unit."""
    return in_deviations(max(max(step) for row in (steered, reference) for step in row["rewards"]), reference)


def in_deviations(value, reference):
    pool = [value for step in reference["rewards"] for value in step]
    return (value - statistics.mean(pool)) / max(statistics.pstdev(pool), 1e-9)


def samples_to_reach(rewards, level):
    """How many samples until a reward of at least `level`, to the end of the step; None if never."""
    for step, values in enumerate(rewards):
        if max(values) >= level - 1e-9:
            return (step + 1) * len(values)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--data", help="JSON lines with a field `history`")
    parser.add_argument("--first", type=int, default=40)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--longest", type=int, default=1000, help="leave out prompts of more tokens")
    parser.add_argument("--batch", type=int, default=4, help="prompts steered together")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--rewards", nargs="*", default=list(REWARDS))
    parser.add_argument("--options", default="{}", help="settings of auto to change, as JSON")
    parser.add_argument("--of", default="auto", choices=list(METHODS), help="the method to report on")
    parser.add_argument("--out", default="runs/untuned.jsonl")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    {"run": run, "report": report}[arguments.command](arguments)


if __name__ == "__main__":
    main()
