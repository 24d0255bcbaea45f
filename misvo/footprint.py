"""What a run needs: memory from a model's shape, by formulas that `benchmarks/growth.py` holds against measurements.

    python -m misvo.footprint          # the paper's four models, K, N and T as in the paper

Everything is linear in its sizes and nothing has the size K×T×V. The time is a floor: every token reads the weights and
the cache once, and a GPU cannot do that faster than its memory allows.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace

from torch import nn

from misvo import projection
from misvo.adapted import LEARN
from misvo.budget import CHUNK, PREFIXES, STEPS
from misvo.cache import bytes_per_row
from misvo.head import BLOCK_BYTES, Shift
from misvo.race import HEAT
from misvo.row_layer import TOGETHER, visible_width
from misvo.sampling import sampler_of
from misvo.settings import Settings
from misvo.tie import TIES

FP32 = 4
MOST_ROWS = 256  # more at once would not be quicker
# Arrays of V numbers a row, as torch counts them on a CPU
NUCLEUS = 2.0  # to find and keep what top-p leaves of a law that is not flat
OWN_SHIFT = 2.0  # to steer each row by a vector of its own
RUNNER = 64  # bytes of a token while the times of its race are made
TWO_LAWS = 5  # blocks of logits and laws while those of an adapted model are compared with the model's own
FORMING = 4  # arrays of d×d numbers while a Fisher matrix is formed: what it was, blocks of W, their products and sums
# Of the inputs and outputs of all linear layers, as torch counts them on a CPU
ACTIVATIONS = 1.25  # what a gradient keeps of a token
TRAINED = 4  # an adapter, what Adam moves, and its two moments
TRAINING = 4  # sums and parts of a gradient, the adapter before and after its budget


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide what it costs to steer it."""

    name: str
    weights: int  # bytes
    vocabulary: int
    width: int  # hidden size d
    cache_per_token: float  # bytes of keys and values that grow with the sequence
    cache_fixed: float = 0.0  # bytes of a row whatever its length: convolution or recurrent states
    window: int | None = None  # layers with sliding attention hold at most so many tokens
    cache_in_window: float = 0.0  # bytes per token in those layers
    cache_copied: float = 0.0  # bytes per token of the largest layer that is copied as it grows, one layer at a time,
    # where rows do not begin at one column
    precision: int = 4  # bytes of each number of a hidden state
    linear: int = 0  # inputs and outputs of all linear layers of the body: what adapters and their gradients grow with
    aligned: int | None = None  # where rows begin at one column (`misvo.row_layer`): the size of a head

    @classmethod
    def of(cls, policy, prefix=None) -> "Shape":
        """The shape of a loaded model, its cache measured on a prompt that was read, or on a few tokens."""
        prefix = prefix or policy.prefill([1, 2, 3, 4], 1)
        parameters = {id(p): p.numel() * p.itemsize for p in policy.model.parameters()}
        head, cache = policy.head, bytes_per_row(prefix.cache)
        layers = [layer for layer in policy.body.modules() if isinstance(layer, nn.Linear)]
        sizes = {"vocabulary": head.vocab_size, "width": head.hidden_size, "precision": head.weight.itemsize}
        sizes["linear"] = sum(layer.in_features + layer.out_features for layer in layers)
        return cls(policy.name, sum(parameters.values()), **sizes, **cache, aligned=policy.aligned_head(prefix))

    def row(self, prompt: int, tokens: int, together: bool) -> float:
        """Bytes of one row of a batch that goes on from a prompt, with room for so many tokens.

        Where rows begin at one column, those that go on together hold none of the prompt.
        """
        if self.aligned is None:
            return self.cache(prompt + tokens) + self._inside(prompt + tokens) * self.cache_copied
        own = visible_width(tokens if together else prompt + tokens, self.aligned)
        seen = visible_width(tokens if together else self._inside(prompt) + tokens, self.aligned)
        return own * self.cache_per_token + seen * self.cache_in_window + self.cache_fixed

    def cache(self, tokens: int) -> float:
        """Bytes of the keys, values and states of so many tokens."""
        return tokens * self.cache_per_token + self._inside(tokens) * self.cache_in_window + self.cache_fixed

    def _inside(self, tokens):
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True)
class Held:
    """What a method holds beside caches and laws, in numbers of arrays."""

    scratch: float  # of V numbers for each row that decodes: logits, and what becomes of them
    mean_laws: float = 0.0  # of V numbers for each prompt
    shifts: float = 0.0  # the same: Wu of the positions that are made together
    expected: float = 0.0  # of K×T×d numbers for each prompt: expected rows of the head
    hidden: float = 0.0  # the same: hidden states, in the precision of the model
    update: float = 0.0  # of V numbers, while one prompt is updated or measured
    blocks: float = 0.0  # the same, of which no more than BLOCK_BYTES are there at once
    formed: float = 0.0  # of d×d numbers, while the Fisher matrix of a shared vector is formed
    stems: float = 0.0  # rows of a batch that are kept beside each row, while others fork from them

    @classmethod
    def by(cls, settings: Settings) -> "Held":
        scratch = 1.0 + (NUCLEUS if not sampler_of(settings).samples_whole_law else 0.0)
        if settings.method in ("particles", "blockwise"):
            hidden = 0.0 if settings.potential == "prefix" else 1.0 + settings.steps / settings.block
            if settings.proposal == "reference":
                return cls(scratch, hidden=hidden, stems=1.0)
            guide = cls.by(Settings.from_preset(rollouts=settings.rollouts, max_new_tokens=settings.max_new_tokens))
            return replace(guide, scratch=scratch, hidden=guide.hidden + hidden, expected=guide.expected + 1, stems=1.0)
        if settings.method == "best-of-n":
            return cls(scratch)
        if settings.method == "lora":  # the states of both models
            return cls(scratch, expected=1.0, hidden=2.0 + settings.kl_ref)
        hidden, update = float(settings.collecting_steps), 0.0
        if settings.kl_ref:
            hidden, update = hidden + 1, 3.0 * settings.rollouts  # the reference's states, and one position of them
        if settings.method != "misvo":
            return cls(scratch + OWN_SHIFT, hidden=hidden, update=update)
        tie, fisher = TIES[settings.tie](settings.max_new_tokens), settings.cost not in ("euclidean", "none")
        untied = tie.basis is None
        mean_laws = tie.positions * (0.5 if settings.law_dtype == "bfloat16" else 1.0) if untied else len(tie.pairs)
        if settings.kl_budget or settings.kl_budget_per_token:
            hidden += 1
            prefixes = PREFIXES * min(STEPS, settings.steps)  # their logits; of untied vectors their shifts too
            update = max(update, prefixes + 2 * CHUNK if settings.tie == "shared" else 2 * prefixes + 4 * CHUNK)
        return cls(
            scratch,
            mean_laws=mean_laws if fisher else 0.0,
            shifts=min(Shift.POSITIONS, tie.positions) if untied else tie.size,
            expected=2.0 if fisher else 1.0,  # of this step, and of the Fisher estimate
            hidden=hidden,
            update=update,
            blocks=tie.size if fisher else 0.0,
            formed=FORMING if settings.cost == "frozen-fisher" and settings.tie == "shared" else 0.0,
        )


def run_bytes(
    shape: Shape, settings: Settings, prompt: int, prompts: int = 1, rows: int | None = None
) -> dict[str, float]:
    """Memory above the weights for `prompts` of so many tokens that are open at once, and `rows` that decode (K each).

    A prompt's step decodes, lets its caches and laws go, and then updates while other prompts decode: what is told is
    the larger of the two.
    """
    K, T, V, held = settings.rollouts, settings.max_new_tokens, shape.vocabulary, Held.by(settings)
    rows = K * prompts if rows is None else rows
    row = shape.row(prompt, T, K >= TOGETHER)
    kept = {
        "mean law": prompts * held.mean_laws * V * FP32,
        "shift": prompts * held.shifts * V * FP32,
        "states": prompts * (held.expected * FP32 + held.hidden * shape.precision) * K * T * shape.width,
    }
    waiting = max(rows * V * FP32, min(projection.BYTES, rows * T * V * FP32))
    decoding = {
        "cache": (1 + held.stems) * rows * row + prompts * shape.cache(prompt),
        "logits": rows * held.scratch * V * FP32,
        "laws": waiting,
        "race": RUNNER * min(HEAT, rows * V),
    }
    # Products with vectors of fp32 raise a head of 16 bits block by block
    raised = min(BLOCK_BYTES, V * shape.width * FP32) if held.expected and shape.precision < FP32 else 0.0
    decoding["head, raised"] = raised
    others = max(0, rows - K)
    formed = held.formed * shape.width**2 * FP32 if shape.width <= K * T else 0.0  # else it is not
    updating = {
        "cache": others * row + prompts * shape.cache(prompt),
        "laws": waiting if others else 0.0,
        "products": max(held.update * V * FP32, min(BLOCK_BYTES, held.blocks * V * FP32), formed),
        "head, raised": raised,
    }
    if settings.method == "lora":
        adapter = settings.lora_rank * shape.linear * FP32
        kept["adapters"] = prompts * TRAINED * adapter
        updating["products"] = max(held.update * V * FP32, TWO_LAWS * BLOCK_BYTES)
        updating["gradient"] = TRAINING * adapter + ACTIVATIONS * max(LEARN, prompt + T) * shape.linear * FP32
    return kept | max(decoding, updating, key=lambda parts: sum(parts.values()))


def most_open(rows: int, rollouts: int) -> int:
    """Prompts that may be open where so many rows decode: those that decode, and as many that are being scored."""
    return 2 * max(1, rows // rollouts)


def rows_that_fit(shape: Shape, settings: Settings, prompt: int, prompts: int, memory: float) -> int:
    """How many rows of `prompts` prompts may decode at once within so many bytes: at least one, at most MOST_ROWS."""

    def needed(rows):
        at_once = min(prompts, most_open(rows, settings.rollouts))
        return sum(run_bytes(shape, settings, prompt, at_once, rows).values())

    return 1 + bisect_right(range(2, MOST_ROWS + 1), memory, key=needed)  # more rows never need less


# Sizes from the models' published configurations; 16-bit weights and caches, as in the paper.
GB, HALF = 1e9, 2
PAPER = {
    "LFM2.5 1.2B": (
        Shape(
            "LFM2.5-1.2B-Instruct",
            weights=1.17e9 * HALF,
            vocabulary=65_536,
            width=2048,
            cache_per_token=6 * 2 * 8 * 64 * HALF,  # 6 of 16 layers attend
            cache_fixed=10 * 2048 * 3 * HALF,  # the others convolve
            precision=HALF,
        ),
        16,
    ),
    "Gemma 3 4B": (
        Shape(
            "Gemma3-4B-IT",
            weights=4.3e9 * HALF,
            vocabulary=262_208,
            width=2560,
            cache_per_token=5 * 2 * 4 * 256 * HALF,  # 5 of 34 layers see everything
            window=1024,
            cache_in_window=29 * 2 * 4 * 256 * HALF,
            precision=HALF,
        ),
        16,
    ),
    "Llama 3 8B": (
        Shape(
            "Llama-3-8B-Instruct", 8.03e9 * HALF, 128_256, 4096, cache_per_token=32 * 2 * 8 * 128 * HALF, precision=HALF
        ),
        32,
    ),
    "Phi-4 14B": (
        Shape("Phi-4", 14.7e9 * HALF, 100_352, 5120, cache_per_token=40 * 2 * 10 * 128 * HALF, precision=HALF),
        32,
    ),
}


def floor_seconds(shape: Shape, rollouts: int, steps: int, prompt: int, tokens: int, bandwidth: float) -> float:
    """Steps × tokens × (weights, the head once more for Wᵀp, and the caches half full) / bandwidth."""
    head = shape.vocabulary * shape.width * HALF
    cache = rollouts * shape.cache(prompt + tokens // 2)
    return steps * tokens * (shape.weights + head + cache) / bandwidth


def paper_table(prompt: int = 256, tokens: int = 512, bandwidth: float = 4.8e12) -> list[dict]:
    """Memory and the least time of one prompt for each of the paper's models."""
    rows = []
    for name, (shape, size) in PAPER.items():

        def needed(preset="paper", shape=shape, size=size, **options):
            settings = Settings.from_preset(preset, rollouts=size, max_new_tokens=tokens, **options)
            return sum(run_bytes(shape, settings, prompt).values()) / GB

        rows.append(
            {
                "model": name,
                "K = N": size,
                "weights": shape.weights / GB,
                "best-of-n": needed(method="best-of-n"),
                "paper, fp32 laws": needed(),
                "paper, bf16 laws": needed(law_dtype="bfloat16"),
                "auto": needed("auto"),
                "K×T×V in fp32": size * tokens * shape.vocabulary * FP32 / GB,
                "seconds, at least": floor_seconds(shape, size, size, prompt, tokens, bandwidth),
            }
        )
    return rows


if __name__ == "__main__":
    table = paper_table()
    print("GB above the weights for one prompt of 256 tokens and 512 new ones; seconds at 4.8 TB/s (H200)\n")
    print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
    for row in table:
        print(
            "| "
            + " | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
            + " |"
        )
