"""The CPU path: gather, scatter and digest of 64 MiB of scattered pages, as a share of a memcpy of the same bytes.

Targets: 0.9 for rows of 512 B and more; digests of 4 GB/s a core. Every other row is taken, as a head slice does.
By the C core on one thread and on all that torch may use, and as it is defined, in numpy and torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from kvmover.kernels import cpu, digest_reference, reference
from kvmover.kernels.digest_reference import Logical
from kvmover.kernels.region import Region, Side
from perf.command_line import options
from perf.record import interleaved, write

NBYTES = 64 << 20
PLANES = 32
PAGE_TOKENS = 16
ROUNDS = 15


def main() -> None:
    options(__doc__).parse_args()
    rows: list[dict[str, object]] = []
    for row_bytes in (128, 256, 512, 1024, 4096):
        for allocations in (1, PLANES):
            rows += _case(row_bytes, allocations)
    for row in rows:
        print(
            f"{row['what']:<20} rows of {row['row_bytes']:>4} B, {row['allocations']:>2} allocations:"
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
    gather, scatter = (
        Region(*ends, 1, PAGE_TOKENS, row_bytes) for ends in ((in_pool, in_packed), (in_packed, in_pool))
    )
    logical = Logical(planes, pages * PAGE_TOKENS)
    source, target = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8), torch.zeros(NBYTES, dtype=torch.uint8)
    spreads = interleaved(
        {
            "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), NBYTES),
            "copy_ on all cores": lambda: target.copy_(source),
            "gather": lambda: cpu.move([gather]),
            "scatter": lambda: cpu.move([scatter]),
            "digest": lambda: cpu.digest([gather], [logical], "src"),
            "gather, one thread": lambda: on_one_thread(lambda: cpu.move([gather])),
            "scatter, one thread": lambda: on_one_thread(lambda: cpu.move([scatter])),
            "digest, one thread": lambda: on_one_thread(lambda: cpu.digest([gather], [logical], "src")),
            "gather as defined": lambda: reference.move([gather]),
            "scatter as defined": lambda: reference.move([scatter]),
        },
        ROUNDS,
    )
    defined = {"digest as defined": lambda: digest_reference.digest([gather], [logical], "src")}
    spreads |= interleaved(defined, 1)  # three hundred times as long
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


def on_one_thread(call: Callable[[], object]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    call()
    torch.set_num_threads(before)


if __name__ == "__main__":
    main()
