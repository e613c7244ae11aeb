"""A ShortList is a list in a store that can't list: numbered entries, each put once by who found its number free.

Reading asks for all numbers. Entries stay until the list is removed, or the donors that hold them are gone; who put one
puts it again then.
"""

from __future__ import annotations

import errno

from kvmover.store.mooncake.client import Asker, PoolClient
from kvmover.store.mooncake.format import ENTRIES, entry_key


class ShortList:
    """At most `ENTRIES` entries below `name`."""

    def __init__(self, pool: PoolClient, name: str) -> None:
        self._pool = pool
        self.keys = [entry_key(name, number) for number in range(ENTRIES)]

    def read(self, asker: Asker) -> dict[int, bytes]:
        """What each number has, of those that are taken. Raises OSError."""
        taken = [number for number, there in enumerate(self._pool.exists(self.keys, asker)) if there]
        found = self._pool.entries([self.keys[number] for number in taken], asker) if taken else []
        return dict(zip(taken, found, strict=True))

    def add(self, entry: bytes) -> dict[int, bytes]:
        """Put an entry that is not there yet; the whole list. Raises OSError, ENOSPC where no number is free."""
        tried = set[int]()
        while True:
            entries = self.read(Asker.WORKER)
            if entry in entries.values():
                return entries
            taken = tried | entries.keys()
            free = next((number for number in range(ENTRIES) if number not in taken), None)
            if free is None:
                break
            # Of two writers the first wins, and one that died at it keeps the number for a while: look again.
            self._pool.put_entry(self.keys[free], entry)
            tried.add(free)
        raise OSError(errno.ENOSPC, f"all {ENTRIES} entries of a list of the pool are taken")
