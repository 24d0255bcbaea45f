"""The invasiveness panel against direct calculations on the candidates of a run."""

import json

import numpy as np
import pytest
import torch
from conftest import letter_reward, make_model, make_policy, make_tokenizer
from scipy.stats import ttest_ind
from typer.testing import CliRunner

import misvo
from misvo.cli import app
from misvo.invasiveness import welch
from misvo.judge import Judge

SIZE = {"rollouts": 6, "steps": 4, "max_new_tokens": 12, "seed": 3}


def words(completions, **_):
    """A reward with a None in it: texts of one word are not scored."""
    return [float(len(text.split())) if len(text.split()) > 1 else None for text in completions]


def encoder(texts):
    vectors = torch.tensor([[text.count(letter) + 0.1 for letter in "abcdefgh"] for text in texts])
    return torch.nn.functional.normalize(vectors, dim=-1)


@pytest.fixture(scope="module")
def result():
    return misvo.steer(make_policy(), "a b c", letter_reward, **SIZE)


@pytest.fixture(scope="module")
def judge():
    return Judge(make_model("gemma3", seed=5), make_tokenizer(), name="tiny")


@pytest.mark.filterwarnings("ignore:Precision loss")  # scipy's, where all responses are as diverse
def test_every_measure_by_hand(result, judge):
    made = misvo.panel(result, judge=judge, held_out=words, encoder=encoder)
    last, first = ([c for c in result.candidates if c.step == step] for step in (3, 0))

    def fluency(group):
        return judge.fluency(["a b c"] * len(group), [c.text for c in group])

    def cosine(group):
        return [float(encoder(["a b c"])[0] @ encoder([c.text])[0]) for c in group]

    by_response = {
        "reward": lambda group: letter_reward([c.text for c in group]),
        "own_likelihood": lambda group: [c.ref_logprob for c in group],
        "fluency": fluency,
        "coherence": cosine,
        "diversity": lambda group: [misvo.metrics.diversity(c.text) for c in group],
        "held_out": lambda group: words([c.text for c in group]),
    }
    names = ["reward", "kl_per_token", "own_likelihood", "fluency", "coherence", "diversity", "changed", "held_out"]
    assert [measure.name for measure in made] == names  # the run does not know which tokens were changed
    for name, values in by_response.items():
        measure = made[name]
        ours, theirs = ([v for v in values(group) if v is not None] for group in (last, first))
        assert measure.last == pytest.approx(np.mean(ours), abs=1e-5)
        assert measure.reference == pytest.approx(np.mean(theirs), abs=1e-5)
        assert measure.returned == pytest.approx(values([result.best])[0], abs=1e-5)
        test = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
        found = measure.difference
        assert [found.low, found.high] == pytest.approx([test.low, test.high], abs=1e-4)
        assert found.mean == pytest.approx(np.mean(ours) - np.mean(theirs), abs=1e-5)


def test_measures_per_token_are_a_ratio_of_sums_with_the_interval_of_a_ratio(result):
    """KL: Σ nats / Σ tokens; its standard error against a jackknife, which knows no delta method."""
    measure = misvo.panel(result, encoder="none")["kl_per_token"]
    last = [(c.kl, len(c.tokens)) for c in result.candidates if c.step == 3]
    assert len({count for _, count in last}) > 1  # else a mean of ratios would do
    ratio = sum(kl for kl, _ in last) / sum(count for _, count in last)
    assert measure.last == pytest.approx(ratio) and measure.reference == pytest.approx(0.0, abs=1e-6)
    assert measure.returned == pytest.approx(result.best.kl / len(result.best.tokens))
    without = [
        sum(kl for i, (kl, _) in enumerate(last) if i != left) / sum(n for i, (_, n) in enumerate(last) if i != left)
        for left in range(6)
    ]
    jackknife = np.sqrt(5 / 6 * np.sum((np.array(without) - np.mean(without)) ** 2))
    error = (
        (measure.difference.high - measure.difference.low) / 2 / 2.5706
    )  # t of 5 degrees: the reference has no spread
    assert error == pytest.approx(jackknife, rel=0.35)  # six responses: the two agree to second order only


def test_changed_tokens_are_a_share_where_they_are_known(result):
    class Known:
        """A candidate that knows where the reference would have drawn another token."""

        def __init__(self, candidate, changed):
            self.candidate, self.changed = candidate, changed

        def __getattr__(self, name):
            return getattr(self.candidate, name)

    marked = misvo.Result(result.prompt, result.settings, trace=result.trace, reference=result.reference)
    marked.candidates = [Known(c, list(range(c.step))) for c in result.candidates]
    measure = misvo.panel(marked, encoder="none")["changed"]
    tokens = [len(c.tokens) for c in result.candidates if c.step == 3]
    assert measure.last == pytest.approx(3 * 6 / sum(tokens)) and measure.reference == 0


def test_methods_that_do_not_start_at_the_reference_have_no_difference(judge):
    result = misvo.steer(make_policy(), "a b c", letter_reward, method="aisp", kl_ref=True, **SIZE)
    for measure in misvo.panel(result, judge, encoder="none"):
        assert measure.reference is None and measure.difference is None and measure.last is not None
    single = misvo.steer(make_policy(), "a b c", letter_reward, **{**SIZE, "steps": 1})
    made = misvo.panel(single, encoder="none")["reward"]
    assert made.difference is None and made.last == made.reference  # the same responses


def test_welch_by_its_textbook_formula():
    assert welch([1.0], [1.0, 2.0]) is None
    same = welch([1.0, 1.0], [0.5, 0.5, 0.5])
    assert (same.mean, same.low, same.high) == (0.5, 0.5, 0.5)
    chance = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = welch(list(chance.normal(1, 3, 16)), list(chance.normal(0, 1, 8)))
        hits += found.low <= 1 <= found.high
    assert 365 <= hits <= 394  # 380 ± 3.2 standard errors


def test_it_prints_as_a_table_and_says_what_it_lacks(result, judge):
    made = misvo.panel(result, judge, held_out="length:5", encoder="none")
    text = str(made)
    assert "fluency under tiny" in text and f"{made['fluency'].last:.3f}" in text and "held-out reward length:5" in text
    with pytest.raises(misvo.MisvoError, match="no measure 'coherence', only reward"):
        made["coherence"]
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain["fluency"]["difference"]["low"] == made["fluency"].difference.low


def test_steer_shows_keeps_and_prints_it(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    make_model("gemma3", seed=5).save_pretrained(tmp_path / "judge")
    make_tokenizer().save_pretrained(tmp_path / "judge")
    words = [
        "steer",
        "a b c",
        "--model",
        str(tmp_path / "model"),
        "--reward",
        "length:5",
        "-k",
        "4",
        "-n",
        "2",
        "-t",
        "6",
    ]
    words += ["--held-out", "length:2", "--judge"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "judge"), "--save", str(tmp_path / "run")])
    assert done.exit_code == 0 and "held-out reward length:2" in done.stdout, done.output
    kept = misvo.Result.load(tmp_path / "run")
    again = misvo.panel(kept, tmp_path / "judge", "length:2").to_dict()
    assert kept.panel.keys() == again.keys() >= {"reward", "fluency", "held_out"}
    for name, measure in again.items():
        assert kept.panel[name]["last"] == pytest.approx(measure["last"], abs=1e-5)
    done = CliRunner().invoke(app, [*words, str(tmp_path / "judge"), "--json"])
    assert json.loads(done.stdout)["panel"].keys() == again.keys()
    done = CliRunner().invoke(app, [*words, "no/such-judge"])
    assert "no model could be loaded from the name 'no/such-judge'" in str(done.exception)
