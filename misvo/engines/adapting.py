"""The engine on transformers for requests with an adapter, too: each of these decodes in a batch of its own.

An adapter changes keys and values, so its rows read the prompt anew and share nothing with others. When they have
ended, one pass of the model as it is over their responses says what the reference law would have been.
"""

import time
from dataclasses import dataclass, replace

from misvo.adapted import AdaptedModel, states
from misvo.adapter import Adapter
from misvo.engine import Ticket
from misvo.engines.torch import TorchEngine
from misvo.footprint import MOST_ROWS
from misvo.model import Model
from misvo.rollouts import Request, Rollouts
from misvo.sampling import RandomStream
from misvo.two_laws import compare


@dataclass(frozen=True)
class _Flight:
    """A request with an adapter under way: what was asked, and the engine that decodes it and nothing else."""

    request: Request
    adapter: Adapter
    adapted: AdaptedModel
    engine: TorchEngine


class AdaptingEngine(TorchEngine):
    """Decodes requests on a model, with adapters where they have one, at most `max_rows` rows at a time."""

    adapts = True

    def __init__(self, model: Model, max_rows: int = MOST_ROWS):
        super().__init__(model, max_rows)
        self._flights: dict[Ticket, _Flight] = {}

    def submit(self, request: Request) -> Ticket:
        adapter = request.adapter
        if adapter is None:
            return super().submit(request)
        adapted = self.model.adapted(adapter.form)
        engine = TorchEngine(adapted.model, self.max_rows)
        adapted.wear(adapter)
        engine.submit(replace(request, adapter=None, keep=replace(request.keep, hidden=True)))
        self._submitted += 1
        self._flights[self._submitted] = _Flight(request, adapter, adapted, engine)
        return self._submitted

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._flights)

    def room(self, request: Request) -> bool:
        flying = sum(len(flight.request.rollouts) for flight in self._flights.values())
        return flying + self.load + len(request.rollouts) <= self.max_rows if flying else super().room(request)

    def cancel(self, ticket: Ticket) -> None:
        if self._flights.pop(ticket, None) is None:
            super().cancel(ticket)

    def close(self) -> None:
        self._flights.clear()
        super().close()

    def advance(self) -> list[tuple[Ticket, Rollouts]]:
        finished = super().advance()
        for ticket, flight in list(self._flights.items()):
            flight.adapted.wear(flight.adapter)
            for _, rollouts in flight.engine.advance():
                del self._flights[ticket]
                finished.append((ticket, self._compared(flight.request, rollouts)))
        return finished

    def _compared(self, request: Request, rollouts: Rollouts) -> Rollouts:
        """Rollouts with their KLs to the model as it is, whose states take the place of the adapted ones."""
        started = time.perf_counter()
        reference = states(self.model, request.prompt, rollouts)
        stream = RandomStream(request.seed, request.prompt)
        keys = stream.keys(request.step, request.rollouts, request.max_new_tokens).to(self.head.device)
        compare(self.head, request.sampler, rollouts, reference, rollouts.hidden, keys)
        rollouts.hidden = reference if request.keep.hidden else None
        rollouts.seconds += time.perf_counter() - started
        return rollouts
