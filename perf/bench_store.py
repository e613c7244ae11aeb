"""The page store beside a raw loop, a file for each page, and SGLang's backends: set, get and exists.

`python -m perf.bench_store [FOLDER on a disk]`. On tmpfs through memory, alone and beside a process that keeps one core
busy; in FOLDER through the page cache and past it (O_DIRECT). Beside each rate stands the time of the processor.
Pages go in batches of 128; every round writes fresh pages, reads them in order, reads them scattered, and looks up 128.
Everybody writes before anybody reads: a disk is busy with what it was given for some tenths of a second, and who wrote
it in the shortest time would read at half the speed (64 KiB pages: 1.0 GB/s at once, 2.0 a little later). Each round
has an order of its own, since a disk that has just been idle is slow for who comes first.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvmover.errors import TransportUnavailable
from kvmover.store import Access, Files, NixlFiles, PlainFiles, memory_of_buffer
from perf.command_line import options
from perf.record import Spread, write
from perf.store_peers import (
    BATCH,
    Contender,
    FileEach,
    OneFile,
    Ours,
    OursUnchecked,
    Pages,
    SglangFile,
    SglangNixl,
    fresh,
    sglang_is_here,
)

KIB = 1024
#: Pages of a round by the size of a page.
COUNTS = {16 * KIB: 512, 64 * KIB: 512, 256 * KIB: 256, 1024 * KIB: 128, 4096 * KIB: 64}
ROUNDS = 7
#: Between writing and reading.
_SETTLE_S = 0.5
RAW, SGLANG = "raw loop, one file", "sglang nixl"


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds by the clock, and of the processor in all threads of this process."""

    wall_s: float
    cpu_s: float

    @classmethod
    def since_start(cls) -> Taken:
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: Taken) -> Taken:
        return Taken(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    disk: Path = asked.parse_args().folder
    peers = sglang_is_here()
    rows: list[dict[str, object]] = []
    memory = Path("/dev/shm")
    for medium, folder, flags, beside in (
        ("tmpfs", memory, 0, nullcontext),
        ("tmpfs, a core busy", memory, 0, _busy_core),
        ("disk, page cache", disk, 0, nullcontext),
        ("disk, O_DIRECT", disk, os.O_DIRECT, nullcontext),
    ):
        for page_bytes, count in COUNTS.items():
            with tempfile.TemporaryDirectory(dir=folder) as place, beside():
                rows += _case(medium, Path(place), flags, (page_bytes, count), peers)
    print(f"wrote {write('store', rows)}")


@contextmanager
def _busy_core() -> Iterator[None]:
    """Keep the last core busy with a process of its own for a `with` block."""
    core = max(os.sched_getaffinity(0))
    spin = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        yield
    finally:
        spin.kill()
        spin.wait()


def _case(medium: str, folder: Path, flags: int, size: tuple[int, int], peers: bool) -> list[dict[str, object]]:
    page_bytes, count = size
    buffer = mmap.mmap(-1, 2 * count * page_bytes)
    buffer.write(os.urandom(1 << 20) * (2 * count * page_bytes >> 20))
    pages = Pages(buffer, memory_of_buffer(buffer), page_bytes, count)
    samples: dict[tuple[str, str], list[Taken]] = {}
    for number in range(ROUNDS + 1):
        with ExitStack() as stack:
            makers = list(_contenders(pages, flags, peers).items())
            random.Random(number).shuffle(makers)
            contenders = {name: stack.enter_context(fresh(folder, make)) for name, make in makers}
            numbers = list(range(count))
            seconds = {(name, "set"): _timed(each.set, numbers) for name, each in contenders.items()}
            if flags:
                os.sync()
                time.sleep(_SETTLE_S)
            for name, each in contenders.items():
                seconds |= {(name, what): taken for what, taken in _round(each, count, number).items()}
                _compare(pages, name)
        if number:
            for key, taken in seconds.items():
                samples.setdefault(key, []).append(taken)
    return _rows(medium, size, samples)


def _compare(pages: Pages, name: str) -> None:
    """Each reads the right bytes; then they are spoilt for the next."""
    for source, target in list(zip(pages.sources, pages.targets, strict=True))[:: max(1, pages.count // 16)]:
        assert source == target, name
        target[:64] = bytes(64)


def _round(contender: Contender, count: int, seed: int) -> dict[str, Taken]:
    numbers = list(range(count))
    scattered = random.Random(seed).sample(numbers, count)
    some = (numbers * BATCH)[:BATCH]
    seconds = {"get": _timed(contender.get, numbers)}
    began = Taken.since_start()
    assert contender.exists(some) == len(some)
    seconds["exists"] = Taken.since_start() - began
    seconds["get scattered"] = _timed(contender.get, scattered)
    return seconds


def _timed(verb: Callable[[list[int]], None], numbers: list[int]) -> Taken:
    began = Taken.since_start()
    for first in range(0, len(numbers), BATCH):
        verb(numbers[first : first + BATCH])
    return Taken.since_start() - began


def _contenders(pages: Pages, flags: int, peers: bool) -> dict[str, Callable[[Path], Contender]]:
    plain = Access.DIRECT if flags else Access.BUFFERED
    found: dict[str, Callable[[Path], Contender]] = {
        RAW: lambda folder: OneFile(folder, pages, flags),
        "raw loop, a file a page": lambda folder: FileEach(folder, pages, flags, 0),
        "a file a page, renamed": lambda folder: FileEach(folder, pages, 0, 4096),
        "kvmover plain": lambda folder: Ours(folder, pages, PlainFiles(plain)),
        "kvmover plain, no digests": lambda folder: OursUnchecked(folder, pages, PlainFiles(plain)),
    }
    if _nixl():
        found["kvmover nixl"] = lambda folder: Ours(folder, pages, NixlFiles())
    if peers:
        found[SGLANG] = lambda folder: SglangNixl(folder, pages, flags)
        found["sglang file"] = lambda folder: SglangFile(folder, pages)
    return found


def _nixl() -> bool:
    try:
        files: Files = NixlFiles()
    except TransportUnavailable:
        return False
    files.close()
    return True


def _rows(medium: str, size: tuple[int, int], samples: dict[tuple[str, str], list[Taken]]) -> list[dict[str, object]]:
    page_bytes, count = size
    spreads = {case: Spread.of([each.wall_s for each in taken]) for case, taken in samples.items()}
    cpu = {case: median(each.cpu_s for each in taken) for case, taken in samples.items()}
    load = round(os.getloadavg()[0], 1)  # on a machine that others use, ratios say little
    rows: list[dict[str, object]] = []
    for (name, what), spread in spreads.items():
        lookups = what == "exists"
        nbytes = page_bytes * count
        raw, peer = spreads[RAW, what], spreads.get((SGLANG, what))
        rows.append(
            {
                "medium": medium,
                "page_kib": page_bytes // KIB,
                "who": name,
                "what": what,
                "gb_s": "" if lookups else round(nbytes / spread.median / 1e9, 3),
                "gb_s_p10": "" if lookups else round(nbytes / spread.high / 1e9, 3),
                "gb_s_p90": "" if lookups else round(nbytes / spread.low / 1e9, 3),
                "us_for_128": round(spread.median * 1e6, 1) if lookups else "",
                "of_raw": "" if lookups else round(raw.median / spread.median, 3),
                "of_sglang_nixl": round(peer.median / spread.median, 2) if peer else "",
                "cpu_ms": round(cpu[name, what] * 1e3, 2),
                "load": load,
            }
        )
    for name in dict.fromkeys(name for name, _ in spreads):
        mine = {row["what"]: row for row in rows if row["who"] == name}
        speeds = "  ".join(
            f"{w} {mine[w]['gb_s']:>7} ({mine[w]['of_raw']:>5} raw)" for w in ("set", "get", "get scattered")
        )
        theirs = "  ".join(f"{mine[w]['of_sglang_nixl']}" for w in ("set", "get", "exists"))
        print(
            f"{medium:<15}{page_bytes // KIB:>5} KiB {name:<26} {speeds}  128 exist {mine['exists']['us_for_128']:>7}"
            f" us  x sglang nixl: {theirs}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
