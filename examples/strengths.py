"""A steering is a value: half of it, the sum of two, saved and loaded.

python examples/strengths.py
"""

import tempfile

import misvo

PROMPT = "Give me one tip for sleeping better."
SIZES = {"rollouts": 4, "steps": 2, "max_new_tokens": 12}

if __name__ == "__main__":
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    cheerful = misvo.steer(policy, PROMPT, "sentiment", **SIZES).steering
    simple = misvo.steer(policy, PROMPT, "reading-ease", **SIZES).steering

    # The same noise at every strength: what differs is what steering changed. 0 is the model as it is.
    for strength in (0, 0.5, 1):
        print(f"{strength:>4}: {policy.generate(PROMPT, cheerful, strength=strength, seed=1)}")
    both = 0.5 * cheerful + 0.5 * simple
    print(f"both: {policy.generate(PROMPT, both, seed=1)}")

    with tempfile.TemporaryDirectory() as folder:
        both.save_pretrained(folder)
        again = misvo.Steering.from_pretrained(folder)
    # One vector for all positions was learned, so it also serves another prompt.
    print(f"else: {policy.generate('How was your day?', again, seed=1, max_new_tokens=20)}")
