"""How time and memory grow with tokens, rollouts, steps, prompts and vocabulary, and what a formula says of them.

    python benchmarks/growth.py --plot docs/growth.png --json growth.json

Each curve moves one size and holds the others (K = 16, N = 2, T = 32, one prompt, the embedded model; the vocabulary is
moved on a random one-layer body). Every point is a process of its own. Exponents are fitted to the points: time against
size, and memory against size with its constant part taken off. Memory is measured twice: as the process grew, and as
torch counts its tensors. `predicted` is `misvo.footprint`, the same formula that makes the table for the paper's
models; it speaks of tensors, and the process takes some MiB more for kernels and what the allocator keeps.
"""

import argparse
import json
import math

from measure import PROMPTS, allocated_bytes, in_a_process_of_its_own, load, peak_bytes, seconds, write_json

import misvo
from misvo.footprint import Shape, run_bytes

BASE = {"T": 32, "K": 16, "N": 2, "prompts": 1, "V": 49_152}
CURVES = {
    "T": [8, 16, 32, 64, 128],
    "K": [4, 8, 16, 32, 64],
    "N": [1, 2, 4, 8],
    "prompts": [1, 2, 4, 8],
    "V": [65_536, 131_072, 196_608, 262_144],
}
NAMES = {"T": "tokens", "K": "rollouts", "N": "steps", "prompts": "prompts", "V": "vocabulary"}


def point(sizes, random_body):
    """Seconds and peak bytes of one run, and the bytes that the formula predicts for it."""
    policy = load()
    if random_body:
        from update import random_policy

        policy = random_policy(policy.tokenizer, sizes["V"], 576)
    prompts, rows = PROMPTS[: sizes["prompts"]], sizes["K"] * sizes["prompts"]
    size = {"rollouts": sizes["K"], "steps": sizes["N"], "max_new_tokens": sizes["T"], "max_rows": rows}
    misvo.steer(
        policy, PROMPTS[0], len, rollouts=2, steps=2, max_new_tokens=4, preset="paper"
    )  # imports and thread pools
    elapsed = []

    def run():
        elapsed.append(seconds(lambda: misvo.steer_many(policy, prompts, len, **size, preset="paper")))

    peak, allocated = peak_bytes(run), allocated_bytes(run)
    longest = max(len(policy.encode(prompt)) for prompt in prompts)
    shape = Shape.of(policy)
    predicted = run_bytes(shape, misvo.Settings(**size), longest, prompts=sizes["prompts"])
    return {"seconds": elapsed[0], "peak": peak, "allocated": allocated, "predicted": sum(predicted.values())}


def exponent(xs, ys):
    """The slope of log y against log x by least squares."""
    xs, ys = [math.log(x) for x in xs], [math.log(max(y, 1e-9)) for y in ys]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def without_constant(xs, ys):
    """y less the intercept of a straight line through the points: what is left of it grows."""
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)
    intercept = min(my - slope * mx, 0.9 * min(ys))
    return [y - max(0.0, intercept) for y in ys]


def plot(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(curves), figsize=(3.2 * len(curves), 5.2), layout="constrained")
    for column, (axis, rows) in enumerate(curves.items()):
        xs = [row["size"] for row in rows]
        top, bottom = axes[:, column]
        top.plot(xs, [row["seconds"] for row in rows], "o-")
        bottom.plot(xs, [row["peak"] / 2**20 for row in rows], "o-", label="process")
        bottom.plot(xs, [row["allocated"] / 2**20 for row in rows], "s-", label="tensors")
        bottom.plot(xs, [row["predicted"] / 2**20 for row in rows], "x--", label="formula")
        bottom.set_xlabel(f"{NAMES[axis]} {axis if len(axis) == 1 else ''}")
        for chart in (top, bottom):
            chart.set_ylim(bottom=0)
            chart.set_xlim(left=0)
            chart.locator_params(axis="x", nbins=3)
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("peak MiB above the model")
    axes[1, 0].legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", nargs=2, metavar=("SIZES", "BODY"), help="measure one point and print it as JSON")
    parser.add_argument("--plot")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(point(json.loads(arguments.point[0]), arguments.point[1] == "random")))
        return
    curves = {}
    for axis, sizes in CURVES.items():
        curves[axis] = []
        for size in sizes:
            body = "random" if axis == "V" else "embedded"
            row = in_a_process_of_its_own(__file__, "--point", json.dumps({**BASE, axis: size}), body)
            curves[axis].append({"size": size, **row})
        rows = curves[axis]
        by_time = exponent(sizes, [row["seconds"] for row in rows])
        process, tensors = (
            exponent(sizes, without_constant(sizes, [row[name] for row in rows])) for name in ("peak", "allocated")
        )
        print(f"\n{NAMES[axis]}: time ~ size^{by_time:.2f}, what grows of process and tensors ~ ", end="")
        print(f"size^{process:.2f} and size^{tensors:.2f}")
        for row in rows:
            mib = [row[name] / 2**20 for name in ("peak", "allocated", "predicted")]
            memory = f"process {mib[0]:6.1f} MiB, tensors {mib[1]:6.1f}, formula {mib[2]:6.1f}"
            print(f"  {row['size']:>8} {row['seconds']:8.2f} s; {memory}", flush=True)
    if arguments.plot:
        plot(curves, arguments.plot)
    write_json(arguments.json, {"base": BASE, "curves": curves})


if __name__ == "__main__":
    main()
