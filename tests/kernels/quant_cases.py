"""Pools of wide rows, fp8 rows and scales for the tests of packing to fp8; and what runs in processes of its own.

Collected by pytest with TRITON_INTERPRET=1, the kernel in Triton's interpreter. As a program it compiles the kernel by
the Triton that comes first on PYTHONPATH and prints what the machine code does, as JSON:

    quant_cases.py ARCHITECTURE all|few
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from row_moves import HND, NAMES, NHD, PACKED, PAGE_FIRST, PoolMemory, PoolShape
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmover.kernels import quant
from kvmover.kernels.launch import RowConfig, constexpr
from kvmover.kernels.quant_reference import SCALE_BYTES, WIDE_BYTES, QuantRegion, dequantize, quantize
from kvmover.kernels.region import Side
from tests.proofs import covering, family

#: numpy says so of signalling NaN, which random bits hold.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DIMS = (64, 80, 128, 192, 576)
DTYPES = (torch.bfloat16, torch.float16)

Mover = Callable[[Sequence[QuantRegion]], None]


@dataclass(frozen=True)
class Case:
    """`heads` heads of `layers` x `kv` planes, in units of `tokens` tokens, which divide the pages of all three pools.

    `even`: the units of fp8 and scales follow each other, as on the wire. `values`: any bits, or normal numbers.
    """

    wide: PoolShape
    narrow: PoolShape
    scales: PoolShape
    dim: int
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 4
    heads: int = 2
    layers: int = 1
    kv: int = 2
    units: int = 3
    first_head: tuple[int, int, int] = (0, 0, 0)
    even: bool = False
    values: str = "bits"
    seed: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.dim}x{kind}-{self.wide}-to-{self.narrow}-and-{self.scales}-x{self.tokens}"


class OpenCase:
    """A case with its memory. Rows are found by loops over coordinates, which share no arithmetic with the kernels."""

    def __init__(self, case: Case) -> None:
        self.case, random = case, np.random.default_rng(case.seed)
        self.pools: list[PoolMemory] = []
        self.units: list[list[tuple[int, int]]] = []
        for shape, row_bytes in zip((case.wide, case.narrow, case.scales), self.row_bytes, strict=True):
            a_page = shape.page_tokens // case.tokens
            pages = -(-case.units // a_page) + 2
            self.pools.append(PoolMemory(shape, case.layers, case.kv, pages, row_bytes, random))
            scattered = row_bytes == self.row_bytes[0] or not case.even
            order = random.permutation(pages * a_page) if scattered else np.arange(case.units)
            self.units.append([(int(u) // a_page, int(u) % a_page * case.tokens) for u in order[: case.units]])
        if case.values == "numbers":
            for whole in self.pools[0].whole:
                numbers = random.standard_normal(whole.numel() // WIDE_BYTES)
                whole.view(case.dtype).copy_(torch.from_numpy(numbers * 3))

    @property
    def row_bytes(self) -> tuple[int, int, int]:
        return WIDE_BYTES * self.case.dim, self.case.dim, SCALE_BYTES

    @property
    def region(self) -> QuantRegion:
        case, sides = self.case, []
        for pool, units, head in zip(self.pools, self.units, case.first_head, strict=True):
            sides.append(pool.side(range(case.layers), range(case.kv), units, head))
        return QuantRegion(*sides, case.heads, case.tokens, case.dim, case.dtype)

    def _rows(self, number: int) -> Iterator[np.ndarray]:
        """The bytes of every row of a pool, one after the other."""
        case, pool = self.case, self.pools[number]
        for layer, kv in product(range(case.layers), range(case.kv)):
            view = pool.view(layer, kv)
            for (page, token), i, head in product(self.units[number], range(case.tokens), range(case.heads)):
                yield view[page, token + i, case.first_head[number] + head]

    def get(self, number: int) -> torch.Tensor:
        """Of pool 0 wide, 1 fp8 or 2 scales: [row, byte]."""
        rows = list(self._rows(number))
        return torch.from_numpy(np.array(rows, np.uint8).reshape(len(rows), self.row_bytes[number]))

    def put(self, number: int, rows: torch.Tensor) -> None:
        values = rows.contiguous().view(torch.uint8).numpy().reshape(-1, self.row_bytes[number])
        for row, new in zip(self._rows(number), values, strict=True):
            row[:] = new

    def wholes(self) -> list[torch.Tensor]:
        """All bytes of all pools, guards included."""
        return [whole.clone() for pool in self.pools for whole in pool.whole]

    def restore(self, wholes: list[torch.Tensor]) -> None:
        for whole, old in zip([whole for pool in self.pools for whole in pool.whole], wholes, strict=True):
            whole.copy_(old)

    def expected(self, packs: bool) -> list[torch.Tensor]:
        """All bytes after packing or unpacking. The memory is as before."""
        before = self.wholes()
        if packs:
            fp8, scales = quantize(self.get(0).view(self.case.dtype))
            self.put(1, fp8)
            self.put(2, scales)
        else:
            self.put(0, dequantize(self.get(1), self.get(2).view(torch.float32).view(-1), self.case.dtype))
        after = self.wholes()
        self.restore(before)
        return after


def run(cases: Sequence[Case], pack: Mover, unpack: Mover) -> None:
    """Pack all cases in one call, overwrite what was packed, and unpack; compare every byte of all pools each time."""
    opened = [OpenCase(case) for case in cases]
    for packs, verb in ((True, pack), (False, unpack)):
        wanted = [each.expected(packs) for each in opened]
        verb([each.region for each in opened])
        for each, after in zip(opened, wanted, strict=True):
            for got, want in zip(each.wholes(), after, strict=True):
                assert torch.equal(got, want), (each.case, "pack" if packs else "unpack")
            if packs and each.case.units:
                each.put(0, torch.full((len(each.get(0)), each.row_bytes[0]), 0xEE, dtype=torch.uint8))


def _orders() -> list[Case]:
    """Every order to every other, a part of the heads, widths and dtypes in turn, separate allocations in turn."""
    separate = [(), ("layer",), ("layer", "kv")]
    return [
        Case(
            PoolShape(wide, 4, 4, separate[number % 3]),
            PoolShape(narrow, 4, 3, separate[number // 3 % 3]),
            PoolShape(list(NAMES)[number % len(NAMES)], 4, 3),
            DIMS[number % len(DIMS)],
            DTYPES[number // 2 % 2],
            first_head=(2, 1, 0),
            layers=1 + number % 2,
            kv=2 - number % 2,
            even=bool(number % 3),
            values="bits" if number % 2 else "numbers",
            seed=number,
        )
        for number, (wide, narrow) in enumerate(product(NAMES, repeat=2))
    ]


def _pages() -> list[Case]:
    """Page sizes that differ on all sides, and ragged ends of 1 and 7 tokens."""
    shapes = [
        ((16, 64, 16), 16),
        ((64, 16, 32), 16),
        ((24, 16, 8), 8),
        ((1, 1, 1), 1),
        ((16, 64, 1), 1),
        ((7, 7, 7), 7),
    ]
    return [
        Case(
            *(PoolShape(order, page, 2) for order, page in zip((NHD, PACKED, HND), pages, strict=True)),
            dim,
            dtype,
            tokens=tokens,
            units=11 if tokens == 1 else 3,
            kv=1,
            even=tokens != 7,
            seed=tokens,
        )
        for (pages, tokens), dim, dtype in zip(shapes, [64, 576] * 3, DTYPES * 3, strict=True)
    ]


def _widths() -> list[Case]:
    """Rows of few elements and of many, and of widths that leave masked elements in the tail."""
    shapes = PoolShape(NHD, 4, 3), PoolShape(PACKED, 4, 2), PoolShape(PAGE_FIRST, 4, 2)
    dims = [1, 2, 3, 7, 16, 17, 48, 72, 100, 112, 256, 1000, 1024]
    return [Case(*shapes, dim, DTYPES[dim % 2], first_head=(1, 0, 0), even=True, seed=dim) for dim in dims]


def _misaligned() -> list[Case]:
    """Sides that start off a 16-byte border."""
    base = Case(PoolShape(NHD, 4, 3), PoolShape(PACKED, 4, 2), PoolShape(PACKED, 4, 2), 64, kv=1)
    return [
        replace(
            base,
            wide=replace(base.wide, misaligned=wide),
            narrow=replace(base.narrow, misaligned=narrow),
            scales=replace(base.scales, misaligned=scale),
            dim=dim,
            seed=wide + narrow,
        )
        for (wide, narrow, scale), dim in zip(
            [(2, 0, 0), (0, 1, 4), (4, 2, 0), (8, 4, 8), (16, 8, 12), (6, 3, 20), (2, 1, 0)],
            [64, 80, 80, 64, 80, 80, 64],
            strict=True,
        )
    ]


_ONE = Case(PoolShape(NHD, 1, 1), PoolShape(HND, 1, 1), PoolShape(HND, 1, 1), 64, tokens=1, heads=1, kv=1, units=1)
_NOTHING = replace(_ONE, units=0)
CASES = [*_orders()[::2], *_pages(), *_widths(), *_misaligned(), _ONE, replace(_ONE, units=70), _NOTHING]

#: Several regions in one launch, of rows of all widths, dtypes, alignments and pages.
TOGETHER = {
    "orders": _orders()[1::6],
    "widths": _widths()[::3],
    "misaligned": _misaligned()[1::2],
    "pages": [*_pages()[1::4], _NOTHING],
    "only-nothing": [_NOTHING, replace(_NOTHING, units=1, layers=0)],
}
IDS = [f"{number}-{case}" for number, case in enumerate(CASES)]


def traits(case: Case) -> set[Hashable]:
    """What sets cases apart for the kernel. A plain run of the interpreter takes a few cases that have all of it."""
    found: set[Hashable] = {("values", case.values, case.dtype), ("units", min(case.units, 2)), ("tokens", case.tokens)}
    for end, pool in enumerate((case.wide, case.narrow, case.scales)):
        found |= {(end, pool.order), (end, pool.separate), (end, "off", pool.misaligned & -pool.misaligned)}
    if case.units:
        shape = quant.QuantShape.of(OpenCase(case).region, RowConfig(1024, 4))
        found |= {
            ("vecs", shape.wide_vec, shape.narrow_vec),
            ("kinds", shape.wide_kind, shape.narrow_kind, shape.scale_kind),
            ("two parts", shape.part < shape.dim, shape.bfloat16),
        }
        found |= {("rows", min(shape.rows, 2)), ("dim", case.dim if case.dim in DIMS else 0)}
    return found


@pytest.mark.parametrize("case", family(CASES, few=covering(CASES, traits)), ids=IDS)
def test_a_case_equals_the_definition(case: Case) -> None:
    run([case], quant.pack, quant.unpack)


@pytest.mark.parametrize(
    ("together", "sms"),
    family(product(TOGETHER, [None, 3]), few=[("misaligned", None), ("only-nothing", None), ("orders", 3)]),
)
def test_regions_of_different_rows_share_a_launch_under_any_budget(together: str, sms: int | None) -> None:
    cases = TOGETHER[together]
    verbs = (partial(verb, config=RowConfig(4096, 4), sms=sms) for verb in (quant.pack, quant.unpack))
    run(cases, *verbs)


@pytest.mark.parametrize("block_bytes", [256, 32768])
@pytest.mark.parametrize("case", family([_orders()[3], _orders()[10], _pages()[3]], few=[_orders()[10]]), ids=str)
def test_any_tile_size_gives_the_same_bytes(case: Case, block_bytes: int) -> None:
    verbs = (partial(verb, config=RowConfig(block_bytes, 4)) for verb in (quant.pack, quant.unpack))
    run([case], *verbs)


@pytest.mark.parametrize("shuffled", [False, True], ids=["sorted", "shuffled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_every_bit_pattern_packs_and_unpacks_as_defined(dtype: torch.dtype, shuffled: bool) -> None:
    """Neighbours give a row one magnitude, which every mantissa is rounded at; shuffled rows have all magnitudes."""
    bits = np.arange(1 << 16).astype(np.uint16)
    if shuffled:
        np.random.default_rng(0).shuffle(bits)
    wide = torch.from_numpy(bits.view(np.int16)).view(dtype).view(-1, 32)
    region, fp8, scales = flat(wide)
    quant.pack([region], config=RowConfig(65536, 4))
    want, factors = quantize(wide)
    assert torch.equal(fp8.view(want.shape), want)
    assert torch.equal(scales.view(torch.float32), factors)
    wide_bytes = region.wide.memory[0]
    wide_bytes.fill_(0xEE)
    quant.unpack([region], config=RowConfig(65536, 4))
    assert torch.equal(wide_bytes, dequantize(want, factors, dtype).view(torch.uint8).view(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_every_fp8_number_unpacks_as_defined_at_any_scale(dtype: torch.dtype) -> None:
    scales = torch.tensor([2.0**-126, 3.3e-39, 2.0**-24, 1 / 3, 1.0, 100.0, 146.0], dtype=torch.float32)
    fp8 = torch.arange(256).to(torch.uint8).repeat(len(scales), 1)
    region, *_ = flat(torch.zeros(len(scales), 256, dtype=dtype), fp8, scales)
    quant.unpack([region])
    assert torch.equal(region.wide.memory[0], dequantize(fp8, scales, dtype).view(torch.uint8).view(-1))


def flat(
    wide: torch.Tensor, fp8: torch.Tensor | None = None, scales: torch.Tensor | None = None, device: str = "cpu"
) -> tuple[QuantRegion, torch.Tensor, torch.Tensor]:
    """One dense region of the rows [row, dim], with its fp8 and scale bytes."""
    rows, dim = wide.shape
    fp8 = torch.full((rows, dim), 0xEE, dtype=torch.uint8) if fp8 is None else fp8
    scales = torch.zeros(rows) if scales is None else scales
    zero, units = np.zeros(1, np.int64), np.arange(rows)
    memories = [part.clone().to(device).view(torch.uint8).view(-1) for part in (wide, fp8, scales)]
    sides = [
        Side.of((memory,), zero, zero, units * width, 0, width)
        for memory, width in zip(memories, (WIDE_BYTES * dim, dim, SCALE_BYTES), strict=True)
    ]
    return QuantRegion(*sides, 1, 1, dim, wide.dtype), memories[1], memories[2]


CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


FEW = {"sm_90-80", "sm_90-128-fp16", "sm_90-576-budget", "sm_90-128-off8"}


def launches() -> Iterator[tuple[str, int, int, Case, RowConfig]]:
    """Name, architecture, whether the hardware converts, rows and configuration of all that is compiled."""
    nhd, packed = PoolShape(NHD, 64, 4), PoolShape(PACKED, 64, 1)
    base = Case(nhd, packed, packed, 128, tokens=64, heads=1, units=4, even=True)
    for architecture, dims in ((80, (128, 576)), (90, DIMS), (100, (128, 576))):
        for dim in dims:
            yield (
                f"sm_{architecture}-{dim}",
                architecture,
                int(architecture >= 90),
                replace(base, dim=dim),
                quant.CONFIG,
            )
    for dim in (128, 576):
        yield f"sm_90-{dim}-fp16", 90, 1, replace(base, dim=dim, dtype=torch.float16), quant.CONFIG
        yield f"sm_90-{dim}-budget", 90, 1, replace(base, dim=dim), quant.BUDGET_CONFIG
    for off in (2, 8):
        case = replace(base, wide=replace(nhd, misaligned=off), narrow=replace(packed, misaligned=off // 2))
        yield f"sm_90-128-off{off}", 90, 1, case, quant.CONFIG


def compiled(case: Case, packs: int, architecture: int, casts: int, config: RowConfig) -> bytes:
    """The cubin of a launch."""
    launch = quant.describe([OpenCase(case).region], config)
    constants = {"SHAPES": tuple(map(constexpr, launch.shapes)), "PACK": packs, "CASTS": casts}
    signature = {"table": "*i64", "regions": "i32", "tiles": "i32", **dict.fromkeys(constants, "constexpr")}
    signature = {name: signature[name] for name in quant.quant_kernel.arg_names}
    source = ASTSource(quant.quant_kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    options = {"num_warps": config.warps, **quant.OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["cubin"]


def report(cubin: bytes) -> dict[str, object]:
    """What the machine code of the one kernel in `cubin` says: accesses by opcode, registers and memory."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text))
    return {**used, "opcodes": opcodes}


def main() -> None:
    results = {
        f"{name}-{verb}": report(compiled(case, packs, architecture, casts, config))
        for name, architecture, casts, case, config in launches()
        if architecture == int(sys.argv[1]) and (sys.argv[2] == "all" or name in FEW)
        for packs, verb in ((1, "pack"), (0, "unpack"))
    }
    sys.stdout.write(json.dumps({"triton": triton.__version__, "results": results}))


if __name__ == "__main__":
    main()
