"""Every method and every cost on one prompt of the embedded model: reward, ‖u‖, both KLs, seconds.

    python benchmarks/methods.py --data ../shared/data/shp_prompts.jsonl --row 0

`--data` is a JSONL file with a `history` or `prompt` field; without it a prompt of our own is used. Settings are the
paper's (η = 0.1, λ = 1; AISP σ² = 0.5, α = 0.999, λ = 0.1) unless given.
"""

import argparse
import json
import time

from misvo.threads import use_free_cores

use_free_cores()

import misvo
from misvo.names import COSTS, METHODS

PROMPT = "My flatmate plays the drums at night and I have an exam next week. What should I do about it, and how?"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--row", type=int, default=0)
    parser.add_argument("--reward", default="sentiment")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    prompt = PROMPT
    if arguments.data:
        with open(arguments.data, encoding="utf-8") as file:
            row = json.loads(file.readlines()[arguments.row])
        prompt = row.get("history") or row["prompt"]
    policy, reward = misvo.Policy.from_pretrained("smollm2-135m"), misvo.rewards.load(arguments.reward)
    names = ("rollouts", "steps", "max_new_tokens", "top_p", "seed")
    options = {name: getattr(arguments, name) for name in names}
    cases = [("misvo", cost) for cost in COSTS] + [(method, None) for method in METHODS if method != "misvo"]
    print(
        f"{'method':11}{'cost':15}{'best':>8}{'first':>8}{'last':>8}{'‖u‖':>9}{'seq. KL':>9}{'KL_ref':>9}{'s':>7}  note"
    )
    rows = []
    for method, cost in cases:
        started = time.perf_counter()
        extra = {} if cost is None else {"cost": cost, "learning_rate": arguments.learning_rate}
        result = misvo.steer(policy, prompt, reward, method=method, kl_ref=True, **extra, **options, preset="paper")
        seconds = time.perf_counter() - started
        first, last = result.trace[0], result.trace[-1]
        row = {
            "method": method,
            "cost": cost or "",
            "best": result.reward,
            "first": first["mean"],
            "last": last["mean"],
            "norm": last["norm"] if result.steering is None else result.steering.norm,
            "kl": last["kl"],
            "kl_ref": 0.0 if result.kl_ref is None else result.kl_ref.total,
            "seconds": seconds,
            "note": "; ".join(sorted({r["note"] for r in result.trace if "note" in r})),
        }
        rows.append(row)
        print(
            f"{method:11}{row['cost']:15}{row['best']:8.3f}{row['first']:8.3f}{row['last']:8.3f}{row['norm']:9.3f}"
            f"{row['kl']:9.3f}{row['kl_ref']:9.3f}{seconds:7.1f}  {row['note']}",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(arguments), "prompt": prompt, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
