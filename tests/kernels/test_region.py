"""A region that would reach outside its memory, or whose sides disagree, is refused before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvmover.kernels import reference, rows
from kvmover.kernels.region import Region, RegionError, Side

Mover = Callable[[Sequence[Region]], None]

MOVERS = [reference.move, rows.move]
MOVER_IDS = ["reference", "rows"]


def flat(nbytes: int, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def side(**changes: object) -> Side:
    """2 planes in 2 allocations, 3 units of 2 tokens and 2 heads of 16 bytes: exactly 256 bytes an allocation."""
    fields = {
        "memory": (flat(256), flat(256)),
        "allocation": ints(0, 1),
        "offset": ints(0, 64),
        "units": ints(0, 128, 64),
        "head_bytes": 32,
        "token_bytes": 16,
    }
    return Side.of(**{**fields, **changes})


def region(src: Side | None = None, dst: Side | None = None, **changes: int) -> Region:
    return replace(Region(src or side(), dst or side(), 2, 2, 16), **changes)


#: What cannot be made at all.
NONE: dict[str, tuple[Callable[[], object], str]] = {
    "no-heads": (lambda: region(heads=0), "0 heads x 2 tokens x 16 bytes"),
    "negative-heads": (lambda: region(heads=-1), "-1 heads x 2 tokens x 16 bytes"),
    "no-tokens": (lambda: region(tokens=0), "2 heads x 0 tokens x 16 bytes"),
    "no-bytes": (lambda: region(row_bytes=0), "2 heads x 2 tokens x 0 bytes"),
    "negative-tokens": (lambda: region(tokens=-1), "2 heads x -1 tokens x 16 bytes"),
    "listed-units": (lambda: side(units=[0, 64]), r"units = \[0, 64\]; they are int64 on the host, one a unit"),
    "fractions": (lambda: side(units=np.array([0.0, 64.7])), r"units = array\(\[ 0. , 64.7\]\); they are int64"),
    "short-units": (lambda: side(units=np.array([0], np.int32)), "they are int64"),
    "two-axes": (lambda: side(units=ints(0, 64)[None]), "they are int64 on the host, one a unit"),
}


@pytest.mark.parametrize(("make", "message"), NONE.values(), ids=NONE.keys())
def test_a_region_of_nothing_and_a_side_without_a_table_are_refused_where_they_are_made(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(RegionError, match=message):
        make()


BAD = {
    "unit-twice": (lambda: region(dst=side(units=ints(64, 128, 64))), "two units of a destination begin 64 bytes into"),
    "units-all-one": (lambda: region(dst=side(units=ints(0, 0, 0))), "two units of a destination begin 0 bytes into"),
    "plane-twice": (
        lambda: region(dst=side(allocation=ints(1, 1), offset=ints(0, 0))),
        "two planes of a destination begin at address",
    ),
    "tokens-in-one-another": (lambda: region(dst=side(token_bytes=8)), "destination tokens of 16 bytes are 8 bytes ap"),
    "heads-in-one": (lambda: region(dst=side(head_bytes=0)), "destination heads of 16 bytes are 0 bytes apart"),
    "fractions-of-planes": (
        lambda: region(src=side(offset=np.array([0.0, 0.5]))),
        r"source has offsets array\(\[0. , 0.5\]\); they are int64 on the host, one a plane",
    ),
    "other-planes": (
        lambda: region(dst=side(allocation=ints(0), offset=ints(0))),
        "source has 2 planes x 3 units, destination 1 x 3",
    ),
    "other-units": (lambda: region(dst=side(units=ints(0, 64))), "source has 2 planes x 3 units, destination 2 x 2"),
    "allocations": (lambda: region(dst=side(allocation=ints(0))), "destination has 1 allocations for 2 planes"),
    "no-memory": (lambda: region(src=side(memory=())), "source has no memory"),
    "negative-unit": (lambda: region(src=side(units=ints(0, -16, 64))), "source plane 0 spans bytes -16..128"),
    "unit-too-far": (lambda: region(dst=side(units=ints(0, 129, 64))), "destination plane 1 spans bytes 64..257"),
    "huge-unit": (lambda: region(src=side(units=ints(0, 1 << 60, 64))), "source plane 0 spans bytes 0.."),
    "plane-too-far": (lambda: region(src=side(offset=ints(0, 80))), "source plane 1 spans bytes 80..272 of an .* 256"),
    "negative-plane": (lambda: region(src=side(offset=ints(-1, 64))), "source plane 0 spans bytes -1..191"),
    "token-stride": (lambda: region(dst=side(token_bytes=33)), "destination plane 1 spans bytes 64..273"),
    "head-stride": (lambda: region(dst=side(head_bytes=97)), "destination plane 0 spans bytes 0..257"),
    "negative-head-stride": (lambda: region(src=side(head_bytes=-32)), "source strides -32, 16 are negative"),
    "negative-token-stride": (lambda: region(dst=side(token_bytes=-1)), "destination strides 32, -1 are negative"),
    "rows-too-wide": (lambda: region(row_bytes=17), "source plane 1 spans bytes 64..257"),
    "allocation-after-last": (lambda: region(src=side(allocation=ints(0, 2))), "source names allocation 2 of 2"),
    "allocation-before-first": (lambda: region(src=side(allocation=ints(-1, 1))), "source names allocation"),
    "short-allocation": (lambda: region(src=side(memory=(flat(256), flat(255)))), "of an allocation of 255"),
    "not-bytes": (lambda: region(src=side(memory=(flat(256), torch.zeros(256)))), "flat uint8 .* torch.float32"),
    "not-flat": (lambda: region(dst=side(memory=(flat(256), flat(256).view(16, 16)))), "destination memory must be"),
    "not-contiguous": (lambda: region(src=side(memory=(flat(256), flat(512)[::2]))), "source memory must be flat"),
    "two-devices": (lambda: region(src=side(memory=(flat(256), flat(256, "meta")))), "on one device, got .* meta"),
    "other-device": (
        lambda: region(dst=side(memory=(flat(256, "meta"), flat(256, "meta")))),
        "source on cpu, destination on meta",
    ),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVERS, ids=MOVER_IDS)
@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_region_is_refused_before_any_other_is_moved(
    move: Mover, make: Callable[[], Region], message: str
) -> None:
    good, bad = region(src=side(memory=(flat(256) + 1, flat(256) + 1))), make()
    with pytest.raises(RegionError, match=message):
        move([good, bad])
    assert not any(memory.any() for memory in good.dst.memory)


@pytest.mark.parametrize("move", MOVERS, ids=MOVER_IDS)
def test_two_regions_with_one_destination_are_refused_before_either_is_moved(move: Mover) -> None:
    memory, lot = (flat(512), flat(512)), np.random.default_rng(0).permutation(200) * 64
    into = side(memory=memory)
    with pytest.raises(RegionError, match="two regions are written to 128 bytes into planes that begin at one address"):
        move([region(dst=replace(into, units=ints(0, 64, 128))), region(dst=replace(into, units=ints(128, 192, 256)))])
    with pytest.raises(RegionError, match="two regions are written to 0 bytes"):  # of some planes, made anew
        move(
            [region(dst=into), region(*[side(memory=m, allocation=ints(0), offset=ints(0)) for m in (memory, memory)])]
        )
    large, source = (flat(200 * 64),), flat(200 * 64) + 1
    wide = [Side.of(each, ints(0), ints(0), lot, 32, 16) for each in ((source,), large)]
    with pytest.raises(RegionError, match=f"two units of a destination begin {lot[7]} bytes into"):
        move([region(wide[0], replace(wide[1], units=np.append(lot[:-1], lot[7])))])
    assert not any(each.any() for each in (*memory, *large))
    reference.move([region(*wide)])
    assert large[0].all()


def test_a_region_that_fills_its_memory_to_the_last_byte_is_good() -> None:
    good = region()
    good.check()
    assert (good.planes, good.units, good.nbytes) == (2, 3, 2 * 3 * 2 * 2 * 16)


@pytest.mark.parametrize("move", MOVERS, ids=MOVER_IDS)
@pytest.mark.parametrize("nothing", ["units", "planes"])
def test_a_region_without_rows_is_nothing_to_do(move: Mover, nothing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "move_kernel", None)
    none = ints()
    empty = side(units=none) if nothing == "units" else side(allocation=none, offset=none)
    before = [memory.clone() for memory in empty.memory]
    move([region(empty, empty)])
    move([])
    assert region(empty, empty).nbytes == 0
    assert all(torch.equal(*pair) for pair in zip(empty.memory, before, strict=True))


def test_regions_on_two_devices_cannot_share_a_launch() -> None:
    elsewhere = (flat(256, "meta"), flat(256, "meta"))
    with pytest.raises(RegionError, match="regions on cpu and meta cannot share a launch"):
        rows.move([region(), region(src=side(memory=elsewhere), dst=side(memory=elsewhere))])


@pytest.mark.parametrize(
    ("changes", "alignment"),
    [
        ({}, 16),
        ({"units": ints(0, 128, 8)}, 8),
        ({"offset": ints(0, 4)}, 4),
        ({"token_bytes": 18}, 2),
        ({"head_bytes": 33}, 1),
    ],
    ids=["aligned", "unit", "plane", "token", "head"],
)
def test_alignment_is_what_divides_every_row_of_both_sides(changes: dict[str, object], alignment: int) -> None:
    assert region(src=side(**changes)).alignment() == alignment
    assert region(dst=side(**changes)).alignment() == alignment


@pytest.mark.parametrize("offset", range(1, 17))
def test_alignment_counts_from_the_memorys_own_address(offset: int) -> None:
    shifted = side(memory=(flat(256), flat(320)[offset:]))
    assert region(src=shifted).alignment() == region(dst=shifted).alignment() == np.gcd(offset, 16)


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 6, 8, 12])
def test_alignment_is_no_wider_than_the_row(row_bytes: int) -> None:
    assert region(row_bytes=row_bytes).alignment() == np.gcd(row_bytes, 16)


def test_a_stride_that_is_never_taken_does_not_narrow_the_words() -> None:
    odd = side(head_bytes=33, token_bytes=17)
    assert region(src=odd, heads=1, tokens=1).alignment() == 16
    assert region(src=odd, heads=2, tokens=1).alignment() == 1
