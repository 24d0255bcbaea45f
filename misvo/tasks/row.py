"""One prompt of a task: what each task's file makes and the task itself holds."""

from dataclasses import dataclass, field

from misvo.prompts import Prompt

CODE = "code"  # the reward of the code tasks, which needs their columns


@dataclass(frozen=True)
class Row:
    """One prompt of a task."""

    id: str
    prompt: Prompt
    columns: dict = field(default_factory=dict)  # handed to the reward beside prompts and completions
