"""The worker: holds one model and its rewards, and turns chunks into rows. The same in this process and on Ray."""

import hashlib
import time
from dataclasses import dataclass, replace

from misvo import tasks
from misvo.bench.environment import PeakMemory
from misvo.bench.plan import KEY, Chunk
from misvo.errors import short
from misvo.freed import give_back


@dataclass
class Outcome:
    """One finished prompt: its row, its responses, and its steering where it has one."""

    row: dict
    candidates: list[dict]
    steering: object = None


class Worker:
    def __init__(self):
        self._model, self._policy, self._rewards = None, None, {}

    def run(self, chunk: Chunk, on_step=None) -> list[Outcome]:
        """Steer the prompts of a chunk together; if that fails, one by one, so that only the guilty one is lost."""
        policy, reward = self.policy(chunk.cell.model), self.reward(chunk.reward)
        try:
            return _steer(policy, reward, chunk, range(len(chunk.rows)), on_step)
        except Exception as error:
            if len(chunk.rows) == 1:
                return [_failure(chunk, 0, error)]
        outcomes = []
        for index in range(len(chunk.rows)):
            try:
                outcomes += _steer(policy, reward, chunk, [index], on_step)
            except Exception as error:
                outcomes.append(_failure(chunk, index, error))
        return outcomes

    def timed(self, chunk: Chunk, on_step=None) -> tuple[list[Outcome], float]:
        """`run`, and the seconds that it took; loading what it needs is not the chunk's time."""
        self.policy(chunk.cell.model), self.reward(chunk.reward)
        started = time.perf_counter()
        outcomes = self.run(chunk, on_step)
        seconds = time.perf_counter() - started
        give_back()
        return outcomes, seconds

    def policy(self, model):
        """The model, loaded once; another one takes its place, since two may not fit."""
        if self._model != model:
            self._policy = None
            self._model, self._policy = model, model.load()
        return self._policy

    def reward(self, spec: str):
        if spec not in self._rewards:
            self._rewards[spec] = tasks.load_reward(spec)
        return self._rewards[spec]


def _steer(policy, reward, chunk, indices, on_step) -> list[Outcome]:
    from misvo.calls import steer_many

    rows = [chunk.rows[index] for index in indices]
    settings = replace(chunk.cell.settings, seed=chunk.seed)
    started, worked = time.perf_counter(), time.process_time()
    with PeakMemory(policy.device) as peak:
        results = steer_many(
            policy,
            [row.prompt for row in rows],
            reward,
            columns=[row.columns for row in rows],
            on_step=on_step,
            settings=settings,
            progress=False,  # a sweep has a bar of its own
        )
    clocks = {  # the share of each prompt; CPU time is that of all threads of this process, whoever else is at work
        "wall": (time.perf_counter() - started) / len(rows),
        "cpu": (time.process_time() - worked) / len(rows),
    }
    return [
        _outcome(policy, chunk.keys[index], result, clocks, peak.bytes)
        for index, result in zip(indices, results, strict=True)
    ]


def _outcome(policy, key, result, clocks, peak) -> Outcome:
    from misvo.metrics import diversity

    name, settings = dict(zip(KEY, key, strict=True)), result.settings
    best, raw, trace, steering = result.best, _raw_best(result), result.trace, result.steering
    row = {
        **name,
        "prompt_text": result.prompt,
        "reward": best.reward,
        "best": _place(best),
        "raw_best": {**_place(raw), "reward": raw.reward, "diversity": diversity(raw.text)},  # whatever select says
        "reference": result.reference and {**_place(result.reference), "reward": result.reference.reward},
        "diversity": diversity(best.text),
        "coherence": None,  # the writer has the encoder, the judge and the held-out reward
        "fluency": None,
        "held_out": None,
        "reference_rewards": _reference_rewards(result),
        "norm": steering.norm if steering is not None else (trace[-1]["norm"] or None),
        "kl_ref": None if result.kl_ref is None else result.kl_ref.total,
        "kl_ref_per_position": None if result.kl_ref is None else result.kl_ref.per_position,
        "kl": trace[-1]["kl"],
        "kl_per_token": trace[-1]["kl"] * settings.rollouts / trace[-1]["tokens"],  # of the last step, too
        "kl_per_position": trace[-1]["kl_per_position"],  # of the last step; the trace keeps totals
        "trace": [{k: v for k, v in step.items() if k not in ("kl_per_position", "seconds")} for step in trace],
        "responses": len(result.candidates),
        "unscored": sum(step["unscored"] for step in trace),
        "prompt_tokens": len(result.prompt_ids),
        "tokens": sum(step["tokens"] for step in trace),
        "vectors_sha256": None if steering is None else _digest(steering.vectors),
        "seconds": {**stage_seconds(result), **clocks, "steps": [sum(step["seconds"].values()) for step in trace]},
        "peak_memory": peak,
        "state_bytes": _state_bytes(policy, result),
    }
    candidates = [{**name, **vars(candidate), "kl": candidate.kl} for candidate in result.candidates]
    for candidate in candidates:
        del candidate["token_kl"]  # 1.6 times as large as all the rest
    return Outcome(row, candidates, steering)


def _state_bytes(policy, result) -> int:
    """What has to be kept of a prompt to sample from its policy again: free vectors, an adapter or a value network."""
    from misvo.adapted import adapted_model
    from misvo.tie import TIES

    if result.settings.method == "lora":
        return adapted_model(policy, None, result.settings).adapter_bytes
    if result.value is not None:
        return sum(tensor.nbytes for tensor in result.value.state_dict().values())
    if result.steering is None:
        return 0  # the model as it is
    length, width = result.steering.vectors.shape
    return TIES[result.steering.tie](length).size * width * result.steering.vectors.itemsize


def _place(candidate) -> dict:
    return {"step": candidate.step, "rollout": candidate.rollout, "text": candidate.text}


def _raw_best(result):
    """The highest reward that was seen, also where `select` passes it over."""
    return max((c for c in result.candidates if c.reward is not None), key=lambda candidate: candidate.reward)


def _reference_rewards(result) -> dict | None:
    """Mean and deviation of the rewards of responses that the reference policy gave; None where it gave none."""
    from misvo.metrics import spread

    settings, reference = result.settings, result.reference
    if reference is None or reference.step != 0:  # the first step was steered
        return None
    steps = settings.steps if settings.method == "best-of-n" else max(1, settings.collecting_steps)
    return vars(spread(c.reward for c in result.candidates if c.step < steps and c.reward is not None))


def stage_seconds(result) -> dict[str, float]:
    """The time of a run by what it went into, over all steps."""
    sums = {stage: sum(row["seconds"][stage] for row in result.trace) for stage in ("decode", "reward", "update")}
    return {"prefill": result.prefill_seconds, **sums}


def failures(chunk: Chunk, error: Exception) -> list[Outcome]:
    """The whole chunk failed, with its worker."""
    return [_failure(chunk, index, error) for index in range(len(chunk.rows))]


def _failure(chunk, index, error) -> Outcome:
    message = short(f"{type(error).__name__}: {error}", 2000)
    return Outcome({**dict(zip(KEY, chunk.keys[index], strict=True)), "error": message}, [])


def _digest(vectors) -> str:
    return hashlib.sha256(vectors.contiguous().numpy().tobytes()).hexdigest()
