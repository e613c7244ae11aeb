"""Conversion: the definition rounds as the formats do and keeps its error bound, and the kernel is the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from ahead import Ahead
from compilers import COMPILERS, LIMIT_S
from convert_cases import CASES, DIGESTED, FORMS, IDS, TOGETHER, WAYS, Case, OpenCase, flat, run
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from row_moves import NHD, PACKED, PoolShape

from kvmover.kernels import convert, convert_reference
from kvmover.kernels.convert_reference import Conversion, decode, encode
from kvmover.kernels.region import RegionError
from kvmover.layout import Codec
from kvmover.layout.codec import error_of

FP8, NVFP4, DS_MLA = FORMS[64]["fp8"], FORMS[64]["nvfp4"], FORMS[576]["ds-mla"]
F32, E5, MXFP8, MXFP4 = (FORMS[64][name] for name in ("f32", "e5m2", "mxfp8", "mxfp4"))

#: Every finite magnitude of e4m3, e5m2 and e2m1, by its code.
E4M3 = np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)])[:-1]
E5M2 = np.array([m / 4 * 2.0**-14 if e == 0 else (1 + m / 4) * 2.0 ** (e - 15) for e in range(31) for m in range(4)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

#: Numbers of a cache of any magnitude that float32 has.
numbers = hnp.arrays(
    np.float32, (3, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_nan=False, allow_infinity=False)
)
scales = st.floats(2.0**-20, 2.0**20, width=32)


def back(form: Codec, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """What is read of `rows` after they were stored."""
    each = [float(np.float32(scale))] * form.scales
    return decode(form, encode(form, rows, each), each)


@pytest.mark.parametrize("case", CASES[::7], ids=IDS[::7])
def test_the_definition_puts_rows_where_a_loop_over_coordinates_does(case: Case) -> None:
    run([case], convert_reference.convert)


@pytest.mark.parametrize("cases", TOGETHER.values(), ids=TOGETHER.keys())
def test_the_definition_converts_several_regions_in_order(cases: list[Case]) -> None:
    run(cases, convert_reference.convert)


# Rounding, by an oracle that looks for the nearest number in the list of all


def nearest(numbers: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Codes of the nearest of `grid`, the even one of two that are as near; the last beyond the last."""
    high = np.clip(np.searchsorted(grid, numbers), 1, len(grid) - 1)
    low = high - 1
    below, above = numbers - grid[low], grid[high] - numbers
    return np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)


@pytest.mark.parametrize(("grid", "form"), [(E4M3, FP8), (E5M2, E5), (E2M1, NVFP4)], ids=["e4m3", "e5m2", "e2m1"])
def test_all_numbers_borders_and_their_neighbours_round_to_the_nearest(grid: np.ndarray, form: Codec) -> None:
    middles = (grid[1:] + grid[:-1]) / 2
    near = np.concatenate([grid, middles, [grid[-1] * 2, 1e30]]).astype(np.float32)
    every = np.unique([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))])
    every = every[every <= 6] if form is NVFP4 else every
    rows = np.zeros((-(-len(every) // 15), 4, 16), np.float32)
    rows.reshape(-1, 16)[: len(every), 0] = 6  # the largest of each block, so that its scale is 1
    rows[..., 1:].reshape(-1)[: len(every)] = every
    rows[:, :, 0] = 6
    for sign in (1, -1):
        stored = encode(form, torch.from_numpy(sign * rows).flatten(1), [1.0])
        if form is not NVFP4:
            codes = stored.view(-1, 4, 16).numpy()
        else:
            assert (stored[:, 32:] == 0x38).all()  # 1 in e4m3
            pairs = stored[:, :32]
            codes = torch.stack([pairs & 0xF, pairs >> 4], 2).view(-1, 4, 16).numpy()
        magnitude, bit = (codes & 7, 8) if form is NVFP4 else (codes & 0x7F, 0x80)
        assert np.array_equal(magnitude, nearest(rows.astype(np.float64), grid))
        assert ((codes & bit > 0) == (np.signbit(sign * rows))).all()


# The bounds that the definition states


@given(numbers, scales)
@example(np.full((3, 64), 2.0**-149, np.float32), 1.0)
@example(np.zeros((3, 64), np.float32), 2.0**-20)
def test_fp8_by_a_scale_keeps_its_bound(rows: np.ndarray, scale: float) -> None:
    inside = np.clip(rows, -448 * scale, 448 * scale).astype(np.float32)
    found = back(FP8, torch.from_numpy(inside), scale).double().numpy()
    x = np.abs(inside.astype(np.float64))
    assert (np.abs(found - inside) <= np.maximum(x / 16, scale / 1000)).all()


@given(numbers, scales)
def test_what_a_scale_has_no_room_for_is_clipped(rows: np.ndarray, scale: float) -> None:
    found = back(FP8, torch.from_numpy(rows), scale)
    largest = torch.tensor(448.0) * torch.tensor(scale, dtype=torch.float32)
    assert (found.abs() <= largest).all()
    assert torch.equal(found[torch.from_numpy(rows) >= largest], largest.expand(int((rows >= largest.item()).sum())))


@given(numbers)
@example(np.full((3, 64), 2.0**-149, np.float32))
@example(np.full((3, 64), 2.0**100, np.float32))
def test_fp8_by_blocks_keeps_its_bound(rows: np.ndarray) -> None:
    whole = np.tile(rows, (1, 9))
    found = back(DS_MLA, torch.from_numpy(whole)).double().numpy()
    error = np.abs(found - whole)
    largest = np.abs(whole[:, :512].reshape(3, 4, 128)).max(2)
    assert (error[:, :512].reshape(3, 4, 128) <= 0.036 * largest[:, :, None] + 2.0**-135).all()
    assert (error[:, 512:] <= 2.0**-8 * np.abs(whole[:, 512:]) + 2.0**-134).all()


@given(numbers, scales)
@example(np.full((3, 64), 6.0, np.float32), 2.0**-20)
@example(np.full((3, 64), 2.0**-149, np.float32), 1.0)
def test_nvfp4_keeps_its_bound(rows: np.ndarray, scale: float) -> None:
    most = 6 * 448 * scale
    inside = np.clip(rows, -most, most).astype(np.float32)
    found = back(NVFP4, torch.from_numpy(inside), scale).double().numpy()
    error = np.abs(found - inside).reshape(3, 4, 16)
    largest = np.abs(inside.astype(np.float64)).reshape(3, 4, 16).max(2)[:, :, None]
    bound = np.where(largest >= 3 * 2.0**-5 * scale, 0.177 * largest, np.maximum(largest / 5, scale / 160))
    assert (error <= bound + 2.0**-140).all()


@given(numbers, scales)
def test_e5m2_by_a_scale_keeps_its_bound(rows: np.ndarray, scale: float) -> None:
    inside = np.clip(rows, -57344 * scale, 57344 * scale).astype(np.float32)
    found = back(E5, torch.from_numpy(inside), scale).double().numpy()
    x = np.abs(inside.astype(np.float64))
    assert (np.abs(found - inside) <= np.maximum(x / 8, scale / 1e5)).all()


@pytest.mark.parametrize(("form", "share"), [(MXFP8, 1 / 16), (MXFP4, 1 / 4)], ids=["mxfp8", "mxfp4"])
@given(rows=numbers)
@example(rows=np.full((3, 64), np.nextafter(np.float32(448), np.float32(449)), np.float32))
@example(rows=np.full((3, 64), np.nextafter(np.float32(6), np.float32(7)), np.float32))
@example(rows=np.zeros((3, 64), np.float32))
def test_powers_of_two_for_scales_keep_their_bound(form: Codec, share: float, rows: np.ndarray) -> None:
    inside = np.where(np.abs(rows) < 1e-30, 0, rows).astype(np.float32)
    error = np.abs(back(form, torch.from_numpy(inside)).double().numpy() - inside).reshape(3, 2, 32)
    largest = np.abs(inside.astype(np.float64)).reshape(3, 2, 32).max(2)[:, :, None]
    assert (error <= share * largest).all()


@pytest.mark.parametrize(("form", "most"), [(MXFP8, 448.0), (MXFP4, 6.0)], ids=["mxfp8", "mxfp4"])
def test_a_power_of_two_is_the_least_that_leaves_the_largest_number_room(form: Codec, most: float) -> None:
    """Bytes of scales for blocks whose largest number is a power of two times `most`, one step above, and zero."""
    powers = np.array([-60, -1, 0, 1, 60])
    exact = np.exp2(powers).astype(np.float32) * np.float32(most)
    for largest, byte in ((exact, 127 + powers), (np.nextafter(exact, np.float32(np.inf)), 128 + powers)):
        rows = np.zeros((5, 64), np.float32)
        rows[:, [0, 40]] = largest[:, None]
        stored = encode(form, torch.from_numpy(rows), [])
        assert (stored[:, -2:].numpy() == byte[:, None]).all()
    none = encode(form, torch.zeros(1, 64), [])
    assert none[0, -1] == 127 + np.ceil(np.log2(1e-30 / most))
    assert not none[0, :-2].any()


@pytest.mark.parametrize("name", ["fp8", "e5m2", "k-v"])
def test_what_was_stored_once_is_stored_again_as_it_is(name: str) -> None:
    """A page that goes there and back, and there again, loses nothing more."""
    form, random = FORMS[64][name], torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 64, generator=random) * torch.exp2(torch.randint(-9, 9, (2000, 1), generator=random))
    each = [0.5] * form.scales
    stored = encode(form, rows, each)
    read = decode(form, stored, each)
    assert torch.equal(encode(form, read, each), stored)
    wide = encode(FORMS[64]["bf16"], read, [])
    assert torch.equal(decode(FORMS[64]["bf16"], wide, []), read)  # by a scale of a power of two, exactly


def test_the_stated_error_is_that_of_what_is_lost() -> None:
    wide = Codec.plain("bfloat16", 576)
    assert error_of(wide, wide) == error_of(DS_MLA, DS_MLA) == 0
    assert error_of(FORMS[64]["bf16"], F32) == 0
    assert error_of(FORMS[64]["bf16"], FP8) == 2.0**-4
    assert error_of(FP8, FORMS[64]["bf16"]) == 2.0**-8
    assert error_of(wide, DS_MLA) == 0.036
    assert error_of(DS_MLA, wide) == 2.0**-8
    assert error_of(FORMS[64]["bf16"], NVFP4) == error_of(FP8, NVFP4) == 0.177
    assert error_of(FP8, E5) == 2.0**-3
    assert (error_of(FP8, MXFP8), error_of(NVFP4, MXFP4)) == (0.0625, 0.25)


# What is not finite


@pytest.mark.parametrize("form", [FP8, NVFP4, DS_MLA], ids=["fp8", "nvfp4", "ds-mla"])
def test_infinity_counts_as_the_largest_number(form: Codec) -> None:
    rows = torch.zeros(1, form.dim)
    rows[0, :3] = torch.tensor([torch.inf, -torch.inf, 1.0])
    most = torch.finfo(torch.bfloat16).max
    plain = rows.clamp(-most, most)
    each = [1.0] * form.scales
    assert torch.equal(encode(form, rows, each), encode(form, plain, each))
    assert torch.isfinite(back(form, rows)).all()


def test_nan_stays_nan_and_spoils_no_scale() -> None:
    row = torch.linspace(-3, 3, 576)[None].clone()
    without = row.clone()
    row[0, [7, 300, 570]], without[0, [7, 300, 570]] = torch.nan, 0.0
    for form in (FORMS[576]["fp8"], FORMS[576]["e5m2"], FORMS[576]["mxfp8"], DS_MLA):
        each = [1.0] * form.scales
        got, want = (decode(form, encode(form, rows, each), each) for rows in (row, without))
        assert got.isnan().nonzero()[:, 1].tolist() == [7, 300, 570]
        assert torch.equal(got.nan_to_num(nan=0.0), want)


@pytest.mark.parametrize(("form", "block"), [(NVFP4, range(16, 32)), (MXFP4, range(32))], ids=["nvfp4", "mxfp4"])
def test_nan_makes_all_of_its_block_nan_where_elements_have_none(form: Codec, block: range) -> None:
    row = torch.full((1, 64), 6.0)
    row[0, 20] = torch.nan
    found = back(form, row)
    assert found.isnan().nonzero()[:, 1].tolist() == list(block)
    assert torch.equal(found.nan_to_num(nan=6.0), torch.full((1, 64), 6.0))


@pytest.mark.parametrize("element", ["bf16", "f16", "f32"])
def test_plain_numbers_keep_infinity_and_write_one_nan(element: str) -> None:
    form = FORMS[64][element]
    row = torch.zeros(1, 64)
    row[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    stored = encode(form, row, [])
    found = decode(form, stored, [])
    assert found[0, :2].tolist() == [torch.inf, -torch.inf]
    size = stored.shape[1] // 64
    assert stored[0, 2 * size : 3 * size].tolist() == [0xFF] * (size - 1) + [0x7F]


# What is refused


MOVERS = (convert.convert, convert_reference.convert)


@pytest.mark.parametrize("verb", MOVERS, ids=["kernel", "definition"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: replace(c, heads=9), "destination rows: plane 0 spans"),
        (lambda c: replace(c, dst=replace(c.dst, units=c.dst.units[:1])), "source has 2 planes x 3 units"),
        (lambda c: replace(c, writes=FORMS[128]["fp8"], tokens=1), "rows of 64 numbers do not become rows of 128"),
        (lambda c: replace(c, src=replace(c.src, units=c.src.units + 1)), "off a multiple of 2 bytes"),
        (lambda c: replace(c, dst_scales=c.dst_scales[:1]), "scales are float32 .1, 1., not of 2 planes"),
        (lambda c: replace(c, dst_scales=c.dst_scales.astype(np.float64)), "scales are float64"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(
    verb: Callable[[Sequence[Conversion]], None], change: Callable[[Conversion], Conversion], words: str
) -> None:
    opened = OpenCase(Case("bf16", "fp8", 64, PoolShape(NHD, 4, 4), PoolShape(PACKED, 8, 3)))
    before = opened.wholes()
    with pytest.raises(RegionError, match=words):
        verb([opened.conversion, change(opened.conversion)])
    assert all(torch.equal(got, want) for got, want in zip(opened.wholes(), before, strict=True))


@pytest.mark.parametrize("verb", MOVERS, ids=["kernel", "definition"])
def test_parts_that_cut_a_block_are_refused(verb: Callable[[Sequence[Conversion]], None]) -> None:
    conversion, _ = flat(Codec.fp8("bfloat16", 8, 56), NVFP4, torch.zeros(4, 64, dtype=torch.uint8))
    with pytest.raises(RegionError, match="number 8 of a row cuts a block"):
        verb([conversion])


# The launches


def test_a_call_is_one_launch_with_code_for_each_kind_of_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[tuple[int, ...], list[tuple[int, int]]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **options: launched.append((grid, [shape[:2] for shape in options["SHAPES"]]))

    monkeypatch.setattr(convert, "convert_kernel", Kernel())
    latents, _ = flat(FORMS[576]["bf16"], DS_MLA, torch.zeros(64, 1152, dtype=torch.uint8))
    convert.convert([latents, latents])
    assert len(launched) == 1
    assert launched[0][1] == [(2, 3), (2, 2)]
    convert.convert([latents], sms=3)
    assert launched[1][0] == (3,)


def test_a_standing_kernel_serves_what_is_aligned_or_listed_otherwise() -> None:
    bf16, pool, packed = FORMS[64]["bf16"], PoolShape(NHD, 4, 4), PoolShape(PACKED, 4, 3)
    case = Case("bf16", "fp8", 64, pool, packed, even=True)
    aligned, tail = (OpenCase(each).conversion for each in (case, replace(case, units=1, first_head=(1, 1))))
    narrow = OpenCase(replace(case, dst=replace(packed, misaligned=4))).conversion
    standing = convert.standing_program([aligned, narrow], (1, 2), 8)
    assert {shape.dst_vec for shape in standing.shapes} == {4, 16}
    for each in (aligned, tail, narrow, replace(aligned, dst=replace(aligned.dst, units=aligned.dst.units[::-1] * 2))):
        assert convert.describe([each], standing.config.block_bytes, standing.shapes).shapes == standing.shapes
    other, _ = flat(bf16, NVFP4, torch.zeros(4, 128, dtype=torch.uint8))
    further = convert.describe([aligned, other], standing.config.block_bytes, standing.shapes).shapes
    assert further[:-1] == standing.shapes


def test_tiles_are_counted_in_32_bits() -> None:
    conversion, _ = flat(FORMS[64]["bf16"], FP8, torch.zeros(1, 128, dtype=torch.uint8))
    with pytest.raises(RegionError, match=f"1 units of {(1 << 31) - 1} tokens"):
        convert.describe([replace(conversion, tokens=(1 << 31) - 1)], convert.CONFIG.block_bytes)


AHEAD = {"report": lambda compiler: compiler.reports("convert_cases.py")}


@pytest.fixture(scope="module", params=COMPILERS, ids=str)
def report(request: pytest.FixtureRequest, ahead: Ahead) -> dict[str, dict]:
    """By launch, of one compiler."""
    found = ahead.result(request.module, "report", request.param)
    latents = sum(way[0] == 576 for way in WAYS)  # have two overlaps, compiled together and alone
    every = len(WAYS) + 2 * latents
    further = request.param.architecture == 90  # where narrower accesses, a budget and digests are compiled too
    digests = 2 * len(DIGESTED) + 2
    assert len(found) == {"all": every + (6 + digests) * further, "few": 5 + 2 * further}[request.param.cases]
    return found


#: Widths of loads and stores, scales aside, and whether rows stay out of shared memory.
WIDE = {
    "bf16-fp8": (128, 128, True),
    "fp8-bf16": (64, 128, True),
    "fp8-fp8": (128, 128, True),
    "bf16-nvfp4": (128, 64, False),
    "nvfp4-bf16": (64, 128, False),
    "bf16-e5m2": (128, 128, True),
    "e5m2-bf16": (64, 128, True),
    "bf16-mxfp8": (128, 32, False),
    "mxfp8-bf16": (32, 128, True),
    "bf16-mxfp4": (128, 32, False),
    "mxfp4-bf16": (32, 128, True),
    "bf16-ds-mla": (128, 128, False),
    "ds-mla-bf16": (64, 128, True),
}


#: Ways that round to e4m3: elements, or the scales of blocks.
TO_E4M3 = {"bf16-fp8", "fp8-fp8", "bf16-nvfp4", "bf16-mxfp8", "bf16-ds-mla"}


@pytest.mark.timeout(LIMIT_S + 30)
def test_machine_code(report: dict[str, dict]) -> None:
    """Wide accesses, no spills, few registers; scalars for scales alone; from sm_90 on the hardware rounds, once."""
    for name, launch in report.items():
        assert (launch["spills"], launch["local_bytes"], launch["stack_bytes"]) == (0, 0, 0), name
        assert 0 < launch["registers"] <= 96, name
        assert not [opcode for opcode in launch["opcodes"] if opcode.startswith("FMUL.FTZ")], name
        loads, stores = (sorted(launch["widths"][kind]) for kind in ("LDG", "STG"))
        if "-off" in name:
            byte = 8 * int(name.split("-off")[1].split("-")[0])
            assert (set(loads), set(stores)) == ({byte}, {byte // 2}), name
            continue
        way = next(each for each in sorted(WIDE, key=len, reverse=True) if each in name)
        read, written, direct = WIDE[way]
        if name.endswith("-1"):  # what turns: bfloat16 both times
            read, written, direct = 128, 128, True
        assert set(loads) == ({128, read} if "576" in name and name.endswith("-all") else {read}), name
        assert max(stores) == written, name
        assert [width for width in stores if width < written] in ([], [8], [32]), name  # a scale
        assert not (direct and launch["shared_bytes"] and "digest" not in name), name
        casts = sum(n for opcode, n in launch["opcodes"].items() if opcode.startswith("F2FP.SATFINITE.E4M3.F32"))
        assert (casts > 0) == (way in TO_E4M3 and not name.endswith("-1") and "sm_80" not in name), name
