"""The digest: its definition, what it is blind to and what it sees, and that Triton has the same value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from ahead import Ahead
from compilers import COMPILERS, LIMIT_S
from digest_cases import coordinates, merged
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from row_moves import HND, NAMES, NHD, Move, PoolMemory, PoolShape

from kvmover.kernels import digest as triton_digest
from kvmover.kernels.digest_reference import Logical, digest
from kvmover.kernels.region import Region, RegionError

LOW, MODULUS = (1 << 32) - 1, 1 << 64


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ z >> 27) * 0x94D049BB133111EB % MODULUS
    return z ^ z >> 31


def by_hand(row: bytes, plane: int, head: int, position: int) -> int:
    """The digest of one head's row, in Python's integers."""
    key = mix64((plane * 0x165667B19E3779F9 + 0x27D4EB2F165667C5) % MODULUS)
    key = mix64((key + head * 0xC2B2AE3D27D4EB4F + position * 0x9E3779B185EBCA87) % MODULUS)
    total = 0
    for number in range(-(-len(row) // 4)):
        word = int.from_bytes(row[4 * number : 4 * number + 4], "little")
        a = ((key & LOW) + number * 0x9E3779B1) & LOW
        product = a * (((key >> 32) + number * 0x85EBCA77) & LOW)
        total += (word + a & LOW) * ((product ^ product >> 32) & LOW | 1)
    return total % MODULUS


@dataclass(frozen=True)
class Content:
    """Rows by logical coordinates: `bytes` [layer, kv, head, position, byte]."""

    bytes: np.ndarray

    @classmethod
    def of(cls, layers: int, heads: int, tokens: int, row_bytes: int, seed: int) -> Content:
        return cls(np.random.default_rng(seed).integers(0, 256, (layers, 2, heads, tokens, row_bytes), np.uint8))

    def by_hand(self) -> int:
        layers, kvs, heads, tokens, _ = self.bytes.shape
        every = np.ndindex(layers, kvs, heads, tokens)
        return sum(by_hand(self.bytes[at].tobytes(), at[0] * 2 + at[1], at[2], at[3]) for at in every) % MODULUS

    def held(self, order: str, page_tokens: int, tp: int, pp: int, seed: int) -> Iterator[tuple[Region, Logical]]:
        """The content in the pools of tp x pp ranks, pages anywhere and in any order, as a region a rank and tail."""
        layers, _, heads, tokens, row_bytes = self.bytes.shape
        random = np.random.default_rng(seed)
        pages = -(-tokens // page_tokens)
        for stage, rank in np.ndindex(pp, tp):
            here = range(stage * layers // pp, (stage + 1) * layers // pp)
            mine = slice(rank * heads // tp, (rank + 1) * heads // tp)
            shape = PoolShape(order, page_tokens, mine.stop - mine.start, ("layer",) if seed % 2 else ())
            memory = PoolMemory(shape, len(here), 2, pages + 2, row_bytes, random)
            table = random.permutation(pages + 2)[:pages]
            for layer, kv in np.ndindex(len(here), 2):
                view = memory.view(layer, kv)
                for position in range(tokens):
                    page, token = divmod(position, page_tokens)
                    view[table[page], token] = self.bytes[here[layer], kv, mine, position]
            whole, tail = divmod(tokens, page_tokens)
            for first, count, length in ((0, whole, page_tokens), (whole, int(tail > 0), tail)):
                if count:
                    chosen = first + random.permutation(count)
                    side = memory.side(range(len(here)), range(2), [(int(table[page]), 0) for page in chosen], 0)
                    planes = np.array([layer * 2 + kv for layer in here for kv in range(2)])
                    logical = Logical(planes, chosen * page_tokens, first_head=mine.start)
                    yield Region(side, side, shape.heads, length, row_bytes), logical

    def digest(self, order: str = HND, page_tokens: int = 4, tp: int = 1, pp: int = 1, seed: int = 0) -> int:
        regions, logicals = zip(*self.held(order, page_tokens, tp, pp, seed), strict=True)
        return digest(regions, logicals, "src")


def test_the_definition_is_the_formula_of_its_docstring() -> None:
    for row_bytes in (1, 3, 4, 6, 16, 34):
        content = Content.of(2, 2, 3, row_bytes, row_bytes)
        assert content.digest() == content.by_hand()


def test_the_digest_is_this_number_for_ever() -> None:
    """It is written to disk and sent between versions."""
    content = Content(np.arange(2 * 2 * 2 * 3 * 16, dtype=np.uint8).reshape(2, 2, 2, 3, 16))
    assert content.digest() == content.by_hand() == GOLDEN


GOLDEN = 4915646470114327112


@settings(max_examples=60)
@given(
    order=st.sampled_from(list(NAMES)),
    page_tokens=st.sampled_from([1, 3, 16, 64]),
    tp=st.sampled_from([1, 2, 3, 4]),
    pp=st.sampled_from([1, 2]),
    row_bytes=st.sampled_from([1, 6, 12, 16]),
    seed=st.integers(0, 9),
)
def test_no_layout_page_size_or_sharding_changes_it(
    order: str, page_tokens: int, tp: int, pp: int, row_bytes: int, seed: int
) -> None:
    content = Content.of(2, 4, 19, row_bytes, 1)
    assert content.digest(order, page_tokens, tp, pp, seed) == content.digest()


@settings(max_examples=30)
@given(row_bytes=st.sampled_from([2, 4, 6, 16, 132]), heads=st.integers(1, 4), seed=st.integers(0, 99))
def test_heads_merged_into_a_row_are_the_heads(row_bytes: int, heads: int, seed: int) -> None:
    shape = PoolShape(NHD, 4, heads)
    opened = Move(shape, shape, row_bytes, 4, heads, layers=1, units=3, seed=seed).open()
    apart = opened.region, coordinates(opened.move, opened.region)
    together = merged(*apart)
    assert digest([apart[0]], [apart[1]], "src") == digest([together[0]], [together[1]], "src")


def test_tokens_a_step_apart_are_the_tokens_one_by_one() -> None:
    opened = Move(PoolShape(NHD, 4, 1), PoolShape(NHD, 4, 1), 16, 4, 1, units=2).open()
    region = opened.region
    planes = np.arange(region.planes)
    stepped = digest([region], [Logical(planes, np.array([5, 40]), position_step=3)], "src")
    units = (region.src.units[:, None] + np.arange(4) * region.src.token_bytes).reshape(-1)
    side = replace(region.src, units=units)
    ones = Logical(planes, np.array([5, 8, 11, 14, 40, 43, 46, 49]))
    assert digest([Region(side, side, 1, 1, 16)], [ones], "src") == stepped


#: Contents of which some differ little: of few values, of zeros but for one word, and of random bytes.
KINDS = ("zeros", "few", "counter", "random")


def content_of(kind: str, seed: int) -> Content:
    random = Content.of(3, 3, 8, 8, seed).bytes
    if kind == "counter":
        random = np.arange(random.size // 4, dtype=np.int32).view(np.uint8).reshape(random.shape)
    return Content({"zeros": random * 0, "few": random & 1}.get(kind, random).copy())


@settings(max_examples=100)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 99), where=st.integers(0, 3 * 2 * 3 * 8 * 8 * 8 - 1))
def test_any_flipped_bit_is_seen(kind: str, seed: int, where: int) -> None:
    content = content_of(kind, seed)
    before = content.digest()
    content.bytes.reshape(-1)[where // 8] ^= 1 << where % 8
    assert content.digest() != before


@settings(max_examples=150)
@given(
    kind=st.sampled_from(KINDS[1:]),
    seed=st.integers(0, 99),
    axis=st.sampled_from(["layer", "kv", "head", "token", "page", "word", "byte", "row"]),
    data=st.data(),
)
def test_anything_swapped_is_seen(kind: str, seed: int, axis: str, data: st.DataObject) -> None:
    content = content_of(kind, seed)
    swapped = content.bytes.copy()
    views = {
        "layer": swapped,
        "kv": swapped.swapaxes(0, 1),
        "head": np.moveaxis(swapped, 2, 0),
        "token": np.moveaxis(swapped, 3, 0),
        "page": np.moveaxis(swapped.reshape(3, 2, 3, 2, 4, 8), 3, 0),
        "word": np.moveaxis(swapped.view(np.int32), 4, 0),
        "byte": np.moveaxis(swapped, 4, 0),
        "row": swapped.reshape(-1, 8),
    }
    view = views[axis]
    one, other = data.draw(st.lists(st.integers(0, len(view) - 1), min_size=2, max_size=2, unique=True))
    view[[one, other]] = view[[other, one]]
    assume(not np.array_equal(swapped, content.bytes))
    assert Content(swapped).digest() != content.digest()


@settings(max_examples=60)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 99), page=st.integers(0, 1), layer=st.integers(0, 2))
def test_a_stale_page_is_seen(kind: str, seed: int, page: int, layer: int) -> None:
    content = content_of(kind, seed)
    stale = content.bytes.copy()
    stale[layer, 0, :, 4 * page : 4 * page + 4] = content_of("random", seed + 100).bytes[layer, 0, :, :4]
    assert Content(stale).digest() != content.digest()


@settings(max_examples=30)
@given(kind=st.sampled_from(KINDS), count=st.integers(1, 7))
def test_missing_rows_are_not_rows_of_zeros(kind: str, count: int) -> None:
    content = content_of(kind, 0)
    shorter, zeroed = Content(content.bytes[:, :, :, :count]), content.bytes.copy()
    zeroed[:, :, :, count:] = 0
    assert len({content.digest(), shorter.digest(), Content(zeroed).digest()}) == (2 if kind == "zeros" else 3)


def test_coordinates_of_another_region_are_refused() -> None:
    region = Move(PoolShape(NHD, 4, 1), PoolShape(NHD, 4, 1), 16, 4, 1, units=2).open().region
    good = Logical(np.arange(region.planes), np.arange(2))
    for bad in (
        replace(good, positions=np.arange(3)),
        replace(good, planes=np.arange(1)),
        replace(good, heads_in_row=3),
    ):
        with pytest.raises(RegionError):
            digest([region], [bad], "src")
    with pytest.raises(RegionError, match="1 sets of coordinates for 2"):
        digest([region, region], [good], "src")


def test_a_copy_onto_what_it_reads_is_refused_and_a_digest_alone_is_not() -> None:
    """Before anything is launched, so that no GPU is needed to see it."""
    region = Move(PoolShape(NHD, 4, 1), PoolShape(NHD, 4, 1), 16, 4, 1, units=2).open().region
    itself = Region(region.src, region.src, region.heads, region.tokens, region.row_bytes)
    coordinates = [Logical(np.arange(region.planes), np.arange(2))]
    out = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RegionError, match="share the byte"):
        triton_digest.move_and_digest([itself], coordinates, out)
    assert digest([itself], coordinates, "src") == digest([itself], coordinates, "dst")


AHEAD = {"compiled": lambda compiler: compiler.reports("digest_worker.py")}


@pytest.fixture(scope="module", params=COMPILERS, ids=str)
def compiled(request: pytest.FixtureRequest, ahead: Ahead) -> dict[str, dict]:
    """The machine code of the Triton kernel, by case, of one compiler."""
    found = ahead.result(request.module, "compiled", request.param)
    assert len(found) == {"all": 18, "few": 7}[request.param.cases]
    return found


@pytest.mark.timeout(LIMIT_S + 30)
def test_aligned_rows_move_in_128_bit_accesses(compiled: dict[str, dict]) -> None:
    for name, case in compiled.items():
        widths = {kind: set(bits) for kind, bits in case["widths"].items()}
        bits = {"word4": {32}, "word1": {8}}.get(name.split("-")[0], {128})
        assert widths == {"LDG": bits, "STG": bits - bits if "read" in name else bits}, name


@pytest.mark.timeout(LIMIT_S + 30)
def test_nothing_spills_and_registers_leave_room(compiled: dict[str, dict]) -> None:
    for name, case in compiled.items():
        assert (case["spills"], case["local_bytes"], case["stack_bytes"]) == (0, 0, 0), name
        assert 0 < case["registers"] <= (128 if "132B-contiguous" in name else 96), name


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_tile_of_a_budget_is_in_flight_at_once(compiled: dict[str, dict]) -> None:
    """32 KiB of each program: all of its loads stand before its first store. In 64 registers, so 16 warps fit twice."""
    budgeted = {name: case for name, case in compiled.items() if name.endswith("-budgeted")}
    assert budgeted
    for name, case in budgeted.items():
        assert case["registers"] <= (96 if "132B-contiguous" in name else 64), name
        if "word1" not in name:  # byte by byte, four passes
            assert case["in_flight"] == len(case["widths"]["LDG"]) == case["accesses"] == 4, name


@pytest.mark.timeout(LIMIT_S + 30)
def test_instructions_leave_the_memory_the_bottleneck(compiled: dict[str, dict]) -> None:
    """An H200 moves a 16-byte vector each 1.7 cycles an SM, in which its lanes issue some 200 instructions."""
    for name, case in compiled.items():
        kinds = {opcode.split(".")[0]: count for opcode, count in case["opcodes"].items()}
        assert "CALL" not in kinds, name
        atomics = sum(count for kind, count in kinds.items() if kind in ("RED", "REDG", "ATOMG"))
        assert atomics == 1, name
        if "aligned" in name and "132B" not in name:
            useful = sum(count for opcode, count in case["opcodes"].items() if opcode.split(".")[0] != "NOP")
            assert useful / len(case["widths"]["LDG"]) <= 210, name  # with the search for a region, once a tile
