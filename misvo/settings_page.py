"""docs/settings.md, made of the fields of `Settings`: `python -m misvo.settings_page > docs/settings.md`.

A test holds the page to what this makes. Imports no torch.
"""

import dataclasses
import types
from collections.abc import Mapping

from misvo.settings import PRESETS, SAMPLER, Settings

# Where a setting has no limit
KINDS = {
    bool: "true or false",
    str: "a text",
    tuple[str, ...]: "a text or several",
    Mapping: "names with values",
}
OPENING = """# Settings

Every setting has one name: `misvo.steer(policy, prompt, reward, max_new_tokens=64)` in Python, `--max-new-tokens 64`
in the shell (where that one is 64 unless you say otherwise), `max_new_tokens = 64` in a sweep. A preset chooses values
for all of them, and what you give beside it wins. For `lora` a preset is what that method has of it, for other methods
than `misvo` its sampler. A setting that your method does not have is refused.

"""


def page() -> str:
    """The table of all settings, and what the names stand for that some of them take."""
    fields = dataclasses.fields(Settings)
    lines = ["| setting | what it is for | values | methods | auto | paper |", "|---|---|---|---|---|---|"]
    for field in fields:
        methods = ", ".join(field.metadata["methods"] or ["all"])
        auto, paper = (_code(PRESETS[preset].get(field.name, field.default)) for preset in ("auto", "paper"))
        auto = "as the model came" if field.name in SAMPLER else auto
        cells = [f"`{field.name}`", field.metadata["about"], _values(field), methods, auto, paper]
        lines.append(f"| {' | '.join(cells)} |")
    for field in fields:
        if field.metadata["names"]:
            lines += ["", f"`{field.name}` is one of", ""]
            lines += [f"- `{name}`: {about}" for name, about in field.metadata["names"].items()]
    return OPENING + "\n".join(lines) + "\n"


def _values(field) -> str:
    names, limit = field.metadata["names"], field.metadata["limit"]
    if names is not None:
        return "a name, see below"
    kind = field.type.__args__[0] if isinstance(field.type, types.UnionType) else field.type
    if limit is None:
        return KINDS[kind]
    return f"a {'whole number of' if kind is int else 'number'} {limit.wish}"


def _code(value) -> str:
    return "" if value in (None, ()) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(page(), end="")
