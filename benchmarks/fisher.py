"""Three ways to a Fisher product: K softmaxes (the paper's text), one averaged law (ours), formed d×d matrices.

    python benchmarks/fisher.py --rounds 5

Random heads of several widths, K = 16 laws per position. Forming costs once, products cost every step, so the formed
matrices pay off after a number of steps: that crossover is printed, beside the memory that each way holds.
"""

import argparse
import json
import statistics
import time

from misvo.threads import use_free_cores

use_free_cores()

import torch

from misvo.head import Fisher, Head


def literal_product(head, hidden, u):
    """(1/K) Σ_i Wᵀ C_{p_i} W u with every p_i rebuilt from its hidden state: K softmaxes per position."""
    out = torch.empty_like(u)
    for t in range(len(u)):
        p = torch.softmax(head.logits(hidden[:, t]), -1)  # (K, V)
        v = head.weight @ u[t]
        out[t] = ((p * v - p * (p @ v)[:, None]) @ head.weight).mean(0)
    return out


def median_seconds(call, rounds):
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]), result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--positions", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 256, 576])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    V, K, T = arguments.vocabulary, arguments.rollouts, arguments.positions
    print(f"V = {V}, K = {K}, T = {T}; seconds for all positions, medians of {arguments.rounds}")
    print(
        f"{'d':>5}{'literal':>10}{'averaged':>10}{'formed':>10}{'forming':>10}{'literal/averaged':>18}{'crossover':>11}"
    )
    rows = []
    for d in arguments.widths:
        generator = torch.Generator().manual_seed(d)
        head = Head(torch.randn(V, d, generator=generator) / d**0.5)
        hidden, u = 3 * torch.randn(K, T, d, generator=generator), torch.randn(T, d, generator=generator)
        p = torch.softmax(head.logits(hidden.flatten(0, 1)), -1).view(K, T, V)
        fisher = Fisher(head, p.mean(0), head.project(p.flatten(0, 1)).view(K, T, d))
        del p
        shift = head.shift(u)  # sampling makes it anyway, and the product shares it
        literal, a = median_seconds(lambda: literal_product(head, hidden, u), arguments.rounds)  # noqa: B023
        averaged, b = median_seconds(lambda: fisher.product(u, shift), arguments.rounds)  # noqa: B023
        forming, matrices = median_seconds(fisher.formed, 1)
        formed, c = median_seconds(lambda: matrices.product(u), arguments.rounds)  # noqa: B023
        assert max((a - b).norm(), (c - b).norm()) < 1e-3 * b.norm()
        crossover = forming / max(averaged - formed, 1e-9)
        rows.append({"d": d, "literal": literal, "averaged": averaged, "formed": formed, "forming": forming})
        rows[-1]["crossover_steps"] = crossover
        print(
            f"{d:5}{literal:10.4f}{averaged:10.4f}{formed:10.5f}{forming:10.3f}",
            f"{literal / averaged:17.1f}{crossover:11.0f}",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"arguments": vars(arguments), "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
