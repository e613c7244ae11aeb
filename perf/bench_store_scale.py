"""A store of many objects: what opening, looking up, counting, evicting and verifying cost, and puts into a full one.

`python -m perf.bench_store_scale [FOLDER] [OBJECTS]`, a million by default: 5 GB of disk.
Ratios: puts of 16 KiB pages into a store at its quota against one that is empty, in turns, by the processor's time, on
tmpfs: on a disk the empty one is slower, since all that it was given is written, and a page that went early is not.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from kvmover.layout import Component
from kvmover.store import Namespace, PagePart, PageStore, PartView, Policy, memory_of_buffer
from kvmover.store.snapshot_file import MEMORY
from perf.command_line import options
from perf.record import write

BATCH, LOOKUPS, EVICTED = 128, 300, 4000
#: Processes that open a store at once.
RANKS = 8
#: Of stores that are full: eviction frees a sixteenth at a time, so a small one does so more often.
QUOTAS_MIB = 64, 256
SPACE = Namespace("scale", "1", 64)
SMALL = Component.mla(64, 1, "uint8")
PAGE = Component.mla(1, 256, "uint8")
_BUFFERS: list[mmap.mmap] = []


def key(number: int) -> bytes:
    """The hash of a page."""
    return hashlib.sha256(b"%d" % number).digest()


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    asked.add_argument("objects", nargs="?", type=int, default=1_000_000)
    given = asked.parse_args()
    folder: Path = given.folder
    count: int = given.objects
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rows = _many(Path(place), count)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        for mib in QUOTAS_MIB:
            ratios = [_put_s(Path(place), mib, None) / _put_s(Path(place), mib, mib << 20) for _ in range(5)]
            what = f"put into a full store of {mib} MiB, of an empty one"
            rows.append({"what": what, "value": round(statistics.median(ratios), 2)})
            print(what, rows[-1]["value"], [round(ratio, 2) for ratio in ratios])
    print(f"wrote {write('store_scale', rows)}")


def _many(place: Path, count: int) -> list[dict[str, object]]:
    with PageStore.open(place, SPACE) as store:
        _fill(store, SMALL, range(count))
    before, rows = _resident_bytes(), list[dict[str, object]]()

    def row(what: str, value: float, unit: str) -> None:
        rows.append({"what": what, "objects": count, "value": round(value, 3), "unit": unit})
        print(f"{what}: {value:.3f} {unit}")

    began_s = time.perf_counter()
    store = PageStore.open(place, SPACE)
    row("open", time.perf_counter() - began_s, "s")
    row("memory", (_resident_bytes() - before) / 1e6, "MB")
    view = store.view(SPACE, PagePart.whole(SMALL, SPACE.page_tokens))
    batches = [[key(random.randrange(count)) for _ in range(BATCH)] for _ in range(LOOKUPS)]
    times = sorted(_seconds(lambda some=some: view.exists(some)) for some in batches)
    row("exists of 128, median", times[LOOKUPS // 2] * 1e6, "us")
    row("exists of 128, 99 %", times[LOOKUPS * 99 // 100] * 1e6, "us")
    row("stat", _seconds(store.stat) * 1e6, "us")
    row("evict, a page", _seconds(lambda: store.evict(EVICTED * 4096)) / EVICTED * 1e6, "us")
    row("verify, an object", _seconds(store.verify) / count * 1e6, "us")
    store.close()
    alone, eight = _ranks_bytes(place, 1), _ranks_bytes(place, RANKS)
    row("memory of a process that opens", alone / 1e6, "MB")
    row(f"memory of {RANKS} that open, of one", eight / alone, "times")
    return rows


def _ranks_bytes(place: Path, ranks: int) -> int:
    """Returns the bytes that so many processes take together to open a store.

    Counts memory of their own, and all of the files that they share in memory, mapped or not.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [context.Process(target=_rank, args=(far, place), daemon=True) for _, far in pipes]
    for process in processes:
        process.start()
    shares: list[int] = []
    for _ in ("all have imported", "all have opened"):
        for near, _far in pipes:
            near.recv()
        shares.append(sum(_own_bytes(process.pid) for process in processes) + _shared_bytes())
        for near, _far in pipes:
            near.send(None)
    for process in processes:
        process.join()
    before, after = shares
    return after - before


def _rank(pipe: Connection, place: Path) -> None:
    pipe.send(None)
    pipe.recv()
    with PageStore.open(place, SPACE):
        pipe.send(None)
        pipe.recv()


def _own_bytes(pid: int | None) -> int:
    """Returns the anonymous memory of a process, its copies of pages of mapped files included."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


def _shared_bytes() -> int:
    """Returns the memory that files of shared indexes take."""
    return sum(path.stat().st_blocks for path in MEMORY.glob("kvmover-store-*")) * 512


def _put_s(place: Path, mib: int, quota_bytes: int | None) -> float:
    """Seconds of the processor for a page, in the second half of as many as take `mib` MiB four times."""
    policy, half = Policy(quota_bytes=quota_bytes), mib * 128
    with tempfile.TemporaryDirectory(dir=place) as root, PageStore.open(Path(root), SPACE, policy) as store:
        _fill(store, PAGE, range(half))
        began_s = time.process_time()
        _fill(store, PAGE, range(half, 2 * half))
        return (time.process_time() - began_s) / half


def _fill(store: PageStore, component: Component, numbers: range) -> None:
    view, addresses = _view(store, component)
    for first in range(numbers.start, numbers.stop, BATCH):
        pages = [key(number) for number in range(first, min(first + BATCH, numbers.stop))]
        assert all(answer.ok for answer in view.put(pages, addresses[: len(pages)]))


def _view(store: PageStore, component: Component) -> tuple[PartView, list[int]]:
    part = PagePart.whole(component, SPACE.page_tokens)
    buffer = mmap.mmap(-1, BATCH * part.nbytes)
    _BUFFERS.append(buffer)
    memory = memory_of_buffer(buffer)
    store.register(memory)
    return store.view(SPACE, part), [memory.address + number * part.nbytes for number in range(BATCH)]


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


if __name__ == "__main__":
    main()
