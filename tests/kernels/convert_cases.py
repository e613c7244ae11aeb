"""Pools in two forms for the tests of conversion; and what runs in processes of its own.

Collected by pytest with TRITON_INTERPRET=1, the kernel in Triton's interpreter. As a program it compiles the kernel by
the Triton that comes first on PYTHONPATH and prints what the machine code does, as JSON:

    convert_cases.py ARCHITECTURE all|few
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import triton
from row_moves import HND, NAMES, NHD, PACKED, PoolMemory, PoolShape

from kvmover.kernels import convert, convert_overlaps, digest_reference
from kvmover.kernels.convert_reference import Conversion, decode, encode
from kvmover.kernels.digest_reference import End, Logical
from kvmover.kernels.launch import Program, RowConfig
from kvmover.kernels.region import RegionError, Side
from kvmover.layout import Codec, CodecPart
from kvmover.layout.codec import cut_block
from perf import machine_code
from tests.proofs import covering, family

#: numpy says so of signalling NaN, which random bits hold, and where float16 cannot hold a number.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: Forms of a row of as many numbers.
FORMS: dict[int, dict[str, Codec]] = {
    dim: {
        "bf16": Codec.plain("bfloat16", dim),
        "f16": Codec("bfloat16", (CodecPart(dim, "float16"),)),
        "f32": Codec("bfloat16", (CodecPart(dim, "float32"),)),
        "half": Codec.fp8("float16", dim),
        "fp8": Codec.fp8("bfloat16", dim),
        "k-v": Codec.fp8("bfloat16", dim // 2, dim // 2),
        "e5m2": Codec.fp8_e5m2("bfloat16", dim),
    }
    for dim in (24, 64, 128, 576)
}
for _dim in (64, 128, 576):
    FORMS[_dim] |= {"nvfp4": Codec.nvfp4("bfloat16", _dim), "mxfp8": Codec.mxfp8("bfloat16", _dim)}
    FORMS[_dim]["mxfp4"] = Codec.mxfp4("bfloat16", _dim)
FORMS[576]["ds-mla"] = Codec.fp8_ds_mla()
FORMS[576]["v-in-4"] = Codec(
    "bfloat16", (CodecPart(512, "float4_e2m1fn_x2", 16, "float8_e4m3fn"), CodecPart(64, "float32"))
)

Verb = Callable[[Sequence[Conversion]], None]


@dataclass(frozen=True)
class Case:
    """`heads` heads of `layers` x `kv` planes, in units of `tokens` tokens, which divide the pages of both pools.

    `even`: the units of the destination follow each other, as on the wire. `values`: any bits, or normal numbers.
    """

    reads: str
    writes: str
    dim: int
    src: PoolShape
    dst: PoolShape
    tokens: int = 4
    heads: int = 2
    layers: int = 1
    kv: int = 2
    units: int = 3
    first_head: tuple[int, int] = (0, 0)
    even: bool = False
    values: str = "bits"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.dim}-{self.reads}-to-{self.writes}-{self.src}-to-{self.dst}-x{self.tokens}"

    @property
    def forms(self) -> tuple[Codec, Codec]:
        return FORMS[self.dim][self.reads], FORMS[self.dim][self.writes]


class OpenCase:
    """A case with its memory. Rows are found by loops over coordinates, which share no arithmetic with the kernel."""

    def __init__(self, case: Case) -> None:
        self.case, random = case, np.random.default_rng(case.seed)
        self.pools: list[PoolMemory] = []
        self.units: list[list[tuple[int, int]]] = []
        self.scales: list[np.ndarray] = []
        for end, (shape, form) in enumerate(zip((case.src, case.dst), case.forms, strict=True)):
            a_page = shape.page_tokens // case.tokens
            pages = -(-case.units // a_page) + 2
            self.pools.append(PoolMemory(shape, case.layers, case.kv, pages, form.row_bytes, random))
            order = np.arange(case.units) if end and case.even else random.permutation(pages * a_page)
            self.units.append([(int(u) // a_page, int(u) % a_page * case.tokens) for u in order[: case.units]])
            planes = case.layers * case.kv
            self.scales.append(np.exp2(random.uniform(-9, 3, (planes, form.scales))).astype(np.float32))
        if case.values == "numbers" and case.units:
            rows = torch.from_numpy(random.standard_normal((len(self.get(0)), case.dim))).float() * 3
            rows[:: len(rows) // 3 + 1] = 0
            self.put(0, torch.cat([encode(case.forms[0], part, s) for part, s in self._by_plane(rows, 0)]))

    @property
    def conversion(self) -> Conversion:
        case, sides = self.case, []
        for pool, units, head in zip(self.pools, self.units, case.first_head, strict=True):
            sides.append(pool.side(range(case.layers), range(case.kv), units, head))
        return Conversion(*sides, case.heads, case.tokens, *case.forms, *self.scales)

    def _by_plane(self, rows: torch.Tensor, end: int) -> Iterator[tuple[torch.Tensor, list[float]]]:
        scales = self.scales[end]
        for plane, part in enumerate(rows.chunk(max(1, len(scales)))):
            yield part, scales[plane].tolist() if len(scales) else []

    def _rows(self, end: int) -> Iterator[np.ndarray]:
        """The bytes of every row of an end, one after the other."""
        case, pool = self.case, self.pools[end]
        for layer, kv in product(range(case.layers), range(case.kv)):
            view = pool.view(layer, kv)
            for (page, token), i, head in product(self.units[end], range(case.tokens), range(case.heads)):
                yield view[page, token + i, case.first_head[end] + head]

    def get(self, end: int) -> torch.Tensor:
        """[row, byte] of the source (0) or the destination."""
        rows = list(self._rows(end))
        return torch.from_numpy(np.array(rows, np.uint8).reshape(len(rows), self.case.forms[end].row_bytes))

    def put(self, end: int, rows: torch.Tensor) -> None:
        for row, new in zip(self._rows(end), rows.numpy(), strict=True):
            row[:] = new

    def wholes(self) -> list[torch.Tensor]:
        """All bytes of both pools, guards included."""
        return [whole.clone() for pool in self.pools for whole in pool.whole]

    def expected(self) -> list[torch.Tensor]:
        """All bytes after the conversion. The memory is as before."""
        before = self.wholes()
        if self.case.units and self.case.layers:
            read = [decode(self.case.forms[0], part, scales) for part, scales in self._by_plane(self.get(0), 0)]
            written = [
                encode(self.case.forms[1], part, self.scales[1][plane].tolist()) for plane, part in enumerate(read)
            ]
            self.put(1, torch.cat(written))
        after = self.wholes()
        for whole, old in zip([whole for pool in self.pools for whole in pool.whole], before, strict=True):
            whole.copy_(old)
        return after


def run(cases: Sequence[Case], verb: Verb) -> None:
    """Convert all cases in one call; compare every byte of all pools."""
    opened = [OpenCase(case) for case in cases]
    wanted = [each.expected() for each in opened]
    verb([each.conversion for each in opened])
    for each, after in zip(opened, wanted, strict=True):
        for got, want in zip(each.wholes(), after, strict=True):
            assert torch.equal(got, want), each.case


def _forms() -> list[Case]:
    """Every form to every other, orders, parts of the heads, separate allocations and pages in turn."""
    separate = [(), ("layer",), ("layer", "kv")]
    orders = list(NAMES)
    pairs = [(dim, *pair) for dim, forms in FORMS.items() for pair in product(forms, repeat=2)]
    pairs = [(dim, one, other) for dim, one, other in pairs if not cut_block(FORMS[dim][one], FORMS[dim][other])]
    return [
        Case(
            reads,
            writes,
            dim,
            PoolShape(orders[number % len(orders)], 4, 4, separate[number % 3]),
            PoolShape(orders[number // 3 % len(orders)], 8, 3, separate[number // 3 % 3]),
            first_head=(2, 1),
            layers=1 + number % 2,
            kv=2 - number % 2,
            even=bool(number % 3),
            values="bits" if number % 2 else "numbers",
            seed=number,
        )
        for number, (dim, reads, writes) in enumerate(pairs)
    ]


def _pages() -> list[Case]:
    """Page sizes that differ, ragged ends of 1 and 7 tokens, many units, and none."""
    base = Case("bf16", "fp8", 64, PoolShape(NHD, 16, 2), PoolShape(PACKED, 64, 2), kv=1)
    sizes = [(16, 64, 16), (24, 16, 8), (1, 1, 1), (16, 64, 1), (7, 7, 7)]
    cases = [
        replace(
            base,
            src=PoolShape(NHD, src, 2),
            dst=PoolShape(HND, dst, 2),
            tokens=tokens,
            units=70 if tokens == 1 else 3,
            writes=writes,
            seed=tokens,
        )
        for (src, dst, tokens), writes in zip(sizes, ["fp8", "nvfp4", "fp8", "nvfp4", "fp8"], strict=True)
    ]
    return [*cases, replace(base, units=0), replace(base, layers=0, units=1)]


def _misaligned() -> list[Case]:
    """Sides that start off a 16-byte border, by whole elements."""
    base = Case("bf16", "fp8", 64, PoolShape(NHD, 4, 3), PoolShape(PACKED, 4, 2), kv=1)
    ways = [("bf16", "fp8"), ("fp8", "bf16"), ("bf16", "nvfp4"), ("nvfp4", "fp8")]
    return [
        replace(
            base,
            src=replace(base.src, misaligned=off * (2 if reads == "bf16" else 1)),
            dst=replace(base.dst, misaligned=off * (2 if writes == "bf16" else 1)),
            reads=reads,
            writes=writes,
            values="numbers",
            seed=off,
        )
        for off, (reads, writes) in product((1, 2, 4), ways)
    ]


CASES = [*_forms(), *_pages(), *_misaligned()]
IDS = [f"{number}-{case}" for number, case in enumerate(CASES)]


ENDS: tuple[End, End] = ("src", "dst")


def coordinates(case: Case, of: Conversion) -> Logical:
    """Planes, heads and positions of another model's request: far apart, and in another order."""
    random = np.random.default_rng(case.seed)
    planes = random.permutation(of.planes).astype(np.int64) * 3 + 1
    positions = random.permutation(len(of.src.units)).astype(np.int64) * case.tokens + 5
    return Logical(planes, positions, first_head=2, head_step=3)


def run_with_digest(cases: Sequence[Case], end: End, config: RowConfig, sms: int | None = None) -> None:
    """Convert as `run` does, with the digest of one end's rows on top of an earlier one."""
    out, wanted = torch.tensor([5], dtype=torch.int64), 0

    def verb(conversions: Sequence[Conversion]) -> None:
        nonlocal wanted
        logicals = [coordinates(*each) for each in zip(cases, conversions, strict=True)]
        launch = convert.prepare_with_digest(conversions, logicals, end, out, config, sms)
        if launch is not None:
            launch.run()
        wanted = digest_reference.digest([each.at(end) for each in conversions], logicals, end)

    run(cases, verb)
    assert int(out[0]) % digest_reference.MODULUS == (wanted + 5) % digest_reference.MODULUS


def digests(case: Case, end: End) -> bool:
    """True if the rows at an end are digested while they are converted."""
    conversion = OpenCase(case).conversion
    return convert_overlaps.can_digest(conversion, coordinates(case, conversion), end)


#: Several conversions in one call, of all kinds, alignments and pages.
TOGETHER = {"forms": _forms()[1::17], "misaligned": _misaligned()[1::3], "pages": _pages()}


def traits(case: Case) -> set[Hashable]:
    """What sets cases apart for the kernel. A plain run of the interpreter takes a few cases that have all of it."""
    found: set[Hashable] = {("values", case.values), ("units", min(case.units, 2)), ("tokens", case.tokens)}
    for end, pool in enumerate((case.src, case.dst)):
        found |= {(end, pool.order), (end, pool.separate), (end, "off", pool.misaligned & -pool.misaligned)}
    if case.units:
        for overlap in convert_overlaps.overlaps(OpenCase(case).conversion):
            shape = convert_overlaps.ColumnShape.of(overlap, 1024)
            found |= {("numbers", shape.src_element, shape.dst_element, shape.src_block, shape.dst_block)}
            found |= {("vecs", shape.src_vec, shape.dst_vec), ("kinds", shape.src_kind, shape.dst_kind)}
            found |= {("cut", shape.values % shape.width > 0, shape.dst_element == 4), ("largest", shape.largest)}
            found.add(("grains", min(shape.columns, 2)))
    return found


#: A few cases that together have all that sets cases apart.
COVERING = covering(CASES, traits)


@pytest.mark.parametrize("case", family(CASES, few=COVERING), ids=IDS)
def test_a_case_equals_the_definition(case: Case) -> None:
    run([case], convert.convert)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("case", family(CASES, few=COVERING[::3], proved=COVERING), ids=IDS)
def test_a_case_converts_and_digests_as_the_definitions_do(case: Case, end: End) -> None:
    if digests(case, end):
        run_with_digest([case], end, RowConfig(4096, 4))
    else:
        with pytest.raises(RegionError, match="not whole words"):
            run_with_digest([case], end, RowConfig(4096, 4))


@pytest.mark.parametrize("end", ENDS)
def test_conversions_of_any_kinds_share_a_digest(end: End) -> None:
    cases = [case for together in TOGETHER.values() for case in together if digests(case, end)]
    assert len(cases) > 10
    run_with_digest(cases[::3], end, RowConfig(4096, 4), sms=3)


def test_all_forms_are_digested_while_they_are_converted_but_from_parts_that_end_within_a_word() -> None:
    others = {(case.reads, case.writes)[end == "src"] for case in CASES for end in ENDS if not digests(case, end)}
    assert others == {"k-v"}


@pytest.mark.parametrize(
    ("together", "sms"),
    family(product(TOGETHER, [None, 3]), few=[("misaligned", None), ("pages", 3)]),
)
def test_conversions_of_any_kinds_share_a_call_under_any_budget(together: str, sms: int | None) -> None:
    run(TOGETHER[together], partial(convert.convert, config=RowConfig(4096, 4), sms=sms))


@pytest.mark.parametrize(
    ("together", "kinds"), family(product(TOGETHER, [(1, 1), (2, 2)]), few=[("misaligned", (1, 1)), ("pages", (2, 2))])
)
def test_a_kernel_for_narrower_accesses_and_units_given_otherwise_writes_the_same(
    together: str, kinds: tuple[int, int]
) -> None:
    def narrowly(conversions: Sequence[Conversion]) -> None:
        own = convert.standing_program(conversions, kinds, None)
        shapes = {shape._replace(src_vec=1, dst_vec=1) for shape in own.shapes}
        launch = convert.prepare(conversions, using=replace(own, shapes=tuple(shapes)))
        assert launch is not None
        assert set(launch.program.shapes) == shapes
        launch.run()

    run([case for case in TOGETHER[together] if case.units], narrowly)


@pytest.mark.parametrize("writes", ["fp8", "half", "e5m2", "nvfp4", "mxfp8", "mxfp4", "f16", "k-v"])
def test_every_pattern_of_bfloat16_is_converted_as_defined(writes: str) -> None:
    """Shuffled, so that blocks have all magnitudes."""
    bits = np.random.default_rng(0).permutation(np.arange(1 << 16).astype(np.uint16))
    assert_flat(FORMS[64]["bf16"], FORMS[64][writes], torch.from_numpy(bits.view(np.uint8)).view(-1, 128), 3.7)


@pytest.mark.parametrize("reads", ["fp8", "e5m2", "nvfp4", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("writes", ["bf16", "f16", "f32", "fp8", "e5m2", "nvfp4", "mxfp8", "mxfp4"])
def test_every_byte_of_a_narrow_form_is_converted_as_defined(reads: str, writes: str) -> None:
    form = FORMS[64][reads]
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (64, form.row_bytes), np.uint8))
    rows.view(-1)[:256] = torch.arange(256)
    assert_flat(form, FORMS[64][writes], rows, 1 / 3)


def assert_flat(reads: Codec, writes: Codec, rows: torch.Tensor, scale: float, device: str = "cpu") -> None:
    """Dense rows [row, byte], converted in large tiles."""
    conversion, out = flat(reads, writes, rows, scale, device)
    convert.convert([conversion], config=RowConfig(65536, 4))
    scales = [[float(np.float32(scale))] * form.scales for form in (reads, writes)]
    want = encode(writes, decode(reads, rows, scales[0]), scales[1])
    assert torch.equal(out.cpu().view(want.shape), want)


def flat(
    reads: Codec, writes: Codec, rows: torch.Tensor, scale: float = 1.0, device: str = "cpu"
) -> tuple[Conversion, torch.Tensor]:
    """One dense conversion of the rows [row, byte], and the bytes that it writes."""
    zero, units = np.zeros(1, np.int64), np.arange(len(rows))
    memories = (
        rows.clone().to(device).view(-1),
        torch.full((len(rows) * writes.row_bytes,), 0xEE, dtype=torch.uint8, device=device),
    )
    sides = [
        Side.of((memory,), zero, zero, units * form.row_bytes, 0, form.row_bytes)
        for memory, form in zip(memories, (reads, writes), strict=True)
    ]
    scales = [np.full((1, form.scales), scale, np.float32) for form in (reads, writes)]
    return Conversion(*sides, 1, 1, reads, writes, *scales), memories[1]


#: What transfers convert, as (numbers of a row, form that is read, form that is written).
WAYS = [
    (128, "bf16", "fp8"),
    (128, "fp8", "bf16"),
    (128, "fp8", "fp8"),
    (128, "bf16", "nvfp4"),
    (128, "nvfp4", "bf16"),
    (128, "bf16", "e5m2"),
    (128, "e5m2", "bf16"),
    (128, "bf16", "mxfp8"),
    (128, "mxfp8", "bf16"),
    (128, "bf16", "mxfp4"),
    (128, "mxfp4", "bf16"),
    (576, "bf16", "ds-mla"),
    (576, "ds-mla", "bf16"),
]
#: Ways that are compiled with a digest of either end too: elements by a scale, by blocks, and two in a byte.
DIGESTED = {("bf16", "fp8"), ("fp8", "bf16"), ("bf16", "nvfp4"), ("bf16", "mxfp8"), ("ds-mla", "bf16")}
FEW = {"128-bf16-fp8", "128-fp8-bf16", "576-bf16-ds-mla", "128-bf16-fp8-budget", "128-bf16-fp8-digest-dst"}


def launches() -> Iterator[tuple[str, int, Case, RowConfig, End | None]]:
    """Name, architecture, rows, configuration and digested end of all that is compiled."""
    nhd, packed = PoolShape(NHD, 64, 4), PoolShape(PACKED, 64, 1)
    base = Case("bf16", "fp8", 128, nhd, packed, tokens=64, heads=1, units=4, even=True)
    for architecture, (dim, reads, writes) in product((80, 90, 100, 120), WAYS):
        case = replace(base, dim=dim, reads=reads, writes=writes)
        name = f"sm_{architecture}-{dim}-{reads}-{writes}"
        yield name, architecture, case, convert.CONFIG, None
        for end in ENDS if architecture == 90 and (reads, writes) in DIGESTED else ():
            yield f"{name}-digest-{end}", architecture, case, convert.CONFIG, end
    latents = replace(base, dim=576, writes="ds-mla")
    for name, case in (("128-bf16-fp8", base), ("576-bf16-ds-mla", latents)):
        yield f"sm_90-{name}-budget", 90, case, convert.BUDGET_CONFIG, None
        yield f"sm_90-{name}-budget-digest-dst", 90, case, convert.BUDGET_CONFIG, "dst"
    for off in (2, 8):
        case = replace(base, src=replace(nhd, misaligned=off), dst=replace(packed, misaligned=off // 2))
        yield f"sm_90-128-bf16-fp8-off{off}", 90, case, convert.CONFIG, None


def programs(case: Case, architecture: int, config: RowConfig, digested: End | None) -> Iterator[tuple[str, Program]]:
    """The kernel of a call, with code for each kind of overlap that it has; and for each of several alone, unless rows
    are digested.
    """
    shapes = convert.describe([OpenCase(case).conversion], config.block_bytes).shapes
    alone = len(shapes) > 1 and digested is None
    parts = {"all": shapes, **({str(i): (shape,) for i, shape in enumerate(shapes)} if alone else {})}
    for name, some in parts.items():
        program = convert.program(some, config, torch.device("cpu"), digested)
        constants = {**dict(program.constants), "CASTS": int(architecture >= 90)}
        yield name, replace(program, constants=tuple(constants.items()))


def main() -> None:
    results: dict[str, object] = {}
    for name, architecture, case, config, end in launches():
        if architecture == int(sys.argv[1]) and (sys.argv[2] == "all" or name.partition("-")[2] in FEW):
            for part, program in programs(case, architecture, config, end):
                code = machine_code.of_program(program, architecture)
                read = {"opcodes": dict(code.opcodes), "widths": code.widths(), "spills": code.spills}
                results[f"{name}-{part}"] = {**asdict(code), **read}
    sys.stdout.write(json.dumps({"triton": triton.__version__, "results": results}))


if __name__ == "__main__":
    main()
