"""NIXL between real processes: bytes land exactly, and a peer that dies, restarts or stops is a typed event in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from nixl_peer import PAUSE_S, POISON, PeerProcess, strided

pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")

from kvmover.errors import DeadlineExceeded, DescriptorError, PeerLost, PeerUnknown, TransportUnavailable
from kvmover.transport import (
    Completed,
    Descriptors,
    Event,
    Failed,
    Memory,
    MemoryKind,
    NixlTransport,
    Note,
    Revocation,
    memory_of,
    whole,
)

MIB = 1 << 20
NBYTES = 32 * MIB

pytestmark = pytest.mark.timeout(60)


class Here:
    """This process's end: a transport and one registered array."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.wire = NixlTransport("here", clock=clock)
        self.array = np.arange(NBYTES // 8, dtype=np.uint64).view(np.uint8)
        self.memory = Memory(MemoryKind.HOST, self.array.ctypes.data, NBYTES)
        self.wire.register(self.memory)

    def meet(self, peer: PeerProcess) -> None:
        self.wire.connect(peer.metadata)
        peer.ask("connect", self.wire.metadata())

    def runs(self, offset: int, nbytes: int, stride: int, count: int) -> Descriptors:
        return strided(self.memory.address + offset, nbytes, stride, count)

    def collect(self, until: int, within_s: float = 10) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + within_s
        while len(events) < until and time.monotonic() < deadline:
            events += self.wire.poll()
            time.sleep(PAUSE_S)
        assert len(events) == until, events
        return events


@pytest.fixture
def here() -> Iterator[Here]:
    side = Here()
    yield side
    side.wire.close()


@pytest.fixture(scope="module")
def lasting() -> Iterator[PeerProcess]:
    peer = PeerProcess("lasting", NBYTES)
    yield peer
    peer.kill()


@pytest.fixture
def start() -> Iterator[Callable[[str], PeerProcess]]:
    """Starts peers that the test may harm."""
    peers: list[PeerProcess] = []

    def spawn(hint: str) -> PeerProcess:
        peers.append(PeerProcess(hint, NBYTES))
        return peers[-1]

    yield spawn
    for peer in peers:
        peer.kill()


@pytest.fixture
def only_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cma, which copies behind a stopped peer's back; the processes started from here on inherit it."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def test_a_strided_write_lands_exactly_in_the_other_process(here: Here, lasting: PeerProcess) -> None:
    here.meet(lasting)
    lasting.ask("fill", POISON)
    ticket = here.wire.write(lasting.name, here.runs(96, 256, 1024, 500), lasting.runs(32, 256, 4096, 500), b"", 10)
    assert here.collect(1) == [Completed(ticket)]
    content = lasting.ask("content", 4 * MIB)
    expected = np.full(4 * MIB, POISON, np.uint8)
    expected[32 : 32 + 500 * 4096].reshape(500, 4096)[:, :256] = here.array[96:][: 500 * 1024].reshape(500, 1024)[
        :, :256
    ]
    np.testing.assert_array_equal(content, expected)
    assert lasting.ask("histogram", 4 * MIB)[POISON] == NBYTES - 4 * MIB


def test_a_read_lands_exactly_in_this_process(here: Here, lasting: PeerProcess) -> None:
    here.meet(lasting)
    lasting.ask("fill", 7)
    before = here.array.copy()
    ticket = here.wire.read(lasting.name, here.runs(0, 100, 1000, 64), lasting.runs(5, 100, 100, 64), b"read", 10)
    assert here.collect(1) == [Completed(ticket)]
    before[:64000].reshape(64, 1000)[:, :100] = 7
    np.testing.assert_array_equal(here.array, before)
    assert lasting.ask("notes", 1) == [(here.wire.name, b"read", b"")]


def test_a_note_arrives_after_the_data_it_was_sent_with(here: Here, lasting: PeerProcess) -> None:
    here.meet(lasting)
    lasting.ask("fill", 0)
    part = MIB
    for i in range(30):
        here.array[i * part : (i + 1) * part] = i + 1
        tail = (i + 1) * part - 4
        note = b"look %d 4" % tail
        here.wire.write(
            lasting.name, here.runs(i * part, 4096, 4096, 256), lasting.runs(i * part, 4096, 4096, 256), note, 10
        )
    assert all(isinstance(event, Completed) for event in here.collect(30))
    seen = lasting.ask("notes", 30)
    assert sorted(looked for _, _, looked in seen) == [bytes([i + 1] * 4) for i in range(30)]


def test_the_peer_answers_by_note(here: Here, lasting: PeerProcess) -> None:
    here.meet(lasting)
    for payload in (b"first", bytes(8192), b"last"):
        lasting.ask("notify", here.wire.name, payload)
    assert here.collect(3) == [Note(lasting.name, payload) for payload in (b"first", bytes(8192), b"last")]


def test_a_killed_peer_fails_every_operation_long_before_the_deadline(
    here: Here, start: Callable[[str], PeerProcess]
) -> None:
    victim = start("victim")
    here.meet(victim)
    here.wire.write(victim.name, here.runs(0, 8, 8, 1), victim.runs(0, 8, 8, 1), b"", 10)
    here.collect(1)
    victim.kill()
    began = time.monotonic()
    ticket = here.wire.write(victim.name, whole(here.memory), victim.runs(0, NBYTES, NBYTES, 1), b"", 60)
    (failed,) = here.collect(1)
    assert time.monotonic() - began < 5
    assert isinstance(failed, Failed)
    assert (failed.ticket, failed.peer, failed.quiescent) == (ticket, victim.name, True)
    assert isinstance(failed.error, PeerLost)
    for again in (here.wire.write, here.wire.read):
        with pytest.raises(PeerLost):
            again(victim.name, here.runs(0, 8, 8, 1), victim.runs(0, 8, 8, 1), b"", 10)
    with pytest.raises(PeerLost):
        here.wire.notify(victim.name, b"")
    with pytest.raises(PeerLost):
        here.wire.connect(victim.metadata)
    here.wire.deregister(here.memory)


@pytest.mark.usefixtures("only_tcp")
def test_a_peer_killed_with_operations_in_flight_fails_them_all(
    here: Here, start: Callable[[str], PeerProcess]
) -> None:
    victim = start("victim")
    here.meet(victim)
    victim.pause()
    tickets = [
        here.wire.write(victim.name, whole(here.memory), victim.runs(0, NBYTES, NBYTES, 1), b"", 60) for _ in range(3)
    ]
    assert here.wire.poll() == []
    victim.kill()
    began = time.monotonic()
    events = here.collect(3)
    assert time.monotonic() - began < 5
    assert {event.ticket for event in events if isinstance(event, Failed) and isinstance(event.error, PeerLost)} == set(
        tickets
    )
    assert here.wire.unsettled() == frozenset()


def test_a_restarted_peer_under_the_same_hint_works_at_once(here: Here, start: Callable[[str], PeerProcess]) -> None:
    first = start("worker")
    here.meet(first)
    first.kill()
    second = start("worker")
    assert second.name != first.name
    here.meet(second)
    here.wire.write(second.name, here.runs(0, 64, 64, 1), second.runs(0, 64, 64, 1), b"hello", 10)
    assert isinstance(here.collect(1)[0], Completed)
    assert second.ask("notes", 1) == [(here.wire.name, b"hello", b"")]


def asleep(here: Here, start: Callable[[str], PeerProcess]) -> PeerProcess:
    """A peer that was written to once, so that the way to it is there, and was stopped then."""
    sleeper = start("sleeper")
    here.meet(sleeper)
    here.wire.write(sleeper.name, here.runs(0, 8, 8, 1), sleeper.runs(0, 8, 8, 1), b"", 10)
    here.collect(1)
    sleeper.pause()
    return sleeper


@pytest.mark.usefixtures("only_tcp")
def test_a_stopped_peer_is_a_deadline_and_its_end_is_seen_when_it_wakes(
    here: Here, start: Callable[[str], PeerProcess]
) -> None:
    sleeper = asleep(here, start)
    began = time.monotonic()
    ticket = here.wire.write(sleeper.name, whole(here.memory), sleeper.runs(0, NBYTES, NBYTES, 1), b"late", 0.3)
    (failed,) = here.collect(1)
    assert 0.3 <= time.monotonic() - began < 5
    assert isinstance(failed, Failed)
    assert (failed.ticket, failed.quiescent) == (ticket, False)
    assert isinstance(failed.error, DeadlineExceeded)
    assert here.wire.unsettled() == {ticket}
    with pytest.raises(DescriptorError, match="in use"):
        here.wire.deregister(here.memory)
    sleeper.resume()
    assert sleeper.ask("notes", 0) == []  # NIXL sends the note from the poll that finds the write done
    while here.wire.unsettled():
        assert here.wire.poll() == []
        time.sleep(PAUSE_S)
    assert sleeper.ask("notes", 1) == [(here.wire.name, b"late", b"")]
    here.wire.deregister(here.memory)


@pytest.mark.parametrize("tls", ["tcp", None])
def test_ucx_writes_to_memory_that_was_deregistered_by_what_a_peer_knew_of_it_before(
    tls: str | None, start: Callable[[str], PeerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tcp and over cma (None): NIXL proves nothing, and says so. Who hears of it goes on by new keys."""
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    side = Here()
    try:
        peer = start("forgetful")
        side.meet(peer)
        metadata = peer.ask("anew", 7)
        late = side.wire.write(peer.name, side.runs(MIB, 4096, 4096, 1), peer.runs(0, 4096, 4096, 1), b"late", 10)
        assert side.collect(1) == [Completed(late)]
        assert peer.ask("notes", 1) == [(side.wire.name, b"late", b"")]
        np.testing.assert_array_equal(peer.ask("content", 4096), side.array[MIB : MIB + 4096])
        assert side.wire.revocation is Revocation.UNPROVEN
        side.wire.connect(metadata)
        side.wire.write(peer.name, side.runs(0, 4096, 4096, 1), peer.runs(0, 4096, 4096, 1), b"new", 10)
        assert isinstance(side.collect(1)[0], Completed)
        assert peer.ask("notes", 1) == [(side.wire.name, b"new", b"")]
        np.testing.assert_array_equal(peer.ask("content", 4096), side.array[:4096])
    finally:
        side.wire.close()


@pytest.mark.usefixtures("only_tcp")
def test_ucx_goes_on_with_a_write_whose_target_is_deregistered_under_it(
    here: Here, start: Callable[[str], PeerProcess]
) -> None:
    """Which of the two is first when the target wakes is chance: a few tries."""
    sleeper = asleep(here, start)
    here.array[:] = 3
    for _ in range(10):
        ticket = here.wire.write(sleeper.name, whole(here.memory), sleeper.runs(0, NBYTES, NBYTES, 1), b"late", 20)
        sleeper.tell("anew", 7)
        sleeper.resume()
        sleeper.answer()
        assert here.collect(1) == [Completed(ticket)]
        assert sleeper.ask("notes", 1) == [(here.wire.name, b"late", b"")]
        content = sleeper.ask("histogram", 0)
        assert content[3] + content[7] == NBYTES
        if content[3]:
            return
        sleeper.pause()
    pytest.fail("no byte was written after its owner had filled it anew")


@pytest.mark.usefixtures("only_tcp")
def test_disconnecting_fails_what_is_in_flight_and_waits_for_its_end(
    here: Here, start: Callable[[str], PeerProcess]
) -> None:
    sleeper = start("sleeper")
    here.meet(sleeper)
    sleeper.pause()
    ticket = here.wire.write(sleeper.name, whole(here.memory), sleeper.runs(0, NBYTES, NBYTES, 1), b"", 10)
    here.wire.disconnect(sleeper.name)
    (failed,) = here.wire.poll()
    assert isinstance(failed, Failed)
    assert (failed.ticket, failed.quiescent) == (ticket, False)
    assert isinstance(failed.error, PeerUnknown)
    sleeper.resume()
    while here.wire.unsettled():
        assert here.wire.poll() == []
        time.sleep(PAUSE_S)
    here.meet(sleeper)
    here.wire.write(sleeper.name, here.runs(0, 8, 8, 1), sleeper.runs(0, 8, 8, 1), b"", 10)
    assert isinstance(here.collect(1)[0], Completed)


@pytest.mark.usefixtures("only_tcp")
def test_closing_with_a_write_in_flight_reads_no_memory_afterwards(
    here: Here, start: Callable[[str], PeerProcess]
) -> None:
    sleeper = start("sleeper")
    here.array[:] = 1
    here.meet(sleeper)
    sleeper.pause()
    here.wire.write(sleeper.name, whole(here.memory), sleeper.runs(0, NBYTES, NBYTES, 1), b"", 10)
    time.sleep(0.2)
    began = time.monotonic()
    here.wire.close()
    assert time.monotonic() - began < 2
    here.array[:] = 2
    sleeper.resume()
    time.sleep(0.5)
    landed = sleeper.ask("histogram", 0)
    assert landed[2] == 0
    assert landed[POISON] + landed[1] == NBYTES


def test_a_deadline_counts_on_the_clock_that_was_given(only_tcp: None, start: Callable[[str], PeerProcess]) -> None:
    now = [100.0]
    sleeper, here = start("sleeper"), Here(clock=lambda: now[0])
    here.meet(sleeper)
    sleeper.pause()
    here.wire.read(sleeper.name, here.runs(0, 8, 8, 1), sleeper.runs(0, 8, 8, 1), b"note", 30)
    assert here.wire.poll() == []
    now[0] = 130.0
    (failed,) = here.wire.poll()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, DeadlineExceeded)
    here.wire.close()


def test_a_process_ends_cleanly_and_so_does_its_forked_child(start: Callable[[str], PeerProcess]) -> None:
    peer = start("parent")
    answer, exit_code = peer.ask("fork")
    assert "spawn" in answer
    assert exit_code == 0
    assert peer.leave() == 0


def test_a_process_that_never_closes_its_transport_ends_too() -> None:
    probe = "from kvmover.transport import NixlTransport; t = NixlTransport('forgetful'); print(t.name)"
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=30)
    assert ended.stdout.startswith("forgetful.")
    assert "NIXL" not in ended.stdout + ended.stderr


def test_a_backend_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportUnavailable, match="NOSUCH"):
        NixlTransport("here", backends=("NOSUCH",))
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(TransportUnavailable, match="UCX_TLS=self"):
        NixlTransport("here")


def test_device_memory_that_nixl_cannot_reach_is_refused(here: Here) -> None:
    with pytest.raises(TransportUnavailable, match="VRAM"):
        here.wire.register(Memory(MemoryKind.DEVICE, here.memory.address, 4096))


def test_a_cut_link_is_bounded_by_the_tcp_timeout_that_is_set_by_default(here: Here) -> None:
    assert here.wire.name.startswith("here.")
    assert os.environ["UCX_TCP_USER_TIMEOUT"] == "5s"


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs a GPU")
def test_a_strided_write_lands_exactly_in_device_memory() -> None:
    torch = pytest.importorskip("torch", reason="needs torch to allocate device memory")
    source = torch.arange(1 << 16, device="cuda", dtype=torch.int32)
    target = torch.full_like(source, -1)
    torch.cuda.synchronize()
    near, far = NixlTransport("near"), NixlTransport("far")
    near.register(memory_of(source))
    far.register(memory_of(target))
    near.connect(far.metadata())
    local, remote = (
        Descriptors(MemoryKind.DEVICE, np.array([[t.data_ptr(), 256, t.device.index, 1024, 256]], np.int64))
        for t in (source, target)
    )
    near.write(far.name, local, remote, b"landed", 30)
    events: list[Event] = []
    while len(events) < 2:
        events += [*near.poll(), *far.poll()]
        time.sleep(PAUSE_S)
    assert not any(isinstance(event, Failed) for event in events)
    expected = torch.full_like(source, -1)
    expected.view(256, 256)[:, :64] = source.view(256, 256)[:, :64]
    assert torch.equal(target, expected)
    near.close()
    far.close()
