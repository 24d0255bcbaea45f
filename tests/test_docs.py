"""Documentation that cannot rot: Python blocks run, commands are read by the real command line, names exist.

Sizes are small here: every run takes at most 2 rollouts, 2 steps and 6 tokens, whatever a block says. Addresses and
engines that a page needs are there: a real server for the page of the server, the engine on transformers in the place
of vLLM's (tests_vllm holds the two equal).
"""

import ast
import json
import re
import shlex
import tomllib
from contextlib import contextmanager

import pytest
from conftest import make_model, make_tokenizer
from documents import ROOT, blocks, commands, pages
from one_policy import one_policy
from serving import served
from typer.main import get_command

import misvo
from misvo import cli
from misvo.server import Config
from misvo.settings import Settings

SMALL = {"rollouts": 2, "steps": 2, "max_new_tokens": 6}
ADDRESS = "http://127.0.0.1:8000"
ELSEWHERE = {"cd", "git", "ray", "vllm", "export", "gh", "twine"}  # programs that are not ours
OUTSIDE = ("http", "hf:", "preference:")  # rewards that need a service, a hub or a folder of the reader's
PYTHON_PAGES = [page for page in pages() if any(block.language == "python" for block in blocks(page))]
SHELL_BLOCKS = [block for page in pages() for block in blocks(page) if block.language in ("bash", "sh", "shell")]


@contextmanager
def small_runs():
    """Inside, settings that steer are cut to the sizes above; samples keep theirs."""
    usual = Settings.from_preset.__func__

    def from_preset(cls, preset="auto", **options):
        if options.get("method") != "best-of-n":
            options |= {name: min(options.get(name, most), most) for name, most in SMALL.items()}
        elif "max_new_tokens" in options:
            options["max_new_tokens"] = min(options["max_new_tokens"], SMALL["max_new_tokens"])
        return usual(cls, preset, **options)

    Settings.from_preset = classmethod(from_preset)
    try:
        yield
    finally:
        Settings.from_preset = classmethod(usual)


class AsOnVllm(misvo.Policy):
    """What `Policy.from_pretrained(..., engine="vllm")` has beside a policy on transformers."""

    def close(self):
        """Ends vLLM."""


@pytest.fixture
def vllm_stands_aside(monkeypatch, smollm2):
    """`engine="vllm"` gives the embedded model on transformers; the name and options are what vLLM would get."""
    from misvo.vllm_policy import VllmPolicy

    standing = AsOnVllm(smollm2.model, smollm2.tokenizer, smollm2.name, smollm2.own_sampler)
    monkeypatch.setattr(VllmPolicy, "from_pretrained", classmethod(lambda cls, name, **options: standing))


def run_page(page, replace=(), given=()):
    """Run the Python blocks of a page in order, in one namespace, as a reader would paste them."""
    names = {"__name__": "__main__", "misvo": misvo, **dict(given)}
    for block in blocks(page):
        if block.language != "python":
            continue
        source = block.text
        for old, new in replace:
            source = source.replace(old, new)
        code = compile("\n" * (block.line - 1) + source, str(block), "exec")
        if not block.check_only and not elided(block.text):
            exec(code, names)


def elided(source):
    """Whether a block leaves something out, as in f(...): it is read, not run."""
    return any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, smollm2, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    with small_runs(), one_policy(smollm2):
        if page.name == "server.md":
            with served(smollm2, {"cheer": "sentiment", "brief": "length:20"}, Config(name="smollm2-135m")) as server:
                run_page(page, [(ADDRESS, server.url)])
        elif page.name == "vllm.md":
            request.getfixturevalue("vllm_stands_aside")
            run_page(page, given={"reward": "words:3-8"})
        elif page.parent.name == "hub":  # what a card of the hub says that its reader has
            make_model("llama").save_pretrained("tiny")
            make_tokenizer(chat=True).save_pretrained("tiny")
            run_page(page, given={"MODEL": "tiny", "FOLDER": str(page.parent)})
        else:
            run_page(page)


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=str)
def test_commands_are_what_they_claim(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    for line in commands(block):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables of the environment
            words.pop(0)
        if words:
            check_command(words)


def make_files(folder):
    """What commands of the documentation read."""
    (folder / "prompts.jsonl").write_text('{"prompt": "Why?"}\n')
    (folder / "chat.json").write_text('[{"role": "user", "content": "Why?"}]')
    (folder / "configs").symlink_to(ROOT / "configs")


def check_command(words):
    program = words[0].rpartition("/")[2]
    if program == "misvo":
        check_misvo(words[1:])
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word} <= targets
    elif program == "pip":
        check_extras(words)
    elif program in ("python", "python3", "pytest"):
        check_python(words)
    elif program == "curl":
        check_curl(words)
    else:
        assert program in ELSEWHERE, f"no test knows what {program} is"


def check_misvo(words):
    """Read the options as the command itself does, and the reward as it would be loaded."""
    group = get_command(cli.app)
    context = group.make_context("misvo", list(words), resilient_parsing=True)
    if words[0].startswith("--"):
        assert words[0] in ("--help", "--version")
        return
    name, command, rest = group.resolve_command(context, list(words))
    if {"--help", "--help-all"} & set(rest):
        return
    told = command.make_context(name, rest, parent=context).params
    rewards = told.get("reward") or []
    for spec in [rewards] if isinstance(rewards, str) else rewards:
        spec = spec.partition("=")[2] if name in ("serve", "studio") else spec
        if ".py:" not in spec and not spec.startswith(OUTSIDE):
            misvo.rewards.load(spec)


def check_extras(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        for extras in re.findall(r"^(?:misvo|\.)\[([\w,-]+)\]", word):
            assert set(extras.split(",")) <= set(project["optional-dependencies"])


def check_python(words):
    """A script that is there, with options that it knows; a module that is there."""
    if words[0] == "pytest" or words[1] == "-m":
        module = "pytest" if words[0] == "pytest" else words[2]
        known = module.partition(".")[0] in ("pytest", "venv", "build", "pip", "vllm")
        assert known or (ROOT / (module.replace(".", "/") + ".py")).exists()
        return
    if words[1] in ("-c", "-V"):
        return
    script = next(path for path in (ROOT / words[1], ROOT / "tests" / words[1]) if path.exists())
    source = script.read_text(encoding="utf-8")
    for option in (word for word in words[2:] if word.startswith("--")):
        assert f'"{option}"' in source, f"{words[1]} has no {option}"


def check_curl(words):
    """A body that is JSON, for a route that the server has."""
    (url,) = (word for word in words if word.startswith("http"))
    bodies = [words[index + 1] for index, word in enumerate(words) if word in ("-d", "--data")]
    assert all(isinstance(json.loads(body), dict) for body in bodies)
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "misvo" / "server").glob("*_routes.py"))
    route = url.partition("8000")[2]
    assert f'"{route}"' in source or f'"{route.removeprefix("/misvo/v1")}"' in source, route


def test_a_command_that_is_wrong_is_found():
    with pytest.raises(Exception, match="No such option"):
        check_command(["misvo", "steer", "Why?", "--rollout-count", "3"])
    with pytest.raises(misvo.MisvoError):
        check_command(["misvo", "steer", "Why?", "--reward", "sentimentality"])
    with pytest.raises(AssertionError):
        check_command(["make", "tea"])
    with pytest.raises(AssertionError):
        check_command(["pip", "install", "misvo[moon]"])
    with pytest.raises(AssertionError):
        check_command(["python", "benchmarks/speed.py", "--no-such-option"])


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    for name in misvo._HOMES:
        assert f"::: {misvo._HOMES[name]}.{name}\n" in page, name


def test_every_command_and_every_variable_of_ours_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `misvo ([a-z-]+)", page, re.MULTILINE))
    assert told == set(get_command(cli.app).commands)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "misvo").rglob("*.py"))
    assert set(re.findall(r'"(MISVO_[A-Z_]+)"', sources)) == set(re.findall(r"`(MISVO_[A-Z_]+)`", page))


def test_every_reward_is_written_about():
    told = "".join(page.read_text(encoding="utf-8") for page in pages())
    assert not [name for name in misvo.rewards.EMBEDDED if not re.search(rf"\b{name}\b", told)]


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    docs = ROOT / "docs"
    assert {str(path.relative_to(docs)) for path in docs.rglob("*.md")} == set(re.findall(r": (\S+\.md)", menu))


def test_links_lead_somewhere():
    for page in pages():
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not target.startswith(("http://", "https://", "mailto:")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} → {target}"


def test_pages_speak_to_their_readers():
    """No history of how this came about: that is what the log and the changes are for."""
    for page in pages():
        found = re.search(r"\bissue \d+|\bwished\b", page.read_text(encoding="utf-8"), re.IGNORECASE)
        assert not found, f"{page.relative_to(ROOT)} says {found[0]!r}"
