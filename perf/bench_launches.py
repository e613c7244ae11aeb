"""What an engine sees of the kernels: launches of 8 MiB on 8 SMs, back to back, each with the upload of its own table.

`python -m perf.bench_launches [--out FOLDER] [--rounds N]`. `bench_kernels` has one launch of all bytes without a
budget; a mover cuts a request into chunks. GB/s from the first call to the end of the last launch: bytes of the wider
side, the host's work included. `host_us` is the host's time a launch; `of_whole` the share of one launch of all bytes
under the same budget. Beside plain chunks: with a digest, to fp8 on the way and back, both, and the chunks of a request
captured as a CUDA graph while a mover's thread polls events and pins memory. Bytes are compared first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from kvmover.kernels import convert, cuda_driver, digest, rows
from kvmover.kernels.convert_reference import Conversion
from kvmover.kernels.digest_reference import Logical
from kvmover.kernels.launch import Prepared, Program
from kvmover.kernels.pinned import pinned
from kvmover.kernels.region import Region
from kvmover.kernels.table import LISTED
from perf.bench_digest import coordinates
from perf.cases import DEEPSEEK, LLAMA, Case, Move, moves
from perf.command_line import options
from perf.conversions import NARROW, back, conversion
from perf.copy_engines import same_bytes
from perf.gpu_time import need_gpu
from perf.measured_code import columns
from perf.record import RESULTS, Spread, write

SMS, CHUNK_BYTES = 8, 8 << 20
CASES = (
    Case("Llama-3-70B", LLAMA, 2, 8, 64),
    Case("Llama-3-70B", LLAMA, 2, 8, 16),
    Case("DeepSeek-V3 MLA", DEEPSEEK, 1, 1, 64),
)
KINDS = LISTED.value, LISTED.value

Rows = TypeVar("Rows", Region, Conversion)

#: Seconds between two looks of a mover's thread, and bytes that it pins in one of them.
LOOK_S, PINNED_BYTES = 20e-6, 4 << 10


@dataclass(frozen=True, slots=True)
class Chunked:
    """Bytes that are moved in chunks. `prepare` uploads the table of a chunk; `whole`: one launch of all of them.

    `truth` moves `of` as a call of the kernels does, to which the chunks are compared; `out` has digests, if any.
    """

    what: str
    of: Region | Conversion
    truth: Callable[[], object]
    nbytes: int
    chunks: int
    prepare: Callable[[int], Prepared]
    whole: Prepared
    out: torch.Tensor | None = None

    def check(self) -> None:
        """Raise unless chunks and the whole leave the bytes of `truth`, and have one digest."""
        same_bytes([self.of], self.truth, [self.whole.run, self.back_to_back])
        if self.out is not None:
            digests = set[int]()
            for call in (self.whole.run, self.back_to_back):
                self.out.zero_()
                call()
                digests.add(int(self.out))
            assert len(digests) == 1, f"{self.what}: chunks have another digest than all of them"

    def back_to_back(self) -> None:
        """Launch each chunk once its table is on its way."""
        for number in range(self.chunks):
            self.prepare(number).run()


def spans(units: int, unit_bytes: int) -> list[slice]:
    """Return the units of each chunk: as many as fit, at least one.

    >>> spans(5, 3 << 20)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, CHUNK_BYTES // unit_bytes)
    return [slice(first, min(first + step, units)) for first in range(0, units, step)]


def some_units(of: Rows, chosen: slice) -> Rows:
    """Return the rows of some units."""
    src, dst = (replace(side, units=side.units[chosen]) for side in (of.src, of.dst))
    return replace(of, src=src, dst=dst)


def _given(launch: Prepared | None) -> Prepared:
    assert launch is not None, "a chunk holds something"
    return launch


def moved(what: str, region: Region) -> Chunked:
    """Plain chunks."""
    using = rows.standing_program([region], KINDS, SMS)
    parts = [some_units(region, span) for span in spans(region.units, region.nbytes // region.units)]

    def prepare(number: int) -> Prepared:
        return _given(rows.prepare([parts[number]], sms=SMS, using=using))

    whole = _given(rows.prepare([region], sms=SMS, using=using))
    return Chunked(what, region, partial(rows.move, [region]), region.nbytes, len(parts), prepare, whole)


def digested(what: str, region: Region, logical: Logical, out: torch.Tensor) -> Chunked:
    """Chunks whose launches take the digest too."""
    using = digest.standing_program([region], [logical], KINDS, SMS)
    cuts = spans(region.units, region.nbytes // region.units)
    parts = [(some_units(region, span), replace(logical, positions=logical.positions[span])) for span in cuts]

    def prepare(number: int) -> Prepared:
        part, where = parts[number]
        return _given(digest.prepare([part], [where], out, sms=SMS, using=using))

    whole = _given(digest.prepare([region], [logical], out, sms=SMS, using=using))
    return Chunked(what, region, partial(rows.move, [region]), region.nbytes, len(parts), prepare, whole, out)


def converted(what: str, work: Conversion, logical: Logical | None, out: torch.Tensor | None) -> Chunked:
    """Chunks that are converted on the way, with the digest of what is read where there are coordinates."""
    wide = max((work.at("src"), work.at("dst")), key=lambda end: end.nbytes)
    using = convert.standing_program([work], KINDS, SMS, None if logical is None else "src")
    cuts = spans(wide.units, wide.nbytes // wide.units)
    parts = [some_units(work, span) for span in cuts]

    def launch(part: Conversion, span: slice, program: Program) -> Prepared:
        if logical is None or out is None:
            return _given(convert.prepare([part], sms=SMS, using=program))
        where = [replace(logical, positions=logical.positions[span])]
        return _given(convert.prepare_with_digest([part], where, "src", out, sms=SMS, using=program))

    whole = launch(work, slice(None), using)

    def prepare(number: int) -> Prepared:
        return launch(parts[number], cuts[number], using)

    truth = partial(convert.convert, [work])
    return Chunked(what, work, truth, wide.nbytes, len(parts), prepare, whole, out)


def contents(move: Move) -> Iterator[Chunked]:
    """What a mover's chunks of a case may be."""
    (region,), (back_again,) = move.gather, move.scatter
    (logical,), out = coordinates(move), torch.zeros(1, dtype=torch.int64, device="cuda")
    yield moved("gather", region)
    yield moved("scatter", back_again)
    yield digested("gather with a digest", region, logical, out)
    dim = move.case.component.dim
    if dim in NARROW:
        narrowed = conversion(region, dim)
        yield converted("gather to fp8", narrowed, None, None)
        yield converted("gather to fp8 with a digest", narrowed, logical, out)
        yield converted("scatter from fp8", back(narrowed), None, None)


def timed(call: Callable[[], object], rounds: int) -> tuple[Spread, float]:
    """Return seconds from a call to the end of its work, and the median seconds until it returned."""
    whole, host = list[float](), list[float]()
    for number in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        if number:
            whole.append(time.perf_counter() - began)
            host.append(returned - began)
    return Spread.of(whole), Spread.of(host).median


class Poller:
    """A thread that does what a mover's does while an engine captures a graph: asks events, pins and frees memory."""

    def __init__(self) -> None:
        self.looks, self.failed = 0, list[Exception]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            torch.cuda.set_device(0)
            cuda_driver.leave_captures_alone()
            event = torch.cuda.Event()
            event.record(torch.cuda.Stream())
            while not self._over.wait(LOOK_S):
                event.query()
                pinned(PINNED_BYTES)
                self.looks += 1
        except Exception as error:  # of torch or the driver: told by the row
            self.failed.append(error)

    def __enter__(self) -> Poller:
        self._thread.start()
        while not self.looks and not self.failed:
            time.sleep(LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def captured(launches: list[Prepared]) -> Callable[[], object]:
    """Return the replay of a graph of launches, captured in CUDA's default mode beside a mover's thread."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with Poller() as poller, torch.cuda.graph(graph):
        for launch in launches:
            launch.run()
    if poller.failed:
        raise poller.failed[0]
    return graph.replay


def measured(move: Move, rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for the whole of each content, its chunks, and the graph of plain ones."""
    for work in contents(move):
        work.check()
        whole, _ = timed(work.whole.run, rounds)
        yield row(move, work, "one launch of all", 1, whole, 0.0, whole)
        yield row(move, work, "launches of 8 MiB", work.chunks, *timed(work.back_to_back, rounds), whole)
        if work.what == "gather":
            launches = [work.prepare(number) for number in range(work.chunks)]  # a replay reads their tables
            replay = captured(launches)
            same_bytes([work.of], work.truth, [replay])
            spread, host = timed(replay, rounds)
            yield row(move, work, "launches of 8 MiB, a graph", len(launches), spread, host, whole)


def row(
    move: Move, work: Chunked, what: str, launches: int, spread: Spread, host_s: float, whole: Spread
) -> dict[str, object]:
    """Return a row, and print it."""
    line: dict[str, object] = {
        "case": move.case.text(),
        "content": work.what,
        "what": what,
        "sms": SMS,
        "mib": round(work.nbytes / launches / 2**20, 2),
        "launches": launches,
        "gb_per_s": round(work.nbytes / spread.median / 1e9, 1),
        "p10_gb_per_s": round(work.nbytes / spread.high / 1e9, 1),
        "p90_gb_per_s": round(work.nbytes / spread.low / 1e9, 1),
        "host_us": round(host_s / launches * 1e6, 1),
        "of_whole": round(whole.median / spread.median, 3),
        **columns(work.whole),
    }
    print(
        f"{line['case']:<52} {work.what:<36} {what:<28} {line['gb_per_s']:>8} GB/s {line['of_whole']:>6} of whole"
        f" {line['host_us']:>7} us a launch",
        flush=True,
    )
    return line


def main() -> None:
    words = options(__doc__)
    words.add_argument("--out", type=Path, default=RESULTS)
    words.add_argument("--rounds", type=int, default=15)
    chosen = words.parse_args()
    need_gpu("perf.bench_launches")
    lines: list[dict[str, object]] = []
    for move in moves(CASES):
        lines += measured(move, chosen.rounds)
        write("bench_launches", lines, chosen.out)
    print(f"wrote {chosen.out / 'bench_launches.csv'}")


if __name__ == "__main__":
    main()
