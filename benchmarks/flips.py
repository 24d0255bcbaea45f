"""Does a prompt's result hang on its batch mates? Candidates of `steer` alone against `steer_many`.

    python benchmarks/flips.py                                                     # the instructions of this machine
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/flips.py    # as on a CPU that has no more

Eight prompts of different lengths, K = 16, N = 4, T = 64, the length of the text as reward; alone, all in one batch,
and in batches of three. Told are the candidates that differ, the tokens that were compared (up to the first difference
of a run: what comes after it hangs on it), and how many vectors have the same bits. `--padded` does the same with rows
that end at one column, as on a GPU and beside sliding windows, where the last digits do depend on the mates, and adds
what the laws of both say of the rate: logits that differ by δ choose another token in ½ ΣΣ p_v p_w |δ_v − δ_w| of the
races.
"""

import argparse
import time

from measure import PROMPTS, write_json

import torch  # isort: skip - measure sets the environment that torch reads

import misvo

WORDS = (5, 1, 9, 30, 3, 16, 24, 12)  # of each prompt


def prompts():
    return [" ".join(prompt.split()[:words]) for prompt, words in zip(PROMPTS, WORDS, strict=True)]


def compare(alone, together):
    """Candidates that differ, tokens that were compared and whether the vectors have the same bits, over all runs."""
    report = {
        "candidates": 0,
        "differ": 0,
        "runs that differ": 0,
        "tokens compared": 0,
        "vectors with same bits": 0,
    }
    for one, other in zip(alone, together, strict=True):
        pairs = list(zip(one.candidates, other.candidates, strict=True))
        differ = [index for index, (a, b) in enumerate(pairs) if a.tokens != b.tokens]
        last = pairs[differ[0]][0].step if differ else one.settings.steps
        report["candidates"] += len(pairs)
        report["differ"] += len(differ)
        report["runs that differ"] += bool(differ)
        report["tokens compared"] += sum(len(a.tokens) for a, _ in pairs if a.step <= last)
        report["vectors with same bits"] += torch.equal(one.steering.vectors, other.steering.vectors)
    return report


def chance_of_a_flip(policy, texts):
    """Mean over draws of ½ ΣΣ p_v p_w |δ_v − δ_w|, δ the difference of logits alone and in a batch, whole laws."""
    from misvo.rollouts import Keep, Request

    def decode(some):
        engine, kept = policy.engine(16 * len(some)), {}
        requests = [Request(tuple(policy.encode(text)), 0, 0, range(16), 32, keep=Keep(hidden=True)) for text in some]
        tickets = [engine.submit(request) for request in requests]
        while engine.busy:
            kept |= dict(engine.advance())
        return [kept[ticket] for ticket in tickets]

    total, count = 0.0, 0
    for text, other in zip(texts, decode(texts), strict=True):
        (alone,) = decode([text])
        same = (alone.tokens == other.tokens).cumprod(1).roll(1, 1)
        same[:, 0] = 1  # a position counts while all tokens before it agree
        here = same.bool() & alone.alive & other.alive
        for one, two in zip(alone.hidden[here].split(64), other.hidden[here].split(64), strict=True):
            logits = policy.head.logits(one)
            delta, order = (policy.head.logits(two) - logits).double().sort(-1)
            probs = torch.softmax(logits, -1).double().gather(-1, order)
            below = probs.cumsum(-1) - probs / 2
            total += (probs * delta * (2 * below - 1)).sum().item()
            count += len(one)
    return total / count, count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["paper", "auto"])
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 3])
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--padded", action="store_true", help="rows that end at one column")
    parser.add_argument("--bf16-laws", action="store_true", help="also compare mean laws in fp32 and in bf16")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    policy, texts, report = misvo.Policy.from_pretrained("smollm2-135m"), prompts(), {}
    print("instructions:", torch.backends.cpu.get_cpu_capability(), flush=True)
    if arguments.padded:
        from misvo import cache

        cache.aligns = lambda *_: False
        chance, count = chance_of_a_flip(policy, texts)
        print(f"chance of another token: {chance:.2e} a token, mean of {count} draws", flush=True)
        report["chance"] = chance
    size = {name: getattr(arguments, name) for name in ("rollouts", "steps", "max_new_tokens", "seed")}
    for preset in arguments.presets:
        started = time.perf_counter()
        alone = [misvo.steer(policy, text, len, preset=preset, **size) for text in texts]
        print(f"{preset}: alone in {time.perf_counter() - started:.0f} s", flush=True)
        for batch in arguments.batches:
            together = []
            for first in range(0, len(texts), batch):
                together += misvo.steer_many(policy, texts[first : first + batch], len, preset=preset, **size)
            report[f"{preset}, batches of {batch}"] = found = compare(alone, together)
            print(f"{preset}, batches of {batch}:", found, flush=True)
        if arguments.bf16_laws and preset == "paper":
            rounded = [misvo.steer(policy, text, len, preset=preset, law_dtype="bfloat16", **size) for text in texts]
            report["fp32 and bf16 laws"] = found = compare(alone, rounded)
            print("paper, fp32 and bf16 laws:", found, flush=True)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
