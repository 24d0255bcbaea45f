"""Find the program in an answer: Markdown fences or bare text, with or without prose around it.

What a person would copy out of the answer: of the Python blocks, the last one that defines the function
asked for (models correct themselves downwards), with the imports and helpers that other blocks define.
Without such a block, the stretch of bare text that is Python and defines it. For a completion-style task,
the body that continues the prompt.

Left out on purpose: repairing code. An answer that does not define the function has no program.
"""

import ast
import re
import textwrap

_LONGEST = 200_000  # characters; parsing time is the verifier's, and no answer to these tasks is near it
_TRIES = 40
_FENCE = re.compile(r"^([ \t>]*)(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_ONE_LINE = re.compile(r"^[ \t]*```(?:python3?|py)?[ \t]+(.+?)[ \t]*```[ \t]*$", re.MULTILINE)
_PYTHON = {"", "python", "python3", "py", "python2", "ipython", "pycon", "code"}
_START = re.compile(r"^(?:def|class|import|from|async def|@)\b|^@")


def extract_code(text, entry_point, prompt=""):
    """The program in `text` that defines `entry_point`, or None.

    `prompt` is the code that the answer may continue (HumanEval): a function header with its docstring.
    """
    if len(text) > _LONGEST:
        return None
    text = text.replace("\r\n", "\n").replace("\0", "")
    blocks = fenced_blocks(text)
    for index in reversed(range(len(blocks))):
        code = _longest_program(blocks[index], entry_point)
        if code:
            others = blocks[:index] + blocks[index + 1 :]
            return _with_helpers(code, others)
    code = _bare_program(text, entry_point)
    if code:
        return code
    if prompt:
        # The body alone: as it stands, with the lost indent of its first line, or indented as a whole.
        for body in [*blocks, text]:
            for variant in (body, "    " + body, textwrap.indent(textwrap.dedent(body), "    ")):
                code = _continuation(prompt, variant, entry_point)
                if code:
                    return code
    return None


def fenced_blocks(text):
    """The contents of the Python fences, in order; an unclosed fence runs to the end."""
    blocks, lines, open_fence = [], [], None
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if open_fence is None:
            if match:
                margin, fence, info = match.groups()
                tag = re.split(r"[\s{:,]", info.strip().lower().lstrip("{."), maxsplit=1)[0]
                open_fence, lines = (margin, fence, tag in _PYTHON), []
            continue
        margin, fence, is_python = open_fence
        if match and not match[3].strip() and match[2][0] == fence[0] and len(match[2]) >= len(fence):
            if is_python:
                blocks.append(_join(lines))
            open_fence = None
        else:
            lines.append(line.removeprefix(margin))
    if open_fence and open_fence[2]:
        blocks.append(_join(lines))
    return blocks or [textwrap.dedent(code) for code in _ONE_LINE.findall(text)]


def _join(lines):
    return textwrap.dedent("\n".join(lines)) + "\n"


def parse(code):
    """The syntax tree, or the SyntaxError; text that the parser gives up on counts as one at its first line."""
    try:
        return ast.parse(code)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError):
        error = SyntaxError("unreadable")
        error.lineno = 1
        return error


def defines(tree, name):
    """Whether the program's top level binds `name` to something that can be called."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(getattr(to, "id", None) == name for to in node.targets):
            return not isinstance(node.value, ast.Constant)
    return False


def _longest_program(code, entry_point):
    """The longest run of lines from the first on that parses and defines the function, or None."""
    lines = code.split("\n")
    for _ in range(_TRIES):
        found = parse("\n".join(lines))
        if not isinstance(found, SyntaxError):
            return "\n".join(lines) + "\n" if defines(found, entry_point) else None
        # Cut from the offending line on; an error found late (an open bracket) still shortens by a line.
        cut = min(found.lineno or len(lines), len(lines)) - 1
        del lines[cut:]
        if not lines:
            return None
    return None


def _bare_program(text, entry_point):
    lines = textwrap.dedent(text).split("\n")
    starts = [index for index, line in enumerate(lines) if _START.match(line)]
    for start in [0, *starts[:_TRIES]]:
        code = _longest_program("\n".join(lines[start:]), entry_point)
        if code:
            return code
    return None


def _continuation(prompt, body, entry_point):
    """The prompt with as much of the body as parses, if that is more than the prompt's own docstring."""
    lines = len(prompt.rstrip().split("\n"))
    code = _longest_program(prompt.rstrip() + "\n" + body, entry_point)
    if not code:
        return None
    function = [node for node in parse(code).body if getattr(node, "name", None) == entry_point][-1]
    return code if any(node.lineno > lines for node in function.body) else None


def _with_helpers(code, others):
    """`code` after the imports, functions and classes of the other blocks that it does not define itself."""
    taken = {getattr(node, "name", None) for node in parse(code).body}
    helpers = []
    for block in others:
        tree = parse(block)
        for node in [] if isinstance(tree, SyntaxError) else tree.body:
            name = getattr(node, "name", None)
            if isinstance(node, ast.Import | ast.ImportFrom):
                helpers.append(ast.get_source_segment(block, node))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and name not in taken:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                helpers.append("\n".join(block.split("\n")[first - 1 : node.end_lineno]))
                taken.add(name)
    # `from __future__` must stay first, and only the answer's own block may ask for it.
    helpers = [helper for helper in helpers if "__future__" not in helper]
    if not helpers:
        return code
    return put_before("\n".join(helpers), code)


def put_before(preamble, code):
    """`code` with `preamble` before it, but after its `from __future__` lines, which must come first."""
    lines = code.split("\n")
    ends = [node.end_lineno for node in parse(code).body if getattr(node, "module", None) == "__future__"]
    end = max(ends, default=0)
    return "\n".join([*lines[:end], preamble, *lines[end:]])
