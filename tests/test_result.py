"""Results as values: what candidates know of KL, the round trip through a folder, and what people get to see."""

import copy
import dataclasses
import html.parser
import json
import os
import re
import shutil
import sys

import pytest
import torch
from conftest import letter_reward, make_policy
from literal import Literal
from tolerances import assert_near, room

import misvo
from misvo import result_files
from misvo.candidate import Candidate
from misvo.result import Divergence, Moved
from misvo.text import one_line

OPTIONS = {"rollouts": 4, "steps": 3, "max_new_tokens": 6, "kl_ref": True}
OWN = {"misvo": {"learning_rate": 2.0}}
METHODS = ("misvo", "best-of-n", "aisp", "re-control", "lora")
HOSTILE = (
    "</bdi></td><script>alert('x')</script><img src=x onerror=\"alert(1)\">&lt; $x^2$ \x1b[31m\x00 ]]> \u202e\n-->"
)


def some_reward(completions, **_):
    """None for some of the responses."""
    return [None if len(text) % 5 == 0 else letter_reward([text])[0] for text in completions]


@pytest.fixture(scope="module")
def results():
    return {
        name: misvo.steer(
            make_policy(), "a b c", some_reward, method=name, **OPTIONS, **OWN.get(name, {}), preset="paper"
        )
        for name in METHODS
    }


@pytest.fixture
def result(results):
    return copy.deepcopy(results["misvo"])


def hostile(result):
    """The same run, had the model been out to break the page and the terminal."""
    candidates = [dataclasses.replace(c, text=HOSTILE + c.text) for c in result.candidates]
    reference = dataclasses.replace(result.reference, text=HOSTILE + "reference")
    steering = dataclasses.replace(result.steering, metadata={"model": HOSTILE})
    return dataclasses.replace(
        result,
        prompt=HOSTILE,
        candidates=candidates,
        reference=reference,
        steering=steering,
        moved=[],
        pieces=[HOSTILE + result.pieces[0], *result.pieces[1:]],
    )


def assert_same(one, other):
    """Field by field, bit for bit; networks by their weights."""
    for field in dataclasses.fields(misvo.Result):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "steering" and a is not None:
            assert torch.equal(a.vectors, b.vectors) and a.vectors.dtype == b.vectors.dtype
            assert (a.head, a.tie, a.metadata) == (b.head, b.tie, b.metadata)
        elif field.name == "value" and a is not None:
            assert (a.head, a.budget) == (b.head, b.budget)
            theirs = b.state_dict()
            assert {
                name: torch.equal(weight, theirs[name]) for name, weight in a.state_dict().items()
            } == dict.fromkeys(theirs, True)
        else:
            assert a == b and type(a) is type(b), field.name


# What a candidate knows


def test_token_kl_is_the_literal_kl_at_each_prefix():
    """Of the last step, sampled from vectors that another run stops at; one that is shifted or cut would be seen."""
    policy = make_policy()
    settings = {"rollouts": 6, "max_new_tokens": 9, "learning_rate": 0.4, "penalty": 0.2, "temperature": 0.9}
    result = misvo.steer(policy, "a b c d e", letter_reward, steps=3, **settings, preset="paper")
    u = misvo.steer(policy, "a b c d e", letter_reward, steps=2, **settings, preset="paper").steering.vectors.double()
    last = [c for c in result.candidates if c.step == 2]
    assert {len(c.tokens) for c in last} > {9}  # some ended early

    def exact(model):
        literal = Literal(model, policy.encode("a b c d e"), 9, 0.9)
        return torch.cat([literal.kl(c.tokens, u) for c in last])

    expected, allowed = exact(policy.model), room(exact, policy.model)
    assert allowed < 1e-3 * expected.norm()
    assert [len(c.token_kl) for c in last] == [len(c.tokens) for c in last]
    assert_near(torch.tensor([nats for c in last for nats in c.token_kl]), expected, allowed)
    assert sum(c.kl for c in last) / 6 == pytest.approx(result.trace[2]["kl"])
    assert {nats for c in result.candidates if c.step == 0 for nats in c.token_kl} == {0.0}


def test_kl_of_a_candidate_is_a_sum_or_unknown():
    assert Candidate(0, 0, [1, 2], "x", 1.0, -2.0, [0.25, 0.5]).kl == 0.75  # positional, in this order
    assert Candidate(0, 0, [1], "x", None).kl is None


# Folders


@pytest.mark.parametrize("method", METHODS)
def test_round_trip(results, method, tmp_path):
    result = results[method]
    assert any(c.reward is None for c in result.candidates) and result.prefill_seconds > 0
    result.save(tmp_path / "run")
    again = misvo.Result.load(str(tmp_path / "run"))
    assert_same(result, again)
    assert (again.value is not None, again.steering is not None) == (
        method == "re-control",
        method in ("misvo", "aisp"),
    )
    assert again.best == result.best and repr(again) == repr(result) and again.summary() == result.summary()
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored == json.loads(json.dumps(result.to_dict()))  # what `misvo steer --json` prints
    rescored = misvo.rescore(tmp_path / "run", some_reward)
    assert rescored.candidates == result.candidates and rescored.old_best.candidate == result.best
    expected = {"result.json"} | ({"steering.json", "steering.safetensors"} if again.steering else set())
    assert set(os.listdir(tmp_path / "run")) == expected | ({"value"} if again.value else set())


def test_every_field_makes_the_trip(result, tmp_path):
    """Values that no default has, floats that no short decimal is, and texts that JSON must escape."""
    assert result.kl_ref.total > 0 and result.moved and result.reference is not None
    odd = dataclasses.replace(
        hostile(result),
        prompt=[{"role": "user", "content": "ä\u2028\ud800"}, {"role": "assistant", "content": "\U0001f600"}],
        kl_ref=Divergence([0.1, 1 / 3, 5e-324, 0.1 + 0.2]),
        moved=[Moved(2, 2 / 3, [("<b>", 1e-300, 1 / 7)])],
        prefill_seconds=1 / 3,
    )
    odd.trace[0] |= {"parts": {"a": -0.0}, "mean": 1e-310, "note": HOSTILE}
    odd.save(tmp_path / "run")
    again = misvo.Result.load(tmp_path / "run")
    assert_same(odd, again)
    assert str(again.trace[0]["parts"]["a"]) == "-0.0" and isinstance(again.moved[0].tokens[0], tuple)


def test_a_run_of_which_nothing_was_scored_is_kept_too(policy, tmp_path):
    with pytest.raises(misvo.RewardError) as caught:
        misvo.steer(policy, "a b c", lambda text: None, **OPTIONS, preset="paper")
    result = caught.value.result
    result.save(tmp_path / "run")
    again = misvo.Result.load(tmp_path / "run")
    assert_same(result, again)
    assert len(again.candidates) == 4 and again.to_dict()["best"] is None
    assert "reward=None" in repr(again) and "not scored" in again.summary() and "not scored" in again._repr_html_()


def test_folders_of_old_still_load(results, tmp_path):
    """What `misvo steer --save` wrote before it knew of token_kl, prefill_seconds and whole references."""
    for method in ("misvo", "aisp"):
        result, folder = results[method], tmp_path / method
        result.steering.save_pretrained(folder)
        old = json.loads(json.dumps(result.to_dict()))
        for name in ("prefill_seconds", "value_network"):
            del old[name]
        for row in old["candidates"]:
            del row["token_kl"]
        old["reference"] = {name: old["reference"][name] for name in ("text", "reward")}
        del old["settings"]["law_dtype"]
        (folder / "result.json").write_text(json.dumps(old))
        again = misvo.Result.load(folder)
        assert again.candidates == [dataclasses.replace(c, token_kl=[]) for c in result.candidates]
        assert again.settings == result.settings and again.best.kl is None and again.prefill_seconds == 0.0
        assert torch.equal(again.steering.vectors, result.steering.vectors)
        assert again.reference.text == result.reference.text
        assert (again.reference in again.candidates) == (method == "misvo")  # aisp samples it beside them
        old["settings"]["of_tomorrow"] = 3
        (folder / "result.json").write_text(json.dumps(old))
        with pytest.warns(UserWarning, match="unknown here: of_tomorrow"):
            assert misvo.Result.load(folder).settings == result.settings


def test_a_folder_is_not_overwritten_unasked(results, tmp_path):
    run = tmp_path / "run"
    results["misvo"].save(run)
    (run / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(misvo.MisvoError, match=r"already holds a run or a steering: .* overwrite=True"):
        results["best-of-n"].save(run)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    results["re-control"].save(run, overwrite=True)  # vectors go, a value network comes
    assert_same(results["re-control"], misvo.Result.load(run))
    assert {path.name for path in run.iterdir()} == {"notes.txt", "result.json", "value"}
    results["best-of-n"].save(run, overwrite=True)
    assert not list((run / "value").iterdir())

    gentle = tmp_path / "gentle"
    results["aisp"].steering.save_pretrained(gentle)
    with pytest.raises(misvo.MisvoError, match="already holds"):
        results["misvo"].save(gentle)
    results["re-control"].value.save_pretrained(gentle / "value")
    results["best-of-n"].save(gentle, overwrite=True)  # never of a run: not ours to remove
    assert misvo.Steering.from_pretrained(gentle) and misvo.ValueNetwork.from_pretrained(gentle / "value")
    assert misvo.Result.load(gentle).steering is None


class Killed(BaseException):
    """No handler of errors sees it, as none sees a SIGKILL."""


@pytest.mark.parametrize(("before", "after"), [("misvo", "aisp"), ("misvo", "re-control"), ("re-control", "misvo")])
def test_a_process_that_dies_leaves_the_old_run_or_the_new_one(results, before, after, tmp_path, monkeypatch):
    """Killed before and after every change that saving makes to the disk: writes, renames, removals."""
    old, new, outcomes = results[before], results[after], []
    for moment in range(100):
        run, left = tmp_path / str(moment), [moment]
        old.save(run)

        def dies(change, left=left):
            def changed(*arguments, **options):
                if left[0] == 0:
                    raise Killed
                done = change(*arguments, **options)
                left[0] -= 1
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return done

            return changed

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dies(os.replace))
            patch.setattr(shutil, "rmtree", dies(shutil.rmtree))
            for name in ("write_text", "unlink", "mkdir"):
                patch.setattr(result_files.Path, name, dies(getattr(result_files.Path, name)))
            patch.setattr("safetensors.torch.save_file", dies(result_files.safetensors.torch.save_file))
            try:
                new.save(run, overwrite=True)
                break
            except Killed:
                pass
        plain = misvo.rescore(run, len).candidates
        loaded = misvo.Result.load(run)
        outcomes.append(loaded.settings.method)
        assert_same({before: old, after: new}[loaded.settings.method], loaded)
        assert plain == loaded.candidates
        if loaded.steering is not None:
            assert torch.equal(misvo.Steering.from_pretrained(run).vectors, loaded.steering.vectors)
        old.save(run, overwrite=True)  # and the folder can be used again
        assert_same(old, misvo.Result.load(run))
        assert not {".saving", ".saved"} & set(os.listdir(run))
    assert len(outcomes) > 12 and outcomes == sorted(outcomes, key=(before, after).index) and len(set(outcomes)) == 2


def test_a_full_disk_leaves_the_old_run_and_no_litter(results, tmp_path, monkeypatch):
    results["misvo"].save(tmp_path / "run")
    written = result_files.Path.write_text

    def full(path, *arguments, **options):
        if path.name == "result.json":
            raise OSError(28, "No space left on device")
        return written(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(result_files.Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            results["aisp"].save(tmp_path / "run", overwrite=True)
    assert_same(results["misvo"], misvo.Result.load(tmp_path / "run"))
    assert set(os.listdir(tmp_path / "run")) == {"result.json", "steering.json", "steering.safetensors"}


def broken(plain, path, value):
    """The same JSON with something else in one place."""
    plain = copy.deepcopy(plain)
    place = plain
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["candidates", 0, "reward"], "<script>", "'reward' is missing or wrong"),
        (["candidates", 0, "reward"], float("nan"), "'reward' is missing or wrong"),
        (["candidates", 0, "tokens"], [1, "2"], "'tokens' is missing or wrong"),
        (["candidates", 0, "token_kl"], ["<b>"], "'token_kl' is missing or wrong"),
        (["candidates", 0, "text"], None, "'text' is missing or wrong"),
        (["candidates", 0, "step"], True, "'step' is missing or wrong"),
        (["candidates", 0], 3, "is missing or wrong"),
        (["candidates"], {}, "'candidates' is missing or wrong"),
        (["trace"], None, "'trace' is missing or wrong"),
        (["trace", 0], {"step": 0}, "'mean' is missing or wrong"),
        (["trace", 0, "best"], "<script>", "'best' is missing or wrong"),
        (["trace", 0, "seconds"], {"decode": "long"}, "'seconds' is missing or wrong"),
        (["kl_ref_per_position"], [None], "'kl_ref_per_position' is missing or wrong"),
        (["moved", 0, "tokens"], [[1, 2, 3]], "'moved' is missing or wrong"),
        (["moved", 0, "tokens"], [["a"]], "is missing or wrong"),
        (["reference"], {"text": 3, "reward": 1.0}, "'text' is missing or wrong"),
        (["prefill_seconds"], "0", "'prefill_seconds' is missing or wrong"),
        (["prompt"], {"role": "user"}, "a prompt is a string or a list of messages"),
        (["settings"], [], "is missing or wrong"),
        (["settings", "method"], "nope", "unknown method 'nope'"),
        (["settings", "steps"], "many", "steps must be a whole number"),
    ],
)
def test_a_wrong_result_is_refused_in_one_sentence(result, path, value, says, tmp_path):
    result.save(tmp_path)
    (tmp_path / "result.json").write_text(broken(result.to_dict(), path, value))
    with pytest.raises(misvo.MisvoError) as caught:
        misvo.Result.load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path} cannot be loaded: ") and says in message and "\n" not in message


def test_broken_folders_are_refused_in_one_sentence(results, tmp_path):
    def refusal(folder):
        with pytest.raises(misvo.MisvoError) as caught:
            misvo.Result.load(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert (
        refusal(tmp_path / "none") == f"there is no {tmp_path / 'none'}: give a folder that `misvo steer --save` wrote."
    )
    (tmp_path / "empty").mkdir()
    assert f"there is no {tmp_path / 'empty' / 'result.json'}" in refusal(tmp_path / "empty")
    results["misvo"].save(tmp_path / "run")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    for name, content, says in (
        ("result.json", whole["result.json"][:-40], "could not be read"),
        ("result.json", b"", "could not be read"),
        ("result.json", b"\xff\xfe", "could not be read"),
        ("result.json", b"[" * 100_000, "could not be read"),
        ("result.json", b"[1]", "holds no result of a run"),
        ("result.json", b"{}", "'prompt' is missing or wrong"),
        ("steering.safetensors", whole["steering.safetensors"][:-4], "truncated"),
        ("steering.safetensors", None, "steering.safetensors is missing"),
        ("steering.json", b"[]", "not the description of a steering"),
        ("steering.json", None, "steering.json is missing"),
    ):
        for other, kept in whole.items():
            (tmp_path / "run" / other).write_bytes(kept)
        path = tmp_path / "run" / name
        path.unlink() if content is None else path.write_bytes(content)
        assert says in refusal(tmp_path / "run"), name
    results["re-control"].save(tmp_path / "value")
    (tmp_path / "value" / "value" / "value.json").write_text("[]")
    assert "no value network that can be read" in refusal(tmp_path / "value")
    shutil.rmtree(tmp_path / "value" / "value")
    assert "no value network that can be read" in refusal(tmp_path / "value")


def test_what_json_cannot_hold_is_refused_before_anything_is_written(result, tmp_path):
    result.trace[0]["extra"] = torch.ones(1)
    with pytest.raises(misvo.MisvoError, match="holds what JSON cannot"):
        result.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


# What people see


def test_reprs_are_short_and_of_one_line(results):
    long = dataclasses.replace(hostile(results["misvo"]), prompt=[{"role": "user", "content": "a\\'\n\x07" * 9999}])
    long.candidates[:] = [
        dataclasses.replace(c, text=c.text * 99 + "\\'" * 99, reward=c.reward and c.reward * 1e300, step=10**6)
        for c in long.candidates
    ]
    for result in (*results.values(), long, misvo.Result("p", misvo.Settings())):
        things = [result, *result.candidates, *([result.steering] if result.steering else [])]
        for thing in things:
            assert len(repr(thing)) < 300 and repr(thing).isprintable()
    result = results["misvo"]
    text, best = repr(result), result.best
    for part in ("'a b c'", f"reward={best.reward:.4g}", best.text, "12 responses", "3 steps"):
        assert part in text
    assert f"KL={result.trace[-1]['kl']:.4g}" in text
    for part in (f"step={best.step}", f"rollout={best.rollout}", f"reward={best.reward:.4g}", f"kl={best.kl:.4g}"):
        assert part in repr(best)
    vectors = result.steering.vectors
    shown = f"Steering(6×32, norm={vectors.norm():.4g}, tie='position', model='LlamaForCausalLM')"
    assert repr(result.steering) == shown


def test_one_line():
    assert one_line(" a\n\tb  c ", 5) == "a b c" and one_line("abcdef", 5) == "abcd…"
    assert one_line("\x1b[2J\u202e", 9) == "�[2J�"
    assert one_line(" " * 99999 + "x", 5) == "…" and len(one_line("x" * 99999, 5)) == 5


def test_summary(results):
    lines = results["misvo"].summary().splitlines()
    best, trace = results["misvo"].best, results["misvo"].trace
    assert lines[0].split() == ["prompt", "a", "b", "c"]
    assert lines[1].endswith(f"reward {best.reward:.4g}, KL {best.kl:.4g} nats: {best.text}")
    assert lines[3].endswith(f"{trace[0]['mean']:.4g} → {trace[-1]['mean']:.4g}")
    assert lines[5].endswith(f"{trace[0]['kl']:.4g} → {trace[-1]['kl']:.4g}")
    tokens = sum(row["tokens"] for row in trace)
    assert any(f"12 responses in 3 steps, {tokens} tokens" in line for line in lines)
    assert lines[-1].startswith(("Without steering, the best", "The answer is one of", "A response with"))
    dangerous = hostile(results["misvo"]).summary()
    assert all(line.isprintable() and len(line) < 200 for line in dangerous.splitlines()) and "script" in dangerous
    for other in (*results.values(), misvo.Result("p", misvo.Settings())):
        assert 2 <= len(other.summary().splitlines()) <= 13


class Page(html.parser.HTMLParser):
    """The tags with their attributes, and the text; complains of tags that do not close."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.tags.append((tag, dict(attributes)))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_panel_shows_both_responses_and_lets_no_markup_in(results):
    page = Page(results["misvo"]._repr_html_())
    best, plain = results["misvo"].best, results["misvo"].unsteered
    scores = f"reward {best.reward:.4g}, KL {best.kl:.4g} nats"
    for part in (best.text, plain.text, scores, "without steering: reward"):
        assert part in page.text
    evil = hostile(results["misvo"])
    bad = Page(evil._repr_html_())
    assert bad.tags == page.tags  # not one tag or attribute came from a text
    for text in (evil.prompt, evil.best.text, evil.unsteered.text):
        assert text.strip() in bad.text
    assert "mathjax_ignore" in bad.tags[0][1]["class"]  # or the dollars would become a formula
    assert {"script", "img", "style", "a"}.isdisjoint(tag for tag, _ in page.tags)
    assert not any(name.startswith("on") or name in ("src", "href") for _, names in page.tags for name in names)


def test_the_pictures_of_the_panel(results):
    """A curve with a point for each step, at the height of its reward, and a bar for each token of the best."""
    result = results["misvo"]
    tags = Page(result._repr_html_()).tags
    curves = [attributes["points"].split() for tag, attributes in tags if tag == "polyline"]
    heights = [[48 - float(point.split(",")[1]) for point in curve] for curve in curves]
    values = [[row[name] for row in result.trace] for name in ("mean", "best")]
    low, high = min(map(min, values)), max(map(max, values))
    for row, expected in zip(heights, values, strict=True):
        assert row == pytest.approx([48 * (value - low) / (high - low) for value in expected], abs=0.06)
    (bars,) = [attributes["d"].split("M")[1:] for tag, attributes in tags if tag == "path"]
    nats = result.best.token_kl
    assert [48 - float(bar.split("V")[1]) for bar in bars] == pytest.approx(
        [48 * x / max(nats) for x in nats], abs=0.06
    )


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e308, -1e308])
def test_odd_figures_break_no_view(result, odd):
    result.trace[0] |= {"mean": odd, "kl": odd}
    result.trace[1] |= {"mean": -odd, "kl": -odd}
    result.candidates[result.candidates.index(result.best)] = dataclasses.replace(result.best, token_kl=[odd, 1.0, odd])
    assert len(repr(result)) < 300 and f"{odd:.4g} → " in result.summary()
    for tag, attributes in Page(result._repr_html_()).tags:
        if tag in ("polyline", "circle", "path"):
            assert not {"nan", "inf"} & {
                part[:3] for value in attributes.values() for part in re.split("[ ,VM-]", value)
            }


def test_an_empty_result_has_views_too():
    empty = misvo.Result("p", misvo.Settings())
    assert repr(empty) == "Result('p', reward=None, 0 responses, 0 steps)"
    assert "0 responses" in Page(empty._repr_html_()).text and "0 responses" in empty.summary()


# Data frames


def test_pandas(results):
    pytest.importorskip("pandas")
    result = results["aisp"]
    frame = result.to_pandas()
    assert list(frame.columns) == ["step", "rollout", "reward", "ref_logprob", "kl", "tokens", "text"]
    for row, c in zip(frame.itertuples(), result.candidates, strict=True):
        assert (row.step, row.rollout, row.tokens, row.text) == (c.step, c.rollout, len(c.tokens), c.text)
        assert row.reward == c.reward or (c.reward is None and row.reward != row.reward)
        assert (row.ref_logprob, row.kl) == (c.ref_logprob, sum(c.token_kl))
    silent = dataclasses.replace(
        result, candidates=[Candidate(0, 0, [1], "x", None), Candidate(0, 1, [1, 2], "y", None)]
    )
    assert silent.to_pandas().dtypes[["reward", "ref_logprob", "kl"]].eq(float).all()
    trace = result.trace_to_pandas()
    assert trace["mean"].tolist() == [row["mean"] for row in result.trace]
    assert trace["seconds.decode"].tolist() == [row["seconds"]["decode"] for row in result.trace]
    assert trace["kl_per_position"].tolist() == [row["kl_per_position"] for row in result.trace]
    empty = misvo.Result("p", misvo.Settings())
    assert len(empty.to_pandas()) == len(empty.trace_to_pandas()) == 0


def test_without_pandas_it_says_what_to_install(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for method in (result.to_pandas, result.trace_to_pandas):
        with pytest.raises(misvo.MisvoError, match="pip install pandas"):
            method()


def test_pandas_stays_out_until_it_is_asked_for():
    import subprocess

    code = "import sys, misvo; misvo.Result; assert not {'pandas', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
