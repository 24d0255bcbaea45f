"""JSON that meets a schema, without a grammar and without a judge: the reward is the share of the schema that is met.

python examples/json_by_schema.py
"""

import json

import misvo

SCHEMA = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
}
# The answer is begun for the model: it goes on behind the brace.
CHAT = [
    {"role": "user", "content": 'Invent a person. Answer in JSON with the keys "name" and "age".'},
    {"role": "assistant", "content": '{"'},
]

if __name__ == "__main__":
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    result = misvo.steer(
        policy, CHAT, f"json:{json.dumps(SCHEMA)}", rollouts=4, steps=2, max_new_tokens=16, stop_reward=1.0
    )
    answer = CHAT[-1]["content"] + result.text
    print(f"reward {result.reward:.2f}: {answer}")
    if result.reward == 1.0:
        print(json.loads(answer))
