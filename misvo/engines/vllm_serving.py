"""Finished vectors on an unmodified vLLM server: a logits processor that adds Wu of a steering by its name.

    misvo export RUN --vllm steerings/calm
    MISVO_STEERINGS=steerings python -m vllm.entrypoints.openai.api_server --model MODEL \\
        --logits-processors misvo.engines.vllm_serving:SteeringProcessor

A request says `"vllm_xargs": {"misvo": "calm", "misvo_strength": 0.8}`. Names are those of the folder as it was when
the server started; everything else that begins with misvo is refused, and requests that say nothing of it are left
alone. One class has both interfaces that vLLM knows, that of its first model runner and that of its second.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2

from misvo.errors import MisvoError
from misvo.exported import NamedShift, Shelf, check_strength

FOLDER = "MISVO_STEERINGS"
NAME, STRENGTH = "misvo", "misvo_strength"
# Read once in each process, when the server loads this module, so that all of them know the same names.
SHELF = Shelf(Path(os.environ[FOLDER])) if os.environ.get(FOLDER) else None


@dataclass(frozen=True)
class Asked:
    """What a request wants."""

    name: str
    strength: float


@dataclass(frozen=True)
class _Row:
    shift: NamedShift
    strength: float
    output: list[int]  # its tokens so far, a list that vLLM lets grow


def asked(sampling_params: Any) -> Asked | None:
    """What a request says of steering; refuses everything that is not a name of this server and a strength."""
    given = {key: value for key, value in (sampling_params.extra_args or {}).items() if key.startswith(NAME)}
    if not given:
        return None
    for key in given:
        if key not in (NAME, STRENGTH):
            raise MisvoError(f"there is no {key[:40]!r} to ask for, only {NAME} and {STRENGTH}.")
    if NAME not in given:
        raise MisvoError(f"{STRENGTH} goes with {NAME}, the name of a steering.")
    _shelf().check(given[NAME])
    return Asked(given[NAME], check_strength(given.get(STRENGTH, 1.0)))


class SteeringProcessor(ProcessorV1, ProcessorV2):
    def __init__(self, vllm_config: Any, place: Any, is_pin_memory: bool | None = None):
        """`place` is the device for the first runner, the states of requests for the second."""
        _shelf().check_vocabulary(vllm_config.model_config.get_vocab_size())
        self.states: Any = None if is_pin_memory is not None else place
        self.device = place if is_pin_memory is not None else place.device
        self.rows: dict[int, _Row] = {}  # by index of the batch, or by slot
        self._loaded: dict[str, NamedShift] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        try:
            asked(sampling_params)
        except MisvoError as error:
            raise ValueError(str(error)) from error

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.rows, batch_update, lambda params, _, output: self._row(params, output))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        row = self._row(sampling_params, [])
        if row is None:
            self.rows.pop(int(req_idx), None)  # the slot may have been another one's
        else:
            self.rows[int(req_idx)] = row
        return row is not None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        for index, row, position in self._first() if ctx is None else self._second(ctx):
            shift = row.shift.at(position)
            if shift is not None:
                logits[index].add_(shift, alpha=row.strength)
        return logits

    def _first(self):
        """(row of the logits, what it wants, how many tokens it has) on the first runner."""
        return [(index, row, len(row.output)) for index, row in self.rows.items()]

    def _second(self, ctx):
        """The same on the second, all on the host."""
        lengths, prompts = ctx.seq_lens_upper_bound_np, self.states.prompt_len.np
        slots = enumerate(ctx.idx_mapping_np.tolist())
        return [(i, self.rows[slot], int(lengths[i]) - int(prompts[slot])) for i, slot in slots if slot in self.rows]

    def _row(self, sampling_params, output) -> _Row | None:
        wanted = asked(sampling_params)
        if wanted is None:
            return None
        if wanted.name not in self._loaded:
            self._loaded[wanted.name] = _shelf().load(wanted.name, self.device)
        return _Row(self._loaded[wanted.name], wanted.strength, output)


def _shelf() -> Shelf:
    if SHELF is None:
        raise MisvoError(
            f"start the server with {FOLDER}=FOLDER, where `misvo export RUN --vllm FOLDER/NAME` wrote to."
        )
    return SHELF
