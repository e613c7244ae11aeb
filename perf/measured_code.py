"""The machine code that a row of results measured, and whether the launch has it still.

A benchmark writes two columns for each launch of ours: `code`, a hash of the kernel's machine code, and `launch`, what
the kernel was compiled from. `python -m perf.measured_code` compiles those of perf/results once more, with the Triton
that measured them and without a GPU, and writes into the column `today` the hash that they have now, or what became of
the launch. Pages say so of code that has parted. With `--check` nothing is written, and a column that is not true ends
it with 1.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import triton

from kvmover.kernels import rows
from kvmover.kernels.ahead_of_time import CompileError, Worker, program_of, written
from kvmover.kernels.code_store import find
from kvmover.kernels.launch import Prepared, Program, architecture
from perf.cases import CASES, build
from perf.command_line import options
from perf.record import RESULTS, read, write

#: Results with rows of launches.
FILES = ("bench_kernels", "bench_digest", "bench_launches", "roofline")

#: Hexadecimal digits of a hash.
DIGITS = 12

#: In place of a hash: the benchmark's case is another launch now, or the kernel cannot be compiled as it was.
OTHER, GONE = "another launch", "gone"

#: Places in an ELF file, and in the header of one of its sections, which is 64 bytes long.
_SECTIONS_AT, _COUNTS_AT, _HEADER = 0x28, 0x3A, struct.Struct("<IIQQQQ")


def machine_code(cubin: bytes) -> bytes:
    """Returns the instructions of all kernels: they do not depend on comments or line numbers, as the file does."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("a cubin is an ELF file")
    (first,) = struct.unpack_from("<Q", cubin, _SECTIONS_AT)
    size, count, names_in = struct.unpack_from("<HHH", cubin, _COUNTS_AT)
    sections = [_HEADER.unpack_from(cubin, first + number * size) for number in range(count)]
    names_at = sections[names_in][4]
    found = list[bytes]()
    for name, _, _, _, start, nbytes in sections:
        if cubin.startswith(b".text.", names_at + name):
            found.append(cubin[start : start + nbytes])
    return b"".join(found)


def hashed(cubin: bytes) -> str:
    """Returns the hash of a kernel's machine code."""
    return hashlib.sha256(machine_code(cubin)).hexdigest()[:DIGITS]


def columns(prepared: Prepared | None) -> dict[str, str]:
    """Returns what a row says of the code of a launch; None for a row of no kernel of ours."""
    if prepared is None:
        return {"code": "", "launch": ""}
    target = architecture(prepared.table.device)
    program = prepared.program
    code = find(program.code_name(target)) or program.compiled(target)
    return {"code": hashed(code.cubin), "launch": json.dumps(written(program, target))}


def described(row: Mapping[str, str], program: Program) -> bool:
    """Whether the row mover describes the row's case for this program still; True for a row of no such case."""
    named = {case.text(): case for case in CASES}
    case = named.get(row.get("case") or row["what"])
    if program.kernel is not rows.move_kernel or case is None or row.get("way") not in ("gather", "scatter"):
        return True
    move = build(case, "meta")
    regions = move.gather if row["way"] == "gather" else move.scatter
    shapes = rows.describe(regions, program.config.block_bytes).shapes
    return tuple(map(tuple, shapes)) == program.shapes


def today(row: Mapping[str, str], worker: Worker) -> str:
    """Returns the hash of a measured launch as it is compiled now, or OTHER or GONE."""
    told = json.loads(row["launch"])
    try:
        program = program_of(told)
        if not described(row, program):
            return OTHER
        return hashed(worker.compile(program, told["architecture"]).cubin)
    except (AttributeError, ImportError, TypeError, CompileError):
        return GONE


def compared(folder: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield each file of results that names code, and its rows with `today`, as far as this Triton measured them."""
    worker, known = Worker(), dict[tuple[str, str, str], str]()
    for name in FILES:
        found = read(name, folder) if (folder / f"{name}.csv").exists() else []
        told = list[dict[str, str]]()
        for row in found:
            now = row.get("today", "")
            if row.get("code") and f"triton {triton.__version__}" in row["versions"]:
                key = row.get("case") or row["what"], row.get("way", ""), row["launch"]
                now = known[key] = known.get(key) or today(row, worker)
            told.append({**row, "today": now})
        if any(row.get("code") for row in found):
            yield name, told
    worker.rest()


def main() -> None:
    words = options(__doc__)
    words.add_argument("--check", action="store_true")
    words.add_argument("--out", type=Path, default=RESULTS)
    chosen = words.parse_args()
    untrue = 0
    for name, found in compared(chosen.out):
        before = [row.get("today", "") for row in read(name, chosen.out)]
        untrue += sum(row["today"] != was for row, was in zip(found, before, strict=True))
        parted = [row for row in found if row["code"] and row["today"] not in ("", row["code"])]
        print(f"{name}: {len(parted)} of {sum(bool(row['code']) for row in found)} rows measured other code")
        if not chosen.check:
            write(name, found, chosen.out)
    if chosen.check and untrue:
        raise SystemExit(f"{untrue} rows are not true of today's code: run python -m perf.measured_code")


if __name__ == "__main__":
    main()
