"""What steering costs on vLLM, against vLLM's own sampling of the same rows: CPU time, in one process, in turn.

    .venv-vllm/bin/python benchmarks/on_vllm.py --rounds 3

Every competitor decodes K rows of T tokens in N steps, ends of text held back, with the same sampler as what it is
compared with: best-of-n all rows at once, the others a step after the other. The cheapest reward there is scores them.
The figure is the median over rounds of the ratio of two neighbours, so that a busy machine shows in both.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import misvo

PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle."
PLAIN = {"temperature": 1.0, "top_p": 1.0}


def lengths(completions, **_):
    return [float(len(text) % 17) for text in completions]


def vllm_alone(policy, arguments, together, sampler):
    """vLLM's own sampler, rows and steps as ours."""
    from vllm import SamplingParams

    engine, tokens = policy.host.vllm, list(policy.encode(PROMPT))
    steps = 1 if together else arguments.steps
    rows = arguments.rollouts * (arguments.steps if together else 1)
    for step in range(steps):
        for row in range(rows):
            params = SamplingParams(
                **sampler, seed=step * rows + row, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False
            )
            (prompt,) = engine.renderer.render_cmpl([{"prompt_token_ids": tokens}])
            engine.add_request(f"plain {step} {row}", prompt, params)
        while engine.has_unfinished_requests():
            engine.step()


def steered(policy, arguments, **options):
    sizes = {"rollouts": arguments.rollouts, "steps": arguments.steps, "max_new_tokens": arguments.tokens}
    held = {"min_new_tokens": arguments.tokens, "stop": ()}
    misvo.steer(policy, PROMPT, lengths, **sizes, **held, kl_ref=False, progress=False, **options)


def spent(work, *arguments, **options) -> float:
    before = time.process_time()
    work(*arguments, **options)
    return time.process_time() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("best-of-n", "paper", "auto"))
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    policy = misvo.Policy.from_pretrained(
        "smollm2-135m", engine="vllm", own_process=False, max_model_len=512, max_num_seqs=64
    )
    own = {"temperature": policy.own_sampler.temperature, "top_p": policy.own_sampler.top_p}
    kinds = {
        "best-of-n": (True, PLAIN, {"preset": "paper", "method": "best-of-n"}),
        "paper": (False, PLAIN, {"preset": "paper"}),
        "auto": (False, own, {"preset": "auto"}),
    }
    figures = {}
    for name, (together, sampler, options) in kinds.items():
        if arguments.only not in (None, name):
            continue
        ratios = []
        for round_ in range(arguments.rounds + 1):
            alone = spent(vllm_alone, policy, arguments, together, sampler)
            ours = spent(steered, policy, arguments, **options)
            if round_:  # the first one warms up
                ratios.append(ours / alone)
        figures[name] = {"ratio": statistics.median(ratios), "rounds": ratios, "seconds_alone": alone}
        print(
            f"{name}: {figures[name]['ratio']:.3f} of vLLM alone ({', '.join(f'{r:.3f}' for r in ratios)})", flush=True
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"sizes": vars(arguments), "figures": figures}, file, indent=2)
    policy.close()


if __name__ == "__main__":
    main()
