"""What an operator decides about a server: limits, doors, how long things are kept. Imports no torch, no fastapi."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from misvo.errors import MisvoError


@dataclass(frozen=True)
class Limits:
    """How much one request, and all of them together, may ask for. Work is counted in tokens: K·N·T."""

    queue: int = 64  # requests that run or wait; one more is refused
    load: int = 4_000_000  # tokens that all of them may decode
    client_queue: int | None = None  # requests of one client that run or wait; None: as many as there are
    client_load: int | None = None  # tokens that they may decode
    request: int = 1_000_000  # tokens that one of them may decode
    prompt_tokens: int = 8192
    body: int = 1 << 20  # bytes
    upload: int = 16 << 20  # bytes of a steering that is sent here
    prompts: int = 64  # of one call of /v1/completions
    strengths: int = 16  # of one call of /misvo/v1/generate
    body_seconds: float = 30.0  # for a body to come in
    send_seconds: float = 60.0  # for a client to read what was sent

    def __post_init__(self):
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise MisvoError(f"the limit {limit.name} must be above 0, not {value!r}.")


@dataclass(frozen=True)
class Config:
    limits: Limits = field(default_factory=Limits)
    name: str | None = None  # of the model, as clients write it; None: the model's own
    default_tokens: int = 256  # of an answer, where a client does not say
    keys: tuple[str, ...] = ()  # one of them opens everything; none: everything is open
    hosts: tuple[str, ...] = ()  # names in the Host header that are answered; none: any
    origins: tuple[str, ...] = ()  # pages of other origins that may call (CORS); none: no page may
    reward_hosts: tuple[str, ...] = ()  # HOST or HOST:PORT that clients' scorers may be at; none: nowhere
    runs: tuple[Path, ...] = ()  # folders of finished runs, which are shown beside those of this server
    steerings: Path | None = None  # folder in which saved steerings are kept; None: in memory
    most_steerings: int = 256
    judge: str | None = None  # a model that reads responses, for the panel
    keep_seconds: float = 3600.0  # how long finished runs and responses can be looked up
    keep_runs: int = 256  # how many of them
    keep_tokens: int = 4_000_000  # and how many tokens they may hold together
    keep_alive: float = 15.0  # seconds between two comments in a silent stream
    reward_seconds: float = 60.0  # for a reward to score the responses of a step
    grace: float = 20.0  # seconds for running requests to end when the server is stopped
    max_rows: int | None = None  # decoded at once; None: what fits memory
    log_requests: bool = False  # a line for each request, with its path
