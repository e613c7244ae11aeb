"""Watched has the observers of one rank's process: the demo's metrics for Prometheus and its run log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvmover.cache.ledger import Account
from kvmover.config.settings import Settings
from kvmover.observe.observers import Observers
from kvmover.transfer.mover import Mover


class Collector(Protocol):
    """A collector in the sense of prometheus_client."""

    def collect(self) -> Iterator[Any]:
        """Returns the current metric families."""
        ...


@dataclass(slots=True, eq=False)
class _Still:
    """The last metrics of some collectors, for scrapes: collectors must not be read while the process works."""

    collectors: Sequence[Collector]
    said: Sequence[Any] = ()

    def look(self) -> None:
        self.said = [family for collector in self.collectors for family in collector.collect()]

    def collect(self) -> Sequence[Any]:
        return self.said


class Watched:
    """The observers of a seated process. `first_port`: ports that its fleet leaves to earlier fleets."""

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
        """Write an account to the run log, if configured."""
        self._observers.account(account)

    def serve(self, *collectors: Collector) -> None:
        """Serve the collectors' metrics to Prometheus, as of the last `look`."""
        self._still = _Still(collectors if self._is_served else ())
        self._still.look()
        self._observers.serve(self._still)

    def look(self) -> None:
        """Refresh the served metrics, between two requests."""
        self._still.look()

    def close(self) -> None:
        """End the endpoint and the run log."""
        self._observers.close()
