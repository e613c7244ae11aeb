"""The row mover on a GPU beside a clone of the same bytes, torch's own ways, a copy loop, and peers' kernels.

`python -m perf.bench_kernels [--out FOLDER] [--only TEXT]`. Every move is compared with what torch's indexing gives
before it is timed. Payload GB/s; `of_clone` is the share of a device-to-device clone of the same bytes in the same run.
`code` and `launch`: see perf/measured_code.py; `peer`: the release of what is not ours, and a hash of its source.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from kvmover.kernels import rows
from kvmover.kernels.launch import Prepared
from kvmover.kernels.region import Region
from perf.cases import CASES, Move, moves
from perf.copy_engines import launchers, same_bytes
from perf.gpu_time import interleaved, need_gpu
from perf.measured_code import columns
from perf.peers import sglang_release, sglang_staging
from perf.record import RESULTS, write

#: The budget under which the engines beside the row mover are measured; the copy engine takes none.
ENGINE_SMS = 8

#: More copies than this take seconds: 32k pages of one token in 160 planes are five million.
MOST_COPIES = 100_000


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--only", default="")
    options.add_argument("--rounds", type=int, default=30)
    chosen = options.parse_args()
    need_gpu("perf.bench_kernels")
    lines: list[dict[str, object]] = []
    peers = sglang_staging()
    print("SGLang's staging kernels:", "as released and aligned" if peers else "not importable, left out")
    for move in moves(tuple(case for case in CASES if chosen.only in case.text())):
        check(move)
        for way in ("gather", "scatter"):
            lines += _measured(move, way, peers, chosen.rounds)
            write("bench_kernels", lines, chosen.out)
    print(f"wrote {chosen.out / 'bench_kernels.csv'}")


def check(move: Move) -> None:
    """Gather against torch's indexing, and scatter back into a poisoned pool against what was there."""
    rows.move(move.gather)
    for number, plane in enumerate(_views(move)):
        assert torch.equal(_wire(move)[:, :, number], _picked(move, plane)), f"{move.case.text()}: gather differs"
    before = [tensor.clone() for tensor in move.pool]
    for plane in _views(move):
        first, count = move.leg_heads
        plane[:, :, first : first + count] = 0
    rows.move(move.scatter)
    torch.cuda.synchronize()
    for tensor, old in zip(move.pool, before, strict=True):
        assert torch.equal(tensor, old), f"{move.case.text()}: scatter differs"


def _views(move: Move) -> list[torch.Tensor]:
    """Each plane as bytes [page, token, head, row_byte]."""
    spec = move.held.spec
    sizes = [spec.layout.extent_of(axis) for axis in ("page", "token", "head")]
    strides = [spec.stride_bytes(axis) for axis in ("page", "token", "head")]
    row = spec.component.row_bytes
    return [tensor.as_strided([*sizes, row], [*strides, 1]) for tensor in move.pool]


def _wire(move: Move) -> torch.Tensor:
    """The packed buffer as bytes [unit, head, plane, token, row_byte]; one page is one unit here."""
    count, row = move.leg_heads[1], move.case.component.row_bytes
    return move.packed.view(len(move.pages), count, len(move.pool), move.case.page_tokens, row)


def _picked(move: Move, plane: torch.Tensor) -> torch.Tensor:
    first, count = move.leg_heads
    index = torch.from_numpy(move.pages).cuda()
    return plane[index][:, :, first : first + count].transpose(1, 2)


def _measured(move: Move, way: str, peers: dict[str, ModuleType], rounds: int) -> list[dict[str, object]]:
    regions = move.gather if way == "gather" else move.scatter
    cases: dict[str, Callable[[], object]] = {"clone": lambda: torch.clone(move.packed)}
    ours = {"kvmover": launcher(regions, None)}
    ours |= {f"kvmover, {sms} SMs": launcher(regions, sms) for sms in (4, ENGINE_SMS, 16)}
    cases |= {name: prepared.run for name, prepared in ours.items()}
    others = launchers(regions, ENGINE_SMS)
    same_bytes(regions, lambda: rows.move(regions), list(others.values()))
    cases |= {f"{engine.value}, {ENGINE_SMS} SMs": call for engine, call in others.items()}
    cases.update(_torch_ways(move) if way == "gather" else {})
    for name, module in peers.items():
        peer = _sglang(move, way, module)
        if peer is not None:
            cases[f"SGLang staging, {name}"] = peer
    spreads = interleaved(cases, rounds)
    if way == "gather" and len(move.pages) * len(move.pool) <= MOST_COPIES:
        spreads |= interleaved({"a copy a page and plane": _copies(move)}, 3)
    clone = spreads["clone"].median
    lines: list[dict[str, object]] = []
    for name, spread in spreads.items():
        line: dict[str, object] = {
            "case": move.case.text(),
            "way": way,
            "row_bytes": regions[0].row_bytes,
            "mib": move.nbytes >> 20,
            "what": name,
            "gb_per_s": round(move.nbytes / spread.median / 1e9, 1),
            "p10_gb_per_s": round(move.nbytes / spread.high / 1e9, 1),
            "p90_gb_per_s": round(move.nbytes / spread.low / 1e9, 1),
            "of_clone": round(clone / spread.median, 3),
            "peer": sglang_release() if name.startswith("SGLang") else "",
            **columns(ours.get(name)),
        }
        print(f"{line['case']:<60} {way:<8} {name:<26} {line['gb_per_s']:>8} GB/s {line['of_clone']:>6}", flush=True)
        lines.append(line)
    return lines


def launcher(regions: list[Region], sms: int | None) -> Prepared:
    """Return the launch alone: tables are described and uploaded before, as they are while another chunk travels."""
    prepared = rows.prepare(regions, None, sms)
    assert prepared is not None
    return prepared


def _torch_ways(move: Move) -> dict[str, Callable[[], object]]:
    """Layer by layer, in the pool's own order: what an engine writes first."""
    index = torch.from_numpy(move.pages).cuda()
    first, count = move.leg_heads
    planes = _views(move)

    def index_select() -> None:
        for plane in planes:
            torch.index_select(plane.narrow(2, first, count), 0, index)

    def advanced() -> None:
        for plane in planes:
            plane[index, :, first : first + count]

    return {"torch.index_select a layer": index_select, "advanced indexing a layer": advanced}


def _copies(move: Move) -> Callable[[], object]:
    """One asynchronous copy for each page of each plane: what a transfer without a kernel posts."""
    first, count = move.leg_heads
    wire, pages = _wire(move), move.pages.tolist()
    planes = _views(move)

    def run() -> None:
        for number, plane in enumerate(planes):
            for unit, page in enumerate(pages):
                wire[unit, :, number].copy_(plane[page, :, first : first + count].transpose(0, 1), non_blocking=True)

    return run


def _sglang(move: Move, way: str, module: ModuleType) -> Callable[[], object] | None:
    """SGLang's kernel on the same pool, in its own staging order. It knows NHD attention only."""
    component = move.case.component
    if component.kv != 2 or move.case.order != "NHD" or move.case.src_tp > component.heads:
        return None
    first, count = move.leg_heads
    elements = count * component.dim
    per_layer = move.case.tokens * elements
    local_heads = move.held.shard.heads.count
    pointers = torch.tensor([tensor.data_ptr() for tensor in move.pool], dtype=torch.int64, device="cuda")
    index = torch.from_numpy(move.pages).cuda()
    staging = move.packed.view(torch.int16)
    grid = (len(move.pool), -(-per_layer // 1024))
    tail = (move.case.tokens, local_heads * component.dim)
    if way == "gather":
        kernel = module._fused_gather_to_staging_kernel
        page = move.case.page_tokens
        return lambda: kernel[grid](
            pointers, index, staging, *tail, first * component.dim, per_layer, elements, page, 1024
        )
    kernel = module._fused_scatter_from_staging_kernel
    offsets = torch.tensor([first * component.dim], dtype=torch.int64, device="cuda")
    planes = len(move.pool)
    return lambda: kernel[grid](
        pointers, index, staging, offsets, *tail, per_layer, elements, move.case.page_tokens, planes, 1024
    )


if __name__ == "__main__":
    main()
