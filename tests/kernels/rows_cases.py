"""The row mover in Triton's interpreter. Run by test_rows_interpreter.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from row_moves import FAR, MOVES, TOGETHER, FarMove, Move, ids, run
from state_moves import ORDERS
from state_moves import run as run_states

from kvmover.kernels import rows
from kvmover.kernels.config import RowConfig

SMALL = RowConfig(block_bytes=1024)


@pytest.mark.parametrize("move", MOVES, ids=ids(MOVES))
def test_a_move_lands_where_a_loop_over_coordinates_puts_it(move: Move) -> None:
    run([move], partial(rows.move, config=SMALL))


@pytest.mark.parametrize("moves", TOGETHER.values(), ids=TOGETHER.keys())
@pytest.mark.parametrize("sms", [None, 1, 3], ids=lambda sms: f"sms-{sms}")
def test_regions_of_different_widths_move_in_one_launch_under_any_budget(moves: list[Move], sms: int | None) -> None:
    run(moves, partial(rows.move, config=SMALL, sms=sms))


@pytest.mark.parametrize("orders", ORDERS)
def test_states_land_by_head_and_by_sub_projection_in_one_launch(orders: str) -> None:
    run_states(orders, 3, partial(rows.move, config=SMALL))


@pytest.mark.parametrize("block_bytes", [256, 16384])
def test_any_tile_size_moves_the_same_bytes(block_bytes: int) -> None:
    run(
        MOVES[3::12] if block_bytes < 1024 else MOVES[::3],
        partial(rows.move, config=RowConfig(block_bytes=block_bytes)),
    )


@pytest.mark.parametrize("far", FAR, ids=str)
def test_offsets_past_32_bits_reach_the_right_bytes(far: FarMove, sparse: torch.Tensor) -> None:
    far.run(sparse, rows.move)
