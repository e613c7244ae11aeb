"""GateWatch asks the gates of requests that somebody waits for whether they have passed, some of them in each poll."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from operator import methodcaller

from kvmover.transfer.result import Gate, Passed
from kvmover.transfer.source.attempts import Request

_HAS_PASSED = methodcaller("query")

#: Gates that one poll asks at most, some 100 ns each and more on a GPU: of more, each poll asks the next.
MAX_GATES = 400


@dataclass(slots=True, eq=False)
class GateWatch:
    """`ask_one` asks a single gate, and fails its request where that raises.

    `_events` are those of `_gates`, all that are watched; None: to be listed anew.
    """

    ask_one: Callable[[Request, Gate], bool]
    _requests: dict[str, Request] = field(default_factory=dict[str, Request])
    _gates: list[tuple[Request, Gate]] = field(default_factory=list["tuple[Request, Gate]"])
    _events: list[Passed] | None = None
    _next: int = 0

    def watch(self, request: Request) -> None:
        """Look at its gates in every poll, while it has some and somebody asked."""
        name = request.transfer.request
        if request.gates and request.attempts and not request.transfer.ended:
            self._requests[name] = request
        elif self._requests.pop(name, None) is None:
            return
        self._events = None

    def clear(self) -> None:
        """Look at none any more."""
        self._requests.clear()

    def passed(self) -> list[Request]:
        """Requests of which a gate has passed since the last look at it."""
        if not self._requests:
            return []
        if self._events is None:
            self._gates = [(request, gate) for request in self._requests.values() for gate in request.gates or ()]
            self._events = [gate.event for _, gate in self._gates if gate.event is not None]
            assert len(self._events) == len(self._gates), "a gate without an event has passed when it is named"
        first = self._next if self._next < len(self._events) else 0
        asked = slice(first, first + MAX_GATES)
        self._next = asked.stop
        try:
            passed = list(map(_HAS_PASSED, self._events[asked]))
        except Exception:  # whose event it is shows when they are asked one by one
            passed = [self.ask_one(request, gate) for request, gate in self._gates[asked]]
        behind = dict[str, Request]()
        for request, gate in compress(self._gates[asked], passed):
            request.let(gate)
            behind[request.transfer.request] = request
        return list(behind.values())
