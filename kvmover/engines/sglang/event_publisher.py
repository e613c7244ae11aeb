"""KvmoverEventPublisher sends SGLang's KV events, and snapshots for late subscribers (`--kv-events-config`).

SGLang's own publisher replays only the events that it kept, so a router that starts later misses older pages. All
frames are as SGLang's.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from typing import Any

from kvmover.cache.prefix import EventForm, EventPublisher, KVEvent
from kvmover.engines.common import EngineUnsupported
from kvmover.engines.sglang import engine_radix


class CacheEvents(list[KVEvent]):
    """The events of a step. `resident` returns all that is cached after them: `PrefixTree.resident`."""

    def __init__(self, events: Iterable[KVEvent], resident: Callable[[], Iterable[KVEvent]]) -> None:
        super().__init__(events)
        self.resident = resident


class KvmoverEventPublisher(engine_radix.EventPublisher):
    """A publisher for one cache, which never blocks the scheduler's thread. The options are SGLang's.

    `max_queue_size` has no effect, because events are sent at once.
    """

    form = EventForm.MAPS

    def __init__(
        self,
        attn_dp_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        topic: str = "",
        **others: Any,
    ) -> None:
        """Raises EngineUnsupported for `bind` false, TransportError for an endpoint that cannot be bound."""
        if others.get("bind") is False:
            raise EngineUnsupported('kvmover\'s publisher of KV events binds its endpoint: leave out "bind": false')
        self._rank, self._topic, self._replays = attn_dp_rank, topic, replay_endpoint is not None
        self._publisher = EventPublisher(
            engine_radix.port_of_rank(endpoint, attn_dp_rank),
            engine_radix.port_of_rank(replay_endpoint, attn_dp_rank) or "",
            topic,
            attn_dp_rank,
            buffer_steps,
            hwm,
            self.form,
        )
        atexit.register(self.shutdown)

    def publish(self, events: Any) -> None:
        """Publish a batch, `events.events`, and a snapshot of kvmover's radix cache if one is due."""
        told = events.events
        self._publisher.publish(told)
        if self._publisher.snapshot_due and isinstance(told, CacheEvents):
            self._publisher.snapshot(told.resident())

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        """Returns the endpoints for subscribers on this host, for SGLang's `/server_info`."""
        source = {
            "dp_rank": self._rank,
            "endpoint": _local(self._publisher.endpoint),
            "topic": self._topic,
            "block_size": block_size,
        }
        return source | ({"replay_endpoint": _local(self._publisher.replay_endpoint)} if self._replays else {})

    def shutdown(self) -> None:
        """Send the published events and close. Safe to call twice."""
        self._publisher.close()


class KvmoverArrayEventPublisher(KvmoverEventPublisher):
    """The same, of events in the form that llm-d's adapter for SGLang reads."""

    form = EventForm.ARRAYS


def _local(endpoint: str) -> str:
    """Returns an endpoint at all addresses by this host's loopback address."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
