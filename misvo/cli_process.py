"""What the process of a command does for itself and a library may not: threads, chatter, warnings, Ctrl-C."""

import gc
import os
import signal
import sys
import warnings
from contextlib import contextmanager

from misvo.threads import use_free_cores


def quiet_libraries(decoding: bool = False) -> None:
    """This process is ours: libraries do not chatter, and there are as many threads as suits us (before torch is
    imported). One that is going to decode looks for free cores while it imports what needs no torch."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    use_free_cores(_import_names_of_transformers if decoding else None)


def _import_names_of_transformers() -> None:
    """Its list of models and its tools; torch comes with the first of its classes that somebody asks for."""
    with _lean_imports():
        import transformers  # noqa: F401


def import_transformers() -> None:
    """Import what decodes."""
    with _lean_imports():
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: F401


@contextmanager
def _lean_imports():
    """Import of transformers without what makes it slow: scikit-learn, SciPy, and the search for garbage.

    Where they are installed, transformers imports them: scikit-learn, with pandas, for a threshold of assisted
    generation, and SciPy's optimisers for losses of object detection, which no command uses. Who imports them later
    finds them. And while modules are imported, Python looks a thousand times for garbage among them, where there is
    none. Together they were more than a third of the way to the first token. All imports of transformers have to come
    this way: what it once found installed, it counts on.
    """
    hidden = [name for name in ("sklearn", "scipy") if name not in sys.modules]
    collecting = gc.isenabled()
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment] # how Python notes that there is no such module
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # what is imported stays, and nobody looks through it again
        if collecting:
            gc.enable()
        for name in hidden:
            del sys.modules[name]


def plain_warnings() -> None:
    """Show what misvo itself warns of as one line, without a file name and code; others warn as they do."""
    usual = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None):
        if file is None and _warned_by().split(".")[0] == "misvo":
            print(f"misvo: {message}", file=sys.stderr, flush=True)
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def _warned_by() -> str:
    """The module that called `warnings.warn`: the place that a warning names is its caller's caller, by stacklevel."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "warnings", "_py_warnings"):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


@contextmanager
def second_ctrl_c_ends():
    """The first Ctrl-C ends the run, which hands over what it has; whoever presses again does not want to wait."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # such as a job that was started with Ctrl-C ignored
        yield
        return

    def first(*_):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, before)
