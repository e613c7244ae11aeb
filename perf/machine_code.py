"""A launch is compiled here without a GPU, to read registers, memory and access widths from its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmover.kernels import convert, rows
from kvmover.kernels.convert_reference import Conversion
from kvmover.kernels.launch import Program, RowConfig
from kvmover.kernels.region import Region

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


#: The types of a launch's arguments that are no pointers.
SCALARS = {"regions": "i32", "tiles": "i32", "first_unit": "i32", "src_bytes": "i64", "dst_bytes": "i64"}

#: Integer arithmetic, comparisons and shifts, without what moves values between registers.
INTEGERS = frozenset(("IADD", "IADD3", "VIADD", "IMAD", "IMUL", "LEA", "SHF", "LOP3", "ISETP", "SEL", "PRMT", "IMNMX"))


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Of one kernel: bytes and registers a thread uses, how often each opcode stands in it, and the most payload loads
    that stand before a store of them: as many of a thread's accesses are in flight at once."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    local_bytes: int
    opcodes: Mapping[str, int]
    in_flight: int

    @property
    def integers(self) -> int:
        """Number of integer instructions, of a thread or of its warp: of a copy all but a few count addresses."""
        return sum(
            count for opcode, count in self.opcodes.items() if opcode.split(".")[0].removeprefix("U") in INTEGERS
        )

    @property
    def spills(self) -> int:
        """Number of instructions that load or store spilled registers."""
        return sum(count for opcode, count in self.opcodes.items() if opcode.split(".")[0] in ("LDL", "STL"))

    def widths(self) -> dict[str, list[int]]:
        """Bits of each payload load and store. Table loads are plain; payload loads carry `.EF`, for evict first."""
        found: dict[str, list[int]] = {"LDG": [], "STG": []}
        for opcode, count in self.opcodes.items():
            kind, *words = opcode.split(".")
            if is_payload(opcode):
                bits = [int(match[1]) for word in words if (match := re.fullmatch(r"[US]?(8|16|64|128|256)", word))]
                found[kind] += [bits[0] if bits else 32] * count
        return found


def is_payload(opcode: str) -> bool:
    """Whether it loads or stores what is moved."""
    kind, *words = opcode.split(".")
    return kind == "STG" or (kind == "LDG" and "EF" in words)


def most_in_flight(opcodes: Sequence[str]) -> int:
    """The longest run of payload loads without a store of any.

    >>> most_in_flight(["LDG.E.EF.128", "LDG.E", "LDG.E.EF.128", "STG.E.128", "LDG.E.EF.128"])
    2
    """
    most = now = 0
    for opcode in filter(is_payload, opcodes):
        now = 0 if opcode.startswith("STG") else now + 1
        most = max(most, now)
    return most


def of_rows(
    regions: Sequence[Region], config: RowConfig, architecture: int, shapes: tuple[rows.RowShape, ...] = ()
) -> MachineCode:
    """The row mover's launch of `regions`, for `shapes` or for what serves these best."""
    launch = rows.describe(regions, config.block_bytes, shapes)
    return of_program(rows.program(launch.shapes, config), architecture)


def of_conversions(conversions: Sequence[Conversion], config: RowConfig, architecture: int) -> MachineCode:
    """The converter's launch."""
    shapes = convert.describe(conversions, config.block_bytes).shapes
    program = convert.program(shapes, config, torch.device("cpu"))
    constants = {**dict(program.constants), "CASTS": int(architecture >= 90)}  # as the device's own would be
    return of_program(replace(program, constants=tuple(constants.items())), architecture)


def of_program(program: Program, architecture: int) -> MachineCode:
    """A kernel as a launch compiles it."""
    return read(_compiled(program, GPUTarget("cuda", architecture, 32))["cubin"])


@dataclass(frozen=True, slots=True)
class AmdCode:
    """Of one kernel for an AMD GPU: vector registers and private bytes a thread, registers that spilled, and the bits
    of each load and store of global memory: all stores are payload, and so are the loads as wide as these.
    """

    registers: int
    private_bytes: int
    spills: int
    loads: Mapping[int, int]
    stores: Mapping[int, int]


#: Bits of an access, by the end of its name.
_AMD_BITS = {
    "ubyte": 8,
    "byte": 8,
    "ushort": 16,
    "short": 16,
    "dword": 32,
    "dwordx2": 64,
    "dwordx3": 96,
    "dwordx4": 128,
}


def of_amd(program: Program, architecture: str) -> AmdCode:
    """A kernel for gfx942 or another of 64 lanes, as Triton compiles it; nobody has run it there."""
    text = _compiled(program, GPUTarget("hip", architecture, 64))["amdgcn"]

    def told(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, name
        return int(found[1])

    widths = [
        Counter(map(_AMD_BITS.__getitem__, re.findall(rf"\bglobal_{kind}_(\w+)", text))) for kind in ("load", "store")
    ]
    spills = told("vgpr_spill_count") + told("sgpr_spill_count")
    return AmdCode(told("vgpr_count"), told("private_segment_fixed_size"), spills, *map(dict, widths))


def _compiled(program: Program, target: GPUTarget) -> Mapping[str, Any]:
    """Forms of the code by name. What no argument of the kernel is called goes to the compiler."""
    names, options = program.kernel.arg_names, program.options
    constants = {name: options.pop(name) for name in names if name in options}
    given = {**dict.fromkeys(names, "*i64"), **SCALARS, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(program.kernel, given, constants, {(0,): [["tt.divisibility", 16]]})
    return triton.compile(source, target=target, options=options).asm


def read(cubin: bytes) -> MachineCode:
    """What the machine code of the one kernel in `cubin` says."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    sizes = used["REG"], used["STACK"], used["SHARED"], used["LOCAL"]
    return MachineCode(*sizes, Counter(opcodes), most_in_flight(opcodes))
