"""Memory at the sizes of the paper's models: random bf16 weights in the published shapes, real width and vocabulary.

    python benchmarks/real_sizes.py --layers 2 --tokens 4 --json real_sizes.json
    python benchmarks/real_sizes.py --models "Gemma 3 4B" --tokens 16     # all layers: 9 GB of weights

Measured is the peak above the weights of two steps of K rows, each in a process of its own: as the process grew, and
with `--tensors`, in a second run, as torch counts its tensors, which is what the formula speaks of. The ways:
best-of-n, MISVO as the paper prints it (fp32 laws, bf16 laws), untuned (`auto`), and the paper's text taken literally
(`benchmarks/update.py`: every probability in memory), which decodes as ours does. Beside them stand `misvo.footprint`
for the same run, and, for all layers and the paper's 512 tokens, that formula and what the paper measured of its way
above AISP, which holds what best-of-n holds. What `--json` names has already is not measured again.

Memory above the weights is logits and laws, which have the size of the head, and caches, which grow with the layers. So
`--layers` cuts what does not fit: the head stays what it is, and the table says how many layers there were.
"""

import argparse
import json
from pathlib import Path

from measure import PROMPTS, allocated_bytes, in_a_process_of_its_own, load, peak_bytes, seconds, write_json

import torch  # isort: skip - measure sets the environment that torch reads
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Lfm2Config, LlamaConfig
from update import stages

import misvo
from misvo.footprint import PAPER, Shape, run_bytes

GB, MIB = 1e9, 2**20
ATTENDS = "full_attention"
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LFM_LAYERS = [ATTENDS if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]
GEMMA_LAYERS = [ATTENDS if layer % 6 == 5 else "sliding_attention" for layer in range(34)]
# Published configurations; the name is that of misvo.footprint.PAPER
CONFIGS = {
    "LFM2.5 1.2B": lambda layers: Lfm2Config(
        vocab_size=65_536,
        hidden_size=2048,
        intermediate_size=12_288,  # which the layer itself takes two thirds of
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        layer_types=cut(LFM_LAYERS, layers),
        **NO_ENDS,
    ),
    "Gemma 3 4B": lambda layers: Gemma3TextConfig(
        vocab_size=262_208,
        hidden_size=2560,
        intermediate_size=10_240,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
        num_hidden_layers=layers,
        layer_types=cut(GEMMA_LAYERS, layers),
        **NO_ENDS,
    ),
    "Llama 3 8B": lambda layers: LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        **NO_ENDS,
    ),
}
ALL_LAYERS = {"LFM2.5 1.2B": 16, "Gemma 3 4B": 34, "Llama 3 8B": 32}
# GB of MISVO above AISP in the paper's Table 5
PAPER_ABOVE = {"LFM2.5 1.2B": 10.7 - 3.5, "Gemma 3 4B": 38.8 - 10.5}
WAYS = {
    "best-of-n": {"method": "best-of-n", "preset": "paper"},
    "paper, fp32 laws": {"preset": "paper"},
    "paper, bf16 laws": {"preset": "paper", "law_dtype": "bfloat16"},
    "auto": {"preset": "auto"},
    "literal": None,
}


def cut(types, layers):
    """The kinds of the first layers; one of them attends to everything, else there would be no cache that grows."""
    types = types[:layers]
    return types if ATTENDS in types else [*types[:-1], ATTENDS]


def build(name, layers):
    """Random weights on this disk's tokenizer: its ids are words of every larger vocabulary."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](layers), dtype=torch.bfloat16).eval()
    return misvo.Policy(model, load().tokenizer, name=name)


@torch.no_grad()
def measure(name, layers, way, rollouts, tokens, steps, tensors):
    """Peak bytes above the weights of one way, and what the formula says of it."""
    policy = build(name, layers)
    shape = Shape.of(policy)
    sizes = {"rollouts": rollouts, "steps": steps, "max_new_tokens": tokens}
    length = len(policy.encode(PROMPTS[0]))
    if WAYS[way] is None:
        predicted = None

        def run():
            stages(policy, rollouts, tokens)["literal"]()

    else:
        settings = misvo.Settings.from_preset(**WAYS[way], **sizes)
        predicted = sum(run_bytes(shape, settings.for_model(policy.own_sampler), length).values())

        def run():
            misvo.steer(policy, PROMPTS[0], len, **WAYS[way], **sizes, max_rows=rollouts)

    misvo.steer(policy, "Why?", len, rollouts=2, steps=2, max_new_tokens=2, preset="paper")  # imports and thread pools
    clock = []
    peak = peak_bytes(lambda: clock.append(seconds(run)))
    return {
        "seconds": clock[0],
        "process": peak,
        "tensors": allocated_bytes(run) if tensors else None,
        "formula": predicted,
        "weights": shape.weights,
        "prompt": length,
    }


def whole(name, way, rollouts=16, tokens=512, prompt=131):
    """GB above the weights, all layers at the paper's length, by the formula; the literal way as it was measured."""
    if WAYS[way] is None:
        return PAPER_ABOVE.get(name)
    settings = misvo.Settings.from_preset(**WAYS[way], rollouts=rollouts, max_new_tokens=tokens)
    return sum(run_bytes(PAPER[name][0], settings, prompt).values()) / GB


def line(name, layers, tokens, way, row, base):
    """A row of the table; `base` is best-of-n's."""

    def beside(key):
        return "" if row[key] is None else f"{row[key] / MIB:,.0f} ({row[key] / base[key]:.2f})"

    of = f"{layers} of {ALL_LAYERS[name]}"
    far = whole(name, way)
    all_of_it = "" if far is None else f"{far:.2f} ({far / whole(name, 'best-of-n'):.2f})"
    cells = [name, of, str(tokens), way, *(beside(key) for key in ("process", "tensors", "formula")), all_of_it]
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--layers", type=int, help="so many of each model's layers, all where it has fewer; else all")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", nargs="*", type=int, default=[4])
    parser.add_argument("--tensors", action="store_true", help="also count torch's tensors")
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "LAYERS", "WAY", "TOKENS"), help="print one as JSON")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.one:
        name, layers, way, tokens = arguments.one
        sizes = (arguments.rollouts, int(tokens), arguments.steps, arguments.tensors)
        print(json.dumps(measure(name, int(layers), way, *sizes)))
        return
    columns = ["model", "layers", "T", "way", "process, MiB", "tensors, MiB", "formula, MiB", "all layers, T = 512, GB"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    path = Path(arguments.json or "")
    report = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    for name in arguments.models:
        layers = min(arguments.layers or ALL_LAYERS[name], ALL_LAYERS[name])
        for tokens in arguments.tokens:
            base = None
            for way in dict.fromkeys(["best-of-n", *arguments.ways]):
                what = {"model": name, "layers": layers, "tokens": tokens, "way": way}
                what |= {"rollouts": arguments.rollouts, "steps": arguments.steps, "counted": arguments.tensors}
                row = next((known for known in report if what.items() <= known.items()), None)
                if row is None:
                    sizes = ["--rollouts", arguments.rollouts, "--steps", arguments.steps]
                    sizes += ["--tensors"] if arguments.tensors else []
                    row = what | in_a_process_of_its_own(__file__, "--one", name, layers, way, tokens, *sizes)
                    report.append(row)
                    write_json(arguments.json, {"rows": report})
                base = base or row
                print(line(name, layers, tokens, way, row, base), flush=True)


if __name__ == "__main__":
    main()
