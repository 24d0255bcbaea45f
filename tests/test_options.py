"""Which method has which options: those of another one are refused where they are given, never silently ignored."""

import json
from dataclasses import fields, replace

import pytest
from bench_helpers import make_world, raw_config, read_lines, to_toml
from conftest import letter_reward, make_policy
from shell import run_shell

import misvo
from misvo.bench import config as configs
from misvo.bench import sweep
from misvo.names import METHODS
from misvo.settings import PRESETS, SAMPLER, Settings

SIZES = {"rollouts": 3, "steps": 2, "max_new_tokens": 5}
# A value that is not the default, for every option that not all methods have; the methods as the README tells them.
MISVO, AISP, RE, LORA = {"misvo"}, {"aisp"}, {"re-control"}, {"lora"}
PARTICLES, BLOCKWISE = {"particles"}, {"blockwise"}
PAUSING = PARTICLES | BLOCKWISE
OWNERS = {
    "cost": ("euclidean", MISVO),
    "learning_rate": (0.7, MISVO),
    "penalty": (0.3, MISVO | AISP | PARTICLES),
    "law_dtype": ("bfloat16", MISVO),
    "explicit_fisher": (True, MISVO),
    "tie": ("shared", MISVO | AISP),
    "step": ("proximal", MISVO),
    "standardize": (True, MISVO),
    "credit": ("prefix", MISVO | LORA),
    "step_nats": (0.7, MISVO | PAUSING),
    "damping": (0.7, MISVO | PAUSING),
    "kl_budget": (7.0, MISVO | LORA | PAUSING),
    "kl_budget_per_token": (0.7, MISVO | LORA | PAUSING),
    "sigma2": (0.7, AISP),
    "alpha": (0.7, AISP),
    "target_ess": (2.0, AISP | PARTICLES),
    "greedy": (True, AISP | RE),
    "mask_after_eos": (True, AISP),
    "window": (3, AISP),
    "block": (3, PAUSING),
    "branches": (3, BLOCKWISE),
    "proposal": ("steered", PAUSING),
    "potential": ("value", PAUSING),
    "value": ("folder", RE),
    "value_steps": (1, RE),
    "value_iterations": (3, RE),
    "value_step_size": (0.7, RE),
    "lora_rank": (3, LORA),
    "lora_alpha": (7.0, LORA),
    "lora_learning_rate": (0.7, LORA),
    "lora_targets": (("q_proj",), LORA),
}


@pytest.mark.parametrize("option", OWNERS)
@pytest.mark.parametrize("method", METHODS)
def test_an_option_is_taken_or_refused(method, option):
    value, owners = OWNERS[option]
    given = {"preset": "paper", "method": method, **SIZES, option: value}
    if method in owners:
        assert getattr(Settings.from_preset(**given), option) == value
        return
    with pytest.raises(misvo.MisvoError) as caught:
        misvo.steer(make_policy(), "a b", letter_reward, **given)
    message = str(caught.value)
    assert message.startswith(f"{option} is no option of {method}, which has ") and "\n" not in message
    named = message.split("which has ")[1].rstrip(".").split(", ")
    assert set(named) == {field.name for field in fields(Settings)} - {
        name for name, (_, owners) in OWNERS.items() if method not in owners
    } - {"method"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_settings_of_a_run_make_the_same_run(method, preset):
    """What a result, a saved file or a sweep says of its settings can be given again, all of it."""
    settings = Settings.from_preset(preset, method=method, **SIZES)
    assert Settings.from_preset(**settings.to_dict()) == Settings(**settings.to_dict()) == settings
    result = misvo.steer(make_policy(), "a b", letter_reward, **settings.to_dict(), preset="paper")
    assert result.settings == settings.for_model(make_policy().own_sampler)
    assert Settings.from_preset(**result.settings.to_dict()) == result.settings


def test_a_preset_with_another_method_is_its_sampler():
    for method in ("best-of-n", "aisp", "re-control"):
        assert Settings.from_preset("auto", method=method) == Settings(method, **dict.fromkeys(SAMPLER))
        with pytest.raises(misvo.MisvoError, match="kl_budget is no option of"):
            Settings.from_preset("auto", method=method, kl_budget=5.0)


def run(*arguments):
    return run_shell("steer", "a b c", "-k", "3", "-n", "2", "-t", "5", *arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "best-of-n", "--kl-budget", "5"], "kl_budget is no option of best-of-n, which has "),
        (["--method", "aisp", "--cost", "euclidean"], "cost is no option of aisp, which has "),
        (["--sigma2", "0.7"], "sigma2 is no option of misvo, which has "),
        (["--method", "re-control", "--mask-after-eos"], "mask_after_eos is no option of re-control"),
    ],
)
def test_the_command_line_refuses_them_too(arguments, says):
    done = run(*arguments)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("method", METHODS)
def test_the_command_line_passes_on_what_was_given(world, method):
    done = run("--method", method, "--model", str(world / "model"), "--reward", f"{world}/reward.py:letters", "--json")
    assert done.returncode == 0, done.stderr
    settings = misvo.Settings.from_preset("auto", method=method, **SIZES, kl_ref=True)
    assert Settings(**json.loads(done.stdout)["settings"]) == settings.for_model(make_policy().own_sampler)


def test_settings_that_a_sweep_shares_go_to_the_methods_that_have_them(world):
    raw = raw_config(world, methods=("misvo", "best-of-n", "aisp"), learning_rate=0.7, sigma2=0.3)
    misvo_cell, plain, aisp = (cell.settings for cell in configs.from_dict(raw).cells())
    assert (misvo_cell.learning_rate, misvo_cell.sigma2) == (0.7, Settings.sigma2)
    assert (plain.learning_rate, plain.sigma2) == (Settings.learning_rate, Settings.sigma2)
    assert (aisp.learning_rate, aisp.sigma2) == (Settings.learning_rate, 0.3)


def test_a_sweep_knows_presets(world, tmp_path):
    """As a method's own word, as a word for all, and with options that win over it; rows are what `steer` gives."""
    raw = raw_config(world, seeds=(3,))
    raw["settings"] = {"preset": "paper", **SIZES}
    raw["methods"] = [{"preset": "auto"}, {"preset": "auto", "kl_budget": 2.0, "label": "tight"}, {"method": "misvo"}]
    (tmp_path / "sweep.toml").write_text(to_toml(raw))
    config = configs.read(tmp_path / "sweep.toml")
    wanted = {
        "auto": Settings.from_preset("auto", **SIZES, kl_ref=True),
        "tight": Settings.from_preset("auto", **SIZES, kl_budget=2.0, kl_ref=True),
        "misvo": Settings.from_preset("paper", **SIZES, kl_ref=True),
    }
    assert {cell.method.label: cell.settings for cell in config.cells()} == wanted
    sweep.run(config, tmp_path / "r")
    policy = misvo.Policy.from_pretrained(str(world / "model"))
    rows = [row for row in read_lines(tmp_path / "r" / "rows.jsonl") if row["prompt"] == "p2"]
    assert {row["method"] for row in rows} == set(wanted)
    for row in rows:
        settings = replace(wanted[row["method"]], seed=3)
        result = misvo.steer(policy, row["prompt_text"], letter_reward, settings=settings)
        assert (row["best"]["text"], row["tokens"]) == (result.text, sum(len(c.tokens) for c in result.candidates))
        assert row["norm"] == result.steering.norm
    assert len({row["norm"] for row in rows}) == 3


def test_a_method_of_a_sweep_has_its_own_options_only(world):
    raw = raw_config(world)
    raw["methods"] = [{"method": "best-of-n", "learning_rate": 0.7}]
    with pytest.raises(misvo.MisvoError, match="× best-of-n: learning_rate is no option of best-of-n"):
        configs.from_dict(raw)


@pytest.mark.parametrize(
    "options", [{"method": "aisp"}, {"method": "re-control", "value": "folder"}], ids=["aisp", "a given network"]
)
def test_ordinary_needs_a_first_step_at_the_reference(options):
    with pytest.raises(misvo.MisvoError, match=f"{options['method']} .*does not take at the reference"):
        misvo.steer(make_policy(), "a b", letter_reward, select="ordinary", **SIZES, **options, preset="paper")


def test_ordinary_goes_with_a_network_that_is_fitted_on_the_way():
    result = misvo.steer(
        make_policy(), "a b", letter_reward, method="re-control", select="ordinary", **SIZES, preset="paper"
    )
    assert result.text


def test_kl_ref_is_measured_where_it_was_asked_for():
    """A KL budget keeps the states of the first step too, and is no wish for a measurement."""
    kl = [
        misvo.steer(make_policy(), "a b", letter_reward, preset="auto", **SIZES, kl_ref=on).kl_ref
        for on in (False, True)
    ]
    assert kl[0] is None and kl[1].total > 0
