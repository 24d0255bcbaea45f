"""What came of a job, as answers: texts, log-probabilities, and what they cost."""

from dataclasses import dataclass

from misvo import selection
from misvo.candidate import Candidate
from misvo.policy import Policy
from misvo.recorder import Recorder
from misvo.result import Result
from misvo.server.errors import ApiError
from misvo.server.jobs import Job, Part
from misvo.text import cut_at_tokens
from misvo.text_policy import Samples


@dataclass(frozen=True)
class Answer:
    """A response that is returned."""

    text: str
    tokens: list[int]
    ended: bool | None
    token_kl: list[float]
    logprobs: list[float] | None  # of the law that it was sampled from
    ref_logprobs: list[float] | None  # of the model as it is
    reward: float | None = None
    step: int | None = None
    rollout: int | None = None
    changed: list[int] | None = None  # positions at which the reference draws another token, with the same noise

    @property
    def finish_reason(self) -> str:
        return "length" if self.ended is False else "stop"


def answers(part: Part, n: int) -> list[Answer]:
    """The n best distinct responses of a run, best first; or the samples, in their order."""
    if isinstance(part.result, Samples):
        return samples(part.result)
    assert isinstance(part.result, Result)
    if n == 1 and part.best is not None:
        return [of_candidate(part.best, part.recorder)]
    return [of_candidate(candidate, part.recorder) for candidate in best(part.result, n)]


def samples(drawn: Samples) -> list[Answer]:
    rollouts = drawn.rollouts
    lengths = rollouts.lengths.tolist()
    changed = None if rollouts.changed is None else rollouts.changed.tolist()

    def rows(table):
        return [row[:length] for row, length in zip(table.tolist(), lengths, strict=True)]

    kl, logprobs, ref = rows(rollouts.kl), rows(rollouts.logprobs), rows(rollouts.ref_logprobs)
    ended = rollouts.ended.tolist() if rollouts.ended is not None else [None] * len(lengths)
    return [
        Answer(
            text,
            tokens,
            ended[i],
            kl[i],
            logprobs[i],
            ref[i],
            changed=None if changed is None else [place for place in range(lengths[i]) if changed[i][place]],
        )
        for i, (text, tokens) in enumerate(zip(drawn.texts, rollouts.responses(), strict=True))
    ]


def pieces_of(policy: Policy, tokens: list[int], text: str) -> list[str]:
    """The pieces of a text, one for each token; those of special tokens are empty."""
    return cut_at_tokens(text, tokens, policy.decode)


def of_candidate(candidate: Candidate, recorder: Recorder | None) -> Answer:
    logprobs, ref_logprobs = None, None
    if recorder is not None and candidate.step in recorder.steps:
        logprobs, ref_logprobs = recorder.logprobs(candidate.step, candidate.rollout, len(candidate.tokens))
    return Answer(
        candidate.text,
        candidate.tokens,
        candidate.ended,
        candidate.token_kl,
        logprobs,
        ref_logprobs,
        candidate.reward,
        candidate.step,
        candidate.rollout,
        candidate.changed,
    )


def rest(text: str, told: str) -> str:
    """What is left of an answer of which a part was told while it was being written."""
    if not text.startswith(told):  # a tokenizer whose texts change behind the last word
        raise ApiError(500, "the text that was streamed is not the answer: ask without stream.", code="stream_broken")
    return text[len(told) :]


def best(result: Result, n: int) -> list[Candidate]:
    """The returned response, then others with other texts: those that read like the model's own, then the rest."""
    scored = [candidate for candidate in result.candidates if candidate.reward is not None]
    if not scored:
        return []
    reference = [c for c in result.candidates if c.step == 0] if result.settings.select == "ordinary" else []
    usual = selection.ordinary(scored, reference) if reference else scored
    rank = {id(candidate) for candidate in usual}
    others = sorted(scored, key=lambda candidate: (id(candidate) not in rank, -(candidate.reward or 0.0)))
    chosen: dict[str, Candidate] = {}
    for candidate in (result.best, *others):
        chosen.setdefault(candidate.text, candidate)
        if len(chosen) == n:
            break
    return list(chosen.values())


def usage(job: Job) -> dict:
    """All tokens that were read and decoded, as OpenAI counts."""
    read, decoded = sum(part.prompt_tokens for part in job.parts), sum(map(_decoded, job.parts))
    return {"prompt_tokens": read, "completion_tokens": decoded, "total_tokens": read + decoded}


def cost(job: Job, given: list[Answer]) -> dict:
    """What `usage` cannot say."""
    runs = [part.result for part in job.parts if isinstance(part.result, Result)]
    return {
        "rollouts": sum(_responses(part) for part in job.parts),
        "reward_calls": sum(len(run.candidates) for run in runs),
        "reward_seconds": sum(row["seconds"].get("reward", 0.0) for run in runs for row in run.trace),
        "answer_tokens": sum(len(answer.tokens) for answer in given),
        "seconds": job.seconds,
    }


def _responses(part: Part) -> int:
    if isinstance(part.result, Result):
        return len(part.result.candidates)
    return 0 if part.result is None else len(part.result.texts)


def _decoded(part: Part) -> int:
    if isinstance(part.result, Result):
        return sum(len(candidate.tokens) for candidate in part.result.candidates)
    return 0 if part.result is None else int(part.result.rollouts.lengths.sum())


def about(job: Job, given: list[Answer], order_seed: int, logprobs: bool) -> dict:
    """The `misvo` object of an answer."""
    told = []
    for answer in given:
        row: dict = {
            "step": answer.step,
            "rollout": answer.rollout,
            "reward": answer.reward,
            "kl": sum(answer.token_kl),
            "tokens": len(answer.tokens),
        }
        if logprobs:
            row["ref_logprobs"] = answer.ref_logprobs
        told.append(row)
    first = job.parts[0]
    extra: dict = {"seed": order_seed, "answers": told, "usage": cost(job, given)}
    if isinstance(first.result, Result) and first.result.trace:
        last = first.result.trace[-1]
        reference = first.result.reference
        extra |= {
            "steps": len(first.result.trace),
            "mean": last["mean"],
            "best": last["best"],
            "kl": last["kl"],
            "reference": reference and {"text": reference.text, "reward": reference.reward},
            "note": last.get("note"),
        }
    elif first.work.steering is not None:
        extra["strength"] = first.work.strength
    return extra


def progress(event: dict, steps: int) -> dict:
    """A step's row, as a stream tells it."""
    row = event["row"]
    tokens = max(1, row["tokens"])
    return {
        "step": row["step"] + 1,
        "steps": steps,
        "mean": row["mean"],
        "best": row["best"],
        "kl": row["kl"],
        "tokens": tokens,
        "seconds_left": event["seconds_left"],
    }


def chat_logprobs(policy: Policy, answer: Answer) -> dict:
    """OpenAI's shape: of the steered policy; the reference's are in `misvo`."""
    pairs = zip(answer.tokens, answer.logprobs or [], strict=False)
    content: list[dict] = [
        {"token": policy.spell(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(policy: Policy, answer: Answer) -> dict:
    """The older shape, of /v1/completions."""
    tokens = [policy.spell(token) for token in answer.tokens]
    offsets, place = [], 0
    for token in tokens:
        offsets.append(place)
        place += len(token)
    return {"tokens": tokens, "token_logprobs": answer.logprobs, "top_logprobs": None, "text_offset": offsets}
