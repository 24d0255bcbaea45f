"""Progress as people see it: in a real terminal (a pty), in 60 columns, in a notebook, in a log, and not at all."""

import io
import os
import re
import sys
import threading
import time
import types

import pytest
from conftest import letter_reward, make_model, make_policy, make_tokenizer
from rich.console import Console
from transformers.utils import logging

import misvo
from misvo import progress as module
from misvo.progress import Progress, clock

QUICK = {"rollouts": 3, "steps": 2, "max_new_tokens": 5, "preset": "paper"}


def row(step, mean=0.5, best=0.75, kl=1.25, **more):
    return {"step": step, "mean": mean, "best": best, "kl": kl, **more}


def halfway(method="misvo", prompts=1, **figures):
    """After 4 of 16 steps, which took 10 seconds."""
    progress = Progress(misvo.Settings(method, steps=16), prompts, show=False)
    for step in range(4):
        progress.update(0, row(step, **figures))
    progress._started = time.perf_counter() - 10.0
    return progress


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize("figures", [{}, {"mean": -1234.5678, "best": -1.5e-7, "kl": 1234.5678}])
def test_the_line_fits_and_tells_what_matters(width, figures):
    text = halfway(**figures).line(width).plain
    best, kl = (f"{(row(0, **figures))[name]:.4g}" for name in ("best", "kl"))
    assert len(text) <= width and "step 4/16" in text and f"best {best}  KL {kl}" in text
    assert text.endswith("0:30 left")  # 10 s for 4 steps, so 30 s for 12
    bar = text.count("━")
    assert bar == 0 or 8 <= bar <= 40
    assert ("Steering with misvo" in text) == (width >= 80) and (bar > 0 or width < 120)


def test_the_bar_goes_before_any_figure_and_shows_the_share():
    """Columns are taken away one by one: the bar has all that is too much, and the title stays as long as it can."""
    seen = [halfway().line(width) for width in range(120, 40, -1)]
    bars = [line.plain.count("━") for line in seen]
    assert bars[0] == 40 and bars[0] >= max(bars)
    done = seen[0].spans[0]
    assert done.end - done.start == 10 and str(done.style) == "green"  # a quarter of 40
    full = next(line.plain for line in seen if "━" not in line.plain)
    assert full == "Steering with misvo  mean 0.5  step 4/16  best 0.75  KL 1.25  0:30 left"


def test_sixty_columns_of_a_terminal():
    stream = io.StringIO()
    console = Console(width=60, force_terminal=True, file=stream)
    with Progress(misvo.Settings(steps=16), show=True, console=console) as progress:
        for step in range(4):
            progress.update(0, row(step, note="all equal [x]" if step else None) if step else row(step))
        progress._started = time.perf_counter() - 10.0
        progress._surface.live.refresh()
    lines = re.split(r"[\r\n]|\x1b\[\d*[A-Za-ln-z]", stream.getvalue())
    shown = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in lines]
    assert max(map(len, shown)) <= 60
    assert any("step 4/16  best 0.75  KL 1.25  0:30 left" in line for line in shown)
    assert shown.count("step 1: all equal [x]") == 1 and not any("step 2: all" in line for line in shown)  # said once


def test_time_left_counts_tokens_of_the_step_under_way():
    progress = Progress(misvo.Settings(steps=4, max_new_tokens=100), show=False)
    assert progress.share == 0 and "so far" in progress.line(80).plain
    for _ in range(50):
        progress.tick()
    assert progress.share == pytest.approx(0.5 / 4)  # half of the longest response
    progress.update(0, row(0))
    for _ in range(25):
        progress.tick()
    assert progress.share == pytest.approx(1.5 / 4)  # steps turned out to take 50
    progress.update(0, None)
    assert progress.share == 1.0  # stopped early
    together = Progress(misvo.Settings("best-of-n", steps=4), show=False)
    together.tick()
    assert together.share == 0  # all steps decode at once


def test_many_prompts_are_counted_and_averaged():
    progress = Progress(misvo.Settings(steps=2), prompts=3, show=False)
    progress.update(0, row(0, best=1.0))
    progress.update(2, row(0, best=2.0))
    assert "Steering 3 prompts with misvo" in (text := progress.line(120).plain) and "step 2/6  best 1.5  KL" in text


class Pty:
    """A real terminal: what is written to `stream` can be read back."""

    def __init__(self):
        self.reader, writer = os.openpty()
        self.stream = os.fdopen(writer, "w", encoding="utf-8")
        os.set_blocking(self.reader, False)

    def read(self):
        self.stream.flush()
        try:
            return os.read(self.reader, 1 << 20).decode()
        except BlockingIOError:
            return ""


@pytest.fixture
def terminal(monkeypatch):
    """Tests make it their standard error themselves: pytest puts its own there after fixtures."""
    pty = Pty()
    for name in ("TERM", "COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield pty
    pty.stream.close()
    os.close(pty.reader)


def slow(completions, **_):
    time.sleep(0.3)
    return letter_reward(completions)


@pytest.mark.parametrize(
    ("progress", "patience", "shown"), [(True, 9, True), (None, 0.1, True), (None, 9, False), (False, 0.0, False)]
)
def test_in_a_terminal(policy, terminal, monkeypatch, progress, patience, shown):
    """A bar at once, or while a reward takes its time, or none; the same result in any case."""
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr(module, "PATIENCE", patience)
    result = misvo.steer(policy, "a b", slow, **QUICK, progress=progress)
    text = terminal.read()
    assert ("step 1/2" in text and "left" in text) if shown else text == ""
    assert [c.tokens for c in result.candidates] == [
        c.tokens for c in misvo.steer(policy, "a b", letter_reward, **QUICK, progress=False).candidates
    ]
    assert threading.active_count() < 10 and not any(isinstance(t, threading.Timer) for t in threading.enumerate())


def test_standard_output_stays_where_it_is(policy, terminal, capsys, monkeypatch):
    """What a reward prints belongs to the file that standard output is, not to the terminal of the bar."""

    def talks(completions, **_):
        print("said by the reward")
        return letter_reward(completions)

    monkeypatch.setattr(sys, "stderr", terminal.stream)
    misvo.steer(policy, "a b", talks, **QUICK, progress=True)
    assert capsys.readouterr().out == "said by the reward\n" * 2
    assert "step 0/2" in (text := terminal.read()) and "said by" not in text


def test_a_log_has_lines_where_they_are_wished_for_and_nothing_else(policy, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in CI: rich then takes a file for a terminal
    for progress, lines in ((None, 0), (False, 0)):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        misvo.steer_many(policy, ["a b", "c"], slow, **QUICK, progress=progress)
        assert stream.getvalue().count("\n") == lines
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    results = misvo.steer_many(policy, ["a b", "c"], letter_reward, **QUICK, progress=True)
    lines = stream.getvalue().splitlines()
    for index, result in enumerate(results):
        for known in result.trace:
            assert (
                f"prompt {index}, step {known['step']}: mean {known['mean']:.3f}  best {known['best']:.3f}  KL "
                + (f"{known['kl']:.2f}")
                in lines
            )
    assert len(lines) == 4


def test_a_thread_of_a_server_is_not_watched(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    seen = []

    def serve():
        with Progress(misvo.Settings()) as progress:
            time.sleep(0.05)
            seen.append(progress._surface)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert seen == [None] and terminal.read() == ""
    serve()  # the same in the main thread
    assert seen[1] is not None and "step 0/16" in terminal.read()


def test_in_a_notebook_a_line_is_written_anew_in_its_place(monkeypatch):
    """By IPython's display protocol: one output with an id, which is updated; no widgets."""
    sent = []

    class Handle:
        def update(self, data, raw):
            sent.append(("update", data["text/plain"]))

    def display(data, raw, display_id=None):
        sent.append(("display" if display_id else "say", data["text/plain"]))
        return Handle() if display_id else None

    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr(module, "REFRESH", 0.0)
    console = Console(force_jupyter=True, file=io.StringIO())
    with Progress(misvo.Settings(steps=4), show=True, console=console) as progress:
        progress.update(0, row(0, note="odd"))
        progress.tick()
    assert [kind for kind, _ in sent] == ["display", "say", "update", "update"]
    assert sent[1][1] == "step 0: odd" and "step 1/4  best 0.75" in sent[2][1] and sent[3][1] == ""


def test_progress_is_not_a_function(policy):
    with pytest.raises(misvo.MisvoError, match=r"progress is True, False or None, not '.*': on_step takes a function"):
        misvo.steer(policy, "a b", letter_reward, **QUICK, progress=print)


@pytest.mark.parametrize("verbosity", [logging.WARNING, logging.ERROR])
def test_bars_of_other_libraries(tmp_path, monkeypatch, verbosity):
    """A user's own load has the bar of transformers; under the command line, which wants errors alone, it has none."""
    make_model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    before = logging.get_verbosity()
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    logging.set_verbosity(verbosity)
    try:
        misvo.Policy.from_pretrained(tmp_path)
    finally:
        logging.set_verbosity(before)
    assert ("Loading weights" in stream.getvalue()) == (verbosity == logging.WARNING)
    assert logging.is_progress_bar_enabled()


def test_an_embedded_model_loads_in_silence(capfd):
    misvo.Policy.from_pretrained("smollm2-135m")
    assert capfd.readouterr() == ("", "")


def test_clock():
    assert [clock(s) for s in (-1, 5.4, 65, 3600)] == ["0:00", "0:05", "1:05", "1:00:00"]


def test_steps_of_a_real_run_are_those_of_the_line():
    policy, lines = make_policy(), []
    real = Progress.update

    def spy(self, prompt, new):
        real(self, prompt, new)
        lines.append(self.line(80).plain)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "update", spy)
        result = misvo.steer(policy, "a b", letter_reward, **QUICK)
    assert len(lines) == 3  # two steps and the end
    for line, known in zip(lines, result.trace, strict=False):
        assert f"step {known['step'] + 1}/2  best {known['best']:.4g}  KL {known['kl']:.4g}" in line
