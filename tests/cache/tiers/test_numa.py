"""Where host memory goes: the choice from a made-up machine, the policy on this one."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch
from rig import GQA, SINGLE

from kvmover.cache.tiers import Reach, host_memory, host_pool
from kvmover.layout import PoolSpec
from kvmover.shared_memory import shares_of

GPU = "0000:17:00.0"


def machine(root: Path, nodes: int, of_gpu: int | None) -> Path:
    for node in range(nodes):
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
    if of_gpu is not None:
        place = root / f"bus/pci/devices/{GPU}"
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{of_gpu}\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "of_gpu", "chosen"), [(2, 1, 1), (2, 0, 0), (1, 0, None), (2, -1, None), (2, 7, None), (2, None, None)]
)
def test_memory_goes_to_the_node_of_the_gpu_where_there_are_several(tmp_path, nodes, of_gpu, chosen):
    assert host_memory.node_of(GPU, machine(tmp_path, nodes, of_gpu)) == chosen
    assert host_memory.node_of("0000:99:00.0", tmp_path) is None


def test_memory_of_the_host_has_no_gpu_to_be_near():
    assert host_memory.pci_of(torch.device("cpu")) is None


def policy() -> int:
    """get_mempolicy of this thread."""
    mode = ctypes.c_int(-1)
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    assert not ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.byref(mode), None, 0, None, 0)
    return mode.value


def test_a_thread_prefers_a_node_for_as_long_as_it_is_told(caplog):
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("numbers of system calls are not known here")
    with host_memory.preferring(0) as why:
        if why:
            assert why in caplog.text, "it is said why not"
            pytest.skip(f"not allowed here: {why}")
        assert policy() == 1
    assert policy() == 0
    with host_memory.preferring(None) as why:
        assert (why, policy()) == ("", 0)


def test_a_node_that_is_not_there_is_named_with_the_reason(caplog):
    with host_memory.preferring(1000) as why:
        assert why
    assert "NUMA node 1000" in caplog.text


def test_host_pools_begin_where_a_disk_may_write_past_the_page_cache():
    spec = PoolSpec.dense(GQA, SINGLE.shard(GQA, 0, 4), 5, 4, "page head layer kv token dim")
    (memory,) = host_pool(spec).tensors
    assert memory.data_ptr() % 4096 == 0
    assert memory.numel() == spec.allocation_bytes
    assert not memory.any()


def test_what_peers_may_map_is_in_memory_that_they_find():
    spec = PoolSpec.dense(GQA, SINGLE.shard(GQA, 0, 4), 5, 4, "page head layer kv token dim")
    own, reached = host_pool(spec), host_pool(spec, reach=Reach.PEERS)
    place = [(memory.data_ptr(), memory.numel()) for pool in (own, reached) for memory in pool.tensors]
    alone, share = shares_of(place)
    assert alone is None
    assert share is not None
    assert place[1][0] % 4096 == 0
    assert place[1][1] == spec.allocation_bytes
    assert not reached.tensors[0].any()
