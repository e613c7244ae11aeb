"""Compile what an autotune would launch, on any machine: registers, access widths and spills of every candidate."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from rich.progress import track

from kvmover.kernels.launch import RowConfig
from kvmover.kernels.region import Region, Side
from perf import machine_code

ARCHITECTURES = (80, 90, 100)

#: Row bytes and tokens a unit of the benchmark's cases, one of each kind.
KINDS = ((256, 64), (256, 16), (256, 1), (2048, 8), (1152, 1), (656, 1))


def region(row_bytes: int, tokens: int) -> Region:
    """A head slice: every other row of scattered units, packed."""
    units = np.array([3, 0, 2, 1], np.int64) * tokens * row_bytes
    zero = np.zeros(1, np.int64)
    memory = torch.zeros(8 * tokens * row_bytes, dtype=torch.uint8)
    src = Side.of((memory,), zero, zero, 2 * units, 0, 2 * row_bytes)
    dst = Side.of((torch.zeros_like(memory),), zero, zero, np.sort(units), 0, row_bytes)
    return Region(src, dst, 1, tokens, row_bytes)


def compile_one(job: tuple[int, int, RowConfig, int]) -> tuple[str, bool]:
    """A line of the report, and whether the candidate is as it should be."""
    row_bytes, tokens, config, architecture = job
    code = machine_code.of_rows([region(row_bytes, tokens)], config, architecture)
    widths = sorted({bits for each in code.widths().values() for bits in each})
    good = widths == [128] and not code.spills and not code.shared_bytes
    what = f"sm_{architecture} {row_bytes:>4} B x {tokens:<2} {config.block_bytes >> 10:>3} KiB {config.warps:>2} warps"
    line = f"{what}: {code.registers:>3} registers, {widths} bit, {code.spills} spills, {code.shared_bytes} B shared"
    return line, good


def compile_all(configs: Sequence[RowConfig]) -> int:
    """Report every candidate, and return how many are not as they should be."""
    jobs = [(*kind, config, arch) for arch in ARCHITECTURES for kind in KINDS for config in configs]
    with ProcessPoolExecutor() as pool:
        found = list(track(pool.map(compile_one, jobs, chunksize=4), "compiling", total=len(jobs)))
    for line, good in found:
        print(line, "" if good else "  <-- not as it should be")
    bad = sum(not good for _, good in found)
    print(f"{len(jobs)} candidates compiled, {bad} not as they should be")
    return bad
