"""What steering costs beyond sampling: a MISVO step against a step of plain sampling with the same engine.

    python benchmarks/overhead.py --rounds 5

Both decode K rows of T tokens of the embedded model (ends of text are ignored, so that both do the same work), in one
process, in turn. Prints medians over the rounds, their spread, and ratios; writes them with --json FILE. Everything
that MISVO adds is in its figure: expected rows, mean law, shift, KL meter, gradient, Fisher product.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import misvo

PROMPT = "My flatmate plays the drums at night and I have an exam next week. What should I do about it, and how?"


def timed_steps(policy, method, options):
    """Seconds of each step's stages, and of the whole run."""
    started = time.perf_counter()
    result = misvo.steer(policy, PROMPT, len, method=method, **options)
    return [row["seconds"] for row in result.trace], time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    policy.eos_tokens = torch.tensor([], dtype=torch.long)
    options = {"rollouts": arguments.rollouts, "max_new_tokens": arguments.max_new_tokens, "top_p": arguments.top_p}
    options |= {"learning_rate": 0.01, "max_rows": arguments.rollouts}
    sampling, first, later, updates = [], [], [], []
    for round_number in range(arguments.rounds + 1):
        plain, _ = timed_steps(policy, "best-of-n", {**options, "steps": 2})
        steered, _ = timed_steps(policy, "misvo", {**options, "steps": 3})
        if round_number == 0:
            continue  # warm-up
        sampling += [step["decode"] for step in plain]
        first.append(steered[0]["decode"] + steered[0]["update"])
        later += [step["decode"] + step["update"] for step in steered[1:]]
        updates += [step["update"] for step in steered]
    base = statistics.median(sampling)
    report = {"settings": vars(arguments), "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(f"{'':34}{'median s':>10}{'spread':>10}{'ratio':>8}")
    for name, values in (
        ("a step of plain sampling", sampling),
        ("first step of misvo (with Fisher)", first),
        ("later steps of misvo", later),
        ("  of which the update", updates),
    ):
        middle = statistics.median(values)
        report[name.strip()] = {"median": middle, "values": values, "ratio": middle / base}
        print(f"{name:34}{middle:10.3f}{max(values) - min(values):10.3f}{middle / base:8.3f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
