"""The digest in Triton's interpreter. Run by test_interpreter.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from move_traits import traits
from row_moves import HND, MOVES, NHD, PACKED, TOGETHER, WHOLE, Move, PoolShape, assert_moved, ids

from kvmover.kernels import digest
from kvmover.kernels.digest_reference import End, Logical
from kvmover.kernels.digest_reference import digest as defined
from kvmover.kernels.launch import RULES, Kernel, RowConfig
from kvmover.kernels.region import Region, RegionError
from tests.proofs import covering, family

#: Several tiles a region, but few: the interpreter takes milliseconds for each.
SMALL = RowConfig(block_bytes=2048)
MODULUS = 1 << 64
SOME = MOVES[::4]


def coordinates(move: Move, region: Region) -> Logical:
    """Some, with nothing even about them: scattered positions, heads that skip one, tokens that skip some."""
    random = np.random.default_rng(move.seed)
    positions = random.permutation(1000)[: region.units].astype(np.int64) * move.tokens
    heads = {"first_head": 3, "head_step": 2, "position_step": 1 + move.seed % 3}
    return Logical(random.permutation(200)[: region.planes].astype(np.int64), positions, **heads)


def merged(region: Region, logical: Logical) -> tuple[Region, Logical]:
    """The same rows with all heads in one row, where both sides hold them side by side."""
    assert region.src.head_bytes == region.dst.head_bytes == region.row_bytes
    wide = replace(region, heads=1, row_bytes=region.heads * region.row_bytes)
    return wide, replace(logical, heads_in_row=region.heads)


def run(
    moves: Sequence[Move], config: RowConfig, sms: int | None, results: int = 1, ends: Sequence[End] = ("dst",)
) -> None:
    """Move and digest in one launch: the bytes, the digest, and the digest by reading these ends alone."""
    opened = [move.open() for move in moves]
    regions = [each.region for each in opened]
    logicals = [coordinates(each.move, each.region) for each in opened]
    expected = [each.expected() for each in opened]
    sources = [[whole.clone() for whole in each.src.whole] for each in opened]
    out = torch.zeros(results, dtype=torch.int64)
    digest.move_and_digest(regions, logicals, out, config, sms)
    assert_moved(opened, expected, sources)
    wanted = [defined([region], [logical], "src") for region, logical in zip(regions, logicals, strict=True)]
    wanted = wanted if results > 1 else [sum(wanted) % MODULUS]
    assert [int(each) % MODULUS for each in out] == wanted
    for side in ends:
        again = torch.zeros(results, dtype=torch.int64)
        digest.digest(regions, logicals, side, again, config, sms)
        assert torch.equal(again, out), side


@pytest.mark.parametrize("move", family(SOME, few=covering(SOME, traits)), ids=ids(SOME))
def test_a_move_has_the_digest_of_the_definition(move: Move) -> None:
    run([move], SMALL, None, ends=())


@pytest.mark.parametrize("row_bytes", family([64, 132, 256, 576, 584, 656, 1152, 4096], few=[132, 584]))
def test_the_general_kernels_move_and_digest_heads_of_public_models(row_bytes: int) -> None:
    """Tokens that follow each other on both sides, and tokens that do not."""
    moves = [Move(PoolShape(order, 4, 2), PoolShape(PACKED, 4, 2), row_bytes, 4, units=3) for order in (NHD, HND)]
    opened = [move.open() for move in moves]
    expected = [each.expected() for each in opened]
    sources = [[whole.clone() for whole in each.src.whole] for each in opened]
    regions = [each.region for each in opened]
    logicals = [coordinates(each.move, each.region) for each in opened]
    wanted = sum(defined([region], [logical], "src") for region, logical in zip(regions, logicals, strict=True))
    for reads in (None, "dst"):
        out, using = torch.zeros(1, dtype=torch.int64), digest.general_program(reads)
        launch = digest.prepare(regions, logicals, out, sms=2, reads=reads, using=using)
        assert launch is not None
        assert launch.program == using
        launch.run()
        assert int(out) % MODULUS == wanted % MODULUS
    assert_moved(opened, expected, sources)


@pytest.mark.parametrize(
    ("together", "sms"),
    family(product(TOGETHER, [None, 3]), few=[("with-nothing", None), ("alignments", 3)]),
)
def test_regions_of_different_widths_share_a_launch(together: str, sms: int | None) -> None:
    moves = TOGETHER[together]
    run(moves, SMALL, sms, results=1 if sms else len(moves), ends=())


@pytest.mark.parametrize(
    ("block_bytes", "moves"),
    family(
        [(256, (3, 30)), *((8192, tuple(range(first, len(MOVES), 36))) for first in (1, 10, 19, 28))],
        few=[(256, (3, 30)), (8192, tuple(range(1, len(MOVES), 36)))],
    ),
)
def test_any_tile_size_has_the_same_digest(block_bytes: int, moves: tuple[int, ...]) -> None:
    run([MOVES[number] for number in moves], RowConfig(block_bytes=block_bytes), None, ends=("src", "dst"))


@pytest.mark.parametrize("move", family(WHOLE, few=WHOLE[3:5]), ids=str)
def test_the_tiles_of_a_budget_have_the_same_digest(move: Move) -> None:
    run([move], RULES[Kernel.DIGEST][1], 2, ends=("src",))


@pytest.mark.parametrize(
    ("units", "row_bytes"),
    family(product([1, 4], [3, 4, 12, 16, 24, 132, 256, 1152]), few=[(1, 1152), (4, 3), (4, 12), (4, 16), (4, 24)]),
)
def test_merged_heads_have_the_digest_of_the_heads_apart(row_bytes: int, units: int) -> None:
    src, dst = PoolShape(NHD, 4, 3), PoolShape(NHD, 8, 3)
    opened = Move(src, dst, row_bytes, 4, heads=3, layers=1, units=units, seed=row_bytes).open()
    apart = opened.region, coordinates(opened.move, opened.region)
    outs = torch.zeros(2, dtype=torch.int64)
    for out, (region, logical) in zip(outs.split(1), (apart, merged(*apart)), strict=True):
        digest.move_and_digest([region], [logical], out, SMALL)
    assert int(outs[0]) == int(outs[1])
    assert int(outs[0]) % MODULUS == defined([apart[0]], [apart[1]], "dst")


def test_launches_of_parts_add_up() -> None:
    opened = Move(PoolShape(NHD, 4, 4), PoolShape(HND, 4, 4), 64, 4, heads=4, units=6).open()
    region, logical = opened.region, coordinates(opened.move, opened.region)
    out = torch.zeros(1, dtype=torch.int64)
    for units in (slice(0, 1), slice(1, 6)):
        sides = (replace(side, units=side.units[units]) for side in (region.src, region.dst))
        part = replace(logical, positions=logical.positions[units])
        digest.move_and_digest([Region(*sides, 4, 4, 64)], [part], out)
    assert int(out) % MODULUS == defined([region], [logical], "src")


def test_bad_input_is_refused_before_anything_moves() -> None:
    opened = Move(PoolShape(NHD, 4, 2), PoolShape(PACKED, 4, 2), 32, 4).open()
    region, logical = opened.region, coordinates(opened.move, opened.region)
    before = [whole.clone() for whole in opened.dst.whole]
    out = torch.zeros(1, dtype=torch.int64)
    for logicals in ([], [replace(logical, planes=logical.planes[1:])], [replace(logical, heads_in_row=3)]):
        with pytest.raises(RegionError):
            digest.move_and_digest([region], logicals, out)
    for bad in (out.to(torch.int32), out[:0], out.to("meta")):
        with pytest.raises(RegionError, match="result"):
            digest.move_and_digest([region], [logical], bad)
    far = replace(region, dst=replace(region.dst, units=region.dst.units + (1 << 20)))
    with pytest.raises(RegionError, match="destination plane 0"):
        digest.digest([far], [logical], "src", out)
    assert all(torch.equal(a, b) for a, b in zip(before, opened.dst.whole, strict=True))
    assert int(out) == 0


def test_nothing_has_the_digest_zero() -> None:
    opened = Move(PoolShape(NHD, 4, 2), PoolShape(PACKED, 4, 2), 32, 4, units=0).open()
    out = torch.zeros(1, dtype=torch.int64)
    digest.move_and_digest([opened.region], [coordinates(opened.move, opened.region)], out)
    digest.move_and_digest([], [], out)
    assert int(out) == 0
