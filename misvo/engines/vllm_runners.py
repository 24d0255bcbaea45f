"""Which rows of vLLM's batch are whose: read from its model runners, between their forward pass and their sampler.

vLLM has two model runners. V1 is the one that this engine chooses; V2 is chosen by `VLLM_USE_V2_MODEL_RUNNER=1`. In
both a row may be a chunk of a prefill, of which no token is wanted, and a row that was preempted comes back with its
response as a part of what is read: only the length of the sequence says where it stands.
"""

from collections.abc import Callable
from typing import Any, Protocol

from misvo.engines.vllm_rows import Ask

ADDRESS = "misvo"  # the key of extra_args under which a row says whose it is


class Runner(Protocol):
    """How rows are found."""

    def asks(self, rows: int) -> list[Ask]:
        """The rows of a call of compute_logits with so many rows that want a token of misvo's."""


def address(sampling_params) -> tuple[str, int] | None:
    """(job, rollout) of a request, None where it is somebody else's."""
    found = ((getattr(sampling_params, "extra_args", None) or {}) if sampling_params is not None else {}).get(ADDRESS)
    return None if found is None else (found[0], int(found[1]))


class RunnerV1:
    def __init__(self, runner: Any):
        self.runner = runner

    def asks(self, rows: int) -> list[Ask]:
        runner, batch = self.runner, self.runner.input_batch
        if rows != batch.num_reqs:  # a dummy run, or log-probabilities of a prompt
            return []
        found = []
        for row, request in enumerate(batch.req_ids):
            whose = address(runner.requests[request].sampling_params)
            if whose is not None and not runner.discard_request_mask.np[row]:  # else a chunk of a prefill
                found.append(Ask(row, *whose, int(runner.optimistic_seq_lens_cpu[row])))
        return found


class RunnerV2:
    """Keeps the address of every slot, and the batch that is being sampled: neither is kept by the runner itself."""

    def __init__(self, runner: Any):
        self.addresses: dict[int, tuple[str, int] | None] = {}
        self.batch: Any = None
        runner.sampler.add_request = self._noting_addresses(runner.sampler.add_request)
        runner.sample = self._noting_batches(runner.sample)

    def asks(self, rows: int) -> list[Ask]:
        batch = self.batch
        if batch is None or batch.num_draft_tokens or rows != batch.num_reqs:  # log-probabilities of a prompt
            return []
        found = []
        for row, slot in enumerate(batch.idx_mapping_np[:rows].tolist()):
            length = int(batch.num_computed_tokens_np[row]) + int(batch.num_scheduled_tokens[row])
            whose = self.addresses.get(slot)
            if whose is not None and length >= int(batch.prefill_len_np[row]):  # else a chunk of a prefill
                found.append(Ask(row, *whose, length))
        return found

    def _noting_addresses(self, add_request: Callable) -> Callable:
        def noting(slot, sampling_params):  # also called when a preempted request comes back, perhaps to another slot
            self.addresses[int(slot)] = address(sampling_params)
            return add_request(slot, sampling_params)

        return noting

    def _noting_batches(self, sample: Callable) -> Callable:
        def noting(hidden_states, input_batch, *rest, **named):
            self.batch = input_batch
            try:
                return sample(hidden_states, input_batch, *rest, **named)
            finally:
                self.batch = None

        return noting


def runner_of(runner: Any) -> Runner:
    """The reader for a model runner of vLLM, told by what it has."""
    return RunnerV1(runner) if hasattr(runner, "discard_request_mask") else RunnerV2(runner)
