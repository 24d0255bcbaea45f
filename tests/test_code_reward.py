"""The code reward on handmade tasks: right answers, wrong answers, cheats, and its contract with the rest of misvo."""

import pickle
import warnings

import pytest
from hostile.cheating import PROGRAMS as CHEATING
from hostile.tasks import ANGLE, HUMANEVAL, MARK, MEAN, RENAMED, SHARED, SPLIT, SQUARE, TASKS, mbpp, score

from misvo.errors import MisvoError
from misvo.rewards.code import (
    CodeReward,
    CodeTask,
    humaneval_columns,
    humaneval_prompt,
    mbpp_plus_columns,
    mbpp_plus_prompt,
)
from misvo.sandbox.codec import decode, loads


@pytest.fixture(scope="module")
def reward():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reward = CodeReward(cpu_seconds=1, call_seconds=0.4, idle_seconds=0.8)
    yield reward
    reward.close()


def fenced(code):
    return f"Here you go:\n```python\n{code}\n```\n"


# --- right and wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", TASKS, ids=lambda record: record["task_id"])
def test_the_reference_scores_one_and_systematic_errors_do_not(reward, record):
    name = record["entry_point"]
    wrong = ["return None", "return a[0]", "return a", "return 0"]
    answers = [f"def {name}(*a):\n    {body}" for body in wrong]
    answers.append(f"{record['canonical_solution']}\n_right = {name}\ndef {name}(*a):\n    return off(_right(*a))\n")
    answers[-1] += "def off(v):\n    return v + 1 if isinstance(v, (int, float)) else (*v, 0)\n"
    right, *others = score(reward, mbpp_plus_columns(record), fenced(record["canonical_solution"]), *answers)
    assert right == 1.0
    assert max(others) < 1.0


def test_the_score_is_the_fraction_of_held_out_tests(reward):
    columns = mbpp_plus_columns(SQUARE)
    assert len(loads(columns["calls"])) == 9  # ten inputs less the one that the prompt shows
    answers = [f"def solve(n):\n    return n * n + 7 if n < {limit} else 0" for limit in (1, 4, 6, 11)]
    assert score(reward, columns, *answers) == [0.0, 2 / 9, 4 / 9, 1.0]


def test_order_is_no_part_of_an_answer_poured_from_a_set(reward):
    columns = mbpp_plus_columns(SHARED)
    assert columns["match"] == "set"
    assert score(reward, columns, "def shared(a, b): return sorted([x for x in a if x in b], reverse=True)") == [1.0]


def test_types_come_from_the_assertions():
    def inputs(record):
        return [decode(tree) for tree in loads(mbpp_plus_columns(record)["calls"])]

    assert inputs(ANGLE) == [[1 + 2j], [-3], [0.5j]]
    assert inputs(SPLIT) == [[(1, [2])], [()], [([], 5)], [("a", ["j"], [["b"]])]]
    assert inputs(SHARED)[1] == [("x", "y", "z"), ("z", "y")]


def test_inputs_that_the_reference_cannot_answer_are_not_held_out(reward):
    answer = "def mean(xs): return sum(xs) / len(xs) if xs else 0"
    assert score(reward, mbpp_plus_columns(MEAN), answer) == [1.0]
    assert len(reward._tests[CodeTask(**mbpp_plus_columns(MEAN))]) == 2


def test_floats_are_compared_by_the_tasks_tolerance(reward):
    answers = [f"import cmath\ndef angle(z): return cmath.phase(z) + {error}" for error in (5e-5, 5e-4)]
    assert score(reward, mbpp_plus_columns(ANGLE), *answers) == [1.0, 0.0]


def test_a_task_whose_solution_fails_cannot_be_scored(reward):
    broken = SQUARE | {"canonical_solution": "def solve(n):\n    raise ValueError\n"}
    assert score(reward, mbpp_plus_columns(broken), "def solve(n): return n", "nothing") == [None, None]


# --- HumanEval ----------------------------------------------------------------------------------------------------


def test_humaneval_is_judged_by_its_own_check(reward):
    columns = humaneval_columns(HUMANEVAL)
    answers = [
        fenced(HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]),
        HUMANEVAL["canonical_solution"],
        "return s[::-1]",
        fenced("def decode(s): return encode(s)"),  # a helper of the prompt
        fenced("def decode(s): return list(s[::-1])"),  # right for `not`, for its length, for tuple(...)
        fenced("def decode(s): return s"),  # right for '', 'xyz' by its length, and 'q'
        fenced("def decode(s): raise ValueError"),
        fenced("def decode(s): return None"),
        "I do not know.",
    ]
    # Held out: 'abc', three random words, '', 'xyz', 'q'; shown in the docstring: 'ab'; `assert True` is no test.
    assert score(reward, columns, *answers) == pytest.approx([1, 1, 1, 1, 3 / 7, 3 / 7, 0, 1 / 7, 0])
    assert len(reward._tests[CodeTask(**columns)]) == 7


def test_humaneval_answers_that_lie_about_equality(reward):
    liar = "class Yes(str):\n    def __eq__(self, other): return True\n    def __len__(self): return 3\n"
    liar += "    __hash__ = None\ndef decode(s): return Yes('wrong')"
    other = "class Yes:\n    def __eq__(self, other): return True\ndef decode(s): return Yes()"
    assert score(reward, humaneval_columns(HUMANEVAL), liar, other) == [0.0, 0.0]


def test_forged_answers_of_any_depth_do_no_harm(reward):
    """Written past the encoder, nested to just below and just above what each reader on the way can take."""
    forger = "import os\ndef decode(s): return 0\n"
    forger += "for index in range(9):\n    for handle in (3, 4, 5, 6, 7):\n        try:\n"
    forger += "            os.write(handle, b'[%d,\"ok\",%s,0]\\n' % (index, b'[\"l\",[' * {n} + b'1' + b']]' * {n}))\n"
    forger += "        except OSError: pass\n"
    answers = [forger.replace("{n}", str(depth)) for depth in (1, 50, 150, *range(300, 520, 20), 2000)]
    for columns in (humaneval_columns(HUMANEVAL), mbpp_plus_columns(SQUARE | {"entry_point": "decode"} | RENAMED)):
        assert max(score(reward, columns, *answers)) < 0.2  # a forged [1] is right for n = 1


def test_a_humaneval_check_that_shows_everything_is_used_all_the_same(reward):
    record = HUMANEVAL | {"test": "def check(candidate):\n    assert candidate('ab') == 'ba'\n"}
    assert score(reward, humaneval_columns(record), "return s[::-1]", "return s") == [1.0, 0.0]


# --- prompts ------------------------------------------------------------------------------------------------------


def test_prompts_show_no_held_out_test():
    prompt = mbpp_plus_prompt(SQUARE)
    assert "assert solve(2) == 11" in prompt and "solve(3)" not in prompt and "n * n" not in prompt
    columns = mbpp_plus_columns(SQUARE)
    assert [2] not in [decode(tree) for tree in loads(columns["calls"])]
    prompt = humaneval_prompt(HUMANEVAL)
    assert "def decode" in prompt and "cba" not in prompt and "check" not in prompt


# --- cheats -------------------------------------------------------------------------------------------------------


def test_the_corpus_is_large_and_an_honest_program_passes(reward):
    assert len(CHEATING) >= 30
    assert score(reward, mbpp_plus_columns(SQUARE), "def solve(n): return n * n + 7") == [1.0]


@pytest.mark.parametrize("name", CHEATING)
def test_cheating_is_not_passing(reward, name):
    assert score(reward, mbpp_plus_columns(SQUARE), CHEATING[name].replace("@MARK@", MARK)) == [0.0]


def test_changing_an_argument_in_place_changes_nothing(reward):
    record = mbpp("Hand/first", "First.", "def first(xs):\n    return xs[0]\n", "assert first([1]) == 1", [[[1]]], [])
    record["plus_input"] = [[[2, 3]], [[4, 5]]]
    answers = [
        "def first(xs):\n    xs[:] = [0]\n    return xs",
        "def first(xs):\n    v = xs[0]\n    xs.clear()\n    return v",
    ]
    assert score(reward, mbpp_plus_columns(record), *answers) == [0.0, 1.0]


# --- the contract -------------------------------------------------------------------------------------------------


def test_messages_and_mixed_tasks(reward):
    columns = [mbpp_plus_columns(SQUARE), mbpp_plus_columns(SHARED), humaneval_columns(HUMANEVAL)]
    names = {name for row in columns for name in row}
    rows = {name: [row.get(name) for row in columns] for name in names}
    answers = [SQUARE["canonical_solution"], "no", "return s[::-1]"]
    completions = [[{"role": "assistant", "content": text}] for text in answers]
    prompts = [[{"role": "user", "content": "?"}]] * 3
    assert reward(prompts=prompts, completions=completions, trainer_state=None, **rows) == [1.0, 0.0, 1.0]


def test_the_same_program_runs_once(reward, monkeypatch):
    ran = []
    run = reward.sandbox.run
    monkeypatch.setattr(reward.sandbox, "run", lambda programs: ran.extend(programs := list(programs)) or run(programs))
    code = "def solve(n): return n * n + 7 + 0"
    columns = mbpp_plus_columns(SQUARE)
    answers = [fenced(code), f"Other words, same code.\n{fenced(code)}", fenced(code + "  # no")]
    assert score(reward, columns, *answers * 5) == [1.0] * 15
    assert score(reward, columns, fenced(code)) == [1.0]
    assert len([program for program in ran if "+ 7 + 0" in program.source]) == 2


def test_expected_values_never_enter_a_programs_process(reward, monkeypatch):
    seen = []
    run = reward.sandbox.run
    monkeypatch.setattr(
        reward.sandbox, "run", lambda programs: seen.extend(programs := list(programs)) or run(programs)
    )
    answer = "def {}(*a): return 'unique'"
    for columns in (mbpp_plus_columns(SQUARE), humaneval_columns(HUMANEVAL)):
        score(reward, columns, answer.format(columns["entry_point"]))
    programs = [program for program in seen if "unique" in program.source]
    assert len(programs) == 2
    for program in programs:
        assert MARK not in program.source and "check(" not in program.source
        assert 16 not in [value for tree in loads(program.calls.text) for value in decode(tree)]


def test_a_reward_can_be_sent_to_another_process(reward):
    copy = pickle.loads(pickle.dumps(reward))
    assert score(copy, mbpp_plus_columns(SQUARE), "def solve(n): return 0") == [0.0]
    copy.close()


def test_bad_columns_are_errors(reward):
    columns = mbpp_plus_columns(SQUARE)
    with pytest.raises(MisvoError, match="entry_point"):
        reward(prompts=["?"], completions=["x"], solution=["y"])
    with pytest.raises(MisvoError, match="rows"):
        reward(prompts=["?"], completions=["x", "y"], **{name: [value] for name, value in columns.items()})
    with pytest.raises(MisvoError, match="string or"):
        score(reward, columns, 5)
    with pytest.raises(MisvoError, match="match"):
        CodeTask("f", "", calls="[]", match="fuzzy")
    with pytest.raises(MisvoError, match="no assertion"):
        mbpp_plus_columns(SQUARE | {"assertion": "assert True"})


def test_the_environment_can_require_the_sandbox(monkeypatch):
    """How `misvo bench --require-sandbox` reaches the rewards that workers make."""
    from misvo import sandbox
    from misvo.errors import MisvoError

    monkeypatch.setattr(sandbox, "_describe", lambda zygote: {"missing": ["no walls at all"]})
    with pytest.warns(UserWarning, match="weaker walls"):
        CodeReward().close()
    monkeypatch.setenv("MISVO_REQUIRE_SANDBOX", "1")
    with pytest.raises(MisvoError, match="cannot isolate model-written code: no walls at all"):
        CodeReward()
