"""Watched is the observers of one rank's process: what the demo shows to Prometheus and writes to the run log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvmover.cache.ledger import Account
from kvmover.config.settings import Settings
from kvmover.observe.observers import Observers
from kvmover.transfer.mover import Mover


class Collector(Protocol):
    """As prometheus_client wants one."""

    def collect(self) -> Iterator[Any]:
        """The metric families at this moment."""
        ...


@dataclass(slots=True, eq=False)
class _Still:
    """What some collectors said last. A demo process works without being asked, so nobody may look while it does."""

    collectors: Sequence[Collector]
    said: Sequence[Any] = ()

    def look(self) -> None:
        self.said = [family for collector in self.collectors for family in collector.collect()]

    def collect(self) -> Sequence[Any]:
        return self.said


class Watched:
    """The observers of one seated process. `first_port`: how many ports its fleet leaves to others before it."""

    def __init__(self, settings: Settings, engine: str, rank: int, first_port: int = 0) -> None:
        metrics = settings.metrics
        if metrics.port:
            settings = replace(settings, metrics=replace(metrics, port=metrics.port + first_port))
        self._observers = Observers(settings, engine, rank)
        self._is_served = metrics.port is not None
        self._still = _Still(())

    def mover(self, mover: Mover) -> None:
        """Observe a mover, from now on."""
        self._observers.watch(mover)

    def account(self, account: Account) -> None:
        """Write an account to the run log, where one is configured."""
        self._observers.account(account)

    def serve(self, *collectors: Collector) -> None:
        """Serve to Prometheus what these say between two requests."""
        self._still = _Still(collectors if self._is_served else ())
        self._still.look()
        self._observers.serve(self._still)

    def look(self) -> None:
        """A request is over: what is served from now on says so."""
        self._still.look()

    def close(self) -> None:
        """End the endpoint and the run log."""
        self._observers.close()
