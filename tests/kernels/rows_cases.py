"""The row mover in Triton's interpreter. Run by test_interpreter.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from move_traits import traits
from row_moves import FAR, MOVES, TOGETHER, WHOLE, FarMove, Move, ids, run
from state_moves import ORDERS
from state_moves import run as run_states

from kvmover.kernels import rows
from kvmover.kernels.launch import RowConfig, RowKind, choose
from tests.proofs import covering, family

SMALL = RowConfig(block_bytes=1024)
BUDGETED = choose(RowKind(256, 16384), 8, torch.device("cpu"))


@pytest.mark.parametrize("move", family(MOVES, few=covering(MOVES, traits)), ids=ids(MOVES))
def test_a_move_lands_where_a_loop_over_coordinates_puts_it(move: Move) -> None:
    run([move], partial(rows.move, config=SMALL))


@pytest.mark.parametrize(
    ("together", "sms"),
    family(
        product(TOGETHER, [None, 1, 3]),
        few=[("pages", None), ("contiguous", 1), ("with-nothing", 3), ("only-nothing", 3)],
    ),
)
def test_regions_of_different_widths_move_in_one_launch_under_any_budget(together: str, sms: int | None) -> None:
    run(TOGETHER[together], partial(rows.move, config=SMALL, sms=sms))


@pytest.mark.parametrize(("move", "sms"), family(product(WHOLE, [None, 2]), few=[(WHOLE[3], 2)]), ids=str)
def test_whole_units_land_where_a_loop_over_coordinates_puts_them(move: Move, sms: int | None) -> None:
    run([move], partial(rows.move, config=BUDGETED, sms=sms))


def test_whole_units_move_beside_units_of_any_other_length() -> None:
    regions = [move.open().region for move in WHOLE[:2]]
    using = rows.standing_program(regions[:1], (1, 1), 2)
    assert [bool(shape.tokens) for shape in using.shapes] == [True, False, False]
    run([WHOLE[0], replace(WHOLE[0], tokens=16, seed=5), MOVES[3]], partial(rows.move, sms=2, using=using))


@pytest.mark.parametrize("together", family(list(TOGETHER), few=["alignments"]))
def test_the_general_kernel_moves_rows_of_every_width_and_alignment(together: str) -> None:
    run(TOGETHER[together], partial(rows.move, sms=2, using=rows.general_program()))


@pytest.mark.parametrize("orders", ORDERS)
def test_states_land_by_head_and_by_sub_projection_in_one_launch(orders: str) -> None:
    run_states(orders, 3, partial(rows.move, config=SMALL))


@pytest.mark.parametrize(
    ("block_bytes", "first"),
    family([(256, 3), (256, 15), (256, 27), (16384, 0), (16384, 3), (16384, 6), (16384, 9)], few=[(16384, 6)]),
)
def test_any_tile_size_moves_the_same_bytes(block_bytes: int, first: int) -> None:
    """Small tiles are many, and the interpreter takes milliseconds for each."""
    some = MOVES[first :: 36 if block_bytes < 1024 else 12]
    run(some, partial(rows.move, config=RowConfig(block_bytes=block_bytes)))


@pytest.mark.parametrize("far", FAR, ids=str)
def test_offsets_past_32_bits_reach_the_right_bytes(far: FarMove, sparse: torch.Tensor) -> None:
    far.run(sparse, rows.move)
    far.run(sparse, partial(rows.move, config=BUDGETED))
