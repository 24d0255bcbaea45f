"""The command line as a user meets it: on the embedded model, in processes of its own where that is the point."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from shell import run_shell
from tolerances import assert_near, rounding

import misvo
from misvo import embedded
from misvo.threads import SETTINGS
from misvo.view import sparkline

QUICK = ["--rollouts", "3", "--steps", "2", "--max-new-tokens", "8", "--preset", "paper", "--learning-rate", "3"]


def run(*arguments, **options):
    command = [sys.executable, "-m", "misvo.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_help_and_lists_answer_without_torch():
    code = (
        "import sys; sys.argv = ['misvo', *{!r}]\n"
        "from misvo.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert not {{'torch', 'transformers', 'matplotlib'}} & set(sys.modules), 'slow import'"
    )
    for arguments, says in (
        (["--help"], ["steer", "bench", "report", "theory"]),
        (["steer", "--help"], ["--reward", "--rollouts", "--preset"]),
        (["steer", "--help-all"], ["--sigma2", "--system", "--file"]),
        (["sample", "--help"], ["--strength"]),
        (["cache"], [embedded.cache_folder().name]),
        (["--version"], [f"misvo {misvo.__version__}"]),
        (["list", "models"], ["smollm2-135m"]),
        (["list", "rewards"], ["sentiment", "similarity:TEXT", "length:WORDS"]),
        (["list", "methods"], ["misvo", "best-of-n", "aisp", "re-control"]),
    ):
        done = subprocess.run([sys.executable, "-c", code.format(arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert [word for word in says if word not in done.stdout] == []


def test_import_misvo_is_light():
    code = "import sys, misvo; assert 'torch' not in sys.modules; misvo.Settings; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="nothing is left out where it is not installed")
@pytest.mark.parametrize("threads", [None, "1"], ids=["looks for free cores", "threads are set"])
def test_commands_import_transformers_without_scikit_learn_and_scipy_and_leave_them_to_others(threads):
    """Both ways to get there: what transformers once found installed, it counts on."""
    code = (
        "import gc, sys; from misvo.cli_process import import_transformers, quiet_libraries\n"
        "quiet_libraries(decoding=True); import_transformers()\n"
        "assert 'transformers.modeling_utils' in sys.modules and gc.isenabled()\n"
        "import misvo.policy, misvo.methods.misvo, misvo.methods.particles\n"
        "assert not {'sklearn', 'pandas', 'scipy'} & set(sys.modules), 'slow import'\n"
        "import sklearn, scipy.optimize; assert sklearn.__version__"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    chosen = {"OMP_NUM_THREADS": threads} if threads else {}
    subprocess.run([sys.executable, "-c", code], env={**environment, **chosen}, check=True)


def test_steer_saves_draws_and_speaks_json(tmp_path, smollm2):
    """The real thing, end to end: the result that the shell prints is the one that Python gets."""
    arguments = ["--json", "--save", str(tmp_path / "s"), "--plot", str(tmp_path / "p.png"), "--seed", "5"]
    done = run("steer", "Give me one tip for sleeping better.", "--reward", "length:6", *QUICK, *arguments)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert json.loads((tmp_path / "s" / "result.json").read_text()) == printed
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    steering = misvo.Steering.from_pretrained(tmp_path / "s")
    policy = smollm2
    settings = {"rollouts": 3, "steps": 2, "max_new_tokens": 8, "learning_rate": 3.0, "seed": 5}
    result = misvo.steer(policy, "Give me one tip for sleeping better.", "length:6", **settings, preset="paper")
    assert printed["text"] == result.text and printed["reward"] == result.reward
    assert [c["tokens"] for c in printed["candidates"]] == [c.tokens for c in result.candidates]
    # Two sublayers in each layer round their longest sum, were the kernels of the two processes not the same.
    relative = 2 * policy.config.num_hidden_layers * rounding(torch.float32, policy.config.intermediate_size)
    assert_near(steering.vectors, result.steering.vectors, relative * result.steering.norm)
    plain, loud = (policy.generate("Hello", steering=how, max_new_tokens=8, seed=1) for how in (None, 1000 * steering))
    assert plain != loud == policy.generate("Hello", steering=1000 * result.steering, seed=1)


def test_steer_shows_a_readable_result():
    done = run_shell("steer", "-", "-k", "3", "-n", "2", "-t", "8", input="Say something nice.")  # the defaults
    assert done.returncode == 0, done.stderr
    for part in (
        "answer: sentiment",
        "highest so far",
        "mean reward",
        "sequence KL",
        "nats",
        "tokens promoted most",
    ):
        assert part in done.stdout
    assert "step 1: mean" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["steer", "x", "--reward", "nope"], "unknown reward 'nope'"),
        (["steer", "x", "--method", "nope"], "unknown method 'nope'"),
        (["steer", "x", "--cost", "nope"], "unknown cost 'nope'"),
        (["steer", "x", "-k", "1"], "rollouts must be"),
        (["steer", "", "-k", "2"], "the prompt is empty"),
        (["steer", "x", "--model", "no-such/model"], "no model could be loaded"),
        (["list", "planets"], "planets"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, says):
    done = run_shell(*arguments)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_theory_prints_its_verdicts(tmp_path):
    done = run_shell("theory", "--policies", "2", "--json", "--plot", str(tmp_path / "orders.png"))
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)
    assert checks["passed"] and len(checks["checks"]) > 40
    assert (tmp_path / "orders.png").read_bytes().startswith(b"\x89PNG")
    assert "Theorem 1" in run_shell("theory", "--policies", "1").stdout


def test_theory_exits_with_1_when_a_claim_fails(monkeypatch):
    from misvo import cli, theory

    class Wrong(theory.Formulas):
        def covariance_trace(self, p):
            return 1.0

    real = theory.run
    monkeypatch.setattr(theory, "run", lambda n, s, progress: real(n, s, only=["covariance-trace"], formulas=Wrong()))
    monkeypatch.setattr(sys, "argv", ["misvo", "theory", "--policies", "1"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1


def test_a_failing_reward_leaves_what_was_done(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text("calls = []\ndef f(text):\n    calls.append(1)\n    return 1 / (4 - len(calls))\n")
    done = run_shell("steer", "Hello there", "--reward", f"{source}:f", "--save", str(tmp_path / "s"), *QUICK)
    assert done.returncode == 2 and "ZeroDivisionError" in done.stderr and "Traceback" not in done.stderr
    assert len(json.loads((tmp_path / "s" / "result.json").read_text())["candidates"]) == 3


def test_sparkline():
    assert sparkline([0, 1, 7]) == "▁▂█" and sparkline([3, 3]) == "▁▁"
