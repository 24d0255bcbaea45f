"""Programs, scored by the tests that they pass: each runs in a sandbox without network or files.

    python examples/code_with_verifier.py

A task of your own is a record in HumanEval's form. Its tests run elsewhere: the program under test sees the
arguments of calls only. `isolation_report()` says what this machine could not isolate.
"""

import misvo
from misvo.rewards.code import CodeReward, humaneval_columns, humaneval_prompt, isolation_report

RECORD = {
    "task_id": "double",
    "entry_point": "double",
    "prompt": 'def double(x):\n    """Return two times x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": """
def check(candidate):
    assert candidate(2) == 4
    assert candidate("a") == "aa"
    assert candidate(-1.5) == -3
""",
}

if __name__ == "__main__":
    print("layers:", ", ".join(isolation_report()["layers"]))
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    result = misvo.steer(
        policy,
        humaneval_prompt(RECORD),
        CodeReward(),
        columns=humaneval_columns(RECORD),
        rollouts=4,
        steps=2,
        max_new_tokens=32,
        stop_reward=1.0,  # all tests pass: done
    )
    print(result.text)
    print(f"share of the tests that it passes: {result.reward:.2f}")
