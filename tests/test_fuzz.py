"""Whatever a user gives, in Python or in the shell: a result, or one sentence. Nothing else is raised, nothing hangs.

200 examples in the usual suite; `pytest -m slow` makes 10,000.
"""

import contextlib
import json
import math
import signal
import time
import warnings
from dataclasses import fields

import pytest
from conftest import letter_reward, make_model, make_policy, make_tokenizer
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from shell import run_shell

import misvo
from misvo import cli
from misvo.names import COSTS, CREDITS, LAW_DTYPES, METHODS, REWARD_ERRORS, SELECTIONS, STEPS, TIES
from misvo.settings import Settings, options_of

SECONDS = 20  # no example may take longer; most take a hundredth of one
SHORT = 2000  # characters of a sentence
QUICK, MANY = 100, 5000  # examples of each of the two tests: 200 and 10,000 in all


def fuzz(count):
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@contextlib.contextmanager
def deadline(what):
    """An example that hangs is interrupted, and says what it was."""

    def late(*_):
        raise AssertionError(f"no answer within {SECONDS} s: {what!r}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def assert_sentence(message: str):
    assert message and "\n" not in message.strip() and len(message) < SHORT and "Traceback" not in message, message


# What users give


def mostly(usual, other):
    """Nine of ten are usual: in an example of many parts, one that is odd is often the only one."""
    return st.integers(0, 9).flatmap(lambda dice: other if dice == 4 else usual)  # ends of a range come more often


texts = st.text(max_size=12)
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 2**31, 2**63, 2**64, 10**30, -(10**30), 10**400]),
    st.floats(),
    texts,
    st.just(""),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(texts, st.integers(), max_size=1),
    st.binary(max_size=2),
)
names = {"method": METHODS, "cost": COSTS, "tie": TIES, "step": STEPS, "credit": CREDITS, "select": SELECTIONS}
names |= {"on_reward_error": REWARD_ERRORS, "law_dtype": LAW_DTYPES}
SIZES = {"rollouts": 4, "steps": 3, "max_new_tokens": 5}
FIELDS = {field.name: field for field in fields(Settings)}


def usual(name):
    """Values that a field may well have."""
    kind = str(FIELDS[name].type)
    if name in names:
        return st.sampled_from(list(names[name]))
    if name in SIZES:
        return st.integers(2, SIZES[name])
    if name == "stop":
        return st.lists(st.sampled_from(["a", "b c", "é"]), max_size=2).map(tuple)
    if name == "memory":
        return st.sampled_from(["1", "20kB", "8GB", "1e3MiB", "9e999"])
    if "bool" in kind:
        return st.booleans()
    if "float" in kind:
        return mostly(st.floats(0, 1, exclude_min=True), st.sampled_from([0, 1e-300, 1e-12, 3, 1e12, 1e300]))
    return st.integers(1, 5) if "int" in kind else st.none()


def is_work(name, value):
    """Whether a number is a wish that takes its time, and no mistake."""
    if type(value) is not int or name == "steps":
        return False
    return value > 5 if name in ("value_iterations", "reward_retries") else name in SIZES and 5 < value < 2**31


@st.composite
def options(draw):
    """Some settings, most of them usual; sizes are small, unless they are odd."""
    chosen = {name: draw(usual(name)) for name in (*SIZES, "method")}
    known = mostly(st.just(options_of(chosen["method"])), st.just(list(FIELDS)))
    for name in draw(known.flatmap(lambda some: st.lists(st.sampled_from(some), max_size=5, unique=True))):
        chosen[name] = draw(mostly(usual(name), odd.filter(lambda value, name=name: not is_work(name, value))))
    strange = draw(mostly(st.none(), texts))
    if strange:
        chosen[strange] = draw(odd)
    preset = draw(mostly(st.sampled_from([None, "auto", "paper"]), odd))
    return chosen if preset is None else {**chosen, "preset": preset}


letters = mostly(st.sampled_from([*"abcdefg", "w1", "<s>", "é", "😀"]), st.characters())
words = st.lists(letters, min_size=1, max_size=6)
string = words.map(" ".join)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": string})
chat = st.lists(message, min_size=1, max_size=3)
strange_chat = st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), odd, max_size=2), max_size=2)
prompts = mostly(
    st.one_of(string, chat, st.lists(st.integers(0, 60), min_size=1, max_size=4)),
    st.one_of(texts, st.lists(message, max_size=1), st.lists(st.integers(-1, 70), max_size=4), strange_chat, odd),
)
columns = mostly(
    st.none(), st.one_of(st.dictionaries(st.sampled_from(["prompts", "answer", ""]), odd, max_size=2), odd)
)
values = mostly(st.floats(-3, 3), odd)


class Returns:
    """A reward that gives these values, one after another."""

    def __init__(self, given, whole):
        self.given, self.whole = given, whole

    def __call__(self, prompts, completions, **_):
        return (
            self.whole if self.whole is not None else [self.given[i % len(self.given)] for i in range(len(completions))]
        )

    def __repr__(self):
        return f"Returns({self.given!r}, {self.whole!r})"


def explode(completions, **_):
    raise LookupError("line one\nline two")


bad_specs = st.one_of(
    st.sampled_from(
        ["1e999*length:2", "length:" + "9" * 400, "hf:/no/such", "no.such:f", "none.py:f", ".:x", "avoids:"]
    ),
    st.sampled_from(
        ["clip(length:2, nan, x)", "repetition:0", "regex:(", 'json:{"type": 3}', "words:5-2", "length:nan"]
    ),
    texts,
)
specs = st.one_of(
    st.sampled_from(["sentiment", "length:3", "words:2-5", "contains:a,b", "regex:(", "regex:a+", "json", "starts:a"]),
    st.sampled_from(["2*length:3 - 0.5*words:1", "clip(length:2, -1, 0)", "clip(length:2, nan, x)", "repetition:0"]),
    st.sampled_from(
        ["1e999*length:2", "length:" + "9" * 400, "hf:/no/such", "no.such:f", "none.py:f", ".:x", "avoids:"]
    ),
    texts,
)
rewards = mostly(
    st.one_of(
        st.just(letter_reward),
        st.just(len),
        st.builds(Returns, st.lists(values, min_size=1, max_size=4), mostly(st.none(), odd)),
        specs,
    ),
    st.one_of(st.just(explode), st.lists(st.one_of(specs, bad_specs), max_size=2), bad_specs, odd),
)
POLICIES = {"plain": make_policy(), "chat": make_policy(chat=True)}


class Enough(Exception):
    """A run of very many steps is not waited for."""


def check_python(name, prompt, reward, columns, given):
    """`steer` gives a whole result, or MisvoError with what was done until then."""
    policy, seen = POLICIES[name], []

    def on_step(_, row):
        seen.append(row)
        if len(seen) > SIZES["steps"]:
            raise Enough

    try:
        result = misvo.steer(policy, prompt, reward, columns=columns, on_step=on_step, **given)
    except Enough:
        assert given["steps"] > SIZES["steps"]
        return "enough"
    except misvo.MisvoError as error:
        assert_sentence(str(error))
        kept = getattr(error, "result", None)
        assert [row["step"] for row in kept.trace] == [row["step"] for row in seen] if kept else not seen
        return str(error)[:25]
    assert len(result.trace) == len(seen) and len(result.candidates) == len(seen) * result.settings.rollouts
    assert all(math.isfinite(c.reward) for c in result.candidates if c.reward is not None)
    assert result.best in result.candidates and len(repr(result)) < 300 and result.summary()
    again = misvo.Result.from_dict(json.loads(json.dumps(result.to_dict())), result.steering)
    assert again.best == result.best
    return "a result"


cases = st.tuples(mostly(st.just("chat"), st.just("plain")), prompts, rewards, columns, options())


def try_python(case):
    with warnings.catch_warnings(), deadline(case):
        warnings.simplefilter("ignore")
        return check_python(*case)


@fuzz(QUICK)
@given(cases)
def test_python(case):
    event(try_python(case))


SMALL = {"rollouts": 2, "steps": 2, "max_new_tokens": 2}


@pytest.mark.parametrize(
    "given",
    [
        {"method": "best-of-n", "temperature": 5e-324},
        {"method": "aisp", "sigma2": 5e-324},
        {"method": "aisp", "sigma2": 1e300},
        {"top_p": 5e-324, "top_k": 1},
        {"memory": "9e999"},
        {"on_reward_error": []},
        {"raw": []},
        {"penalty": 10**400},
        {"rollouts": 2**31},
        {"method": "best-of-n", "steps": 2**62},
    ],
)
def test_what_was_found_before(given):
    try_python(("plain", "a b", letter_reward, None, {**SMALL, **given}))


def test_half_a_character_is_no_text():
    with pytest.raises(misvo.MisvoError, match=r"holds U\+DCFF at index 1: it is not text in UTF-8"):
        misvo.steer(POLICIES["plain"], "a\udcff", letter_reward, **SMALL)


@pytest.mark.slow
@fuzz(MANY)
@given(cases)
def test_python_long(case):
    event(try_python(case))


# The command line


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


paths = st.sampled_from(
    ["run", "a/b/c", "ü 😀.png", "", ".", "x" * 300, "/dev/null", "/proc/x", "/dev/null/x", "-", "a.PNG"]
)
shell_values = st.one_of(
    texts.filter(lambda text: "\x00" not in text),
    paths,
    st.sampled_from(
        ["0", "1", "2", "3", "-1", "nan", "inf", "1e400", "9" * 30, "9" * 5000, "1.5", "٣", "true", "None"]
    ),
    st.sampled_from(
        ["auto", "paper", "misvo", "best-of-n", "aisp", "re-control", "{}", '{"a": NaN}', "\udcff", "length:3"]
    ),
)
flags = [p.name.replace("_", "-") for p in cli.cli_options.parameters()]
flags += [
    "reward",
    "preset",
    "save",
    "overwrite",
    "plot",
    "held-out",
    "json",
    "dtype",
    "device",
    "quantize",
    "revision",
]
switches = [name.replace("_", "-") for name, field in FIELDS.items() if field.type is bool] + ["json", "overwrite"]


@st.composite
def command_lines(draw):
    """Mostly `misvo steer` on a tiny model, in few small steps."""
    if draw(st.integers(0, 4)) == 0:
        command = draw(st.sampled_from(["list", "rescore", "report", "bench", "profile", "theory", "nope", "--x"]))
        given = draw(st.lists(shell_values, min_size=1, max_size=3))
        if command == "rescore":
            given += ["--reward", draw(st.one_of(specs, bad_specs))]
        return [command, *given, *(["--policies", "nope"] if command == "theory" else [])]
    line = ["steer", draw(st.one_of(string, shell_values)), "--reward", draw(st.sampled_from(["length:3", "words:2"]))]
    line += ["-k", "2", "-n", "2", "-t", "3", "--model", "MODEL"]
    for name in draw(st.lists(st.sampled_from(flags), max_size=3)):
        line += [f"--{name}"] if name in switches else [f"--{name}", draw(shell_values)]
    return line


def check_shell(arguments):
    shown = run_shell(*arguments)
    code, out, err = shown.returncode, shown.stdout, shown.stderr
    assert "Traceback" not in err and "Traceback" not in out
    assert code in (0, 2), (code, err)
    if code == 2:
        assert err.strip(), "an error without a word"
        said = [line for line in err.splitlines() if line.startswith("misvo: ")]
        assert len(said) <= 1
        for line in said:
            assert_sentence(line)
    elif arguments[0] == "steer" and "--help" not in arguments:
        assert out.strip(), "a result that is not shown"
        if "--json" in arguments:
            assert json.loads(out)["candidates"]


def try_shell(folder, monkeypatch, tmp_path, arguments):
    here = tmp_path / f"{time.monotonic_ns()}"
    here.mkdir()
    monkeypatch.chdir(here)  # what is saved without a folder is saved here
    arguments = [str(folder) if argument == "MODEL" else argument for argument in arguments]
    with warnings.catch_warnings(), deadline(arguments):
        warnings.simplefilter("ignore")
        check_shell(arguments)


@fuzz(QUICK)
@given(arguments=command_lines())
def test_shell(model_folder, monkeypatch, tmp_path, arguments):
    try_shell(model_folder, monkeypatch, tmp_path, arguments)


@pytest.mark.slow
@fuzz(MANY)
@given(arguments=command_lines())
def test_shell_long(model_folder, monkeypatch, tmp_path, arguments):
    try_shell(model_folder, monkeypatch, tmp_path, arguments)
