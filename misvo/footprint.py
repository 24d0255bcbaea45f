"""What a run needs: memory from a model's shape, by formulas that `benchmarks/growth.py` holds against measurements.

    python -m misvo.footprint          # the paper's four models, K, N and T as in the paper

Everything is linear in its sizes and nothing has the size K×T×V. The time is a floor: every token reads the weights and
the cache once, and a GPU cannot do that faster than its memory allows.
"""

from dataclasses import dataclass

from misvo import laws
from misvo.cache import bytes_per_row
from misvo.head import BLOCK_BYTES, Shift

FP32 = 4


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

    @classmethod
    def of(cls, policy) -> "Shape":
        """The shape of a loaded model, its cache measured on a few tokens."""
        prefix = policy.prefill([1, 2, 3, 4], 1)
        grows, fixed = bytes_per_row(prefix.cache)
        parameters = {id(p): p.numel() * p.itemsize for p in policy.model.parameters()}
        head = policy.head
        return cls(policy.name, sum(parameters.values()), head.vocab_size, head.hidden_size, grows, fixed)

    def cache(self, tokens: int) -> float:
        """Bytes of one row of so many tokens."""
        windowed = min(tokens, self.window or 0) * self.cache_in_window
        return tokens * self.cache_per_token + windowed + self.cache_fixed


def sampling_bytes(shape: Shape, rows: int, prompt: int, tokens: int, prompts: int = 1) -> dict[str, float]:
    """Memory above the weights for plain sampling of so many rows: what best-of-n takes."""
    return {
        "cache": rows * shape.cache(prompt + tokens) + prompts * shape.cache(prompt),
        "logits": rows * shape.vocabulary * FP32,
        "laws": rows * shape.vocabulary * FP32,
    }


def steering_bytes(
    shape: Shape, rollouts: int, prompt: int, tokens: int, prompts: int = 1, law_bytes: int = FP32, tied: bool = False
) -> dict[str, float]:
    """Memory above the weights for MISVO with the frozen Fisher cost, all prompts in flight at once.

    A step decodes, lets caches and laws go, and then updates: what is told is the larger of the two.
    """
    rows, V, d = rollouts * prompts, shape.vocabulary, shape.width
    kept = {
        "mean law": prompts * (V * FP32 if tied else tokens * V * law_bytes),
        "shift": prompts * (V * FP32 if tied else min(Shift.POSITIONS, tokens) * V * FP32),
        "expected rows": 2 * rows * tokens * d * FP32,  # of this step, and of the frozen estimate
    }
    decoding = sampling_bytes(shape, rows, prompt, tokens, prompts)
    decoding["laws"] = max(rows * V * FP32, min(laws.BYTES, rows * tokens * V * FP32))
    updating = {
        "cache": prompts * shape.cache(prompt),
        "products": min(BLOCK_BYTES, (1 if tied else tokens) * V * FP32),
    }
    return kept | max(decoding, updating, key=lambda parts: sum(parts.values()))


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
        ),
        16,
    ),
    "Llama 3 8B": (
        Shape("Llama-3-8B-Instruct", 8.03e9 * HALF, 128_256, 4096, cache_per_token=32 * 2 * 8 * 128 * HALF),
        32,
    ),
    "Phi-4 14B": (Shape("Phi-4", 14.7e9 * HALF, 100_352, 5120, cache_per_token=40 * 2 * 10 * 128 * HALF), 32),
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
        plain = sampling_bytes(shape, size, prompt, tokens)
        lean = steering_bytes(shape, size, prompt, tokens, law_bytes=2)
        tied = steering_bytes(shape, size, prompt, tokens, tied=True)
        rows.append(
            {
                "model": name,
                "K = N": size,
                "weights": shape.weights / GB,
                "best-of-n": sum(plain.values()) / GB,
                "paper, fp32 laws": sum(steering_bytes(shape, size, prompt, tokens).values()) / GB,
                "paper, bf16 laws": sum(lean.values()) / GB,
                "auto": sum(tied.values()) / GB,
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
