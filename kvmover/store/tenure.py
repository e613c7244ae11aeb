"""A Tenure is a store's period on one namespace; NoObjects is the empty engine if no namespace is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Any

from kvmover.store.objects import Failure, ObjectDraft, ObjectRead, Objects, Verdict, Watcher
from kvmover.store.part import PagePart, PartKey
from kvmover.store.store_results import Collected, Counters, Recovered, Stat, Verified
from kvmover.transport import Memory

#: Why a put fails: in a store without a namespace, and through a view of a namespace that the store has left.
NOWHERE = "the store holds nothing: which weights the engine serves is not known"
LEFT = "the store has left the namespace of this view"


class NoObjects(Objects[Any]):
    """An empty engine: every look-up misses, every put fails with reason `why`, and memory is ignored."""

    def __init__(self, why: str) -> None:
        self.why, self.counters, self.recovered = why, Counters(), Recovered(0, 0, {})

    @property
    def name(self) -> str:
        return "nowhere"

    def register(self, memory: Memory) -> None:
        return

    def deregister(self, memory: Memory) -> None:
        return

    def memory_at(self, address: int, nbytes: int) -> memoryview:
        return memoryview(b"")

    def parts_of(self, pages: Sequence[bytes], wanted: PartKey) -> list[tuple[PartKey, ...]]:
        return [()] * len(pages)

    def find(self, pages: Sequence[bytes], wanted: PartKey) -> Sequence[None]:
        return [None] * len(pages)

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        return [self.why] * len(drafts)

    def owe(self, objects: Sequence[Any]) -> None:
        return

    def read(self, part: PagePart, reads: Sequence[ObjectRead[Any]]) -> list[Failure[Any]]:
        return []

    def judge(self, failure: Failure[Any]) -> tuple[Verdict, str]:
        return Verdict.UNKNOWN, self.why

    def used(self, pages: Sequence[bytes]) -> None:
        return

    def watch(self, watcher: Watcher) -> None:
        return

    def evict(self, nbytes: int) -> int:
        return 0

    def collect(self) -> Collected:
        return Collected(0, 0, 0, 0)

    def flush(self) -> None:
        return

    def clear(self) -> int:
        return 0

    def stat(self) -> Stat:
        return Stat(0, 0, 0, 0, 0, 0, 0, 0)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        return Verified(0, 0, {})

    def close(self) -> None:
        return


class Tenure:
    """The objects of one namespace until `end`, which waits for all operations within `using`.

    Operations begun later see an empty store, so that no page of one namespace lands in another.
    """

    def __init__(self, objects: Objects[Any]) -> None:
        self.objects = objects
        self._none = NoObjects(objects.why if isinstance(objects, NoObjects) else LEFT)
        self._users, self._is_over, self._changed = 0, False, Condition()

    @contextmanager
    def using(self) -> Generator[Objects[Any]]:
        """Yield the objects for one operation; the empty engine once the tenure is over."""
        with self._changed:
            objects = self._none if self._is_over else self.objects
            self._users += objects is self.objects
        try:
            yield objects
        finally:
            if objects is self.objects:
                with self._changed:
                    self._users -= 1
                    self._changed.notify_all()

    def end(self) -> None:
        """Refuse new operations, wait for those under way, and close the objects. Raises as their `close` does."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._users)
        self.objects.close()
