"""What both adapters stand on: the place of a rank, and the thread that works for it."""

from __future__ import annotations

import doctest
from hashlib import sha256
from threading import Event

import pytest

from kvmover.cache.page_tiers import StoreWorker
from kvmover.engines.common import EngineUnsupported, ParallelRank, layers_of, parallel_rank

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


def test_of_copies_of_a_fleet_one_writes_a_page() -> None:
    places = [ParallelRank(tp, 2, copy=copy, copies=3) for copy in range(3) for tp in range(2)]
    assert [place.number for place in places] == list(range(6))
    assert (places[0].ranks, places[0].in_stage.ranks, places[0].grid) == (6, 6, "TP2 x3")
    pages = [sha256(bytes([number])).digest() for number in range(200)]
    writers = [{place.copy for place in places if place.writes(page)} for page in pages]
    assert {len(writer) for writer in writers} == {1}
    assert set.union(*writers) == {0, 1, 2}
    assert all(ParallelRank(0, 1).writes(page) for page in pages)


def test_heads_and_layers_are_shared_as_a_fleet_shares_them() -> None:
    places = [ParallelRank.from_rank(rank, 4, 2) for rank in range(8)]
    assert [place.heads(2).triple() for place in places[:4]] == [[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert [place.layers(5).triple() for place in (places[0], places[4])] == [[0, 2, 1], [2, 3, 1]]


def test_stages_add_up_to_the_model_if_they_hold_what_a_fleet_says() -> None:
    assert layers_of([{"kv": 15, "state": 2}, {"kv": 16, "state": 2}], "SETTING") == {"kv": 31, "state": 4}
    with pytest.raises(
        EngineUnsupported, match=r"hold \[15, 15, 16, 16\] layers .* \[15, 16, 15, 16\] would be \(SETTING"
    ):
        layers_of([{"kv": 15}, {"kv": 15}, {"kv": 16}, {"kv": 16}], "SETTING")
    with pytest.raises(EngineUnsupported, match=r"\[0, 1\] layers of the cache 'draft'"):
        layers_of([{"kv": 2}, {"kv": 2, "draft": 1}], "SETTING")


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
