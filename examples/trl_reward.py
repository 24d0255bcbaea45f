"""A reward as TRL's trainers take it: batches of prompts and completions, and columns by name.

    python examples/trl_reward.py

What was written for GRPO works unchanged, by path too: `--reward my_rewards.py:right_and_brief`.
"""

import misvo

CAPITALS = [
    {"prompt": "What is the capital of France?", "answer": "Paris"},
    {"prompt": "What is the capital of Japan?", "answer": "Tokyo"},
]


def right_and_brief(prompts, completions, answer, log_metric=None, **kwargs):
    """1 for an answer that occurs, less a hundredth for each word; `answer` is a column of the data."""
    right = [float(wanted in text) for text, wanted in zip(completions, answer, strict=True)]
    if log_metric is not None:  # what a reward logs stands in `result.trace` as a part
        log_metric("share_right", sum(right) / len(right))
    return [value - 0.01 * len(text.split()) for value, text in zip(right, completions, strict=True)]


if __name__ == "__main__":
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    results = misvo.steer_many(
        policy,
        [row["prompt"] for row in CAPITALS],
        right_and_brief,
        columns=[{"answer": row["answer"]} for row in CAPITALS],
        rollouts=4,
        steps=2,
        max_new_tokens=12,
    )
    for result in results:
        print(f"{result.prompt} {result.text!r}: {result.reward:.2f}")
        print(f"  right in each step: {[row['parts']['share_right'] for row in result.trace]}")
