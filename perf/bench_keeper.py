"""A fleet that comes back to its keeper beside memcpy: attach, and read all that was committed, by another shape.

`python -m perf.bench_keeper [--bytes 1GiB]`. Four ranks of TP4 commit pages to a keeper in a process of its own, and
are gone. Then a fleet attaches, rank by rank, and reads everything into memory that it has already. Beside it memcpy
brings the same bytes to the same places, page by page, out of memory that is mapped, by one thread and by two, which
are what copy for the keeper's client.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvmover.config.load import bytes_in
from kvmover.layout import Component, Fleet
from kvmover.store import Namespace, PagePart, PageStore, memory_of_buffer
from perf.command_line import options
from perf.record import interleaved, write

#: By name, pages of 64 tokens: a rank of TP4 holds 5 MiB of one, 512 KiB, and 64 KiB.
MODELS = {
    "Llama-3-70B": Component.attention(80, 8, 128, "bfloat16"),
    "16 layers": Component.attention(16, 8, 64, "bfloat16"),
    "2 layers": Component.attention(2, 8, 64, "bfloat16"),
}
PAGE_TOKENS, ROUNDS = 64, 7
FORMER, RAW = 4, "memcpy, page by page"


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("--bytes", type=bytes_in, default=1 << 30)
    given = asked.parse_args()
    rows: list[dict[str, object]] = []
    for model, component in MODELS.items():
        with _keeper(2 * given.bytes) as location:
            rows += _case(model, component, location, given.bytes)
    print(f"wrote {write('keeper', rows)}")


@contextmanager
def _keeper(nbytes: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keeper.sock"
        command = [sys.executable, "-m", "kvmover", "keeper", "--socket", str(path), "--bytes", str(nbytes)]
        keeper = subprocess.Popen(command)
        while not path.exists():
            time.sleep(0.05)
        yield f"keeper://{path}"
        keeper.terminate()
        keeper.wait()


class _Case:
    """All pages of one model, as the ranks of a fleet hold them, in memory of this process."""

    def __init__(self, model: str, component: Component, location: str, nbytes: int) -> None:
        self.component, self.location, self.space = component, location, Namespace(model, "1", PAGE_TOKENS)
        self.page_bytes = PagePart.whole(component, PAGE_TOKENS).nbytes
        self.pages = [number.to_bytes(32, "little") for number in range(nbytes // self.page_bytes)]
        self.nbytes = len(self.pages) * self.page_bytes
        self.source, self.target = (mmap.mmap(-1, self.nbytes) for _ in range(2))
        for each in (self.source, self.target):
            each.write(os.urandom(1 << 20) * (self.nbytes >> 20) + bytes(self.nbytes & (1 << 20) - 1))

    def over_ranks(self, tp: int, fleet: str, do: Callable[[PageStore, PagePart, list[int], int], None]) -> None:
        """One rank after the other, as each would in a process of its own: its share of the memory, page by page."""
        shape = Fleet(tp=tp, page_tokens=PAGE_TOKENS)
        for rank in range(tp):
            with PageStore.open(f"{self.location}?{fleet}", self.space) as store:
                part = PagePart.held(self.component, shape, rank, PAGE_TOKENS)
                size, count = part.nbytes, len(self.pages)
                do(store, part, list(range(rank * count * size, (rank + 1) * count * size, size)), rank)

    def commit(self) -> None:
        memory = memory_of_buffer(self.source)

        def put(store: PageStore, part: PagePart, places: list[int], _rank: int) -> None:
            store.register(memory)
            answers = store.view(self.space, part).put(self.pages, [memory.address + place for place in places])
            assert all(answer.ok for answer in answers)

        self.over_ranks(FORMER, "fleet=engine&generation=1", put)

    def read(self, tp: int) -> None:
        memory = memory_of_buffer(self.target)

        def get(store: PageStore, part: PagePart, places: list[int], _rank: int) -> None:
            store.register(memory)
            answers = store.view(self.space, part).get(self.pages, [memory.address + place for place in places])
            assert all(answer.ok for answer in answers)

        self.over_ranks(tp, "fleet=engine&generation=2", get)

    def copy_by_two(self, pool: ThreadPoolExecutor) -> None:
        source, target = (np.frombuffer(each, np.uint8) for each in (self.source, self.target))
        size, half = self.page_bytes // FORMER, len(self.pages) * FORMER // 2 * (self.page_bytes // FORMER)

        def some(first: int, stop: int) -> None:
            for at in range(first, stop, size):
                target[at : at + size] = source[at : at + size]

        list(pool.map(some, (0, half), (half, self.nbytes)))

    def copy(self, tp: int) -> None:
        size, source, target = self.page_bytes // tp, memoryview(self.source), memoryview(self.target)
        for at in range(0, self.nbytes, size):
            target[at : at + size] = source[at : at + size]


def _case(model: str, component: Component, location: str, nbytes: int) -> list[dict[str, object]]:
    case = _Case(model, component, location, nbytes)
    before = _huge_bytes()
    case.commit()
    time.sleep(8)  # the keeper compares what is sealed, and copies it to huge pages, meanwhile
    huge = round((_huge_bytes() - before) / case.nbytes, 2)
    pool = ThreadPoolExecutor(2)
    cases = {
        RAW: lambda: case.copy(FORMER),
        "memcpy by two threads": lambda: case.copy_by_two(pool),
        "keeper, TP4 as before": lambda: case.read(FORMER),
        "keeper, TP8 in place of TP4": lambda: case.read(8),
        "keeper, TP2 in place of TP4": lambda: case.read(2),
    }
    spreads = interleaved(cases, ROUNDS)
    pool.shutdown()
    case.target[:] = bytes(case.nbytes)
    case.read(FORMER)
    assert case.source[:] == case.target[:], "what came back is what was written"
    rows: list[dict[str, object]] = []
    for who, spread in spreads.items():
        ratio = spread.median / spreads[RAW].median
        row = {"model": model, "object_kib": case.page_bytes // FORMER >> 10, "gib": round(case.nbytes / (1 << 30), 2)}
        times = {"seconds": round(spread.median, 4), "p10": round(spread.low, 4), "p90": round(spread.high, 4)}
        rows.append({**row, "huge_share": huge, "who": who, **times, "of_memcpy": round(ratio, 2)})
        print(f"{model:<12}{who:<30}{case.nbytes / spread.median / 1e9:7.2f} GB/s, {ratio:.2f} of memcpy's time")
    return rows


def _huge_bytes() -> int:
    """Shared memory of this machine that is in huge pages."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemHugePages")), 0)


if __name__ == "__main__":
    main()
