"""Is it better, or only better at its reward? Ask one that took no part.

python examples/held_out_reward.py
misvo steer "Why sleep?" --save run && misvo rescore run --reward reading-ease     # the same in the shell
"""

import misvo

if __name__ == "__main__":
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    result = misvo.steer(policy, "Why is sleep good for us?", "sentiment", rollouts=4, steps=2, max_new_tokens=16)

    held_out = misvo.rescore(result, "reading-ease")
    print(f"chosen by sentiment: {result.text!r}")
    print(f"its place of {len(held_out)} by reading ease: {held_out.rank}; correlation {held_out.correlation}")

    # Reward, KL, likelihood, coherence, diversity and the held-out reward; last step beside the model as it was.
    # judge="gemma3-270m" adds fluency under a model that took no part (`make judge` installs it).
    print(misvo.panel(result, held_out="reading-ease"))
