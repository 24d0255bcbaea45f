"""Memory of every method above the loaded model: one prompt, K rows, two steps, each in a process of its own.

    python benchmarks/method_memory.py --json method_memory.json

As the process grew, as torch counts its tensors (a second run in the same process), and as `misvo.footprint` foresees.
"""

import argparse
import json

from measure import PROMPTS, allocated_bytes, in_a_process_of_its_own, load, peak_bytes, write_json

import misvo
from misvo.footprint import Shape, run_bytes

MIB = 2**20
SAMPLER = {"temperature": 0.6, "top_p": 0.9}  # the one that the embedded model came with
METHODS = {
    "best-of-n": {"method": "best-of-n"},
    "auto": {"preset": "auto"},
    "paper": {"preset": "paper"},
    "aisp": {"method": "aisp"},
    "re-control": {"method": "re-control"},
    "particles": {"method": "particles"},
    "particles, steered": {"method": "particles", "proposal": "steered"},
    "blockwise": {"method": "blockwise"},
    "lora": {"method": "lora"},
}


def measure(label, rollouts, tokens):
    policy = load()
    options = {**METHODS[label], **SAMPLER, "rollouts": rollouts, "max_new_tokens": tokens, "steps": 2, "kl_ref": False}
    reward = misvo.rewards.load("sentiment")

    def run(**other):
        misvo.steer(policy, PROMPTS[0], reward, **{**options, **other}, max_rows=rollouts)

    run(rollouts=2, max_new_tokens=2)  # imports and thread pools
    settings = misvo.Settings.from_preset(**options)
    formula = run_bytes(Shape.of(policy), settings, len(policy.encode(PROMPTS[0])))
    return {"process": peak_bytes(run), "tensors": allocated_bytes(run), "formula": sum(formula.values())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS), help="these methods")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--one", metavar="METHOD", help="print one as JSON")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.rollouts, arguments.max_new_tokens)))
        return
    print("| MiB above the model | process | tensors | formula |\n|---|---|---|---|", flush=True)
    sizes, rows = ["--rollouts", arguments.rollouts, "--max-new-tokens", arguments.max_new_tokens], {}
    for label in arguments.only:
        rows[label] = in_a_process_of_its_own(__file__, "--one", label, *sizes)
        print(f"| {label} | " + " | ".join(f"{rows[label][key] / MIB:,.0f}" for key in rows[label]) + " |", flush=True)
    write_json(arguments.json, {"arguments": vars(arguments), "methods": rows})


if __name__ == "__main__":
    main()
