"""A directory without a server: every process answers at a port of its own, and asks at the addresses it was given."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing

from kvmover.errors import KvmoverError, LayoutError
from kvmover.transfer.rendezvous.directory import Entry, newest, read_entries, write_entries
from kvmover.transfer.rendezvous.keeper import Keeper
from kvmover.transport.nixl_door import Caller, Door

log = logging.getLogger(__name__)

#: Between looks at the door. NIXL's listener takes 200 ms to introduce a caller: this is not what a caller waits for.
_PERIOD_S = 0.02


class ListenerDirectory:
    """Publishes at `port` (0: publishes nothing), and finds the ranks that answer at `seeds`, as `host:port`.

    An entry goes when its process does, since nothing outlives it. Every seed has `deadline_s`, asked one by one: 0.4 s
    to begin with and 0.2 s each where they answer. The door is open to every host that can reach it.
    """

    def __init__(self, port: int, seeds: Sequence[str], deadline_s: float = 5.0) -> None:
        self._seeds = tuple(dict.fromkeys(_address(seed) for seed in seeds))
        self._deadline_s = deadline_s
        self._entries: dict[tuple[str, int], Entry] = {}
        self._publishing = threading.Lock()
        self._close = weakref.finalize(self, _nothing)
        self._door: Door | None = None
        if port:
            self._door = Door(port)
            self._door.show(write_entries(()))
            keeper = Keeper(f"door at port {port}", _PERIOD_S, self._door.poll)
            self._close = weakref.finalize(self, _leave, self._door, keeper)

    def publish(self, entry: Entry) -> None:
        """Hand the entry out from now on, in the place of an older one of its rank.

        Raises LayoutError without a port.
        """
        with self._publishing:
            if self._door is None:
                raise LayoutError(f"{entry.text()} cannot be published: this directory has no port")
            wanted = self._entries | {(entry.engine, entry.rank): entry}
            self._door.show(write_entries(wanted.values()))
            self._entries = wanted

    def withdraw(self, entry: Entry) -> None:
        """Hand it out no more; nothing happens where it is not there."""
        with self._publishing:
            if self._door is not None and self._entries.get((entry.engine, entry.rank)) == entry:
                del self._entries[entry.engine, entry.rank]
                self._door.show(write_entries(self._entries.values()))

    def ranks(self, engine: str) -> tuple[Entry, ...]:
        """Of the seeds that answer; those that do not are logged. Raises the last one's error when none did."""
        found: list[Entry] = []
        failures: list[KvmoverError] = []
        with closing(Caller()) as caller:
            for host, port in self._seeds:
                try:
                    found += read_entries(caller.ask(host, port, self._deadline_s))
                except KvmoverError as error:
                    log.warning("%s:%d: %s", host, port, error)
                    failures.append(error)
        if failures and len(failures) == len(self._seeds):
            raise failures[-1]
        return newest(entry for entry in found if entry.engine == engine)

    def ask(self, host: str, port: int) -> tuple[Entry, ...]:
        """What is published at `host`:`port`. Raises PeerUnknown, PeerLost, DeadlineExceeded and ProtocolError."""
        with closing(Caller()) as caller:
            return read_entries(caller.ask(host, port, self._deadline_s))

    def close(self) -> None:
        """Stop listening. Entries of this process are found no more."""
        self._close()
        self._entries.clear()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise LayoutError(f"{text!r} is not host:port")
    return host, int(port)


def _nothing() -> None:
    pass


def _leave(door: Door, keeper: Keeper) -> None:
    keeper.stop()
    door.close()
