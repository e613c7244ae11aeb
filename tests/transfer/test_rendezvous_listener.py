"""Ranks find each other by host and port over NIXL's listener, in real processes, and nobody waits without end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence

import pytest
from rendezvous_peers import Publisher, free_port, listener_directory

pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")

from kvmover.errors import DeadlineExceeded, LayoutError, PeerUnknown, ProtocolError, TransportUnavailable
from kvmover.transfer.rendezvous import Entry, ListenerDirectory
from kvmover.transport.nixl_agent import listen

pytestmark = pytest.mark.timeout(60)

FIRST = (Entry("prefill", 0, 1, os.urandom(40_000)), Entry("prefill", 1, 1, b"b"), Entry("decode", 0, 1, b"d"))
SECOND = (Entry("prefill", 1, 2, b"newer"), Entry("prefill", 2, 1, b"c"))


class Doors:
    """Two processes that publish, and who asks them."""

    def __init__(self) -> None:
        self.ports = (free_port(), free_port())
        self.publishers = [self.open(port, entries) for port, entries in zip(self.ports, (FIRST, SECOND), strict=True)]
        for publisher in self.publishers:
            publisher.ready()
        self.here = ListenerDirectory(0, [f"127.0.0.1:{port}" for port in self.ports])

    @staticmethod
    def open(port: int, entries: Sequence[Entry]) -> Publisher:
        return Publisher(listener_directory, port, entries=entries)


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    both = Doors()
    yield both
    both.here.close()
    for publisher in both.publishers:
        publisher.kill()


def test_the_ranks_of_an_engine_are_found_at_all_seeds_and_the_newest_of_each(doors: Doors) -> None:
    assert doors.here.ranks("prefill") == (FIRST[0], *SECOND)
    assert doors.here.ranks("decode") == (FIRST[2],)


def test_one_address_is_asked_by_name_as_often_as_one_likes(doors: Doors) -> None:
    for _ in range(2):
        assert doors.here.ask("localhost", doors.ports[0]) == FIRST


def test_a_dead_port_is_told_with_its_address_and_the_next_question_is_answered(doors: Doors) -> None:
    port = free_port()
    with pytest.raises(PeerUnknown, match=f"nobody listens at 127.0.0.1:{port}: Connection refused"):
        doors.here.ask("127.0.0.1", port)
    assert doors.here.ask("127.0.0.1", doors.ports[1]) == SECOND


def test_a_host_without_an_address_is_told_by_name(doors: Doors) -> None:
    with pytest.raises(PeerUnknown, match="no.such.host.invalid:1 has no IPv4 address"):
        doors.here.ask("no.such.host.invalid", 1)


def test_what_listens_and_is_no_door_is_a_deadline() -> None:
    asking = ListenerDirectory(0, [], deadline_s=0.6)
    words = r"no answer from 127.0.0.1:\d+ within 0.6 s"
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(DeadlineExceeded, match=words):
        asking.ask("127.0.0.1", mute.getsockname()[1])
    asking.close()


def test_seeds_that_are_dead_hide_no_other_and_are_told_when_all_are(
    doors: Doors, caplog: pytest.LogCaptureFixture
) -> None:
    dead = f"127.0.0.1:{free_port()}"
    some = ListenerDirectory(0, [dead, f"127.0.0.1:{doors.ports[1]}"])
    assert some.ranks("prefill") == SECOND
    assert dead in caplog.text
    some.close()
    none = ListenerDirectory(0, [dead])
    with pytest.raises(PeerUnknown, match=dead):
        none.ranks("prefill")
    none.close()


def test_a_stopped_process_is_a_deadline_and_answers_when_it_goes_on(doors: Doors) -> None:
    asking = ListenerDirectory(0, [], deadline_s=0.6)
    doors.publishers[1].pause()
    try:
        with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{doors.ports[1]} within 0.6 s"):
            asking.ask("127.0.0.1", doors.ports[1])
    finally:
        doors.publishers[1].resume()
    assert doors.here.ask("127.0.0.1", doors.ports[1]) == SECOND
    asking.close()


def test_strangers_at_the_door_take_nothing_and_break_nothing(doors: Doors) -> None:
    port, stranger = doors.ports[0], listen("stranger", 0)
    with socket.create_connection(("127.0.0.1", port)) as noise:
        noise.sendall((40).to_bytes(8, "little") + b"NIXLCOMM:LOADjunk".ljust(40))
    stranger.nixl.send_local_metadata("127.0.0.1", port)
    stranger.nixl.fetch_remote_metadata("", "127.0.0.1", port)
    deadline = time.monotonic() + 10
    while not stranger.nixl.check_remote_metadata(f"kvmover door {port}") and time.monotonic() < deadline:
        time.sleep(0.01)
    for note in (b"", b"junk", b"kvmover/ask/1 too short"):
        stranger.nixl.send_notif(f"kvmover door {port}", note)
    assert doors.here.ask("127.0.0.1", port) == FIRST
    for _ in range(30):
        time.sleep(0.01)
        assert stranger.nixl.get_new_notifs() == {}


def test_a_port_in_use_is_refused_with_its_number(doors: Doors) -> None:
    with pytest.raises(TransportUnavailable, match=f"port {doors.ports[0]}"):
        ListenerDirectory(doors.ports[0], [])


def test_a_restart_at_the_same_port_is_found_as_the_newer_generation() -> None:
    port = free_port()
    first = Doors.open(port, [Entry("prefill", 0, 1, b"old")])
    asking = ListenerDirectory(0, [f"127.0.0.1:{port}"], deadline_s=10.0)
    first.ready()
    assert asking.ranks("prefill") == (Entry("prefill", 0, 1, b"old"),)
    first.kill()
    second = Doors.open(port, [Entry("prefill", 0, 2, b"new")]).ready()
    assert asking.ranks("prefill") == (Entry("prefill", 0, 2, b"new"),)
    asking.close()
    assert second.leave() == 0


def test_a_process_asks_itself_and_its_entries_come_and_go() -> None:
    port = free_port()
    both = ListenerDirectory(port, [f"127.0.0.1:{port}"])
    assert both.ranks("prefill") == ()
    both.publish(FIRST[0])
    both.publish(Entry("prefill", 0, 2, b"again"))
    assert both.ranks("prefill") == (Entry("prefill", 0, 2, b"again"),)
    both.withdraw(FIRST[0])
    assert len(both.ranks("prefill")) == 1, "only the generation that is there is taken back"
    both.withdraw(Entry("prefill", 0, 2, b"again"))
    assert both.ranks("prefill") == ()
    with pytest.raises(ProtocolError, match=r"2000\d{3} bytes to hand out"):
        both.publish(Entry("prefill", 1, 1, bytes(2_000_000)))
    assert both.ranks("prefill") == ()
    both.close()
    both.close()
    again = ListenerDirectory(port, [])
    again.close()


def test_a_directory_without_a_port_publishes_nothing_and_says_so() -> None:
    asking = ListenerDirectory(0, [])
    with pytest.raises(LayoutError, match="rank 0 of prefill, generation 1 cannot be published"):
        asking.publish(FIRST[0])
    assert asking.ranks("prefill") == ()


@pytest.mark.parametrize("seed", ["", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:8o"])
def test_a_seed_that_is_no_address_is_refused(seed: str) -> None:
    with pytest.raises(LayoutError, match="is not host:port"):
        ListenerDirectory(0, [seed])
