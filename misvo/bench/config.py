"""A sweep as a sparse TOML file: models × tasks × methods × seeds, resolved and checked once. Imports no torch.

    seeds = [42, 1340]
    judge = "gemma3-270m"         # reads what was returned: fluency
    held_out = "length:40"        # a reward that takes no part in steering, of what was returned
    [settings]                    # fields of misvo.Settings, for every cell
    rollouts = 16
    [[models]]
    path = "smollm2-135m"         # an embedded name, a Hugging Face id or a folder
    engine = "vllm"               # what decodes; engine_options = {max_model_len = 4096} are vLLM's own
    [[tasks]]
    name = "shp"
    first = 100                   # leave out the rows before this one, counted from 0
    longest = 150                 # leave out prompts of more tokens, in those of the first model
    prompts = 8                   # of what is left, drawn by sample_seed; the first ones where that is not given
    more_data = "more.jsonl"      # prompts of another file before these, all of them
    more_prompts = 8              # only the first ones of that file
    [[methods]]
    method = "misvo"              # with any other field of misvo.Settings
    tasks = ["shp"]               # only on these; `models` likewise
    prompts = 4                   # only on the first ones of each task

Settings of a cell are those of [settings], then of its task, its model, its method: the last one wins. Those that cells
share go to the methods that have them; a method is refused options that it does not have.
"""

import difflib
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from misvo.errors import MisvoError
from misvo.fields import one_of
from misvo.names import ENGINES
from misvo.settings import LOAD_OPTIONS, Settings, options_of

SETTINGS = ["preset", *(field.name for field in fields(Settings) if field.name != "seed")]


@dataclass(frozen=True)
class Model:
    path: str
    label: str = ""
    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    quantize: str | None = None
    compile: bool = False
    engine: str = "torch"
    engine_options: dict = field(default_factory=dict)  # of vLLM
    settings: dict = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """How many of them it is split over, where there are any."""
        return self.engine_options.get("tensor_parallel_size", 1)

    def load(self):
        from misvo.policy import Policy

        options = {name: getattr(self, name) for name in LOAD_OPTIONS} | self.engine_options
        if self.engine == "vllm":  # in the worker's own process, so that neither outlives the other
            options.setdefault("own_process", False)
        return Policy.from_pretrained(self.path, **options)

    def tokenizer(self):
        from transformers import AutoTokenizer

        from misvo import embedded, hub

        folder = embedded.model_folder(self.path) if self.path in embedded.MODELS else self.path
        source = hub.find(folder)
        options = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        try:
            with source.reading():
                return AutoTokenizer.from_pretrained(folder, local_files_only=source.local_files_only, **options)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise MisvoError(f"no tokenizer could be loaded from {self.path!r} ({source.explain(error)})") from error


@dataclass(frozen=True)
class TaskEntry:
    name: str
    label: str = ""
    data: str | None = None
    more_data: str | None = None
    more_prompts: int | None = None
    first: int = 0
    longest: int | None = None
    prompts: int | None = None
    sample_seed: int | None = None
    reward: str | None = None
    own_prompts: bool = False  # where the file is absent, use a few prompts of misvo's own in its place
    settings: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    label: str
    settings: dict
    tasks: tuple[str, ...] | None = None  # labels of the only tasks that it runs on
    models: tuple[str, ...] | None = None
    prompts: int | None = None  # only the first ones of each task


@dataclass(frozen=True)
class Cell:
    """One model, task and method, with the settings that they add up to (the seed is the job's)."""

    model: Model
    task: TaskEntry
    method: Method
    settings: Settings


@dataclass(frozen=True)
class Config:
    models: tuple[Model, ...]
    tasks: tuple[TaskEntry, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...] = (0,)
    settings: dict = field(default_factory=dict)
    name: str = "run"
    encoder: str = "auto"
    judge: str | None = None  # a causal LM that judges fluency
    held_out: str | None = None  # a reward that no method sees
    save_vectors: bool = False
    prompts_per_batch: int = 4
    warmup: int = 0  # prompts that `misvo profile` runs and forgets

    def cells(self) -> list[Cell]:
        """Every cell, methods innermost, so that a sweep that is cut short can be compared."""
        return [
            Cell(model, task, method, self._settings(model, task, method))
            for model in self.models
            for task in self.tasks
            for method in self.methods
            if (method.tasks is None or task.label in method.tasks)
            and (method.models is None or model.label in method.models)
        ]

    def _settings(self, model, task, method) -> Settings:
        shared = {"kl_ref": True, **self.settings, **task.settings, **model.settings}
        try:
            own = ["preset", *options_of(method.settings.get("method", shared.get("method", Settings.method)))]
            shared = {name: value for name, value in shared.items() if name in own}
            return Settings.from_preset(**{**shared, **method.settings})
        except MisvoError as error:
            raise MisvoError(f"in the cell {model.label} × {task.label} × {method.label}: {error}") from error


def read(path, data: dict[str, str] | None = None) -> Config:
    """The config in a TOML file; `data` maps a task's label (or "" for the first task) to a file of prompts."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MisvoError(f"there is no config file {path}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MisvoError(f"{path} is not TOML: {error}.") from error
    return from_dict({"name": path.stem, **raw}, folder=path.parent, data=data)


def from_dict(raw: dict, folder=Path(), data: dict[str, str] | None = None) -> Config:
    raw = dict(raw)
    models = tuple(_model(entry) for entry in _tables(raw, "models"))
    tasks = tuple(_task(entry, folder) for entry in _tables(raw, "tasks"))
    methods = tuple(_method(entry) for entry in _tables(raw, "methods"))
    _known("the config", raw, Config)
    settings = raw.pop("settings", {})
    _check_settings("[settings]", settings)
    seeds = tuple(raw.pop("seeds", (0,)))
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise MisvoError("seeds must be a list of different whole numbers of at least 0.")
    for name in ("prompts_per_batch", "warmup"):
        if name in raw and (type(raw[name]) is not int or raw[name] < (name != "warmup")):
            raise MisvoError(f"{name} must be a whole number, not {raw[name]!r}.")
    for name, example in (("judge", "gemma3-270m"), ("held_out", "length:40")):
        if name in raw and not (isinstance(raw[name], str) and raw[name]):
            raise MisvoError(f"{name} must be a text such as {example!r}, not {raw[name]!r}.")
    tasks = _with_data(tasks, data or {})
    for kind, entries in (("models", models), ("tasks", tasks), ("methods", methods)):
        labels = [entry.label for entry in entries]
        for label in labels:
            if labels.count(label) > 1:
                raise MisvoError(f"two {kind} are called {label!r}: give them a label each.")
    for method in methods:
        for kind, wished, entries in (("task", method.tasks, tasks), ("model", method.models, models)):
            for label in wished or ():
                _among(f"{kind} of the method {method.label}", label, [entry.label for entry in entries])
    config = Config(models, tasks, methods, seeds, settings, **raw)
    if not config.cells():  # this also checks the settings of every cell
        raise MisvoError("the config has no cell: every method is kept from every task or model.")
    return config


def _tables(raw, name) -> list[dict]:
    entries = raw.pop(name, None)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise MisvoError(f"the config needs at least one [[{name}]] table.")
    return entries


def _model(entry):
    _known("[[models]]", entry, Model)
    if "path" not in entry:
        raise MisvoError("each [[models]] table needs a path: an embedded name, a Hugging Face id or a folder.")
    _check_settings("settings of [[models]]", entry.get("settings", {}))
    one_of("engine", entry.get("engine", "torch"), ENGINES)
    if entry.get("engine_options") and entry.get("engine") != "vllm":
        raise MisvoError('engine_options of [[models]] goes with engine = "vllm".')
    return Model(**{**entry, "label": entry.get("label") or Path(entry["path"]).name})


def _task(entry, folder):
    from misvo.tasks import TASKS

    _known("[[tasks]]", entry, TaskEntry)
    if "name" not in entry:
        raise MisvoError(f"each [[tasks]] table needs a name: {', '.join(TASKS)}.")
    _among("task", entry["name"], TASKS)
    _check_settings("settings of [[tasks]]", entry.get("settings", {}))
    for name, least in (("first", 0), ("longest", 1), ("more_prompts", 1)):
        if name in entry:
            _check_whole(f"{name} of [[tasks]]", entry[name], least)
    if "more_prompts" in entry and "more_data" not in entry:
        raise MisvoError("more_prompts of [[tasks]] goes with more_data.")
    files = {name: _beside(entry.get(name), folder) for name in ("data", "more_data")}
    return TaskEntry(**{**entry, **files, "label": entry.get("label") or entry["name"]})


def _beside(file, folder):
    """A file of prompts from here, or from beside the config."""
    return str(folder / file) if file and not Path(file).is_file() and (folder / file).is_file() else file


def _method(entry):
    entry = dict(entry)
    label, tasks, models, prompts = (entry.pop(name, None) for name in ("label", "tasks", "models", "prompts"))
    _check_settings("[[methods]]", entry, ["label", "tasks", "models", "prompts"])
    if prompts is not None:
        _check_whole("prompts of [[methods]]", prompts, 1)
    name, cost = entry.get("method", Settings.method), entry.get("cost", Settings.cost)
    if label is None and name == "misvo":
        label = entry.get("preset") or (f"{name}/{cost}" if cost != Settings.cost else None)
    label = label or name
    return Method(label, entry, tasks and tuple(tasks), models and tuple(models), prompts)


def _with_data(tasks, data):
    """The tasks with the files given on the command line in place of their own.

    A file without a label is for the first task, and for all that ask for the same file as that one.
    """
    files = dict(data)
    if "" in files:
        path, asked = files.pop(""), tasks[0].data
        same = [task.label for task in tasks if task is tasks[0] or (asked is not None and task.data == asked)]
        files = dict.fromkeys(same, path) | files
    for label, path in files.items():
        _among("task", label, [task.label for task in tasks])
        if not Path(path).is_file():
            raise MisvoError(f"there is no file {path} to read prompts from.")
    return tuple(
        TaskEntry(**{**vars(task), "data": files.get(task.label, task.data)}) if task.label in files else task
        for task in tasks
    )


def _known(where, entry, kind):
    for name in entry:
        _among(f"key of {where}", name, [field.name for field in fields(kind)])


def _check_whole(what, value, least):
    if type(value) is not int or value < least:
        raise MisvoError(f"{what} must be a whole number of at least {least}, not {value!r}.")


def _check_settings(where, entry, more=()):
    for name in entry:
        _among(f"setting of {where}", name, [*SETTINGS, *more])


def _among(what, name, known):
    if name not in known:
        close = difflib.get_close_matches(str(name), list(known), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(known)}."
        raise MisvoError(f"unknown {what} {name!r}: {hint}")
