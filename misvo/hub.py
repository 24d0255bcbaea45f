"""Where a checkpoint comes from: a folder, the Hugging Face hub, or what this machine has of the hub.

Without a network, transformers tries every file of a checkpoint again and again, for a minute in all. So one request
shows first whether the hub answers at all, and what it showed holds for the whole process. Where nothing answers,
names load from the cache of this machine, or fail at once. A folder asks nobody.
"""

import contextlib
import queue
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock, Thread

from huggingface_hub import constants, is_offline_mode
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, validate_repo_id

from misvo.errors import first_line, said, short

PATIENCE = 5.0  # seconds for the one request, whatever it waits for: a name to be found, a connection, an answer
UNREACHED = (502, 503, 504)  # what a proxy says of a hub that it cannot reach
_alone = Lock()


@dataclass(frozen=True)
class Source:
    """A checkpoint by its name, and why only this machine is asked for it, where that is so."""

    name: str
    barrier: str | None = None
    silent: bool = False  # whether that is because the hub does not answer
    on_hub: bool = False  # whether the hub may be asked

    @property
    def local_files_only(self) -> bool:
        return self.barrier is not None

    @contextlib.contextmanager
    def reading(self):
        """Load inside of this. Not every question of the libraries heeds `local_files_only`, so where the hub is silent
        they are offline for as long as this takes."""
        if not self.on_hub:
            _make_headers()
        with _offline() if self.silent else contextlib.nullcontext():
            yield

    def explain(self, error: BaseException) -> str:
        """Why loading failed, in one line."""
        if self.barrier is not None and _is_absent(error):
            return f"{self.barrier}, and the cache of this machine does not have it"
        if not Path(self.name).exists() and not is_id(self.name):
            return "there is no such folder"
        return short(first_line(error), 240).rstrip(".")


def find(name, local_files_only: bool = False) -> Source:
    """Where to look for a checkpoint. Asks the hub whether it is there, once for the process, where that matters."""
    name = str(name)
    if Path(name).is_dir() or not is_id(name):
        return Source(name)
    if local_files_only:
        return Source(name, "local_files_only was given")
    if is_offline_mode():
        return Source(name, "HF_HUB_OFFLINE is set")
    why = silence(constants.ENDPOINT)
    if why is None:
        return Source(name, on_hub=True)
    return Source(name, f"the hub at {constants.ENDPOINT} does not answer ({why})", silent=True)


def is_id(name: str) -> bool:
    """Whether a name could be one of the hub: `owner/name` or `name`."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@cache
def silence(endpoint: str) -> str | None:
    """Why a hub does not answer; None where it does."""
    heard: queue.Queue[str | None] = queue.Queue()
    # A thread, since looking up a name has no time limit of its own; one that is stuck does not keep a process alive.
    Thread(target=lambda: heard.put(_ask(endpoint)), name="misvo-hub", daemon=True).start()
    try:
        return heard.get(timeout=PATIENCE)
    except queue.Empty:
        return f"nothing came in {PATIENCE:g} s"


def _ask(endpoint: str) -> str | None:
    """One request, by the client that downloads would use, with its proxies and certificates: any answer will do."""
    try:
        status = get_session().head(endpoint, timeout=2 * PATIENCE, follow_redirects=False).status_code
    except Exception as error:  # no name, no route, no certificate, a proxy that refuses: each has errors of its own
        return short(said(error), 100)
    return f"HTTP {status}" if status in UNREACHED else None


@contextlib.contextmanager
def _offline():
    """The libraries of Hugging Face ask nobody."""
    with _alone:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


@cache
def _make_headers():
    """huggingface_hub asks the hub once a process, for the headers of its requests, which programs might have started
    it, and makes headers for files of this machine too. Made offline first, they hold what this machine knows of that.
    The load itself is not offline: other threads may be downloading, and a folder may name an adapter's model.
    """
    with _offline():
        build_hf_headers(token=False)


def _is_absent(error: BaseException | None) -> bool:
    """Whether an error comes of files that this machine does not have."""
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError):
            return True
        error = error.__cause__ or error.__context__
    return False
