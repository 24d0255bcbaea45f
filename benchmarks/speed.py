"""Steering against its competitors: time, tokens per second and peak memory, in one process, in turn.

    python benchmarks/speed.py --rounds 2 --json speed.json

Competitors, all with the same prompts, K rows a step, N steps and T tokens a row (ends of text are ignored, so that
all do the same work): plain sampling with our engine, with the whole law and under top-p 0.95; `generate` of
transformers on the model as transformers loads it, K rows a call; MISVO as printed in the paper, the same under top-p,
untuned (`auto`); AISP; MISVO for many prompts at once, whose figures are per prompt; and, where it is installed,
llama.cpp (`benchmarks/by_llama_cpp.py`). Peak memory is that of two steps in a process of its own, above the loaded
model; of llama.cpp, with its model.
"""

import argparse
import importlib.util
import statistics

from measure import PROMPTS, allocated_bytes, in_a_process_of_its_own, load, peak_bytes, seconds, spread, write_json

import torch  # isort: skip - measure sets the environment that torch reads
from transformers import AutoModelForCausalLM

import misvo
from misvo.embedded import model_folder


def hugging_face(arguments):
    """Best-of-n the usual way: `generate` on a model that nobody has touched."""
    model = AutoModelForCausalLM.from_pretrained(model_folder("smollm2-135m")).eval()

    def run(ids):
        for step in range(arguments.steps):
            torch.manual_seed(step)
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                num_return_sequences=arguments.rollouts,
                min_new_tokens=arguments.max_new_tokens,
                max_new_tokens=arguments.max_new_tokens,
            )

    return run


def half_length(text):
    """A reward that takes no time, in a unit with which MISVO moves this model by some 0.1 nats a token, as the paper's
    moved theirs (0.04, 0.18 and 0.27 in steps 2 to 4): laws that steering made flat take longer to cut."""
    return len(text) / 2


def competitors(policy, arguments):
    size = {"rollouts": arguments.rollouts, "steps": arguments.steps, "max_new_tokens": arguments.max_new_tokens}
    generate = llama = None

    def steer(**options):
        def run(prompt):
            asked = {**size, "max_rows": arguments.rollouts, "preset": "paper", **options}
            result = misvo.steer(policy, prompt, half_length, **asked)
            run.stages = {name: sum(row["seconds"][name] for row in result.trace) for name in ("decode", "update")}

        return run

    def by_transformers(prompt):
        nonlocal generate
        generate = generate or hugging_face(arguments)
        generate(torch.tensor([policy.encode(prompt)]))

    def by_llama_cpp(prompt):
        nonlocal llama
        if llama is None:
            from by_llama_cpp import Sampling

            llama = Sampling(arguments.rollouts, arguments.max_new_tokens)
        for step in range(arguments.steps):
            llama(policy.encode(prompt), seed=step)

    def many(_):
        misvo.steer_many(policy, PROMPTS[: arguments.prompts], half_length, **size, preset="paper")

    return {
        "sampling": steer(method="best-of-n"),
        "misvo paper": steer(law_dtype=arguments.law_dtype),
        "sampling top-p": steer(method="best-of-n", top_p=0.95, preset="paper"),
        "misvo paper top-p": steer(top_p=0.95),
        "misvo auto": steer(preset="auto"),
        "aisp": steer(method="aisp"),
        "generate": by_transformers,
        "many": many,
        **({"llama.cpp": by_llama_cpp} if importlib.util.find_spec("llama_cpp") else {}),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--only", nargs="*", help="names of competitors")
    parser.add_argument("--quantize", choices=["int8"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--law-dtype", default="float32", help="of misvo paper")
    parser.add_argument("--longer", type=int, default=0, help="repeat the prompt so many times more")
    parser.add_argument("--peak", help="print the peak memory of this competitor, and nothing else")
    parser.add_argument("--tensors", action="store_true", help="with --peak: of torch's tensors, not of the process")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    policy = load(quantize=arguments.quantize, compile=arguments.compile)
    calls = competitors(policy, arguments)
    prompts = [" ".join([prompt] * (1 + arguments.longer)) for prompt in PROMPTS]
    if arguments.peak:
        misvo.steer(
            policy, PROMPTS[1], len, rollouts=2, steps=2, max_new_tokens=4, preset="paper"
        )  # imports and thread pools
        measured = allocated_bytes if arguments.tensors else peak_bytes
        print(measured(lambda: calls[arguments.peak](prompts[0])))
        return
    names = arguments.only or list(calls)
    times, stages = {name: [] for name in names}, {}
    misvo.steer(
        policy, PROMPTS[0], len, rollouts=arguments.rollouts, steps=2, max_new_tokens=16, preset="paper"
    )  # warm-up
    for number in range(arguments.rounds):
        for name in names:
            share = arguments.prompts if name == "many" else 1
            times[name].append(seconds(lambda: calls[name](prompts[number % len(prompts)])) / share)  # noqa: B023
            stages[name] = getattr(calls[name], "stages", {})
        print(f"round {number}", {name: round(values[-1], 2) for name, values in times.items()}, flush=True)
    tokens = arguments.rollouts * arguments.steps * arguments.max_new_tokens
    middle = {name: statistics.median(values) for name, values in times.items()}
    columns = {"median s": 10, "spread": 8, "tok/s": 8, "update s": 10, "/sampling": 11, "/generate": 11, "MiB": 7}
    print("\n" + " " * 20 + "".join(f"{name:>{width}}" for name, width in columns.items()))
    rows = {}
    for name in names:
        options = ["--steps", 2, "--prompts", arguments.prompts, "--rollouts", arguments.rollouts]
        options += ["--law-dtype", arguments.law_dtype, "--longer", arguments.longer]
        peak = in_a_process_of_its_own(__file__, "--peak", name, *options)
        rows[name] = {"median": middle[name], "values": times[name], "peak": peak, "stages": stages[name]}
        against = [f"{middle[name] / middle[base]:11.3f}" if base in middle else " " * 11 for base in BASES]
        update = f"{stages[name].get('update', 0):10.2f}"
        speed = f"{middle[name]:10.2f}{spread(times[name]):8.2f}{tokens / middle[name]:8.0f}"
        print(f"{name:20}{speed}{update}{''.join(against)}{peak / 2**20:7.0f}", flush=True)
    if "sampling top-p" in middle and "misvo paper top-p" in middle:
        print(f"under top-p, misvo / sampling: {middle['misvo paper top-p'] / middle['sampling top-p']:.3f}")
    write_json(arguments.json, {"arguments": vars(arguments), "rows": rows})


BASES = ("sampling", "generate")

if __name__ == "__main__":
    main()
