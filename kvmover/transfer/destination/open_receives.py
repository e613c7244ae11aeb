"""The open receives of a rank, found by request, by transfer and by source in a time that does not grow with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvmover.transfer.destination.destination_attempts import Id, ReceiveAttempt
from kvmover.transfer.result import Transfer


@dataclass(slots=True, eq=False)
class OpenReceives:
    """The attempts, one a request. `_from`: ids by source, the peer's transport name, in the order of their begin."""

    _by_request: dict[str, ReceiveAttempt] = field(default_factory=dict[str, ReceiveAttempt])
    _from: dict[str, dict[Id, None]] = field(default_factory=dict[str, "dict[Id, None]"])

    def add(self, attempt: ReceiveAttempt) -> None:
        """Add an attempt at a request that has none."""
        request, _ = attempt.id
        assert request not in self._by_request, f"{request} has an attempt already"
        self._by_request[request] = attempt
        for peer in attempt.state.sources:
            self._from.setdefault(peer, {})[attempt.id] = None

    def remove(self, attempt: ReceiveAttempt) -> None:
        """Remove an attempt that is there."""
        del self._by_request[attempt.id[0]]
        for peer in attempt.state.sources:
            ids = self._from[peer]
            del ids[attempt.id]
            if not ids:
                del self._from[peer]

    def get(self, id_: Id) -> ReceiveAttempt | None:
        """Returns the attempt of (request, generation), or None."""
        attempt = self._by_request.get(id_[0])
        return attempt if attempt is not None and attempt.id == id_ else None

    def of(self, transfer: Transfer) -> ReceiveAttempt | None:
        """Returns a transfer's attempt, or None."""
        attempt = self._by_request.get(transfer.request)
        return attempt if attempt is not None and attempt.transfer is transfer else None

    def from_peer(self, peer: str) -> tuple[Id, ...]:
        """Returns the attempts of which a peer is a source, in the order of their begin."""
        return tuple(self._from.get(peer, ()))

    def __contains__(self, request: str) -> bool:
        return request in self._by_request

    def __iter__(self) -> Iterator[ReceiveAttempt]:
        """Yield the attempts that are open now; they may end meanwhile."""
        return iter(tuple(self._by_request.values()))

    def __len__(self) -> int:
        return len(self._by_request)
