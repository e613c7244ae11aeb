"""Shares and the mapped route: who may map what, and what is refused before a byte moves."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
import torch
from mover_fleets import CONFIG, SMALL_CHUNKS, Pair

from kvmover.errors import PeerRefused, PlanError
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.cost import BY_HOST, HOST, Costs, Route
from kvmover.shared_memory import (
    HostProcess,
    Maker,
    MapMode,
    NotShared,
    SharedRange,
    _state_of,
    allocate,
    map_file,
    shares_of,
)
from kvmover.transfer.protocol.handshake import read_card, write_card
from kvmover.transfer.protocol.wire import Verb

MAPPED = replace(CONFIG, route=Route.MAPPED)


def of(memory: mmap.mmap, offset: int, nbytes: int) -> SharedRange | None:
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return shares_of([(address + offset, nbytes)])[0]


def test_what_is_written_on_one_side_is_read_on_the_other():
    memory = allocate(3 * mmap.PAGESIZE)
    share = of(memory, 100, 1000)
    assert share is not None
    assert (share.pid, share.offset) == (os.getpid(), 100)
    there = map_file(share, MapMode.WRITE)
    there[100] = 7
    assert memory[100] == 7
    assert map_file(share, MapMode.READ).readonly


def test_memory_of_a_process_alone_is_no_share():
    private = torch.zeros(mmap.PAGESIZE, dtype=torch.uint8)
    memory = allocate(mmap.PAGESIZE)
    assert shares_of([(private.data_ptr(), 10)]) == [None]
    assert of(memory, 0, mmap.PAGESIZE + 1) is None, "it reaches over the end"


def test_a_number_that_was_given_to_another_file_opens_nothing():
    memory = allocate(mmap.PAGESIZE)
    share = of(memory, 0, 10)
    assert share is not None
    other = of(allocate(mmap.PAGESIZE), 0, 10)
    assert other is not None
    for wrong in (replace(share, token="0" * 32), replace(share, fd=0), replace(share, pid=1), replace(share, pid=-1)):
        with pytest.raises(NotShared, match="not the memory that was announced"):
            map_file(wrong, MapMode.READ)


def test_a_share_is_announced_by_the_descriptor_that_stays_whoever_maps_it_meanwhile():
    """Both ends may be one process: what maps the memory there may have a lower descriptor, and goes first."""
    low = os.open(os.devnull, os.O_RDONLY)
    memory = allocate(mmap.PAGESIZE)
    first = of(memory, 0, 10)
    assert first is not None
    os.close(low)
    mapped = map_file(first, MapMode.READ)
    share = of(memory, 0, 10)
    assert share == first
    del mapped
    assert len(map_file(share, MapMode.READ)) == mmap.PAGESIZE


def test_a_process_that_maps_our_memory_lives_until_it_has_ended_though_nobody_has_waited_for_it():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        state, before = _state_of(child.pid), len(os.listdir("/proc/self/fd"))
        assert state is not None
        process = HostProcess(child.pid, state[1])
        with pytest.raises(NotShared, match="not the one that was announced"):
            Maker(replace(process, started=process.started - 1))
        assert len(os.listdir("/proc/self/fd")) == before
        maker = Maker(process)
        assert maker.lives()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its end, and nobody has waited for it yet
        assert not maker.lives()
        del maker
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(NotShared, match=f"process {child.pid} cannot be watched"):
        Maker(process)


def test_a_process_has_ended_when_it_is_gone_unwaited_for_or_another_has_its_number():
    own = HostProcess.own()
    assert own is not None
    assert own.pid == os.getpid()
    assert not own.has_ended()
    assert replace(own, started=own.started - 1).has_ended()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        state = _state_of(child.pid)
        assert state is not None
        other = HostProcess(child.pid, state[1])
        assert not other.has_ended()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert other.has_ended()
    assert other.has_ended()


def test_memory_that_could_shrink_under_a_reader_is_not_mapped():
    token = "f" * 32
    fd = os.memfd_create(f"kvmover-{token}", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100)
    with pytest.raises(NotShared, match="may be shrunk"):
        map_file(SharedRange(os.getpid(), fd, token, 0), MapMode.READ)
    os.close(fd)
    with pytest.raises(OSError, match="not permitted"):
        allocate(100).resize(50)


def test_no_descriptor_is_left_when_a_pool_and_its_mappings_are_gone():
    fleet, attention = Fleet(page_tokens=4), Component("attention", 2, 2, 2, 64, "bfloat16")
    spec = PoolSpec.dense(attention, fleet.shard(attention, 0, 1), 8, 4, "NHD", ("layer", "kv"))
    before = len(os.listdir("/proc/self/fd"))
    pool = Pool.shared(spec)
    assert len(os.listdir("/proc/self/fd")) == before + 2, "one file for four allocations, and its mapping"
    share = shares_of([(pool.tensors[3].data_ptr(), pool.tensors[3].numel())])[0]
    assert share is not None
    there = map_file(share, MapMode.WRITE)
    there[share.offset] = 9
    assert pool.tensors[3][0] == 9
    del pool, there
    assert len(os.listdir("/proc/self/fd")) == before


def test_pools_of_their_own_process_are_refused_before_anything_is_asked():
    pair = Pair.of(config=CONFIG)
    pair.dst.movers[0].configure(MAPPED)
    pair.send()
    with pytest.raises(PlanError, match=r"route = mapped, but this rank and prefill0\.\d+ cannot map each other"):
        pair.receive()


def test_a_peer_of_another_machine_is_not_mapped():
    pair = Pair.of(config=MAPPED)
    pair.dst.movers[0]._core.mappings.machine = "elsewhere"
    with pytest.raises(PlanError, match="cannot map each other's pools"):
        pair.receive()


@pytest.mark.parametrize("verb", list(Verb))
def test_costs_choose_the_mapped_route_where_both_ends_map(verb: Verb):
    pair = Pair.of(config=MAPPED)
    costs = Costs(1.0, 1e3, 1.0, 1.0, 10.0, SMALL_CHUNKS.chunk_bytes)
    pair.dst.movers[0].configure(replace(CONFIG, route=None, costs=costs, verb=verb))
    sent, landed = pair.send(), pair.receive()
    pair.bench.ended([*sent, *landed])
    assert landed[0].landed().routes == sent[0].landed().routes == (Route.MAPPED,)
    pair.assert_landed()


def test_a_source_that_may_not_map_says_so_to_who_asked():
    pair = Pair.of(config=MAPPED)
    pair.src.movers[0]._core.mappings.machine = "elsewhere"
    (sent,), (landed,) = pair.send(), pair.receive()
    pair.bench.ended([landed])
    assert landed.result is not None
    assert landed.result.reason is not None
    assert "cannot map the pools of decode0" in landed.result.reason
    pair.src.movers[0].abort(sent, "nobody asks again")
    pair.dst.assert_holds(pair.before)


def test_a_card_with_shares_for_some_allocations_is_refused():
    pair = Pair.of(config=MAPPED)
    mover = pair.src.movers[0]
    rank = read_card(mover._model, mover.card)
    assert rank.shares
    with pytest.raises(PeerRefused, match="2 shares for 1 allocations"):
        read_card(mover._model, write_card(mover._model, msgspec.structs.replace(rank, shares=(rank.shares[0] * 2,))))


def test_a_card_that_shares_memory_of_another_process_is_refused():
    mover = Pair.of(config=MAPPED).src.movers[0]
    rank = read_card(mover._model, mover.card)
    other = tuple(tuple(replace(share, pid=share.pid + 1) for share in pool) for pool in rank.shares)
    with pytest.raises(PeerRefused, match=f"is of process {os.getpid()} and shares memory of {os.getpid() + 1}"):
        read_card(mover._model, write_card(mover._model, msgspec.structs.replace(rank, shares=other)))


@pytest.mark.parametrize("pid", [-1, 0, 1 << 22 | 1, 1 << 62])
def test_a_card_of_no_process_is_refused(pid: int):
    mover = Pair.of(config=MAPPED).src.movers[0]
    rank = msgspec.structs.replace(read_card(mover._model, mover.card), process=HostProcess(pid, 1))
    with pytest.raises(PeerRefused, match=f"names process {pid}"):
        read_card(mover._model, write_card(mover._model, rank))


def test_shares_that_reach_over_their_file_are_not_mapped():
    pair = Pair.of(config=MAPPED)
    mappings, peer = pair.dst.movers[0]._core.mappings, next(iter(pair.dst.movers[0]._core.peers._by_name.values()))
    far = replace(peer.card.shares[0][0], offset=1 << 30)
    wrong = replace(peer, name="wrong", card=msgspec.structs.replace(peer.card, shares=((far,),)))
    assert mappings.pools(peer, MapMode.READ) is not None
    assert mappings.pools(wrong, MapMode.READ) is None


def test_one_copy_is_cheaper_than_three_and_than_a_call_a_run():
    choice = HOST.choose(64 << 20, 131072, BY_HOST)
    assert choice.route is Route.MAPPED
    assert HOST.choose(64 << 20, 131072).route is Route.PACKED
    assert choice.why() == (
        "mapped: one copy takes 16.8 ms, 131072 runs of 512 B would take 934.3 ms, the packed route 36.5 ms"
    )
