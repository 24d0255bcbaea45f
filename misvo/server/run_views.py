"""What clients are told of a run: where it stands and what came of it, and its responses as rows."""

from misvo.candidate import Candidate
from misvo.metrics import diversity
from misvo.result import Result
from misvo.server import answers as made
from misvo.server.core import Core
from misvo.server.jobs import Job, Part

HEAVY = ("tokens", "token_kl", "changed")  # one entry for each token: left out of light rows


def state(core: Core, job: Job) -> dict:
    """Where a run stands, and, once it is over, what came of it. `request` is what started it, with its seed."""
    work = job.works[0]
    settings = job.parts[0].settings if job.parts else work.settings
    steps = [event for event in job.events if event["type"] == "step"]
    last = steps[-1]["row"] if steps else None
    per_token = settings.kl_budget_per_token or (last and last.get("kl_budget_per_token"))
    told = {
        "id": job.id,
        "name": job.about.get("name"),
        "state": job.state,
        "created": int(job.created),
        "seconds": job.seconds,
        "seconds_left": steps[-1]["seconds_left"] if steps and not job.over else None,
        "prompt": work.prompt,
        "request": job.about.get("request"),
        "weights": job.about.get("weights", {}),
        "settings": settings.to_dict(),
        "budget": {"per_token": per_token, "per_response": settings.kl_budget},
        "steps_done": len(steps),
        "last": last,
        "events": len(job.events),
        "has_judge": core.config.judge is not None,
        "error": None if job.error is None else job.error.body()["error"],
        "answer": None,
    }
    part = job.parts[0] if job.parts else None
    if part is not None and isinstance(part.result, Result) and part.best is not None:
        result, reference = part.result, part.result.reference
        told["answer"] = row(part.best, part)
        told["reference"] = None if reference is None else row(reference, part)
        told["story"] = part.story
        told["usage"] = made.usage(job) | made.cost(job, [made.of_candidate(part.best, None)])
        told["steering"] = result.steering is not None
        told["kl_ref"] = None if result.kl_ref is None else result.kl_ref.total
    return told


def row(candidate: Candidate, part: Part, light: bool = False) -> dict:
    """A response: what the run knows of it, and measures that cost nothing. A reward that is null was not scored."""
    known = {name: value for name, value in vars(candidate).items() if not light or name not in HEAVY}
    return known | {
        "token_count": len(candidate.tokens),
        "kl": candidate.kl,
        "kl_per_token": candidate.kl_per_token,
        "changed_count": None if candidate.changed is None else len(candidate.changed),
        "distinct": candidate.distinct,
        "diversity": diversity(candidate.text),
        "fluency": part.fluency.get((candidate.step, candidate.rollout)),
    }


def pieces(core: Core, part: Part, candidate: Candidate) -> list[str] | None:
    """The text of a response in pieces, one for each token; None where there is no tokenizer to tell."""
    if core.has_model:
        return made.pieces_of(core.policy, candidate.tokens, candidate.text)
    assert isinstance(part.result, Result)
    known = part.result.pieces if candidate is part.best else []
    return known if len(known) == len(candidate.tokens) else None
