"""Where KV can live: put and get of pages of 1 MiB through the page store in every place, beside a copy in memory.

`python -m perf.bench_places [FOLDER on a disk]`: tmpfs, the disk, an object store (moto's server, which is Python), and
where mooncake is installed a pool of memory (its master and one donor over loopback TCP), in turn within each round. A
put ends with its flush, so that what a place promises is kept. Every get is checked by its digests.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kvmover.layout import Component
from kvmover.store import Namespace, PagePart, PageStore, files_for, memory_of_buffer
from perf.bench_bucket import moto_server
from perf.command_line import options
from perf.record import interleaved, write
from tests.mooncake_home import find_mooncake

TESTS = Path(__file__).parents[1] / "tests" / "store"
SPACE = Namespace("bench", "1", 64)
#: 64 cells of 16 KiB: pages of 1 MiB.
PART = PagePart.whole(Component.attention(8, 8, 128, "uint8"), SPACE.page_tokens)
BATCH, ROUNDS = 16, 9
MEMORY = "host memory"


class _Memory:
    """A copy of each page, which is what all others are compared with."""

    def __init__(self) -> None:
        self.pages = Pages()
        self.kept = mmap.mmap(-1, len(self.pages.buffer))
        self.address = memory_of_buffer(self.kept).address

    def put(self, count: int) -> None:
        for at in range(0, count * PART.nbytes, PART.nbytes):
            ctypes.memmove(self.address + at, self.pages.address + at, PART.nbytes)

    def get(self, count: int) -> None:
        for at in range(0, count * PART.nbytes, PART.nbytes):
            ctypes.memmove(self.pages.address + at, self.address + at, PART.nbytes)

    def close(self) -> None: ...


class Pages:
    """A batch of pages in memory of its own."""

    def __init__(self) -> None:
        self.buffer = mmap.mmap(-1, BATCH * PART.nbytes)
        self.buffer.write(os.urandom(len(self.buffer)))
        self.memory = memory_of_buffer(self.buffer)
        self.address = self.memory.address


class _Stored:
    """Pages in a store. What is put is new each time; what is read was there before."""

    def __init__(self, root: Path | str) -> None:
        self.pages, self.turn = Pages(), 0
        self.store = PageStore.open(root, SPACE, files=files_for(root) if isinstance(root, Path) else None)
        self.store.register(self.pages.memory)
        self.view = self.store.view(SPACE, PART)
        self.put(BATCH)
        self.there = self._names(BATCH)

    def _names(self, count: int) -> list[bytes]:
        return [(self.turn << 32 | number).to_bytes(32, "little") for number in range(count)]

    def _places(self, count: int) -> list[int]:
        return [self.pages.address + number * PART.nbytes for number in range(count)]

    def put(self, count: int) -> None:
        self.turn += 1
        answers = self.view.put(self._names(count), self._places(count))
        assert all(answer.ok for answer in answers), answers[0]
        self.store.flush()

    def get(self, count: int) -> None:
        answers = self.view.get(self.there[:count], self._places(count))
        assert all(answer.ok for answer in answers), answers[0]

    def close(self) -> None:
        self.store.close()


@contextmanager
def _pool() -> Iterator[str]:
    sys.path.insert(0, str(TESTS))
    processes = import_module("pool_processes").PoolProcesses()
    processes.donate(1 << 30)
    yield processes.location
    processes.close()


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("folder", nargs="?", type=Path)
    given = asked.parse_args()
    find_mooncake()
    with ExitStack() as stack:
        shared, disk = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) for folder in ("/dev/shm", given.folder)
        )
        places: dict[str, _Memory | _Stored] = {MEMORY: _Memory(), "tmpfs": _Stored(shared), "disk": _Stored(disk)}
        places["S3, moto"] = _Stored(stack.enter_context(moto_server()))
        if find_spec("mooncake"):
            places["Mooncake, loopback TCP"] = _Stored(stack.enter_context(_pool()))
        rows = [row for what in ("put", "get") for row in _measured(places, what)]
        for place in places.values():
            place.close()
    print(f"wrote {write('places', rows)}")


def _measured(places: dict[str, _Memory | _Stored], what: str) -> list[dict[str, object]]:
    def calls(count: int) -> dict[str, Callable[[], None]]:
        return {name: partial(getattr(place, what), count) for name, place in places.items()}

    single, whole = interleaved(calls(1), 3 * ROUNDS), interleaved(calls(BATCH), ROUNDS)
    rows: list[dict[str, object]] = []
    for name in places:
        one, batch = single[name], whole[name]
        rows.append(
            {
                "place": name,
                "what": what,
                "page_p50_ms": f"{one.median * 1e3:.3g}",
                "page_p90_ms": f"{one.high * 1e3:.3g}",
                "gb_per_s": f"{BATCH * PART.nbytes / batch.median / 1e9:.3g}",
                "of_memcpy": f"{whole[MEMORY].median / batch.median:.2g}",
            }
        )
        print(*rows[-1].values())
    return rows


if __name__ == "__main__":
    main()
