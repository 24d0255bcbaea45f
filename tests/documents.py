"""Code blocks of Markdown files, read off as a reader would copy them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
CHECK_ONLY = "<!-- check only -->"  # above a block that cannot run here: it is compiled, or its commands are read
SHELL = ("misvo", "make", "pip", "python", "curl", "git", "cd", ".venv/bin/misvo", ".venv-vllm/bin/python")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int  # of the page, from 1
    language: str
    text: str
    check_only: bool = False

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Everything that people read."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "hub").rglob("*.md")])


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        first = body.split(maxsplit=1)[0] if body.strip() else ""
        if not language and first in SHELL:
            language = "bash"
        line = text.count("\n", 0, match.start()) + 2
        marked = text[: match.start()].rstrip().endswith(CHECK_ONLY)
        found.append(Block(page, line, language, body, marked))
    return found


def commands(block: Block) -> list[str]:
    """The commands of a shell block, one each; what is broken over lines is joined."""
    joined = block.text.replace("\\\n", " ")
    lines, open_quote = [], ""
    for line in joined.splitlines():  # a quoted text may run over several lines
        if open_quote:
            lines[-1] += "\n" + line
        elif line.strip() and not line.lstrip().startswith("#"):
            lines.append(line)
        else:
            continue
        open_quote = "'" if lines[-1].count("'") % 2 else ""
    return [part.strip() for line in lines for part in line.split(" && ")]
