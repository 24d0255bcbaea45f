"""Chats: a system message, an answer that is begun, and what the template is told.

python examples/chat.py
misvo steer --messages chat.json --system "You are terse." --reward words:5-15     # the same in the shell
"""

import misvo

CHAT = [
    {"role": "system", "content": "You are a friendly gardener."},
    {"role": "user", "content": "My tomatoes have yellow leaves."},
    {"role": "assistant", "content": "How often do you water them?"},
    {"role": "user", "content": "Every evening."},
]


def asks_back(completions, **kwargs):
    """For a chat, a completion is a list with the assistant's message, as in TRL."""
    return [float("?" in completion[0]["content"]) for completion in completions]


if __name__ == "__main__":
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    sizes = {"rollouts": 4, "steps": 2, "max_new_tokens": 12}
    result = misvo.steer(policy, CHAT, asks_back, **sizes)
    print(result.text)

    # An assistant's last message is continued: the response is what follows, the reward sees the whole.
    begun = misvo.steer(policy, [*CHAT, {"role": "assistant", "content": "Too much water"}], "words:8-16", **sizes)
    print("Too much water" + begun.text)

    # The model's own template does this; raw=True leaves it out.
    print(len(policy.encode(CHAT)), "tokens;", policy.encode("Every evening.", raw=True))
