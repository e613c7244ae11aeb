"""Sweep tile size and warps of row mover, digest and conversion, with and without an SM budget, and keep the best.

`python -m perf.autotune` measures on a GPU and writes `kernels/tuned/<gpu>.json`; it resumes where it was stopped.
Every candidate is compared with the checked default's bytes before it is timed. `--dry-run` compiles the whole sweep
without a GPU and reports registers, access widths and spills, so that no sweep dies on a GPU for a compile error. A
candidate that spills is left out, and named.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track

from kvmover.kernels import cuda_driver, rows
from kvmover.kernels.launch import RULES, TUNED, Kernel, RowConfig, RowKind, device_key
from kvmover.kernels.region import Region
from perf.conversions import NARROW, back, conversion

if TYPE_CHECKING:
    from kvmover.kernels.convert_reference import Conversion
    from kvmover.kernels.launch import Prepared
    from perf.cases import Case, Move

#: Tiles and warps to try without a budget, and where each program has an SM to itself.
FREE = tuple(product((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8)))
ALONE = tuple(product((8192, 16384, 32768, 65536, 131072), (4, 8, 16, 32)))
BUDGETS = (None, 8)

#: 16-byte accesses a thread of the wider side of a conversion.
MOST_CONVERTED = 8
ROUNDS = 7

#: Of a measured table.
COLUMNS = ("block_bytes", "warps", "gb_per_s")


def candidates(sms: int | None) -> Iterator[RowConfig]:
    """One to sixteen 16-byte accesses a thread: less leaves lanes idle, more registers than there are.

    32 warps have 64 registers a thread; at eight accesses they spill.
    """
    for block_bytes, warps in FREE if sms is None else ALONE:
        if 1 <= block_bytes // (warps * 32 * 16) <= (4 if warps == 32 else 16):
            yield RowConfig(block_bytes, warps)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dry-run", action="store_true")
    options.add_argument("--out", type=Path, default=TUNED)
    options.add_argument("--only", default="", help="of cases with this text")
    chosen = options.parse_args()
    if chosen.dry_run:
        from perf.compile_sweep import compile_all

        configs = [config for sms in BUDGETS for config in candidates(sms)]
        converting = [config for sms in BUDGETS for config in conversion_candidates(sms)]
        raise SystemExit(min(1, compile_all(configs, converting)))
    from perf.gpu_time import need_gpu

    need_gpu("perf.autotune")
    sweep(chosen.out, chosen.only)


def text_of(table: Mapping[str, Any]) -> str:
    """A table as JSON with an entry a line, so that a difference between two can be read."""
    head = json.dumps({key: value for key, value in table.items() if key != "entries"})
    entries = ",\n".join(map(json.dumps, table["entries"]))
    return f'{head[:-1]}, "entries": [\n{entries}\n]}}\n'


def sweep(folder: Path, only: str) -> None:
    """One table a GPU: for every kind of row, direction and budget all candidates with their rates, best first.

    A case is done when its last kernel is: entries of a table that lacks it are measured again.
    """
    import torch

    from perf.bench_kernels import check
    from perf.cases import CASES, build
    from perf.record import machine

    path = folder / f"{device_key(torch.cuda.get_device_name())}.json"
    table = json.loads(path.read_text()) if path.exists() else {"about": machine(), "columns": COLUMNS, "entries": []}
    for case in track(
        [case for case in CASES if not is_done(case, table["entries"]) and only in case.text()], "tuning"
    ):
        move, name = build(case), case.text()
        check(move)
        entries = [entry for entry in table["entries"] if entry["case"] != name]
        for way, regions in (("gather", move.gather), ("scatter", move.scatter)):
            entries += [{"case": name, "way": way, "sms": sms, **best(regions, sms)} for sms in BUDGETS]
        entries += [{"case": name, "way": "gather", "sms": sms, **best_digest(move, sms)} for sms in BUDGETS]
        if is_converted(case):
            there = [conversion(region, case.component.dim) for region in move.gather]
            for way, work in (("gather", there), ("scatter", list(map(back, there)))):
                entries += [{"case": name, "way": way, "sms": sms, **best_conversion(work, sms)} for sms in BUDGETS]
        table = {**table, "about": machine(), "entries": entries}
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(table))
        torch.cuda.empty_cache()
    print(f"wrote {path}")


def is_converted(case: Case) -> bool:
    """Whether its rows are numbers that an engine may keep in another form."""
    return case.component.dtype == "bfloat16" and case.component.dim in NARROW


def is_done(case: Case, entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a table has all of a case."""
    last = Kernel.CONVERT if is_converted(case) else Kernel.DIGEST
    return any(entry["case"] == case.text() and entry.get("kernel") == last for entry in entries)


def swept(ready: Mapping[RowConfig, Prepared | None]) -> dict[RowConfig, Callable[[], object]]:
    """The candidates' launches, but those that spill, which are named."""
    found: dict[RowConfig, Callable[[], object]] = {}
    for config, launch in ready.items():
        assert launch is not None
        if launch.function is not None and (spilled := cuda_driver.local_bytes(launch.function)):
            print(f"left out: {launch.program.kernel.__name__} with {config} spills {spilled} bytes a thread")
        else:
            found[config] = launch.run
    return found


def best(regions: Sequence[Region], sms: int | None) -> dict[str, object]:
    """The kind of row, the fastest candidate, and the measured table, fastest first."""
    from perf.copy_engines import same_bytes

    calls = swept({config: rows.prepare(regions, config, sms) for config in candidates(sms)})
    same_bytes(regions, lambda: rows.move(regions), list(calls.values()))
    return fastest(rows.kind_of(regions[0]), sum(region.nbytes for region in regions), calls)


def fastest(kind: RowKind, nbytes: int, calls: Mapping[RowConfig, Callable[[], object]]) -> dict[str, Any]:
    """What a table says of the candidates, which move `nbytes` of a kind."""
    from perf.gpu_time import interleaved

    spreads = interleaved(dict(calls), ROUNDS)
    rates = sorted(((round(nbytes / spreads[each].median / 1e9, 1), astuple(each)) for each in calls), reverse=True)
    table = [[*config, rate] for rate, config in rates]
    return {"kind": astuple(kind), "best": rates[0][1], "gb_per_s": rates[0][0], "table": table}


def best_digest(move: Move, sms: int | None) -> dict[str, object]:
    """The same of a gather that takes a digest."""
    import torch

    from kvmover.kernels import digest
    from perf.bench_digest import coordinates
    from perf.copy_engines import same_bytes

    logicals, out = coordinates(move), torch.zeros(1, dtype=torch.int64, device="cuda")
    tried = dict.fromkeys((RULES[Kernel.DIGEST][sms is not None], *candidates(sms)))
    calls = swept({config: digest.prepare(move.gather, logicals, out, config, sms) for config in tried})
    same_bytes(move.gather, lambda: rows.move(move.gather), list(calls.values()))
    sums = set[int]()
    for call in calls.values():
        out.zero_()
        call()
        sums.add(int(out))
    assert len(sums) == 1, f"{move.case.text()}: candidates have other digests than each other"
    return {"kernel": Kernel.DIGEST.value, **fastest(rows.kind_of(move.gather[0]), move.nbytes, calls)}


def conversion_candidates(sms: int | None) -> Iterator[RowConfig]:
    """The rule first; of the others those whose numbers fit into registers as float32: of 32 warps two accesses."""
    rule = RULES[Kernel.CONVERT][sms is not None]
    yield rule
    for config in candidates(sms):
        accesses = config.block_bytes // (config.warps * 32 * 16)
        if config != rule and accesses <= (2 if config.warps == 32 else MOST_CONVERTED):
            yield config


def best_conversion(conversions: Sequence[Conversion], sms: int | None) -> dict[str, object]:
    """The same of what converts; rates are of its wider side."""
    from kvmover.kernels import convert
    from perf.copy_engines import same_bytes

    calls = swept({config: convert.prepare(conversions, config, sms) for config in conversion_candidates(sms)})
    same_bytes(conversions, lambda: convert.convert(conversions), list(calls.values()))
    nbytes = sum(convert.widest([each]).nbytes for each in conversions)
    return {"kernel": Kernel.CONVERT.value, **fastest(convert.kind_of_most(conversions), nbytes, calls)}


if __name__ == "__main__":
    main()
