"""The ports of live servers: no two servers of a run may be given one port."""

from __future__ import annotations

from tests.live.server import free_port, ports_of

#: A rank takes its server's metrics port plus its number, and vLLM's scheduler the next: TP4 at most.
RANKS = 5


def test_no_two_servers_or_ranks_are_given_one_port_by_any_worker() -> None:
    given = [port + rank for worker in range(2) for port in ports_of(worker, 2) for rank in range(RANKS)]
    assert len(set(given)) == len(given) == 2 * 1250 * RANKS
    assert min(given) >= 12000
    assert max(given) < 32768, "a port that the kernel gives to connections"


def test_a_port_is_given_once_even_if_no_server_has_bound_it_yet() -> None:
    drawn = [free_port() for _ in range(200)]
    assert len(set(drawn)) == 200
