"""What runs inside a vLLM worker: vLLM runs the body, schedules and keeps caches; misvo draws every token.

`LawWorker` is vLLM's `worker_extension_cls`. It wraps the model's `compute_logits`, which gets the states of the rows
that vLLM is about to sample. For rows that carry an address (`extra_args={"misvo": [job, rollout]}`) the whole law step
happens there, and what goes back is −∞ everywhere but at the drawn token, so that vLLM's greedy sampler, its stop
rules and its scheduler carry on. Rows without an address are vLLM's own and are not touched.

One method is called from outside: `misvo(blob)`, with a pickled (name, arguments) and a pickled answer.

Under tensor parallelism every rank does all of this, with its own rows of W (`misvo.sharded`), and comes to the same
tokens; what is answered is the first rank's.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from misvo.engines.vllm_head import head_of
from misvo.engines.vllm_rows import Counts, LawRows, light
from misvo.engines.vllm_runners import runner_of
from misvo.errors import MisvoError
from misvo.interventions import Noise
from misvo.rollouts import Request, Rollouts


@dataclass(frozen=True)
class Taken:
    """A finished job: what is sent of it, and the names under which the rest stays."""

    rollouts: Rollouts
    laws: str | None
    states: str | None


class LawWorker:
    """Methods that vLLM adds to its worker, which has `model_runner`."""

    model_runner: Any
    rank: int
    misvo_desk: "Desk"

    def misvo(self, blob: bytes) -> bytes:
        """Call a method of the desk; what it raises comes back as a sentence, since the worker must live on."""
        name, arguments = pickle.loads(blob)
        try:
            if name == "install":
                self.misvo_desk = Desk(self.model_runner, self.rank, *arguments)
                answer = self.misvo_desk.install()
            else:
                answer = CALLS[name](self.misvo_desk, *arguments)
            return pickle.dumps((True, answer if self.rank == 0 or name in OF_ALL else None))
        except MisvoError as error:  # which all ranks raise, or none
            return pickle.dumps((False, str(error)))
        except Exception as error:
            if name != "install" and self.misvo_desk.head.split:
                _leave(error)
            return pickle.dumps((False, f"the vLLM worker failed at {name} ({type(error).__name__}: {error})"))


class Desk:
    """The worker's side of the engine: open jobs, and records that stay here."""

    def __init__(self, runner: Any, rank: int, ends: tuple[int, ...], tokenizer: Any, driver: int):
        self.rank = rank
        if os.getpid() != driver:
            threading.Thread(target=_end_with, args=(driver,), name="misvo-driver-watch", daemon=True).start()
        self.model = runner.get_model()
        self.plain = self.model.compute_logits
        self.head = head_of(self.model, self.plain)
        self.runner = runner_of(runner)
        self.rows = LawRows(self.head, ends, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
        self.kept: dict[str, Rollouts] = {}

    def install(self) -> int:
        """From now on rows with an address are ours; gives this process."""
        self.model.compute_logits = self.compute_logits
        return os.getpid()

    def compute_logits(self, hidden: torch.Tensor, *rest, **named) -> torch.Tensor:
        asks = self.runner.asks(len(hidden))
        if not asks:
            return self.plain(hidden, *rest, **named)
        if len(asks) == len(hidden):
            logits = torch.full((len(hidden), self.head.vocab_size), -torch.inf, device=hidden.device)
        else:  # other people's requests, or chunks, share the batch
            logits = self.plain(hidden, *rest, **named).float()
        try:
            tokens = self.rows.draw(hidden, asks).to(hidden.device)
        except RuntimeError as error:
            if not self.head.split:
                raise
            _leave(error)
        rows = torch.tensor([ask.row for ask in asks], device=hidden.device)
        logits[rows] = -torch.inf
        logits[rows, tokens] = 0.0
        return logits

    def open(self, name: str, request: Request) -> None:
        intervention = request.intervention
        if isinstance(intervention, Noise):  # the others look where the states are
            intervention = replace(intervention, centre=intervention.centre.to(self.head.device))
        self.rows.open(name, replace(request, intervention=intervention))

    def cancel(self, name: str) -> None:
        self.rows.cancel(name)

    def take(self, name: str) -> Taken:
        """The records of a job that is over; laws and states stay here until they are released.

        States of rows that are decoded in blocks go with them, since blocks are put together over there.
        """
        job = self.rows.take(name)
        rollouts, in_blocks = job.rollouts, job.request.resumable or bool(job.request.beginnings)
        laws = states = None
        if rollouts.mean_probs is not None:
            laws = f"{name} laws"
            self.kept[laws] = replace(rollouts, hidden=None, score_rows=None)
        if rollouts.hidden is not None and not in_blocks:
            states = f"{name} states"
            self.kept[states] = replace(rollouts, mean_probs=None, score_rows=None, fisher_rows=None)
        return Taken(light(rollouts, states=in_blocks), laws, states)

    @torch.no_grad()
    def run(self, name: str, function: Callable, arguments: tuple) -> Any:
        """A function of the head and of records that stayed here."""
        answer = function(self.head, self.kept[name], *arguments)
        return answer.cpu() if isinstance(answer, torch.Tensor) else answer

    def release(self, names: list[str]) -> None:
        for name in names:
            self.kept.pop(name, None)

    def counts(self) -> dict[str, int]:
        """What vLLM asked for since the last call."""
        counts, self.rows.counts = self.rows.counts, Counts()
        return asdict(counts)

    def write_head(self, folder: str) -> tuple[str, float]:
        """W and b, or this rank's part, into a file that the driver maps; gives it, and what multiplies the logits."""
        bias, file = None if self.head.bias is None else self.head.bias.cpu(), f"{folder}/head-{self.rank}.pt"
        torch.save({"weight": self.head.weight.cpu().clone(), "bias": bias}, file)
        return file, self.head.scale


def _leave(error: Exception) -> NoReturn:
    """End this process: where one of several ranks fails alone, the others would wait for it for ever, and so would
    whoever waits for them. That a rank is gone is noticed."""
    print(f"misvo: a rank of vLLM failed ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
    os._exit(1)


def _end_with(driver: int) -> None:
    """End this process when the one that started vLLM is gone, and vLLM with it: it would stay, with all its memory."""
    while _lives(driver):
        time.sleep(1.0)
    os._exit(1)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # dead, and not asked for yet
    except ProcessLookupError:
        return False
    except OSError:  # a system without /proc
        return True


OF_ALL = ("install", "write_head")  # what is answered by every rank
CALLS: dict[str, Callable] = {
    "open": Desk.open,
    "cancel": Desk.cancel,
    "take": Desk.take,
    "run": Desk.run,
    "release": Desk.release,
    "counts": Desk.counts,
    "write_head": Desk.write_head,
}
