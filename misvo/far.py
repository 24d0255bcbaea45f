"""Records that stay where they were made, because they are too large to be sent: beside the head of an engine's worker.

Where an engine decodes in another process, mean laws (T, V) and hidden states (K, T, d) do not come back with the other
records. `Far` stands in their place, and what is to be made of them is made over there:

    beside(head, rollouts, rollouts.hidden, function, *arguments)  # function(head, rollouts, *arguments), here or there

Functions are sent by their names, so they are those of a module; arguments and answers are plain data.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from misvo.head import Head


@runtime_checkable
class Far(Protocol):
    """Some records of one request. They are dropped over there when nobody holds this any more."""

    def run(self, function: Callable, *arguments) -> Any:
        """function(head, rollouts, *arguments) over there, where `rollouts` have the records; gives its answer."""
        ...


def beside(head: Head, rollouts, records, function: Callable, *arguments) -> Any:
    """What `function(head, rollouts, *arguments)` gives, called where these records of the rollouts are."""
    if isinstance(records, Far):
        return records.run(function, *arguments)
    return function(head, rollouts, *arguments)
