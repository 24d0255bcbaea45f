"""The engine on vLLM: it schedules, caches and runs the body; every token is drawn by misvo's law step in its worker.

`VllmHost` is one vLLM that was started, in this process or in its own; engines on it are cheap and may come and go.
Every rollout is a request of its own to vLLM, and its prompt is read once by prefix caching. What comes back of a
request is at most of the size K×T×d: mean laws and hidden states stay in the worker (`misvo.far`).
"""

import itertools
import os
import pickle
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch

from misvo.engine import Engine, Ticket
from misvo.engines.vllm_loading import start
from misvo.engines.vllm_worker import Taken
from misvo.errors import MisvoError, first_line, short
from misvo.head import Head
from misvo.interventions import Climb, Noise, Vectors
from misvo.model import check_length
from misvo.rollouts import Request, Rollouts

DECODED = (Vectors, Noise, Climb)  # interventions at the head; what changes the body is not vLLM's to run
LOST = "vLLM has died ({}): what it was decoding is lost, and steering again starts it anew."


class VllmHost:
    """One vLLM, and the jobs of all engines on it. Its calls are made one at a time, whatever thread they come from."""

    def __init__(self, options: dict, ends: tuple[int, ...], tokenizer: Any):
        self.options, self.ends, self.tokenizer = options, ends, tokenizer
        self.lock = threading.RLock()
        self.dead: str | None = None  # why there is nobody any more
        self._names = itertools.count(1)
        self._left: dict[str, int] = {}  # rows of each job that vLLM has not finished
        self._over: deque[str] = deque()  # jobs that are finished and were not taken
        self._released: deque[str] = deque()  # records in the worker that nobody holds any more
        self.vllm = start(options)
        try:
            with self._talking():
                self._workers = self._ask_all("install", ends, tokenizer, os.getpid())
                self.head = self._read_head()
        except BaseException:
            self.close()
            raise
        core = self.vllm.engine_core
        if hasattr(core, "outputs_queue"):  # in a process of its own, which may be killed
            threading.Thread(target=_watch, args=(core,), name="misvo-vllm-watch", daemon=True).start()

    @property
    def context_length(self) -> int:
        return self.vllm.vllm_config.model_config.max_model_len

    @property
    def max_rows(self) -> int:
        return self.vllm.vllm_config.scheduler_config.max_num_seqs

    def pids(self) -> list[int]:
        """The processes that vLLM runs in, where they are not this one: its scheduler's, and one for each rank."""
        manager = getattr(getattr(self.vllm.engine_core, "resources", None), "engine_manager", None)
        scheduling = [] if manager is None else [process.pid for process in manager.processes]
        return list(dict.fromkeys(pid for pid in (*scheduling, *self._workers) if pid != os.getpid()))

    def call(self, name: str, *arguments) -> Any:
        """A method of the worker's desk."""
        with self._talking():
            if self._released:
                gone = [self._released.popleft() for _ in range(len(self._released))]
                self._say("release", gone)
            return self._say(name, *arguments)

    def submit(self, request: Request) -> str:
        """Open a job in the worker and hand its rows to vLLM; gives its name."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError

        with self._talking():
            name = f"job {next(self._names)}"
            self.call("open", name, request)
            rows = len(request.rollouts)
            self._left[name] = rows
            try:
                for rollout in range(rows):
                    begun = request.beginning(rollout)
                    read = {"prompt_token_ids": [*request.prompt, *begun]}
                    params = SamplingParams(
                        temperature=0.0,
                        max_tokens=request.max_new_tokens - len(begun),
                        stop_token_ids=list(self.ends),
                        ignore_eos=True,  # ends are those of the policy, whatever vLLM reads in other files
                        detokenize=False,
                        extra_args={"misvo": [name, rollout]},
                    )
                    (prompt,) = self.vllm.renderer.render_cmpl([read])
                    self.vllm.add_request(_row(name, rollout), prompt, params)
            except (ValueError, VLLMClientError) as error:
                self.cancel(name, rows)
                raise MisvoError(f"vLLM does not take this request: {short(first_line(error), 300)}") from error
            return name

    def step(self) -> None:
        """One step of vLLM, for the jobs of all engines."""
        with self._talking():
            if not self._left:
                return
            for output in self.vllm.step():
                name, _, _ = output.request_id.rpartition(".")
                if output.finished and name in self._left:
                    self._left[name] -= 1
                    if self._left[name] == 0:
                        del self._left[name]
                        self._over.append(name)

    def take(self, name: str) -> Rollouts | None:
        """The records of a job, or None while it is under way."""
        with self.lock:
            if name not in self._over:
                return None
            self._over.remove(name)
            taken: Taken = self.call("take", name)
        rollouts = taken.rollouts
        if taken.laws is not None:
            rollouts.mean_probs = FarRecords(self, taken.laws)
        if taken.states is not None:
            rollouts.hidden = FarRecords(self, taken.states)
        return rollouts

    def cancel(self, name: str, rows: int) -> None:
        with self.lock:
            self._left.pop(name, None)
            if name in self._over:
                self._over.remove(name)
            if self.dead is not None:
                return
            try:
                with self._talking():
                    self.vllm.abort_request([_row(name, rollout) for rollout in range(rows)])
                    self.call("cancel", name)
            except MisvoError:
                if self.dead is None:
                    raise
                # It died on the way, as by a Ctrl-C that its processes heard too, and the job with it.

    def release(self, name: str) -> None:
        """Records that nobody holds any more: dropped at the next call, since this may come from anywhere."""
        self._released.append(name)

    def close(self) -> None:
        """End vLLM and its process."""
        self.dead = self.dead or "it was closed"
        self.vllm.engine_core.shutdown()

    def _say(self, name, *arguments):
        return self._ask_all(name, *arguments)[0]

    def _ask_all(self, name, *arguments) -> list:
        """What each rank answers; most calls are answered by the first alone."""
        blobs = self.vllm.collective_rpc("misvo", args=(pickle.dumps((name, arguments)),))
        answers = [pickle.loads(blob) for blob in blobs]
        for well, answer in answers:
            if not well:
                raise MisvoError(answer)
        return [answer for _, answer in answers]

    def _read_head(self) -> Head:
        """W by way of files that are mapped: it may be a gigabyte, and stays on the disk until it is read."""
        with tempfile.TemporaryDirectory(prefix="misvo-") as folder:
            written = self._ask_all("write_head", folder)
            parts = [torch.load(file, mmap=True, weights_only=True) for file, _ in written]
        weights, biases = [part["weight"] for part in parts], [part["bias"] for part in parts]
        if len(parts) == 1:
            return Head(weights[0], biases[0], written[0][1])
        return Head(torch.cat(weights), None if biases[0] is None else torch.cat(biases), written[0][1])

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Say in a sentence that vLLM is not there any more, where that is so."""
        with self.lock:
            if self.dead is not None:
                raise MisvoError(LOST.format(self.dead))
            try:
                yield
            except MisvoError:
                raise
            except Exception as error:  # of vLLM: whatever it was, its scheduler cannot be trusted afterwards
                self.dead = short(first_line(error) or type(error).__name__, 300).rstrip(".")
                self._left.clear()
                self.vllm.engine_core.shutdown()
                raise MisvoError(LOST.format(self.dead)) from error


@dataclass(frozen=True, eq=False)
class FarRecords:
    """Mean laws or hidden states of one request, which the worker keeps for as long as somebody holds this."""

    host: VllmHost
    name: str

    def __post_init__(self):
        finalize(self, self.host.release, self.name)

    def run(self, function: Callable, *arguments) -> Any:
        return self.host.call("run", self.name, function, arguments)


@dataclass
class _Flight:
    """A request under way."""

    name: str
    request: Request
    seconds: float = 0.0


class VllmEngine(Engine):
    """Decodes requests on a vLLM that was started; `max_rows` bounds what is begun, vLLM how much of it runs."""

    def __init__(self, host: VllmHost, max_rows: int):
        self.host, self.head, self.max_rows = host, host.head, max_rows
        self._flying: dict[Ticket, _Flight] = {}
        self._submitted = 0
        self.drawn = 0  # tokens, of all requests that are finished

    @property
    def in_flight(self) -> int:
        """Rows that vLLM has."""
        return self._rows()

    def submit(self, request: Request) -> Ticket:
        if request.adapter is not None:
            raise MisvoError("vLLM runs the model as it is, without an adapter: take engine='torch'.")
        if request.intervention is not None and not isinstance(request.intervention, DECODED):
            kind = type(request.intervention).__name__
            raise MisvoError(f"{kind} changes the body of the model, which vLLM runs: take engine='torch'.")
        check_length("vLLM", self.host.context_length, len(request.prompt), request.max_new_tokens)
        name = self.host.submit(request)
        self._submitted += 1
        self._flying[self._submitted] = _Flight(name, request)
        return self._submitted

    def advance(self) -> list[tuple[Ticket, Rollouts]]:
        """One step of vLLM: a token for every row that it runs, or a part of the prompts that it reads."""
        started = time.perf_counter()
        self.host.step()
        elapsed, rows = time.perf_counter() - started, self._rows()
        finished = []
        for ticket, flight in list(self._flying.items()):
            flight.seconds += elapsed * len(flight.request.rollouts) / rows
            rollouts = self.host.take(flight.name)
            if rollouts is not None:
                del self._flying[ticket]
                rollouts.seconds = flight.seconds
                self.drawn += rollouts.drawn
                finished.append((ticket, rollouts))
        return finished

    def cancel(self, ticket: Ticket) -> None:
        flight = self._flying.pop(ticket, None)
        if flight is not None:
            self.host.cancel(flight.name, len(flight.request.rollouts))

    def room(self, request: Request) -> bool:
        return not self._flying or self._rows() + len(request.rollouts) <= self.max_rows

    def forget(self, prompt: tuple[int, ...]) -> None:
        """Nothing: vLLM's prefix cache lets go of what was not used for longest."""

    @property
    def busy(self) -> bool:
        return bool(self._flying)

    def close(self) -> None:
        for ticket in list(self._flying):
            self.cancel(ticket)

    def _rows(self) -> int:
        return sum(len(flight.request.rollouts) for flight in self._flying.values())


def _row(name: str, rollout: int) -> str:
    return f"{name}.{rollout}"


def _watch(core: Any) -> None:
    """Wake whoever waits for a vLLM process that was killed: its own client would wait for ever."""
    from vllm.v1.engine.exceptions import EngineDeadError

    while not core.resources.engine_dead:
        time.sleep(0.2)
    core.outputs_queue.put_nowait(EngineDeadError())
    for future in list(core.utility_results.values()):
        if not future.done():
            future.set_exception(EngineDeadError())
