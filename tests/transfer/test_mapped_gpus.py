"""Pools on a GPU as their owner exports them and a peer maps them, over a driver that keeps them in host memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from fake_cuda import FakeCuda, collected, drive
from mover_fleets import CONFIG, Pair

from kvmover.errors import PeerRefused
from kvmover.kernels.cuda_exports import Export, HandleKind, exported, imported
from kvmover.shared_memory import HostProcess, MapMode, machine
from kvmover.transfer.memory.mapped import Mappings, exports
from kvmover.transfer.protocol.handshake import read_card, write_card
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport.base import Memory, MemoryKind

CPU = torch.device("cpu")
POISON = 0xA5

#: Another process. At a line "anew": two pools in one allocation of 4 pages, 100 bytes apart from its start, and what
#: it exports of them.
OWNER = """
import sys
import torch
from fake_cuda import FakeCuda
from kvmover.kernels import cuda_driver
from kvmover.shared_memory import HostProcess
from kvmover.transfer.memory.mapped import exports
from kvmover.transport.base import Memory, MemoryKind
import msgspec
fake = FakeCuda(sys.argv[1])
cuda_driver.library = lambda: fake
for line in sys.stdin:
    if line != "anew\\n":
        print(whole.sum(dtype=torch.int64).item(), flush=True)
        continue
    whole = fake.memory(16384)
    whole.fill_(7)
    at = [whole.data_ptr() + 100, whole.data_ptr() + 8292]
    memories = [Memory(MemoryKind.DEVICE, address, 4096) for address in at]
    said = exports([[memory] for memory in memories], torch.device("cpu"))
    print(msgspec.json.encode([said, HostProcess.own(), memories]).decode(), flush=True)
"""


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    driver = FakeCuda(*getattr(request, "param", ()))
    drive(driver, monkeypatch)
    return driver


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    for process in Owner.processes.values():
        process.kill()
        process.communicate()
    Owner.processes.clear()


class Owner:
    """Memory of the other process, one of each kind for all tests, and a peer as its card would describe it."""

    processes: ClassVar[dict[str, subprocess.Popen[str]]] = {}

    def __init__(self, kind: str) -> None:
        if kind not in self.processes:
            command = [sys.executable, "-c", OWNER, kind]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes[kind] = subprocess.Popen(command, cwd=Path(__file__).parent, **pipes)
        self._process = self.processes[kind]
        said = msgspec.json.decode(
            self._answer("anew"), type=tuple[tuple[tuple[Export, ...], ...], HostProcess, list[Memory]]
        )
        self.exports, self.process, memories = said
        card = SimpleNamespace(
            exports=self.exports,
            shares=(),
            allocations=[(memory,) for memory in memories],
            machine=machine(),
            process=self.process,
        )
        self.peer: Any = SimpleNamespace(name="owner", card=card)

    def _answer(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def total(self) -> int:
        return int(self._answer("sum"))


def of_gpus(ours: bool = True) -> Mappings:
    return Mappings(ours, CPU, MemoryKind.DEVICE)


@pytest.mark.parametrize("kind", ["plain", "fabric"])
def test_what_is_written_into_a_mapped_pool_is_in_its_owners_and_nowhere_else(kind: str, fake: FakeCuda):
    owner = Owner(kind)
    mappings = of_gpus()
    pools = mappings.pools(owner.peer, MapMode.WRITE)
    assert pools is not None
    assert [[len(tensor) for tensor in pool.tensors] for pool in pools] == [[4096], [4096]]
    assert all(bool((tensor == 7).all()) for pool in pools for tensor in pool.tensors)
    pools[1].tensors[0].fill_(9)
    assert owner.total() == 7 * (16384 - 4096) + 9 * 4096
    assert bool((pools[0].tensors[0] == 7).all())
    opened = {"plain": "cuIpcOpenMemHandle_v2", "fabric": "cuMemImportFromShareableHandle"}[kind]
    assert fake.calls.count(opened) == 1, "both pools lie in one allocation"


@pytest.mark.parametrize("kind", ["plain", "fabric"])
def test_a_mapping_is_undone_once_when_the_last_that_uses_it_is_gone(kind: str, fake: FakeCuda):
    owner = Owner(kind)
    mappings = of_gpus()
    assert mappings.pools(owner.peer, MapMode.WRITE) is not None
    assert mappings.pools(owner.peer, MapMode.READ) is not None
    pools = mappings.pools(owner.peer, MapMode.READ)
    assert pools is not None
    part, before = pools[0].tensors[0], list(fake.calls)
    mappings.forget("owner")
    del pools
    collected()
    assert fake.calls == before, "a copy under way keeps what it needs"
    assert bool((part == 7).all())
    del part
    collected()
    closed = {"plain": ["cuIpcCloseMemHandle"], "fabric": ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]}
    assert fake.calls[len(before) :] == closed[kind]


STEPS = ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
BACK = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


@pytest.mark.parametrize("step", range(4))
def test_what_cannot_be_mapped_is_not_and_leaves_nothing_behind(step: int, fake: FakeCuda):
    fake.fails = STEPS[step]
    owner = Owner("fabric")
    assert of_gpus().pools(owner.peer, MapMode.WRITE) is None
    assert fake.calls == [*STEPS[: step + 1], *BACK[len(BACK) - step :]]


@pytest.mark.parametrize("fake", [("hidden",)], indirect=True)
def test_memory_without_a_handle_is_not_exported_and_that_is_said(fake: FakeCuda, caplog: pytest.LogCaptureFixture):
    memory = fake.memory(4096)
    assert exported(memory.data_ptr(), CPU) is None
    assert exports([[Memory(MemoryKind.DEVICE, memory.data_ptr(), 4096)]], CPU) == ()
    assert "expandable segments" in caplog.text
    assert fake.calls.count("cuMemRetainAllocationHandle") == fake.calls.count("cuMemRelease") == 2


def test_a_handle_says_where_in_its_allocation_a_pool_lies(fake: FakeCuda):
    memory = fake.memory(12288)
    export = exported(memory.data_ptr() + 5000, CPU)
    assert export is not None
    assert (export.kind, export.offset, export.nbytes) == (HandleKind.IPC, 5000, 12288)
    assert imported(export, CPU) is imported(export, CPU)


def test_a_pool_that_reaches_over_its_allocation_is_not_mapped(fake: FakeCuda):
    owner = Owner("plain")
    assert owner.exports[0][0].nbytes == 16384
    last = replace(owner.exports[0][0], offset=16384 - 4095)
    owner.peer.card.exports = (owner.exports[0], (last,))
    assert of_gpus().pools(owner.peer, MapMode.READ) is None


@pytest.mark.parametrize(("kind", "pulled"), [("plain", False), ("fabric", True)])
def test_a_process_of_another_host_is_read_over_the_fabric_alone_and_never_let_write(
    kind: str, pulled: bool, fake: FakeCuda
):
    owner = Owner(kind)
    assert of_gpus().reach(owner.peer, Verb.PUSH), "on one host"
    owner.peer.card.machine = "elsewhere"
    mappings = of_gpus()
    assert mappings.reach(owner.peer, Verb.PULL) is pulled
    assert not mappings.reach(owner.peer, Verb.PUSH), "nobody would hear of its end"
    assert not of_gpus(ours=False).reach(owner.peer, Verb.PUSH)


def test_memory_of_the_other_kind_is_not_mapped(fake: FakeCuda):
    owner = Owner("plain")
    assert Mappings(True, CPU, MemoryKind.HOST).pools(owner.peer, MapMode.READ) is None
    assert not fake.calls


@pytest.mark.parametrize(
    ("export", "why"),
    [
        (Export(HandleKind.IPC, bytes(63), 4096, 0), "63 bytes to 4096 bytes"),
        (Export(HandleKind.IPC, bytes(64), 4096, 4096), "from 4096 on"),
        (Export(HandleKind.FABRIC, bytes(64), 1 << 63, 0), "64 bytes to"),
        (Export(HandleKind.IPC, bytes(64), 4096, -1), "from -1 on"),
    ],
)
def test_a_card_with_an_impossible_handle_is_refused(export: Export, why: str):
    mover = Pair.of(config=CONFIG).src.movers[0]
    rank = read_card(mover._model, mover.card)
    said = tuple(tuple(export for _ in pool) for pool in rank.allocations)
    with pytest.raises(PeerRefused, match=why):
        read_card(mover._model, write_card(mover._model, msgspec.structs.replace(rank, exports=said)))
    twice = ((export, export),)
    with pytest.raises(PeerRefused, match="2 exports for 1 allocations"):
        read_card(mover._model, write_card(mover._model, msgspec.structs.replace(rank, exports=twice)))
