"""Compile what an autotune would launch, on any machine: registers, access widths and spills of every candidate.

A candidate that spills is left out of the sweep, here and on a GPU. One that is otherwise not as it should be ends the
dry run with status 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import StrEnum

import numpy as np
import torch
from rich.progress import track

from kvmover.kernels.launch import RowConfig
from kvmover.kernels.region import Region, Side
from kvmover.kernels.rows import RowShape, rest_rows
from perf import machine_code
from perf.conversions import NARROW, back, conversion

ARCHITECTURES = (80, 90, 100)

#: Row bytes and tokens a unit of the benchmark's cases, one of each kind.
KINDS = ((256, 64), (256, 16), (256, 1), (2048, 8), (2048, 9), (1024, 41), (1152, 1), (656, 1))


class Verdict(StrEnum):
    """What becomes of a candidate, in the words of the report."""

    SWEPT = ""
    SPILLS = "  <-- left out: it spills"
    WRONG = "  <-- not as it should be"


def region(row_bytes: int, tokens: int) -> Region:
    """A head slice: every other row of scattered units, packed."""
    units = np.array([3, 0, 2, 1], np.int64) * tokens * row_bytes
    zero = np.zeros(1, np.int64)
    memory = torch.zeros(8 * tokens * row_bytes, dtype=torch.uint8)
    src = Side.of((memory,), zero, zero, 2 * units, 0, 2 * row_bytes)
    dst = Side.of((torch.zeros_like(memory),), zero, zero, np.sort(units), 0, row_bytes)
    return Region(src, dst, 1, tokens, row_bytes)


def compile_one(job: tuple[int, int, RowConfig, int]) -> tuple[str, Verdict]:
    """A line of the report, and the verdict. As it should be are 16 bytes an access, but for what is left of whole
    units, of which threads may be more than accesses.
    """
    row_bytes, tokens, config, architecture = job
    regions = [region(row_bytes, tokens)]
    code, own = machine_code.of_rows(regions, config, architecture), RowShape.of(regions[0], config.block_bytes)
    narrow = int(own.tokens > 0 and rest_rows(own.tokens * own.grains) > 0)
    good = not any(sum(bits != 128 for bits in each) > narrow for each in code.widths().values())
    return _line(f"{row_bytes:>4} B x {tokens:<2}", config, architecture, code), _verdict(
        code, good and not code.shared_bytes
    )


def convert_one(job: tuple[int, str, RowConfig, int]) -> tuple[str, Verdict]:
    """The same of a conversion of rows of so many numbers, `to` their narrow form or `from` it."""
    dim, way, config, architecture = job
    there = conversion(region(2 * dim, 64), dim)
    code = machine_code.of_conversions([there if way == "to" else back(there)], config, architecture)
    return _line(f"{way:>4} {NARROW[dim].text()}", config, architecture, code), _verdict(code, True)


def _verdict(code: machine_code.MachineCode, good: bool) -> Verdict:
    if code.spills:
        return Verdict.SPILLS
    return Verdict.SWEPT if good else Verdict.WRONG


def _line(what: str, config: RowConfig, architecture: int, code: machine_code.MachineCode) -> str:
    widths = sorted({bits for each in code.widths().values() for bits in each})
    launch = f"sm_{architecture} {what} {config.block_bytes >> 10:>3} KiB {config.warps:>2} warps"
    return f"{launch}: {code.registers:>3} registers, {widths} bit, {code.spills} spills, {code.shared_bytes} B shared"


def compile_all(configs: Sequence[RowConfig], converting: Sequence[RowConfig]) -> int:
    """Report every candidate, those of conversion last. Returns how many are neither as they should be nor left out."""
    copies = [(*kind, config, arch) for arch in ARCHITECTURES for kind in KINDS for config in configs]
    ways = [(dim, way) for dim in NARROW for way in ("to", "from")]
    conversions = [(*way, config, arch) for arch in ARCHITECTURES for way in ways for config in converting]
    with ProcessPoolExecutor() as pool:
        found = list(track(pool.map(compile_one, copies, chunksize=4), "copies", total=len(copies)))
        found += track(pool.map(convert_one, conversions, chunksize=4), "conversions", total=len(conversions))
    for line, verdict in found:
        print(f"{line}{verdict}")
    counts = Counter(verdict for _, verdict in found)
    print(
        f"{len(found)} candidates compiled, {counts[Verdict.SPILLS]} left out because they spill,"
        f" {counts[Verdict.WRONG]} not as they should be"
    )
    return counts[Verdict.WRONG]
