"""A reward of your own: any function from a text to a number.

python examples/own_reward.py
misvo steer "How do I sleep better?" --reward examples/own_reward.py:few_long_words    # the same in the shell
"""

import misvo


def few_long_words(text: str) -> float:
    """1 where every word is short, 0 where every word is long; None where there is nothing to score."""
    words = text.split()
    return sum(len(word) <= 6 for word in words) / len(words) if words else None


few_long_words.scores_prefixes = True  # it is cheap and makes sense of a beginning: tokens then earn what they add

if __name__ == "__main__":
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    result = misvo.steer(policy, "How do I sleep better?", few_long_words, rollouts=4, steps=2, max_new_tokens=16)
    print(f"as it is: {result.reference.text}")
    print(f"steered:  {result.text}")
    print(f"mean reward by step: {[round(row['mean'], 3) for row in result.trace]}")
