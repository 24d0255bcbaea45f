"""Finding the program in an answer, as a person would who copies it out."""

import pytest

from misvo.rewards.code.extract import extract_code, put_before

F = "def f(x):\n    return x + 1"


def run(text, *arguments, entry_point="f", prompt=""):
    """What the extracted program's function returns: extraction is right when the program works."""
    code = extract_code(text, entry_point, prompt)
    assert code is not None, text
    scope = {"__name__": "answer"}
    exec(code, scope)
    return scope[entry_point](*arguments)


@pytest.mark.parametrize(
    "text",
    [
        F,
        f"```python\n{F}\n```",
        f"```\n{F}\n```",
        f"```py\n{F}\n```",
        f"``` python3 title=x\n{F}\n```",
        f"```{{.python}}\n{F}\n```",
        f"~~~python\n{F}\n~~~",
        f"````python\n{F}\n````",
        f"Sure! Here it is:\n\n```python\n{F}\n```\n\nThis adds one.",
        f"```python\n{F}\n",  # unclosed
        f"```python\n{F}",
        f"```python\r\n{F}\r\n```\r\n".replace("\n    ", "\r\n    "),
        f"- step one:\n\n  ```python\n  {F.replace(chr(10), chr(10) + '  ')}\n  ```\n",  # in a list
        f"> ```python\n> {F.replace(chr(10), chr(10) + '> ')}\n> ```\n",  # in a quotation
        f"Here is the function:\n{F}\n\nIt adds one to x, and that's all.",
        f"{F}\nThis adds one.",
        f"I think:\n\n{F}\n<|im_end|>",
        "```python def f(x): return x + 1```",
        "    " + F.replace("\n", "\n    "),  # an indented code block
        f"import math\n{F}\nprint(f(1)",  # cut off in the middle of a later line
        f"```python\n{F}\n\nif __name__ == '__main__':\n    print(f(in",
        f"```bash\npip install x\n```\n```python\n{F}\n```\n```text\n>>> f(1)\n2\n```",
        f"```python\ndef g(x):\n    return 0\n```\nand then\n```python\n{F}\n```",
        f"```python\n{F}\n```\nUse it like this:\n```python\nprint(f(1))\nassert f(1) == 3\n```",
        "```python\nf = lambda x: x + 1\n```",
        "```python\nclass f:\n    def __new__(cls, x):\n        return x + 1\n```",
        "@staticmethod\ndef g(): pass\n" + F,
    ],
)
def test_the_program_is_found(text):
    assert run(text, 1) == 2


def test_the_last_definition_wins():
    wrong = "def f(x):\n    return x"
    assert run(f"```python\n{wrong}\n```\nWait, that is wrong:\n```python\n{F}\n```", 1) == 2
    assert run(f"```python\n{wrong}\n{F}\n```", 1) == 2


def test_helpers_and_imports_of_other_blocks_come_along():
    text = (
        "First a helper:\n```python\nimport math\nfrom functools import lru_cache\n\n@lru_cache\ndef half(x):\n"
        "    return math.floor(x / 2)\nprint(f(3))\n```\nThen:\n```python\ndef f(x):\n    return half(x)\n```"
    )
    assert run(text, 5) == 2


def test_future_imports_stay_first():
    text = f"```python\nimport math\n```\n```python\nfrom __future__ import annotations\n{F}\n```"
    assert run(text, 1) == 2
    assert put_before("a = 1", "from __future__ import annotations\nb = 2\n").split("\n")[:2] == [
        "from __future__ import annotations",
        "a = 1",
    ]


PROMPT = 'from typing import List\n\n\ndef f(x: int) -> int:\n    """Add one.\n    >>> f(1)\n    2\n    """\n'


@pytest.mark.parametrize(
    "text",
    [
        "    y = x + 1\n    return y\n",
        "y = x + 1\n    return y\n",  # the first indent lost, as tokenizers do
        "    return x + 1\n\n\ndef other():\n    return 0\n",
        "    return x + 1\n\n# Test\nprint(f(1))\nand so on",
        "```python\n    return x + 1\n```",
        "```python\nreturn x + 1\n```",
        "return x + 1",
        f"```python\n{F}\n```",
    ],
)
def test_a_body_continues_the_prompt(text):
    assert run(text, 1, prompt=PROMPT) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot do that.",
        "```python\n```",
        "```python\ndef g(x):\n    return x + 1\n```",
        "f(1)",
        "def f(x",
        "f = 3",
        "```json\n{}\n```",
        "class A:\n    def f(self, x):\n        return x + 1",
        "def f(x): return 1" + " " * 300_000,
        "\0\0",
        "(" * 50_000,
        "-" * 50_000 + "1",
    ],
)
def test_no_program_is_none(text):
    assert extract_code(text, "f") is None


def test_a_prompt_alone_is_no_answer():
    for text in ("", "\n", "    # nothing", "Sorry."):
        assert extract_code(text, "f", PROMPT) is None
