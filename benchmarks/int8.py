"""int8 against packed fp32: how fast it decodes and how far it is from the model it was made of, for both ranges.

    python benchmarks/int8.py                                                      # the instructions of this machine
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/int8.py     # no VNNI: half of the range alone

Responses of the fp32 model (K rows of T tokens for each prompt, whole law) are read again by each of the others; told
is the KL of the other's law to the fp32 one at every token, mean, median and largest. Speed is by CPU time, to which
threads that wait for each other add: set OMP_NUM_THREADS=1. Whole range where sums would saturate is not measured: it
is another function, and wrong.
"""

import argparse
import statistics

from measure import PROMPTS, cpu_seconds, load, write_json

import torch  # isort: skip - measure sets the environment that torch reads


from misvo import int8
from misvo.rollouts import Request


def decode(policy, prompt, rows, tokens):
    return policy.engine(rows).run(Request(tuple(policy.encode(prompt)), 0, 0, range(rows), tokens))


@torch.no_grad()
def laws(policy, prompt, response):
    """Log-probabilities of every token of a response, (T, V)."""
    ids = torch.tensor([[*policy.encode(prompt), *response]])
    hidden = policy.body(input_ids=ids).last_hidden_state[0, -len(response) - 1 : -1]
    return policy.head.logits(hidden).double().log_softmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    print(
        "instructions:", torch.backends.cpu.get_cpu_capability(), "int8 weights up to", int8.weight_range(), flush=True
    )
    policies, ranges = {"fp32": load()}, sorted({int8.HALF_RANGE, int8.weight_range()})
    for levels in ranges:
        int8.weight_range = lambda levels=levels: levels  # what the layers ask for as they are made
        policies[f"int8, weights up to {levels}"] = load(quantize="int8")
    texts = PROMPTS[: arguments.prompts]
    responses = [decode(policies["fp32"], text, arguments.rows, arguments.tokens).responses() for text in texts]
    times = {name: [] for name in policies}
    for number in range(arguments.rounds):
        for name, policy in policies.items():
            times[name].append(cpu_seconds(lambda: decode(policy, texts[0], arguments.rows, arguments.tokens)))  # noqa: B023
        print(f"round {number}", {name: round(values[-1], 2) for name, values in times.items()}, flush=True)
    report = {}
    for name, policy in policies.items():
        ratio = statistics.median(times["fp32"]) / statistics.median(times[name])
        report[name] = {"speed": ratio}
        if name != "fp32":
            kls = []
            for text, rows in zip(texts, responses, strict=True):
                for row in rows[:4]:
                    own, other = laws(policies["fp32"], text, row), laws(policy, text, row)
                    kls += (other.exp() * (other - own)).sum(-1).tolist()
            report[name] |= {"tokens": len(kls), "mean KL": statistics.mean(kls), "median KL": statistics.median(kls)}
            report[name] |= {"largest KL": max(kls)}
        print(name, {key: round(value, 4) for key, value in report[name].items()}, flush=True)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
