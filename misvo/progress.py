"""How far a run has come, in one line: at the foot of a terminal, under the cell of a notebook, or as lines of a log.

`misvo.steer(..., progress=...)` and `misvo steer` show the same. Standard output is never written to.
"""

import sys
import threading
import time
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from misvo.errors import MisvoError, short
from misvo.settings import Settings

PATIENCE = 3.0  # seconds after which a run counts as long
REFRESH = 0.25  # seconds between two looks at the line
NARROWEST, WIDEST = 8, 40  # columns of the bar; a shorter one tells nothing
GAP = "  "


class Progress:
    """Step, mean and best reward, KL and time left; of several prompts, steps are counted and figures are means.

    `show`: True shows it at once, as a line for each step where there is no terminal. None shows it in a terminal or a
    notebook alone, once a run turns out to be long. False shows nothing.
    """

    def __init__(self, settings: Settings, prompts: int = 1, show: bool | None = None, console: Console | None = None):
        if show is not None and not isinstance(show, bool):
            raise MisvoError(f"progress is True, False or None, not {short(show)!r}: on_step takes a function.")
        self.settings, self.prompts, self.show = settings, prompts, show
        self.console = console or Console(stderr=True, highlight=False)
        self._rows: dict[int, dict] = {}  # prompt -> its newest trace row
        self._steps = [0] * prompts
        self._tokens = self._tokens_before = 0  # of the step under way, and of all steps before it
        self._started = time.perf_counter()
        self._surface: Surface | None = None
        self._timer: threading.Timer | None = None
        self._closed, self._lock = False, threading.Lock()
        self._notes: list[str] = []  # that could not be shown yet
        self._noted: dict[int, str] = {}  # prompt -> what was said of it last

    def __enter__(self):
        self._started = time.perf_counter()
        if self.show:
            self._open()
        elif self.show is None and _is_watched(self.console):
            self._timer = threading.Timer(PATIENCE, self._open)  # a reward may take longer than this by itself
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_):
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._surface is not None:
                self._surface.close()

    def _open(self):
        with self._lock:
            if not self._closed:
                self._surface = _surface(self, self.console)
                for note in self._notes:
                    self._surface.say(note)

    def tick(self) -> None:
        """Every row has one more token."""
        self._tokens += 1
        if self._surface is not None:
            self._surface.draw()

    def update(self, prompt: int, row: dict | None) -> None:
        """A prompt has a new trace row; with None it is done, maybe before its last step."""
        if row is None:
            self._steps[prompt] = self.settings.steps
            return
        self._rows[prompt] = row
        self._steps[prompt] += 1
        self._tokens_before, self._tokens = self._tokens_before + self._tokens, 0
        place = f"step {row['step']}" if self.prompts == 1 else f"prompt {prompt}, step {row['step']}"
        with self._lock:
            if self._surface is not None:
                self._surface.step(f"{place}: mean {row['mean']:.3f}  best {row['best']:.3f}  KL {row['kl']:.2f}")
            note = row.get("note")
            if note is not None and self._noted.get(prompt) != note:  # what holds for many steps is said once
                self._noted[prompt] = note
                said = f"{place}: {note}"
                self._notes.append(said) if self._surface is None else self._surface.say(said)

    @property
    def share(self) -> float:
        """How much is done, from 0 to 1; of a single prompt, tokens of the step under way count too."""
        done, total = sum(self._steps), self.prompts * self.settings.steps
        one_by_one = self.settings.method != "best-of-n" or self.settings.may_stop
        if self.prompts == 1 and one_by_one and done < total:
            usual = self._tokens_before / done if done else self.settings.max_new_tokens
            done += min(0.95, self._tokens / max(1, usual))
        return done / max(1, total)

    def line(self, width: int, full: str = "━") -> Text:
        """All of it in so many columns: the bar becomes shorter first, then the title goes, then the mean.

        `full` is what the bar is made of.
        """
        rows, share = list(self._rows.values()), self.share
        what = "" if self.prompts == 1 else f" {self.prompts} prompts"
        title, mean, facts = f"Steering{what} with {self.settings.method}", "", []
        facts.append(f"step {sum(self._steps)}/{self.prompts * self.settings.steps}")
        if rows:
            mean = f"mean {_mean(rows, 'mean')}"
            facts += [f"best {_mean(rows, 'best')}", f"KL {_mean(rows, 'kl')}"]
        elapsed = time.perf_counter() - self._started
        facts.append(f"{clock(elapsed * (1 - share) / share)} left" if share else f"{clock(elapsed)} so far")
        told = GAP.join(facts)
        for before in ([title, mean], [mean], []):
            texts = [text for text in (*before, told) if text]
            room = width - len(GAP.join(texts))
            if room >= 0:
                break
        line = Text(GAP.join(texts), no_wrap=True, overflow="ellipsis")
        columns = min(WIDEST, room - len(GAP))
        if columns < NARROWEST:
            return line
        done = round(columns * share)
        return Text.assemble((full * done, "green"), (full * (columns - done), "dim"), GAP, line, no_wrap=True)

    def __rich_console__(self, console, options):
        yield self.line(options.max_width, "-" if options.ascii_only else "━")


class Surface(Protocol):
    """Where progress is shown."""

    def draw(self) -> None: ...  # the line may have changed

    def step(self, line: str) -> None: ...  # a step is done

    def say(self, note: str) -> None: ...  # something that stays

    def close(self) -> None: ...


class Terminal:
    """The last line of a terminal, which goes when the run is done; a thread looks at it now and then."""

    def __init__(self, progress: Progress, console: Console):
        # What a reward prints goes above the line; but where standard output is a file, there and nowhere else.
        options = {"transient": True, "refresh_per_second": 1 / REFRESH, "redirect_stdout": sys.stdout.isatty()}
        self.console, self.live = console, Live(progress, console=console, **options)
        self.live.start(refresh=True)

    def draw(self):
        pass

    def step(self, line):
        pass

    def say(self, note):
        self.console.print(note, style="yellow", markup=False, highlight=False)

    def close(self):
        self.live.stop()


class Cell:
    """A line under the cell of a notebook, written anew in its place; this needs no widgets, as rich's own would."""

    def __init__(self, progress: Progress, width: int = 100):
        from IPython.display import display

        self.progress, self.width, self.drawn = progress, width, time.monotonic()
        self.display = display
        self.handle = display(self._shown(), raw=True, display_id=True)

    def draw(self):
        if time.monotonic() - self.drawn >= REFRESH:
            self.drawn = time.monotonic()
            self.handle.update(self._shown(), raw=True)

    def step(self, line):
        pass

    def say(self, note):
        self.display({"text/plain": note}, raw=True)

    def close(self):
        self.handle.update({"text/plain": ""}, raw=True)

    def _shown(self):
        return {"text/plain": self.progress.line(self.width).plain}


class Log:
    """A line for each step: a file has no use for a bar."""

    def __init__(self, console: Console):
        self.console = console

    def draw(self):
        pass

    def step(self, line):
        print(line, file=self.console.file, flush=True)

    say = step

    def close(self):
        pass


def _surface(progress: Progress, console: Console) -> Surface:
    if console.is_jupyter:
        return Cell(progress)
    return Terminal(progress, console) if console.is_terminal and not console.is_dumb_terminal else Log(console)


def _is_watched(console: Console) -> bool:
    """Whether somebody looks at what a program writes that has not been asked to write. Other threads are servers'."""
    alone = threading.current_thread() is threading.main_thread()
    return alone and (console.is_jupyter or (console.file.isatty() and not console.is_dumb_terminal))


def clock(seconds: float) -> str:
    """3:05 or 1:00:00."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _mean(rows, name) -> str:
    return f"{sum(row[name] for row in rows) / len(rows):.4g}"
