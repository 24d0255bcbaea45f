"""The code reward: how many held-out tests the program in an answer passes.

`reward` scores; `humaneval` and `mbpp` turn records of the benchmarks into the rows that it needs, `extract` finds the
program in an answer, `held_out` has the tests, `compare` the rules. Programs run in `misvo.sandbox`, which knows
nothing of rewards.
"""

from misvo.rewards.code.humaneval import humaneval_columns, humaneval_prompt
from misvo.rewards.code.mbpp import mbpp_plus_columns, mbpp_plus_prompt
from misvo.rewards.code.reward import REQUIRE_SANDBOX, CodeReward, CodeTask
from misvo.sandbox import isolation_report

__all__ = [
    "REQUIRE_SANDBOX",
    "CodeReward",
    "CodeTask",
    "humaneval_columns",
    "humaneval_prompt",
    "isolation_report",
    "mbpp_plus_columns",
    "mbpp_plus_prompt",
]
