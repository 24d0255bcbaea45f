"""`misvo fit-reward` and `preference:FOLDER`: pairs in every usual form, the fit against other ways to its minimum."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from scipy.optimize import minimize
from typer.testing import CliRunner

import misvo
from misvo import cli, preference_fit, preference_pairs, rewards
from misvo.errors import MisvoError
from misvo.rewards import preference


def written(path: Path, rows) -> Path:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


USER, YES, NO = {"role": "user", "content": "Why?"}, "Because it rains.", "No."
SAID = {text: {"role": "assistant", "content": text} for text in (YES, NO)}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "chosen": YES, "rejected": NO},
        {"chosen": [USER, SAID[YES]], "rejected": [USER, SAID[NO]]},
        {"prompt": [USER], "chosen": [SAID[YES]], "rejected": [SAID[NO]]},
        {"chosen": f"\n\nHuman: Why?\n\nAssistant: {YES}", "rejected": f"\n\nHuman: Why?\n\nAssistant: {NO}"},
        {"chosen": f"Human: Why?\n\nAssistant: {YES} ", "rejected": f"\n\nHuman: Why?\n\nAssistant: {NO}"},
    ],
)
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_pairs_are_read_in_every_usual_form(tmp_path, row, name):
    (pair,) = preference_pairs.read(written(tmp_path / name, [row])).rows
    assert (pair.prompt, pair.chosen, pair.rejected) == ("Why?", YES, NO)


def test_of_a_dialogue_the_last_question_counts_and_the_rest_is_context(tmp_path):
    text = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: "
    (pair,) = preference_pairs.read(written(tmp_path / "p.jsonl", [{"chosen": text + YES, "rejected": text + NO}])).rows
    assert pair.prompt == "Why?" and "Hello." in pair.context


def test_lines_without_a_preference_are_counted_and_left_out(tmp_path):
    rows = [
        {"prompt": "Why?", "chosen": YES, "rejected": YES},
        {"chosen": f"\n\nHuman: A\n\nAssistant: {YES}", "rejected": f"\n\nHuman: B\n\nAssistant: {NO}"},
        {"prompt": "Why?", "chosen": YES, "rejected": NO},
    ]
    pairs = preference_pairs.read(written(tmp_path / "p.jsonl", rows))
    assert len(pairs.rows) == 1 and pairs.left_out == 2


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": YES},
        {"chosen": YES, "rejected": NO},
        {"prompt": "a", "chosen": 3, "rejected": NO},
        [1],
        {"chosen": [USER], "rejected": [USER]},
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path, row):
    path = written(tmp_path / "p.jsonl", [{"prompt": "Why?", "chosen": YES, "rejected": NO}, row])
    with pytest.raises(MisvoError, match="line 2 of"):
        preference_pairs.read(path)


def test_a_file_that_is_none_is_one_sentence(tmp_path):
    with pytest.raises(MisvoError, match="could not be read"):
        preference_pairs.read(tmp_path / "none.jsonl")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08 and no more")
    with pytest.raises(MisvoError, match="could not be read"):
        preference_pairs.read(tmp_path / "broken.jsonl.gz")


def made_up(count: int) -> preference_pairs.Pairs:
    """Pairs of which the polite one is preferred, two of each prompt."""
    rows = []
    for number in range(count):
        asked = f"Question {number // 2}?"
        rows.append(
            preference_pairs.Pair(asked, f"Thank you kindly, friend {number}.", f"Shut up, fool {number}.", asked)
        )
    return preference_pairs.Pairs(rows, 0)


def test_parts_and_splits_are_disjoint_whole_and_keep_a_prompt_together():
    pairs = made_up(400)
    parts = [pairs.part(number, 2).rows for number in range(2)]
    assert len(parts[0]) + len(parts[1]) == 400 and min(map(len, parts)) > 140  # 200 prompts: 100 ± 4 · 7 of them
    fitted, held = pairs.split(0.25)
    assert len(fitted) + len(held) == 400 and 50 < len(held) < 150
    for one, other in (parts, (fitted, held)):
        assert {row.context for row in one}.isdisjoint(row.context for row in other)


def test_newton_finds_the_minimum_that_another_method_finds():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    for l2 in (0.01, 1.0, 50.0):
        w = preference_fit.newton(x, l2)

        def value(v, l2=l2):
            return preference_fit.loss(x, torch.from_numpy(v), l2)

        other = minimize(value, torch.zeros(6, dtype=torch.float64).numpy(), method="BFGS", tol=1e-12)
        assert value(w.numpy()) <= other.fun + 1e-9 * (1 + abs(other.fun))
        slope = l2 * w - x.T @ torch.sigmoid(-(x @ w))  # by hand: 0 at the minimum
        assert slope.norm() < 1e-6 * x.norm()


def test_pairs_that_can_be_told_apart_do_not_run_away():
    x = torch.eye(4, dtype=torch.float64).repeat(5, 1) * 100  # every margin can be as large as it likes
    w = preference_fit.newton(x, 1e-3)
    assert torch.isfinite(w).all() and (x @ w > 0).all()


def test_quality_is_that_of_hand_made_margins():
    told = preference_fit.quality(torch.tensor([2.0, 1.0, -1.0, 0.0], dtype=torch.float64))
    assert told.accuracy == (1 + 1 + 0 + 0.5) / 4
    expected = sum(math.log1p(math.exp(-m)) for m in (2.0, 1.0, -1.0, 0.0)) / 4
    assert told.log_loss == pytest.approx(expected, rel=1e-12)


def test_calibration_of_a_true_law_is_small_and_of_a_sure_one_large():
    generator = torch.Generator().manual_seed(1)
    margins = 2 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    flips = torch.rand(20_000, generator=generator, dtype=torch.float64) < torch.sigmoid(-margins)
    true = torch.where(flips, -margins, margins)  # the first is preferred as often as its margin says
    assert preference_fit.quality(true).calibration_error < 5 * 0.5 / math.sqrt(
        4000
    )  # a bin's standard error is 0.5/√4000
    assert preference_fit.quality(10 * true).calibration_error > 0.1


def test_a_preference_is_learned_saved_and_used(tmp_path, monkeypatch):
    rows = [{"prompt": one.prompt, "chosen": one.chosen, "rejected": one.rejected} for one in made_up(600).rows]
    path = written(tmp_path / "pairs.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["fit-reward", str(path), "--out", "taste", "--part", "1/2", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["held_out"]["accuracy"] > 0.95 and 200 < told["fitted"]["pairs"] + told["held_out"]["pairs"] < 400
    assert f"{told['held_out']['accuracy']:.3f}" in (tmp_path / "taste/README.md").read_text(encoding="utf-8")
    reward = rewards.load("preference:taste")
    polite, rude = rewards.score(reward, "Question 7?", ["Thank you kindly, friend.", "Shut up, fool."], [[0], [0]], {})
    assert polite > rude
    again = CliRunner().invoke(cli.app, ["fit-reward", str(path), "--out", "taste"])
    assert "is there already" in str(again.exception)
    odd = CliRunner().invoke(cli.app, ["fit-reward", str(path), "--out", "b", "--part", "3/2"])
    assert "--part" in str(odd.exception)


def test_the_reward_is_its_formula(tmp_path):
    """w·[r, √d p⊙r], each response with its own prompt; messages answer the last of them."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(768, generator=generator)
    preference.write(tmp_path / "w", weight, {})
    reward = preference.Preference(str(tmp_path / "w"))
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    values = reward(["Who?", chat], ["Me.", [{"role": "assistant", "content": "It rains."}]])
    for value, asked, said in zip(values, ("Who?", "Why?"), ("Me.", "It rains."), strict=True):
        (p,), (r,) = reward.encoder([asked]).double(), reward.encoder([said]).double()
        expected = sum(float(w) * float(f) for w, f in zip(weight, [*r, *(math.sqrt(384) * p * r)], strict=True))
        assert value == pytest.approx(expected, abs=768 * 6e-8 * 8)  # rounding of 768 products of size below 8


def test_a_folder_without_a_preference_is_refused(tmp_path):
    with pytest.raises(MisvoError, match="fit-reward"):
        rewards.load(f"preference:{tmp_path}")
    preference.write(tmp_path, torch.full((768,), math.nan), {})
    with pytest.raises(MisvoError, match="another kind"):
        rewards.load(f"preference:{tmp_path}")


def test_few_pairs_are_refused_before_anything_is_encoded():
    with pytest.raises(MisvoError, match="50 of each"):
        preference_fit.fit(made_up(60), encoder=lambda texts: pytest.fail("encoded"))


def test_it_steers(tmp_path, policy):
    preference.write(tmp_path / "w", torch.randn(768, generator=torch.Generator().manual_seed(0)), {})
    result = misvo.steer(policy, "a b", f"preference:{tmp_path / 'w'}", rollouts=4, steps=2, max_new_tokens=4)
    assert all("credit" in row for row in result.trace)  # beginnings are scored too
