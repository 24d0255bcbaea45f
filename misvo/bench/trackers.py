"""`report_to`: finished rows to TensorBoard, Weights & Biases or Trackio. Each is imported only when asked for."""

import importlib
from pathlib import Path

from misvo.errors import MisvoError


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, folder: Path, resolved: dict):
        _need("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict, step: int):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self):
        self.writer.close()


class Wandb:
    """A run of wandb; Trackio has the same calls."""

    package = "wandb"

    def __init__(self, folder: Path, resolved: dict):
        self.module = _need(self.package)
        self.module.init(project="misvo", name=resolved["name"], config=resolved)

    def log(self, values: dict, step: int):
        self.module.log({**values, "row": step})

    def close(self):
        self.module.finish()


class Trackio(Wandb):
    package = "trackio"


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def open_trackers(names, folder: Path, resolved: dict) -> list:
    for name in names:
        if name not in TRACKERS:
            raise MisvoError(f"unknown report_to {name!r}: choose among {', '.join(TRACKERS)}.")
    return [TRACKERS[name](folder, resolved) for name in names]


def scalars(row: dict, mean: float) -> dict:
    """What is logged of a row; `mean` is the cell's mean reward so far."""
    where = "/".join((row["model"], row["task"], row["method"]))
    values = {"reward": row["reward"], "mean_reward": mean, "diversity": row["diversity"], "kl": row["kl"]}
    values |= {name: row[name] for name in ("coherence", "fluency", "held_out", "norm", "kl_ref")}
    values["seconds"] = row["seconds"]["wall"]
    return {f"{where}/{name}": value for name, value in values.items() if value is not None}


def _need(package):
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MisvoError(f"report_to {package} needs the package: pip install {package}") from error
