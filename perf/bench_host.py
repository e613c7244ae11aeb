"""Pages between pinned host memory and the GPU, and within the GPU, by every engine, beside one contiguous copy.

`python -m perf.bench_host [--out FOLDER] [--only TEXT] [--rounds N] [--mib N]`: by direction, size of a page and number
of pages, scattered on both sides. Every move is compared with torch's indexing before it is timed. GB/s of payload;
`of_contiguous` is the share of one copy of the same bytes in the same run; `host_us` is what the call takes of the
host, of an idle GPU. The end says of each experimental engine whether it is kept: if it is the fastest somewhere, by
more than the noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvmover.kernels import bulk
from kvmover.kernels.copy_engine import EXPERIMENTAL, CopyEngine
from kvmover.kernels.pinned import pinned
from kvmover.kernels.region import Region, Side
from perf.gpu_time import interleaved, need_gpu
from perf.record import RESULTS, write

PAGES = (2 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
WAYS = ("host to device", "device to host", "device to device")

#: Of small pages there are no more than the last: a call a page would take seconds a round.
COUNTS = (16, 256, 4096, 1 << 15)

#: An experimental engine is kept where it is faster by this than every other that takes no more SMs than these.
GAIN, FEW_SMS = 1.05, 8

#: No budget: more SMs than there are.
ALL = 1 << 12
HOST_ENGINES: tuple[tuple[CopyEngine, int | None], ...] = (
    (CopyEngine.COPY, None),
    (CopyEngine.LOOP, None),
    *((CopyEngine.BULK, sms) for sms in (1, 2, 4, 8)),
    *((CopyEngine.ROWS, sms) for sms in (4, 16, ALL)),
)
DEVICE_ENGINES: tuple[tuple[CopyEngine, int | None], ...] = (
    *((CopyEngine.BULK, sms) for sms in (1, 2, 4, 8, 16, ALL)),
    *((CopyEngine.ROWS, sms) for sms in (1, 2, 4, 8, 16, ALL)),
    *((CopyEngine.TENSOR, sms) for sms in (1, 2, 4, 8)),
    (CopyEngine.GREEN, 8),
    (CopyEngine.BOXES, None),
    (CopyEngine.COPY, None),
)


@dataclass(frozen=True, slots=True)
class Pools:
    """`host` pinned, and two on the device, of one size. `mirror` holds what a source is filled with."""

    host: torch.Tensor
    device: torch.Tensor
    mirror: torch.Tensor

    @classmethod
    def of(cls, nbytes: int) -> Pools:
        words = torch.randint(-(2**62), 2**62, (nbytes // 8,), dtype=torch.int64, device="cuda")
        return cls(pinned(nbytes), torch.empty(nbytes, dtype=torch.uint8, device="cuda"), words.view(torch.uint8))

    def ends(self, way: str, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Source, filled, and destination."""
        src = self.host if way == WAYS[0] else self.mirror
        dst = self.host if way == WAYS[1] else self.device
        if src is self.host:
            src.copy_(self.mirror)
        return src[:nbytes], dst[:nbytes]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--only", default="")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--mib", type=int, default=1024)
    chosen = options.parse_args()
    need_gpu("perf.bench_host")
    lines: list[dict[str, object]] = []
    pools = Pools.of(chosen.mib << 20)
    with torch.cuda.stream(torch.cuda.Stream()):
        for way in WAYS:
            for page_bytes in PAGES:
                for pages in counts(pools.host.numel() // page_bytes):
                    if chosen.only in way:
                        lines += measured(pools, way, page_bytes, pages, chosen.rounds)
                        write("bench_host", lines, chosen.out)
    print(*verdicts(lines), sep="\n")
    print(f"wrote {chosen.out / 'bench_host.csv'}")


def counts(most: int) -> list[int]:
    """Return how many pages are moved at once, where a pool holds at most so many.

    >>> counts(1000), counts(8)
    ([16, 256, 1000], [8])
    """
    return sorted({min(count, most) for count in COUNTS})


def verdicts(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the measurements say of each experimental engine: kept where it is the fastest by GAIN."""
    cells = dict[tuple[str, int, int], dict[str, float]]()
    for line in lines:
        engine, _, budget = line["what"].partition(", ")
        few = not budget or (budget != "all SMs" and int(budget.split()[0]) <= FEW_SMS)
        if few and engine in {each.value for each in CopyEngine}:
            found = cells.setdefault((line["way"], line["page_bytes"], line["pages"]), {})
            found[engine] = max(found.get(engine, 0.0), line["gb_per_s"])
    for each in CopyEngine:
        tried = {cell: found for cell, found in cells.items() if each.value in found}
        if each in EXPERIMENTAL and tried:
            best = [cell for cell, found in tried.items() if _fastest(each, found)]
            where = "; ".join(f"{way}, {pages} of {page_bytes} B" for way, page_bytes, pages in best)
            fate = f"kept for {where}" if best else "deleted"
            yield f"{each.value}: fastest in {len(best)} of {len(tried)}, {fate}"


def _fastest(engine: CopyEngine, rates: Mapping[str, float]) -> bool:
    others = [rate for name, rate in rates.items() if name != engine.value]
    return all(rates[engine.value] >= GAIN * rate for rate in others)


def measured(pools: Pools, way: str, page_bytes: int, pages: int, rounds: int) -> list[dict[str, object]]:
    """Every engine on the same pages, checked, then timed one after the other in each round."""
    nbytes = pages * page_bytes
    src, dst = pools.ends(way, nbytes)
    ids = [np.random.default_rng(seed).permutation(pages) for seed in (0, 1)]
    region = Region(_side(src, ids[0], page_bytes), _side(dst, ids[1], page_bytes), 1, 1, page_bytes)
    cases: dict[str, Callable[[], object]] = {"one contiguous copy": lambda: dst.copy_(src, non_blocking=True)}
    for name, prepared in _prepared(region, HOST_ENGINES if "host" in way else DEVICE_ENGINES):
        dst.view(pages, -1)[:, :: page_bytes // 64] = 0  # what the engine before has left must not pass for its own
        prepared.run()
        _check(pools, dst, ids, page_bytes, f"{way}, {page_bytes} B, {name}")
        cases[name] = prepared.run
    host_us = {name: _host_us(call) for name, call in cases.items()}
    spreads = interleaved(cases, rounds)
    contiguous = spreads["one contiguous copy"].median
    lines: list[dict[str, object]] = []
    for name, spread in spreads.items():
        line: dict[str, object] = {
            "way": way,
            "page_bytes": page_bytes,
            "pages": pages,
            "what": name,
            "gb_per_s": round(nbytes / spread.median / 1e9, 2),
            "p10_gb_per_s": round(nbytes / spread.high / 1e9, 2),
            "p90_gb_per_s": round(nbytes / spread.low / 1e9, 2),
            "of_contiguous": round(contiguous / spread.median, 3),
            "host_us": round(host_us[name], 1),
        }
        print(
            f"{way:<17} {pages:>6} x {page_bytes >> 10:>5} KiB  {name:<32} {line['gb_per_s']:>9} GB/s"
            f" {line['of_contiguous']:>6} {line['host_us']:>10} us",
            flush=True,
        )
        lines.append(line)
    return lines


def _side(memory: torch.Tensor, ids: npt.NDArray[np.int64], page_bytes: int) -> Side:
    zero = np.zeros(1, np.int64)
    return Side.of((memory,), zero, zero, ids * page_bytes, page_bytes, page_bytes)


def _prepared(
    region: Region, engines: tuple[tuple[CopyEngine, int | None], ...]
) -> Iterator[tuple[str, bulk.PreparedBulk]]:
    """By name; what this machine lacks is said and left out."""
    device = torch.device("cuda", torch.cuda.current_device())
    for engine, sms in engines:
        reason = bulk.unavailable(engine, device)
        budget = "" if sms is None else f", {'all' if sms == ALL else sms} SMs"
        name = engine.value + budget
        if reason is None:
            yield name, bulk.prepare([region], sms, engine)
        else:
            print(f"{name}: {reason}")


def _check(pools: Pools, dst: torch.Tensor, ids: list[npt.NDArray[np.int64]], page_bytes: int, what: str) -> None:
    """Every page of the destination, on the GPU."""
    got = dst.cuda() if dst.device.type == "cpu" else dst
    taken, put = (torch.from_numpy(each).cuda() for each in ids)
    wanted = torch.empty_like(got).view(-1, page_bytes // 8, 8)
    wanted[put] = pools.mirror[: got.numel()].view(-1, page_bytes // 8, 8)[taken]
    assert torch.equal(got, wanted.view(-1)), what


def _host_us(call: Callable[[], object]) -> float:
    """Of the second call, once the GPU is idle."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return took * 1e6


if __name__ == "__main__":
    main()
