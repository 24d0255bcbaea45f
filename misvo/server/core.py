"""What all routes stand on: the model, its engine's thread, places, rewards, steerings, and the jobs under way."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from misvo.errors import MisvoError
from misvo.judge import Judge
from misvo.policy import Policy
from misvo.rewards import AnyReward, check_columns
from misvo.server.config import Config
from misvo.server.doors import Who
from misvo.server.engine_thread import EngineThread, Tally
from misvo.server.errors import ApiError
from misvo.server.jobs import Job, Store, Work
from misvo.server.metrics import Metrics
from misvo.server.orders import Order
from misvo.server.places import Places
from misvo.server.registry import Registry
from misvo.server.saved import SavedRun, job_of, read
from misvo.server.shelf import Shelf
from misvo.server.terms import RewardBody

NO_MODEL = ApiError(409, "this server shows finished runs and has no model.", code="no_model", retry=False)
STOPPED = ApiError(503, "the server is being stopped.", code="stopping", retry_after=5, retry=True)


class Core:
    """`policy` is None where finished runs are shown and nothing is decoded: what needs a model is refused then."""

    def __init__(self, policy: Policy | None, rewards: Mapping[str, AnyReward], config: Config):
        if policy is not None and config.name not in (
            None,
            policy.name,
        ):  # as clients know it: no message shows a folder
            policy = Policy(policy.model, policy.tokenizer, config.name, policy.own_sampler)
        self._policy, self.config = policy, config
        self.places, self.store, self.metrics = Places(config.limits), Store(config), Metrics()
        self.registry, self.shelf = Registry(rewards, config), Shelf(policy, config)
        self._saved: list[SavedRun] = read(config.runs)
        self._engine: EngineThread | None = None
        if policy is not None:
            self._engine = EngineThread(policy, config.max_rows, config.limits.prompt_tokens)
        self.stopping = False
        self.created = int(time.time())
        self._jobs: set[Job] = set()
        self._judge: Judge | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Begin to work, in the event loop."""
        for run in self._saved:
            self.store.show(job_of(run))
        if self._engine is not None:
            self._engine.start()

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise NO_MODEL
        return self._policy

    @property
    def engine(self) -> EngineThread:
        if self._engine is None:
            raise NO_MODEL
        return self._engine

    @property
    def has_model(self) -> bool:
        return self._policy is not None

    @property
    def alive(self) -> bool:
        """Whether everything works that this server has."""
        return self._engine is None or self._engine.alive

    @property
    def tally(self) -> Tally:
        return Tally() if self._engine is None else self._engine.tally

    @property
    def name(self) -> str:
        return self.policy.name

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(404, f"this server has the model {self.name!r} only.", param="model", code="model_not_found")

    async def start(self, order: Order, kind: str, who: Who, about: dict | None = None) -> Job:
        """Take a place, make the reward, hand the work to the engine; what is wrong with it is raised here."""
        if self.stopping:
            raise STOPPED
        engine = self.engine
        steering = order.vectors or (None if order.steering is None else self.shelf.get(order.steering))
        settings = order.resolve(steering)
        tokens = order.tokens(settings)
        self.places.check(tokens)
        if order.reward is not None and order.n > settings.rollouts * settings.steps:
            raise ApiError(400, "n is larger than rollouts × steps: there are no more responses.", param="n")
        if order.greedy and order.n > 1:
            raise ApiError(400, "at temperature 0 all responses are equal: leave n out.", param="n")
        check_columns(order.columns)
        self.places.take(who.client, tokens, engine.tally.tokens_per_second)
        job = None
        try:
            reward, held_out = await asyncio.to_thread(
                lambda: [self._reward(order.reward), self._reward(order.held_out)]
            )
            common = Work("", settings, reward, order.columns, steering, order.greedy, not order.explicit)
            common = replace(common, record=order.record, held_out=held_out, live=order.live)
            works = [
                replace(common, prompt=prompt, strength=strength)
                for prompt in order.prompts
                for strength in order.strengths
            ]
            job = Job(kind, works, tokens, who.owner, about)
            job.at_end += [lambda: self.places.give_back(who.client, tokens), lambda: self._jobs.discard(job)]
            self._jobs.add(job)
            if not engine.alive:
                job.fail(ApiError(503, "the engine of this server has stopped.", code="engine_stopped", retry=True))
            else:
                engine.submit(job)
            await job.accepted()
        except BaseException:
            if job is None:
                self.places.give_back(who.client, tokens)
            else:
                engine.cancel(job)
            raise
        return job

    def _reward(self, body: RewardBody | None):
        return None if body is None else self.registry.make(body)

    def cancel(self, job: Job) -> None:
        if not job.over:
            self.engine.cancel(job)

    async def drain(self, seconds: float) -> None:
        """No new requests; those that run have so many seconds, and are told then."""
        self.stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(job.finished() for job in self._jobs))
        self.tell_all()

    def tell_all(self) -> None:
        """End what is under way: its clients are told that the server is being stopped."""
        for job in list(self._jobs):
            self.engine.cancel(job)
            job.fail(STOPPED)

    def close(self) -> None:
        self.stopping = True
        self.tell_all()
        self.registry.close()
        if self._engine is not None:
            self._engine.stop()

    def judge(self) -> Judge | None:
        """Who reads responses for the panel, loaded when first asked for; not in the event loop."""
        with self._lock:
            if self._judge is None and self.config.judge is not None:
                self._judge = Judge.from_pretrained(self.config.judge)
            return self._judge

    def describe(self) -> dict:
        """The model, for the page and for people."""
        policy, limits = self.policy, self.config.limits
        return {
            "name": self.name,
            "parameters": policy.parameter_count,
            "precision": policy.precision,
            "context_length": policy.context_length,
            "vocabulary": policy.head.vocab_size,
            "hidden_size": policy.head.hidden_size,
            "chat": bool(getattr(policy.tokenizer, "chat_template", None)),
            "judge": self.config.judge,
            "limits": {**vars(limits), "rows": self.engine.rooms.most, "default_tokens": self.config.default_tokens},
        }

    def status(self) -> dict:
        tally = self.tally
        return {
            "rows_in_flight": tally.rows,
            "tokens_per_second": tally.tokens_per_second,
            "requests": self.places.taken,
            "queue": self.config.limits.queue,
            "load": self.places.tokens,
            "stopping": self.stopping,
        }

    async def call(self, function):
        """What a function gives that needs the model: it is called between two decoding steps."""
        if not self.engine.alive:
            raise MisvoError("the engine of this server has stopped.")
        return await asyncio.wrap_future(self.engine.call(function))
