"""What both adapters stand on: the place of a rank, and the thread that works for it."""

from __future__ import annotations

import doctest
from threading import Event

import pytest

from kvmover.engines.common import ParallelRank, StoreWorker, parallel_rank

WITHIN_S = 10.0


def test_the_examples_in_the_docstrings_hold() -> None:
    found = doctest.testmod(parallel_rank)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (4, 1), (1, 3), (4, 2)])
def test_a_ranks_number_and_its_place_are_one(tp_size: int, pp_size: int) -> None:
    for rank in range(tp_size * pp_size):
        place = ParallelRank.from_rank(rank, tp_size, pp_size)
        at = place.fleet(16).coordinate(rank)
        assert (place.rank, place.tp, place.pp) == (rank, at.tp, at.pp)


def test_stages_are_named_where_there_are_several() -> None:
    assert [ParallelRank(0, 2, 0, size).grid for size in (1, 3)] == ["TP2", "TP2 PP3"]


def test_heads_and_layers_are_shared_as_a_fleet_shares_them() -> None:
    places = [ParallelRank.from_rank(rank, 4, 2) for rank in range(8)]
    assert [place.heads(2).triple() for place in places[:4]] == [[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert [place.layers(5).triple() for place in (places[0], places[4])] == [[0, 2, 1], [2, 3, 1]]


def test_jobs_are_done_in_order_and_a_close_waits_for_them() -> None:
    done: list[str] = []
    worker = StoreWorker[str]("kvmover-test", done.append)
    for job in ("a", "b"):
        worker.put(job)
    worker.close()
    assert done == ["a", "b"]


def test_settling_waits_for_every_job_that_was_put() -> None:
    done, gate = list[int](), Event()

    def work(job: int) -> None:
        assert gate.wait(WITHIN_S)
        done.append(job)

    worker = StoreWorker[int]("kvmover-test", work)
    for job in range(3):
        worker.put(job)
    assert not done
    gate.set()
    worker.settle()
    assert done == [0, 1, 2]
    worker.close()
