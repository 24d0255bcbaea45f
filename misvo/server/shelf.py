"""Saved steerings by name: in memory, and in a folder where the operator gave one. A name is never a path."""

import re
import shutil
import threading
import time

from misvo.errors import MisvoError
from misvo.policy import Policy
from misvo.server.config import Config
from misvo.server.errors import ApiError
from misvo.server.jobs import Job
from misvo.steering import Steering

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Shelf:
    def __init__(self, policy: Policy | None, config: Config):
        self.policy, self.folder, self.most = policy, config.steerings, config.most_steerings
        self._lock = threading.Lock()
        self._saved: dict[str, tuple[Steering, float]] = {}
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.folder.iterdir()):
                if NAME.fullmatch(path.name) and path.is_dir():
                    steering = Steering.from_pretrained(path)
                    if policy is not None:
                        steering.check(policy)
                    self._saved[path.name] = (steering, path.stat().st_mtime)

    def get(self, name: str) -> Steering:
        try:
            return self._saved[name][0]
        except KeyError:
            raise ApiError(404, "there is no steering by this name.", param="steering", code="not_found") from None

    def list(self) -> list[dict]:
        return [self.describe(name) for name in sorted(self._saved)]

    def describe(self, name: str) -> dict:
        steering = self.get(name)
        settings = steering.metadata.get("settings", {})
        return {
            "name": name,
            "positions": len(steering),
            "hidden_size": steering.vectors.shape[1],
            "norm": steering.norm,
            "tie": steering.tie,
            "prompt": steering.metadata.get("prompt"),
            "model": steering.metadata.get("model"),
            "settings": settings,
            "created": int(self._saved[name][1]),
        }

    def save(self, name: str, steering: Steering) -> None:
        """Keep a steering under a name that is free; writes a folder, so not in the event loop."""
        if not NAME.fullmatch(name) or name.endswith("."):
            raise ApiError(
                400, "the name of a steering has up to 64 letters, digits and . _ -, a letter first.", param="name"
            )
        with self._lock:
            if name in self._saved:
                raise ApiError(409, "there is a steering by this name: delete it first.", param="name", code="exists")
            if len(self._saved) >= self.most:
                raise ApiError(409, f"there are {self.most} steerings already: delete one first.", code="full")
            if self.folder is not None:
                steering.save_pretrained(self.folder / name)
            self._saved[name] = (steering, time.time())

    def delete(self, name: str) -> None:
        with self._lock:
            self.get(name)
            del self._saved[name]
            if self.folder is not None:
                shutil.rmtree(self.folder / name)


def steering_of(job: Job) -> Steering:
    """The steering of a run that is over."""
    if not job.over:
        raise ApiError(409, "the run is not over yet.", code="not_over", retry=True)
    steering = getattr(job.parts[0].result, "steering", None) if job.parts else None
    if steering is None:
        raise MisvoError("this run has no steering vectors: its method only chooses among samples, or had no step.")
    return steering
