"""Ray: the same chunks on many workers. Ray is imported only when a pool is made, for `--ray`.

One actor per GPU, per as many GPUs as a model is split over, or per wished number of cores; each loads a model once
and asks for no more than one chunk at a time, so chunks go to whoever is free. Ray restarts an actor that is lost and
runs its chunk again; one that does not come back leaves its chunk to the others and a fresh actor takes its place. A
chunk that takes down every worker it is given to is recorded as failed. The driver alone writes.

A worker finds models and rewards for itself: on a cluster, a reward in a file must be at the same path everywhere.
"""

import os
from collections import deque

from misvo.bench.plan import Chunk
from misvo.bench.work import Worker, failures
from misvo.errors import MisvoError, first_line

RESTARTS, TRIES = 3, 3
PASSED_ON = (
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "MISVO_CACHE",
    "PYTHONPATH",
    "MISVO_REQUIRE_SANDBOX",
)


class RayPool:
    """Hands chunks to actors; `run` yields them as they are finished, in any order."""

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 1,
        **options,
    ):
        ray = self._ray = _import_ray(local=address is None)
        variables = {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith("VLLM_")}
        local = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
        try:
            ray.init(
                address=address or "local",
                runtime_env={"env_vars": variables},
                log_to_driver=False,
                logging_level="error",
                **({} if address else local),
                **options,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = address or "this machine"
            raise MisvoError(f"no Ray cluster could be reached at {where} ({first_line(error)})") from error
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        have, needed = (gpus, gpus_per_worker) if gpus else (cpus, cpus_per_worker)
        self.workers = workers or max(1, have // needed)
        needs = {"num_gpus": needed} if gpus else {"num_cpus": needed}
        if self.workers * needed > have:
            ray.shutdown()
            kind = "GPUs" if gpus else "cores"
            wanted = f"{self.workers} workers" + (f" of {needed} {kind} each" if needed > 1 else "")
            raise MisvoError(f"the Ray cluster has {have} {kind}, which is not enough for {wanted}.")
        self._actor = ray.remote(**needs, max_restarts=RESTARTS, max_task_retries=RESTARTS)(_Actor)
        self._actors = [self._actor.remote() for _ in range(self.workers)]

    def run(self, chunks: list[Chunk], on_step):
        """Yield (chunk, outcomes, seconds) as workers finish; steps are not told from afar."""
        ray, errors = self._ray, self._ray.exceptions
        waiting, free, busy = deque((chunk, 0) for chunk in chunks), list(self._actors), {}
        while waiting or busy:
            while waiting and free:
                (chunk, tries), actor = waiting.popleft(), free.pop()
                busy[actor.run.remote(chunk)] = (chunk, tries, actor)
            (ready, *_), _ = ray.wait(list(busy), num_returns=1)
            chunk, tries, actor = busy.pop(ready)
            try:
                outcomes, seconds = ray.get(ready)
            except errors.RayActorError as error:  # lost for good, after Ray's own restarts
                self._actors.remove(actor)
                actor = self._actor.remote()
                self._actors.append(actor)
                free.append(actor)
                if tries + 1 < TRIES:
                    waiting.append((chunk, tries + 1))
                    continue
                outcomes, seconds = failures(chunk, error), 0.0
            except errors.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, Exception) else error
                raise cause if isinstance(cause, MisvoError) else MisvoError(f"a worker failed: {cause}") from error
            else:
                free.append(actor)
            yield chunk, outcomes, seconds

    def pids(self) -> list[int]:
        """The process ids of the actors."""
        return self._ray.get([actor.pid.remote() for actor in self._actors])

    def close(self):
        self._ray.shutdown()


def _import_ray(local: bool):
    """A cluster of this machine alone listens on loopback only; Ray decides that when it is imported."""
    if local:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # its switch for that, whatever its name says
    try:
        import ray
    except ImportError as error:
        raise MisvoError("--ray needs the package ray: pip install 'misvo[bench]'") from error
    return ray


class _Actor:
    def __init__(self):
        self.worker = Worker()

    def run(self, chunk: Chunk):
        return self.worker.timed(chunk)

    def pid(self) -> int:
        return os.getpid()
