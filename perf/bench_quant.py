"""Packing to fp8 and back on a GPU, beside the plain row mover on the same pool, and a clone.

`python -m perf.bench_quant [--out FOLDER] [--rounds N] [--tiles BYTES,..]`. Every case is compared with the definition
before it is timed. `of_copy_per_byte_read` is time per byte read, relative to the row mover's: what converting costs
while packing. Unpacking reads half the bytes and writes as many as the copy, so there `of_copy_per_byte_moved` is what
compares: it counts bytes read and written, scales included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvmover.kernels import quant
from kvmover.kernels.launch import RowConfig
from kvmover.kernels.quant_reference import SCALE_BYTES, WIDE_BYTES, QuantRegion, dequantize, quantize
from kvmover.kernels.region import Side
from perf.bench_kernels import launcher
from perf.cases import DEEPSEEK, LLAMA, Case, Move, build
from perf.gpu_time import interleaved, need_gpu
from perf.record import RESULTS, write

CASES = (
    Case("Llama-3-70B", LLAMA, 2, 8, 64),
    Case("Llama-3-70B", LLAMA, 2, 8, 16),
    Case("DeepSeek-V3 MLA", DEEPSEEK, 1, 1, 64),
)
SMS = (4, 16)
#: Rows that are compared with the definition, at each end of the packed buffer: the CPU takes long for all.
COMPARED = 1 << 16


@dataclass(frozen=True, slots=True)
class Way:
    """What is timed, and the bytes that it reads and writes."""

    call: Callable[[], object]
    read: int
    written: int


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--tiles", default="4096,8192", help="bytes of wide rows a tile, without a budget")
    chosen = options.parse_args()
    need_gpu("perf.bench_quant")
    configs = [RowConfig(int(tile), 4) for tile in chosen.tiles.split(",")]
    lines: list[dict[str, object]] = []
    for case in CASES:
        move = build(case)
        fill(move)
        regions, fp8, scales = quantised(move)
        check(move, regions, fp8, scales)
        lines += measured(move, regions, configs, chosen.rounds)
        write("bench_quant", lines, chosen.out)
        del move, regions, fp8, scales
        torch.cuda.empty_cache()
    print(f"wrote {chosen.out / 'bench_quant.csv'}")


def fill(move: Move) -> None:
    """Numbers as a model has them: random bits would be of all magnitudes, and NaN."""
    for tensor in move.pool:
        tensor.view(torch.bfloat16).normal_()


def quantised(move: Move) -> tuple[list[QuantRegion], torch.Tensor, torch.Tensor]:
    """The gather's regions with the wire as fp8 and scales, each in a buffer and in the order of the wide wire."""
    row_bytes = move.case.component.row_bytes
    dim = row_bytes // WIDE_BYTES
    rows = move.packed.numel() // row_bytes
    fp8, scales = (
        torch.empty(rows * width, dtype=torch.uint8, device=move.packed.device) for width in (dim, SCALE_BYTES)
    )

    def scaled(side: Side, memory: torch.Tensor, width: int) -> Side:
        parts = {"offset": side.offset, "units": side.units}
        strides = {"head_bytes": side.head_bytes, "token_bytes": side.token_bytes}
        changed = {name: part * width // row_bytes for name, part in {**parts, **strides}.items()}
        return replace(side, memory=(memory,), **changed)

    regions: list[QuantRegion] = []
    for region in move.gather:
        assert region.row_bytes == row_bytes, "heads were merged into rows, and each has a scale of its own"
        narrow, factors = scaled(region.dst, fp8, dim), scaled(region.dst, scales, SCALE_BYTES)
        regions.append(QuantRegion(region.src, narrow, factors, region.heads, region.tokens, dim, torch.bfloat16))
    return regions, fp8, scales


def check(move: Move, regions: list[QuantRegion], fp8: torch.Tensor, scales: torch.Tensor) -> None:
    """Pack and unpack against the definition on what the row mover gathers, on the first and last rows."""
    prepared = quant.prepare(regions)
    assert prepared is not None
    launcher(move.gather, None)()
    prepared.pack()
    dim = regions[0].dim
    gathered = move.packed.view(torch.bfloat16).view(-1, dim)
    for rows in (slice(None, COMPARED), slice(-COMPARED, None)):
        want, factors = quantize(gathered[rows].cpu())
        assert torch.equal(fp8.view(-1, dim)[rows].cpu(), want), f"{move.case.text()}: fp8 differs"
        assert torch.equal(scales.view(torch.float32)[rows].cpu(), factors), f"{move.case.text()}: scales differ"
    prepared.unpack()
    launcher(move.gather, None)()
    for rows in (slice(None, COMPARED), slice(-COMPARED, None)):
        back = dequantize(fp8.view(-1, dim)[rows].cpu(), scales.view(torch.float32)[rows].cpu(), torch.bfloat16)
        assert torch.equal(gathered[rows].cpu(), back), f"{move.case.text()}: unpacked rows differ"


def ways(move: Move, regions: list[QuantRegion], configs: list[RowConfig]) -> dict[tuple[str, str], Way]:
    """By direction and name. The clone is of the wide wire."""
    wide = move.nbytes
    narrow = wide // WIDE_BYTES + sum(region.rows for region in regions) * SCALE_BYTES
    found: dict[tuple[str, str], Way] = {}
    for way, moved in (("pack", move.gather), ("unpack", move.scatter)):
        read, written = (wide, narrow) if way == "pack" else (narrow, wide)
        found[way, "clone"] = Way(lambda: torch.clone(move.packed), wide, wide)
        for sms in (None, *SMS):
            budget = "" if sms is None else f", {sms} SMs"
            found[way, f"copy{budget}"] = Way(launcher(moved, sms), wide, wide)
            for config in configs if sms is None else [None]:
                tile = f", {config.block_bytes} B tiles" if config else budget
                found[way, f"fp8{tile}"] = Way(_verb(regions, config, sms, way), read, written)
    return found


def _verb(regions: list[QuantRegion], config: RowConfig | None, sms: int | None, way: str) -> Callable[[], object]:
    prepared = quant.prepare(regions, config, sms)
    assert prepared is not None
    return prepared.pack if way == "pack" else prepared.unpack


def measured(move: Move, regions: list[QuantRegion], configs: list[RowConfig], rounds: int) -> list[dict[str, object]]:
    found = ways(move, regions, configs)
    spreads = interleaved({key: way.call for key, way in found.items()}, rounds)
    lines: list[dict[str, object]] = []
    for (direction, name), way in found.items():
        spread = spreads[direction, name]
        plain = f"copy{name[name.index(',') :]}" if name.endswith("SMs") else "copy"
        copy, copied = spreads[direction, plain].median, found[direction, plain]
        line: dict[str, object] = {
            "case": move.case.text(),
            "way": direction,
            "what": name,
            "mib_read": way.read >> 20,
            "mib_written": way.written >> 20,
            "gb_read_per_s": round(way.read / spread.median / 1e9, 1),
            "gb_moved_per_s": round((way.read + way.written) / spread.median / 1e9, 1),
            "p10_gb_moved_per_s": round((way.read + way.written) / spread.high / 1e9, 1),
            "p90_gb_moved_per_s": round((way.read + way.written) / spread.low / 1e9, 1),
            "of_copy_time": round(spread.median / copy, 3),
            "of_copy_per_byte_read": round(spread.median / way.read / (copy / copied.read), 3),
            "of_copy_per_byte_moved": round(
                spread.median / (way.read + way.written) / (copy / (copied.read + copied.written)), 3
            ),
        }
        print(
            f"{line['case']:<52} {direction:<7} {name:<18} {line['gb_read_per_s']:>8} GB/s read"
            f" {line['gb_moved_per_s']:>8} moved; of the copy: {line['of_copy_per_byte_read']:>6} a byte read"
            f" {line['of_copy_per_byte_moved']:>6} moved",
            flush=True,
        )
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
