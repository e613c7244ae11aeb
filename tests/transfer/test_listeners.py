"""Where a process listens, and whether anybody is there: a dial of nobody would cost a socket."""

from __future__ import annotations

import os
import socket
import time

import msgspec
import pytest
from mover_fleets import Pair

from kvmover.errors import PeerRefused
from kvmover.transfer.peers.listeners import TcpProbe, own_listeners
from kvmover.transfer.protocol.handshake import Listener, read_card, write_card


def routable() -> str:
    """An address of this host that others may reach: no packet is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no way to others")
        return any_socket.getsockname()[0]


def listening(address: str) -> tuple[socket.socket, Listener]:
    server = socket.create_server((address, 0))
    return server, Listener(address, server.getsockname()[1])


def refused(*listeners: Listener) -> bool:
    """What a probe of the own host says, which is known within milliseconds."""
    probe = TcpProbe(listeners)
    time.sleep(0.05)
    return probe.is_refused()


def test_a_process_names_what_it_listens_at_for_other_hosts_while_it_does():
    here, there = listening("127.0.0.1"), listening(routable())
    assert there[1] in own_listeners()
    assert here[1] not in own_listeners()
    for server, _ in (here, there):
        server.close()
    assert there[1] not in own_listeners()


def test_nobody_is_there_when_every_listener_refuses_and_asking_leaves_no_descriptor():
    (one, first), (other, second) = listening("127.0.0.1"), listening("127.0.0.1")
    before = len(os.listdir("/proc/self/fd"))
    assert not refused(first, second)
    one.close()
    assert not refused(first, second), "one listener answers"
    other.close()
    assert refused(first, second)
    assert not refused(), "of nobody that named none it is known"
    TcpProbe([first, second]).close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "224.0.0.1", "a.host.name", ""])
def test_a_card_with_a_listener_that_other_hosts_do_not_reach_is_refused(address: str):
    mover = Pair.of().src.movers[0]
    rank = msgspec.structs.replace(read_card(mover._model, mover.card), listeners=(Listener(address, 1),))
    with pytest.raises(PeerRefused, match="which other hosts do not reach"):
        read_card(mover._model, write_card(mover._model, rank))
