"""State-space states move by head and by sub-projection, in one call, by the definition."""

from __future__ import annotations

import pytest

from kvmover.kernels import reference, rows
from tests.kernels.state_moves import ORDERS, States, regions, run


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("orders", ORDERS)
def test_states_land_by_head_and_by_sub_projection(orders: str, rank: int) -> None:
    run(orders, rank, reference.move)


def test_rows_of_a_few_bytes_take_the_narrow_word_and_do_not_narrow_the_others() -> None:
    states = [States.of(1, 2, "channels", 1), States.of(3, 4, "width", 2)]
    found = [rows.RowShape.of(rows.recut(region), 4096) for region in regions(*states, [0], [1])]
    assert [shape.word_bytes * shape.vec for shape in found] == [16, 2, 2, 2]
