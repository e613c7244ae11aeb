"""Packing to fp8: the definition rounds as e4m3 does and keeps its error bound, and the kernel is the definition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from ahead import Ahead
from compilers import COMPILERS, LIMIT_S
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from quant_cases import CASES, DTYPES, IDS, TOGETHER, Case, OpenCase, flat, run
from row_moves import NHD, PACKED, PoolShape

from kvmover.kernels import quant, quant_reference
from kvmover.kernels.launch import RowConfig
from kvmover.kernels.quant_reference import QuantRegion, dequantize, quantize
from kvmover.kernels.region import RegionError, Side

REGISTERS = 96

#: Every finite magnitude of e4m3, by its code.
CODES = np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)])[
    :-1
]

#: Of a finite row: the share that rounding back adds, and half the smallest subnormal.
ROUNDING = {torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25)}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])


def patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)


def finite(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that 16-bit patterns stand for, the largest in place of infinity and NaN."""
    numbers = torch.from_numpy(bits.view(np.int16)).view(dtype)
    most = torch.finfo(dtype).max
    return numbers.nan_to_num(nan=most, posinf=most, neginf=-most)


def bound(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The largest error that the definition states, in float64."""
    u, h = ROUNDING[rows.dtype]
    x = rows.double().abs()
    e = torch.maximum(x / 16, scales.double()[:, None] / 1024)
    return e + u * (x + e) + h


def assert_bound(rows: torch.Tensor) -> None:
    fp8, scales = quantize(rows)
    error = (dequantize(fp8, scales, rows.dtype).double() - rows.double()).abs()
    assert (error <= bound(rows, scales)).all()
    share = {torch.bfloat16: 0.0667, torch.float16: 0.0631}[rows.dtype]
    largest = rows.double().abs().amax(1, keepdim=True)
    assert (error <= share * largest + ROUNDING[rows.dtype][1] + 2.0**-135 * (scales[:, None] <= 2.0**-126)).all()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_definition_puts_rows_where_a_loop_over_coordinates_does(case: Case) -> None:
    run([case], quant_reference.pack, quant_reference.unpack)


@pytest.mark.parametrize("cases", TOGETHER.values(), ids=TOGETHER.keys())
def test_the_definition_takes_several_regions(cases: list[Case]) -> None:
    run(cases, quant_reference.pack, quant_reference.unpack)


@each_dtype
@pytest.mark.parametrize("shuffled", [False, True], ids=["sorted", "shuffled"])
def test_rounding_is_to_the_nearest_of_all_e4m3_numbers(dtype: torch.dtype, shuffled: bool) -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    if shuffled:
        np.random.default_rng(1).shuffle(bits)
    rows = finite(bits, dtype).view(-1, 16)
    fp8, scales = quantize(rows)
    amax = rows.float().abs().amax(1).numpy()
    assert np.array_equal(scales.numpy(), np.maximum(amax * (np.float32(1) / np.float32(448)), np.float32(2.0**-126)))
    scaled = rows.float().numpy() * (np.float32(1) / scales.numpy())[:, None]
    middles = (CODES[1:] + CODES[:-1]) / 2
    exact = np.abs(scaled).astype(np.float64)
    code = np.searchsorted(middles, exact, side="left")
    tied = np.append(middles, np.inf)[code] == exact
    code += tied & (code % 2 == 1)
    assert np.array_equal(fp8.numpy(), code | np.signbit(scaled) << 7)


@each_dtype
def test_ties_go_to_even_numbers(dtype: torch.dtype) -> None:
    row = torch.from_numpy(np.append((CODES[1:] + CODES[:-1]) / 2, 448.0)).to(dtype)
    fp8, scales = quantize(torch.stack([row, -row]))
    even = np.append(np.arange(126) + np.arange(126) % 2, 126)
    assert scales.tolist() == [1.0, 1.0]
    assert np.array_equal(fp8.numpy(), [even, even + 0x80])


@each_dtype
def test_the_error_bound_holds_for_every_number_beside_any_other(dtype: torch.dtype) -> None:
    numbers = finite(np.arange(1 << 16).astype(np.uint16), dtype)
    numbers = numbers[numbers >= 0].float().sort().values
    for share in (1.0, 1 / 3, 2.0**-6, 2.0**-9, 2.0**-14):
        largest = torch.maximum(numbers, (numbers / share).clamp(max=torch.finfo(dtype).max))
        assert_bound(torch.stack([numbers, -largest], 1).to(dtype))


@given(hnp.arrays(np.uint16, st.integers(1, 64)), st.sampled_from(DTYPES))
@example(np.zeros(3, np.uint16), torch.bfloat16)
@example(np.array([1, 0x8001, 2], np.uint16), torch.bfloat16)
@example(np.array([1, 0x8003], np.uint16), torch.float16)
@example(np.array([0x7F7F, 0xFF7F, 1], np.uint16), torch.bfloat16)
@example(np.array([0x7BFF, 0x0400, 0x8001], np.uint16), torch.float16)
def test_the_error_bound_holds(bits: np.ndarray, dtype: torch.dtype) -> None:
    assert_bound(finite(bits, dtype)[None])


@each_dtype
def test_zeros_come_back_as_zeros_with_their_signs(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, -0.0, 0.0]], dtype=dtype)
    fp8, scales = quantize(rows)
    assert scales.item() == quant_reference.SCALE_FLOOR
    assert fp8.tolist() == [[0, 0x80, 0]]
    assert torch.equal(dequantize(fp8, scales, dtype).view(torch.int16), rows.view(torch.int16))


@each_dtype
def test_infinity_counts_as_the_largest_number(dtype: torch.dtype) -> None:
    inf, most = float("inf"), torch.finfo(dtype).max
    odd, plain = (torch.tensor([[x, -x, 1.0, 0.5]], dtype=dtype) for x in (inf, most))
    for got, want in zip(quantize(odd), quantize(plain), strict=True):
        assert torch.equal(got, want)
    assert dequantize(*quantize(odd), dtype)[0, :2].tolist() == [most, -most]


@each_dtype
def test_nan_stays_nan_and_leaves_its_row_alone(dtype: torch.dtype) -> None:
    row = torch.tensor([[3.0, float("nan"), -0.1, -float("nan")]], dtype=dtype)
    fp8, scales = quantize(row)
    without, same = quantize(row.nan_to_num(0.0))
    assert torch.equal(scales, same)
    assert fp8[0, 1::2].tolist() == [quant_reference.FP8_NAN] * 2
    assert torch.equal(fp8[:, ::2], without[:, ::2])
    back = dequantize(fp8, scales, dtype)
    assert back.view(torch.int16)[0, 1::2].tolist() == [quant_reference.WIDE_NAN] * 2
    assert back.isnan().tolist() == row.isnan().tolist()
    assert quantize(row[:, 1::2])[1].item() == quant_reference.SCALE_FLOOR


def test_fp8_and_scale_of_a_row_may_lie_side_by_side() -> None:
    wide = torch.randn(6, 128).to(torch.bfloat16)
    region, fp8, scales = flat(wide)
    wire = torch.full((6 * 132,), 0xEE, dtype=torch.uint8)
    zero, units = np.zeros(1, np.int64), np.arange(6) * 132
    narrow, factors = Side.of((wire,), zero, zero, units, 0, 0), Side.of((wire,), zero, zero + 128, units, 0, 0)
    joined = replace(region, narrow=narrow, scales=factors)
    quant_reference.pack([region])
    quant_reference.pack([joined])
    assert torch.equal(wire.view(6, 132)[:, :128], fp8.view(6, 128))
    assert torch.equal(wire.view(6, 132)[:, 128:], scales.view(6, 4))
    shape = quant.QuantShape.of(joined, quant.CONFIG)
    assert (shape.wide_vec, shape.narrow_vec) == (8, 4)


def region(**changes: object) -> QuantRegion:
    """2 planes, 3 units of 2 heads of 4 tokens of 16 elements."""
    case = Case(PoolShape(NHD, 4, 2), PoolShape(PACKED, 4, 2), PoolShape(PACKED, 4, 2), 16)
    return replace(OpenCase(case).region, **changes)


def in_memory(side: Side, change: Callable[[torch.Tensor], torch.Tensor]) -> Side:
    memory = tuple(map(change, side.memory))
    return Side.of(memory, side.allocation, side.offset, side.units, side.head_bytes, side.token_bytes)


def _off(side: Side, offset: int) -> Side:
    return in_memory(side, lambda memory: torch.cat([memory, memory])[offset:])


def _elsewhere(side: Side) -> Side:
    return in_memory(side, lambda memory: memory.to("meta"))


BAD = {
    "float32": (lambda: region(dtype=torch.float32), "rows of torch.float32"),
    "no-dim": (lambda: region(dim=0), "wide rows: region of 2 heads x 4 tokens x 0 bytes"),
    "no-heads": (lambda: region(heads=0), "wide rows: region of 0 heads"),
    "wide-too-far": (lambda: region(dim=4096), "wide rows: source plane 0 spans"),
    "fp8-too-far": (
        lambda: region(narrow=replace(region().narrow, units=np.array([0, 0, 1 << 40]))),
        "fp8 rows: source plane 0 spans",
    ),
    "scale-before": (
        lambda: region(scales=replace(region().scales, units=np.array([0, 0, -4096]))),
        "scale rows: source plane 0 spans bytes -4096",
    ),
    "other-units": (
        lambda: region(narrow=replace(region().narrow, units=np.zeros(2, np.int64))),
        "fp8 rows: 2 planes x 2 units, wide rows 2 x 3",
    ),
    "other-device": (
        lambda: region(scales=_elsewhere(region().scales)),
        "scale rows on meta, wide rows on cpu",
    ),
    "odd-wide": (lambda: region(wide=_off(region().wide, 1)), "wide rows lie off a multiple of 2 bytes"),
    "odd-scale": (lambda: region(scales=_off(region().scales, 2)), "scale rows lie off a multiple of 4 bytes"),
}  # fmt: skip

MOVERS = (quant.pack, quant.unpack, quant_reference.pack, quant_reference.unpack)


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_region_is_refused_before_any_other_is_moved(make: Callable[[], QuantRegion], message: str) -> None:
    good = region()
    before = [memory.clone() for _, side, _ in good.sides for memory in side.memory]
    for move in MOVERS:
        with pytest.raises(RegionError, match=message):
            move([good, make()])
    after = [memory for _, side, _ in good.sides for memory in side.memory]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


class Kernel:
    """Stands in for the kernel, and keeps what each launch was given."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple, dict]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self.launches.append((grid, arguments, options))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stand_in = Kernel()
    monkeypatch.setattr(quant, "quant_kernel", stand_in)
    return stand_in


def test_one_launch_for_all_layers_and_regions(kernel: Kernel) -> None:
    pools = PoolShape(NHD, 16, 4), PoolShape(PACKED, 16, 2), PoolShape(PACKED, 16, 2)
    case = Case(*pools, 64, tokens=16, layers=80, even=True)
    regions = [OpenCase(each).region for each in (case, replace(case, dim=80), replace(case, units=0))]
    quant.pack(regions)
    quant.unpack(regions, RowConfig(1024, 8), sms=3)
    quant.pack(regions[2:])
    (grid, (_, count, tiles), packs), (budget, _, unpacks) = kernel.launches
    assert (count, grid) == (2, (tiles,))
    assert budget == (3,)
    assert (packs["PACK"], unpacks["PACK"], packs["CASTS"], unpacks["num_warps"]) == (1, 0, 0, 8)
    assert packs["enable_fp_fusion"] is False


def test_units_that_follow_each_other_need_no_table() -> None:
    case = Case(PoolShape(NHD, 16, 4), PoolShape(PACKED, 16, 2), PoolShape(PACKED, 16, 2), 64, tokens=16, units=30)
    tables = []
    for even in (False, True):
        launch = quant.describe([OpenCase(replace(case, even=even)).region], quant.CONFIG)
        (shape,) = launch.shapes
        kinds = shape.wide_kind, shape.narrow_kind, shape.scale_kind
        assert kinds == ((1, 0, 0) if even else (1, 1, 1))
        tables.append(len(launch.table))
    words = quant.REGION_WORDS.value + 3 * 2
    assert tables == [words + 3 * 30, words + 30]


def test_more_rows_than_32_bits_count_are_refused() -> None:
    memory = torch.zeros(1 << 10, dtype=torch.uint8)
    zero = np.zeros(1, np.int64)
    side = Side.of((memory,), zero, zero, zero, 0, 0)
    fits = QuantRegion(side, side, side, 1, 1 << 30, 16, torch.bfloat16)
    assert quant.describe([fits], quant.CONFIG).tiles == (1 << 30) // 128
    with pytest.raises(RegionError, match=f"1 units of {(1 << 31) - 1} tokens"):
        quant.describe([replace(fits, tokens=(1 << 31) - 1)], quant.CONFIG)


AHEAD = {"report": lambda compiler: compiler.reports("quant_cases.py")}


@pytest.fixture(scope="module", params=COMPILERS, ids=str)
def report(request: pytest.FixtureRequest, ahead: Ahead) -> dict[str, dict]:
    """By launch, of one compiler."""
    found = ahead.result(request.module, "report", request.param)
    sizes = {80: 4, 90: 22, 100: 4}
    assert len(found) == (sizes[request.param.architecture] if request.param.cases == "all" else 8)
    return found


def widths(launch: dict, kind: str) -> Iterator[int]:
    """In bits, of the payload's loads (LDG, with `.EF`) or all stores (STG)."""
    for opcode, count in launch["opcodes"].items():
        words = opcode.split(".")
        if words[0] == kind and (kind == "STG" or "EF" in words):
            found = (re.fullmatch(r"[US]?(8|16|64|128|256)", word) for word in words)
            yield from [next((int(width[1]) for width in found if width), 32)] * count


@pytest.mark.timeout(LIMIT_S + 30)
def test_machine_code(report: dict[str, dict]) -> None:
    """Wide accesses, no spills, few registers; aligned, no shared memory; from sm_90 on, the hardware rounds, once."""
    for name, launch in report.items():
        kinds = {opcode.split(".")[0] for opcode in launch["opcodes"]}
        assert not kinds & {"LDL", "STL"}, name
        assert (launch["LOCAL"], launch["STACK"]) == (0, 0), name
        assert 0 < launch["REG"] <= (64 if "budget" in name else REGISTERS), name
        direct = sum(n for opcode, n in launch["opcodes"].items() if opcode.startswith("F2FP.SATFINITE.E4M3.F32"))
        assert (direct > 0) == (name.endswith("-pack") and "sm_80" not in name), name
        assert not [opcode for opcode in launch["opcodes"] if opcode.startswith("FMUL.FTZ")], name
        loads, stores = (sorted(widths(launch, kind)) for kind in ("LDG", "STG"))
        if "-off" in name:
            byte = 8 * int(name.split("-off")[1].split("-")[0])
            wide, narrow = (loads, stores[1:]) if name.endswith("-pack") else (stores, loads)
            assert (set(wide), set(narrow) - {32}) == ({byte}, {byte // 2} - {32}), name
            continue
        assert (launch["SHARED"], kinds & {"LDS", "STS", "BAR"}) == (0, set()), name
        parts = 1 if int(name.split("-")[1]) in (64, 128) else 2
        scale = [32] * name.endswith("-pack")
        want = ([128] * 2, [128]) if scale else ([64] * 2, [128] * 2)
        assert (loads, stores) == (want[0] * parts, scale + want[1] * parts), name
