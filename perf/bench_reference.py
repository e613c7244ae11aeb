"""The CPU path: gather and scatter of 64 MiB of scattered pages, as a share of a plain memcpy of the same bytes.

Targets on two cores: 0.5 for rows of 1 KiB and more, 0.3 for 256 B. Every other row is taken, as a head slice does.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kvmover.kernels import reference
from kvmover.kernels.region import Region, Side
from perf.record import interleaved, write

NBYTES = 64 << 20
PLANES = 32
PAGE_TOKENS = 16
ROUNDS = 15


def main() -> None:
    rows: list[dict[str, object]] = []
    for row_bytes in (128, 256, 512, 1024, 4096):
        for allocations in (1, PLANES):
            rows += _case(row_bytes, allocations)
    for row in rows:
        print(
            f"{row['what']:<8} rows of {row['row_bytes']:>4} B, {row['allocations']:>2} allocations:"
            f" {row['gb_per_s']:>6.2f} GB/s, {row['of_memcpy']:.2f} of memcpy"
        )
    print(f"wrote {write('bench_reference', rows)}")


def _case(row_bytes: int, allocations: int) -> list[dict[str, object]]:
    units = NBYTES // (PLANES * PAGE_TOKENS * row_bytes)
    page_bytes = 2 * PAGE_TOKENS * row_bytes
    plane_bytes = units * page_bytes
    per = PLANES // allocations
    pool = tuple(torch.randint(0, 255, (per * plane_bytes,), dtype=torch.uint8) for _ in range(allocations))
    packed = torch.zeros(NBYTES, dtype=torch.uint8)
    planes = np.arange(PLANES)
    pages = np.random.default_rng(0).permutation(units).astype(np.int64)
    in_pool = Side.of(pool, planes // per, planes % per * plane_bytes, pages * page_bytes, row_bytes, 2 * row_bytes)
    unit_bytes = PLANES * PAGE_TOKENS * row_bytes
    in_packed = Side.of(
        (packed,),
        planes * 0,
        planes * PAGE_TOKENS * row_bytes,
        np.arange(units, dtype=np.int64) * unit_bytes,
        unit_bytes,
        row_bytes,
    )
    source, target = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8), torch.zeros(NBYTES, dtype=torch.uint8)
    spreads = interleaved(
        {
            "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), NBYTES),
            "copy_ on all cores": lambda: target.copy_(source),
            "gather": lambda: reference.move([Region(in_pool, in_packed, 1, PAGE_TOKENS, row_bytes)]),
            "scatter": lambda: reference.move([Region(in_packed, in_pool, 1, PAGE_TOKENS, row_bytes)]),
        },
        ROUNDS,
    )
    return [
        {
            "what": what,
            "row_bytes": row_bytes,
            "allocations": allocations,
            "gb_per_s": round(NBYTES / spread.median / 1e9, 2),
            "p10_gb_per_s": round(NBYTES / spread.high / 1e9, 2),
            "p90_gb_per_s": round(NBYTES / spread.low / 1e9, 2),
            "of_memcpy": round(spreads["memcpy"].median / spread.median, 3),
        }
        for what, spread in spreads.items()
    ]


if __name__ == "__main__":
    main()
