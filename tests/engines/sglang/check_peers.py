"""SGLang over kvmover's tiers and a peer: what another engine has on its host is not computed, byte by byte."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from check_hybrid_tiers import serving as serving_windows
from check_tiers import KINDS, TieredServer, served, serving, with_accounts
from check_tiers import run as run_request
from scheduling import publish

from kvmover.engines.common import NO_VERSION, EngineUnsupported
from kvmover.engines.sglang import engine_radix, sglang_plugin
from kvmover.engines.sglang.sglang_weight_updates import UPDATES

#: Instead of the root of a page store.
NO_STORE = Path("none")


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish(tmp_path_factory.mktemp("serving"))


@pytest.fixture
def addresses() -> list[str]:
    """Of ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(2)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@pytest.fixture
def start(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TieredServer]]:
    """Servers that are each other's peers; the first one's tokens are in the pages of any other size."""
    started: list[TieredServer] = []
    environment = {
        "KVMOVER_PEERS_ENGINES": ",".join(addresses),
        "KVMOVER_PEERS_ASK_S": "5",
        "KVMOVER_PEERS_SILENCE_S": "0.5",
        "KVMOVER_PEERS_MEET_S": "0.05",
        "KVMOVER_MOVER_ARENA_BYTES": "4MiB",
        "KVMOVER_MOVER_PING_S": "0.1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def begun(page: int, **more: Any) -> TieredServer:
        monkeypatch.setenv("KVMOVER_PEERS_ADDRESS", addresses[len(started)])
        started.append(serving(page, **{"root": NO_STORE, **more}))
        return started[-1]

    yield begun
    for server in started:
        server.cache.release_host_resources()


def peers(server: TieredServer) -> Any:
    return server.cache._tiers.peers


def met(*servers: TieredServer) -> None:
    stop = time.monotonic() + 20
    while not all(peers(server).neighbours.connected() for server in servers):
        assert time.monotonic() < stop
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lender", "borrower"), [(4, 8), (8, 1)])
def test_what_a_peer_has_is_read_from_it_and_the_ledger_says_so(
    start: Callable[..., TieredServer], kind: str, lender: int, borrower: int
) -> None:
    accounts = with_accounts()
    first, second = start(lender, kind=kind), start(borrower, kind=kind, accounts=accounts)
    met(first, second)
    served(first, list(range(40)), answer=0)
    first.settle()
    second.poison()
    req = second.fetch([*range(40), 7])
    assert (req.storage_hit_length, req.storage_hit_start) == (40, 0)
    # The check after the prefill reads every byte of what was found.
    run_request(second, req)
    second.settle()
    sums = accounts.ledger.total().first
    assert (sums.peer_tokens, sums.storage_tokens, sums.computed_tokens, sums.lost) == (40, 0, 1, {})
    assert accounts.ledger.faults == 0
    # It lends in its turn what it has read.
    assert peers(second).tier.counts().pages >= 40 // borrower
    accounts.close()


def test_what_a_peer_had_before_an_update_is_not_lent_and_peers_of_one_version_meet_again(
    start: Callable[..., TieredServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(4), start(4)
    met(first, second)
    served(first, list(range(40)), answer=0)
    first.settle()
    for name, value in {"is_changed": True, "version": "2"}.items():
        monkeypatch.setattr(UPDATES, name, value)
    first.cache.reset()
    first.cache.reweigh()
    stop = time.monotonic() + 20
    while peers(second).neighbours.connected():
        assert time.monotonic() < stop
        time.sleep(0.01)
    assert second.fetch([*range(40), 7]).storage_hit_length == 0
    second.cache.reset()
    second.cache.reweigh()
    met(first, second)
    assert second.fetch([*range(40), 7]).storage_hit_length == 0
    served(first, list(range(40)), answer=0)
    first.settle()
    second.poison()
    req = second.fetch([*range(40), 8])
    assert req.storage_hit_length == 40
    run_request(second, req)
    second.settle()
    monkeypatch.setattr(UPDATES, "version", None)
    second.cache.reweigh()
    assert peers(second).weights.unknown == NO_VERSION
    assert not peers(second).neighbours.connected()


def test_beside_what_is_here_the_rest_alone_is_a_peers(start: Callable[..., TieredServer]) -> None:
    accounts = with_accounts()
    first, second = start(4), start(4, accounts=accounts)
    met(first, second)
    served(first, list(range(40)), answer=0)
    first.settle()
    served(second, list(range(21)), answer=0)
    req = second.fetch([*range(40), 7])
    assert (req.storage_hit_length, req.storage_hit_start) == (20, 20)
    run_request(second, req)
    sums = accounts.ledger.total().first
    assert (sums.device_tokens, sums.peer_tokens, sums.storage_tokens) == (20, 20, 0)
    assert accounts.ledger.faults == 0
    accounts.close()


def test_what_another_request_has_computed_meanwhile_is_no_peers(start: Callable[..., TieredServer]) -> None:
    accounts = with_accounts()
    first, second = start(4), start(4, accounts=accounts)
    met(first, second)
    waiting = second.asked([*range(40), 7])
    served(second, [*range(40), 8], answer=0)
    req = second.fetched(*waiting)
    assert req.storage_hit_length == 0
    run_request(second, req)
    sums = accounts.ledger.total().first
    assert (sums.device_tokens, sums.peer_tokens, sums.storage_tokens, accounts.ledger.faults) == (40, 0, 0, 0)
    accounts.close()


def test_a_peer_that_is_gone_costs_a_miss_and_no_wait_without_end(start: Callable[..., TieredServer]) -> None:
    accounts = with_accounts()
    first, second = start(4), start(8, accounts=accounts)
    met(first, second)
    served(first, list(range(40)), answer=0)
    first.settle()
    peers(first).close()
    began = time.monotonic()
    req = second.fetch([*range(40), 7])
    assert time.monotonic() - began < 10
    assert req.storage_hit_length == 0
    run_request(second, req)
    sums = accounts.ledger.total().first
    assert (sums.peer_tokens, sums.computed_tokens, accounts.ledger.faults) == (0, 41, 0)
    accounts.close()


def test_pages_that_are_used_again_are_lent_no_more(start: Callable[..., TieredServer]) -> None:
    first, second = start(4, size=96, ratio=1.0), start(8)
    met(first, second)
    served(first, list(range(40)), answer=0)
    for at in range(100, 400, 50):
        served(first, list(range(at, at + 44)), answer=0)
        first.settle()
    assert second.fetch([*range(40), 7]).storage_hit_length == 0
    req = second.fetch([*range(350, 394), 7])
    assert req.storage_hit_length == 40
    run_request(second, req)


def test_of_a_peer_and_a_store_that_have_as_much_the_peer_is_read_and_without_it_the_store(
    start: Callable[..., TieredServer], tmp_path: Path
) -> None:
    accounts = with_accounts()
    first, second = start(4, root=tmp_path), start(4, root=tmp_path, accounts=accounts)
    met(first, second)
    for prompt in (list(range(60)), list(range(100, 140))):
        served(first, prompt, answer=0)
        first.settle()
    run_request(second, second.fetch([*range(60), 7]))
    sums = accounts.ledger.total().first
    assert (sums.peer_tokens, sums.storage_tokens) == (60, 0)
    peers(first).close()
    run_request(second, second.fetch([*range(100, 140), 7]))
    sums = accounts.ledger.total().first
    assert (sums.peer_tokens, sums.storage_tokens, accounts.ledger.faults, sums.lost) == (60, 40, 0, {})
    accounts.close()


def test_what_peers_do_not_share_is_refused_in_a_sentence(
    start: Callable[..., TieredServer], addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineUnsupported, match="write_back: peers share what --enable-hierarchical-cache keeps"):
        start(4, write="write_back")
    with pytest.raises(EngineUnsupported, match=r"no storage: .*--hicache-storage-backend dynamic"):
        start(4, root=None)
    with pytest.raises(EngineUnsupported, match="peers do not share windows or states beside attention KV: leave out"):
        serving_windows("windows", 4, root=NO_STORE)
    with monkeypatch.context() as patch:
        patch.setattr(engine_radix, "data_parallel_groups", lambda: 2)
        with pytest.raises(EngineUnsupported, match="do not share data-parallel groups of one server"):
            start(4)
    assert engine_radix.data_parallel_groups() == 1
    monkeypatch.setenv("KVMOVER_PEERS_ADDRESS", addresses[0])
    context = SimpleNamespace(disable_radix_cache=False, enable_hierarchical_cache=False)
    monkeypatch.setattr(engine_radix, "refuse", lambda context: None)
    with pytest.raises(EngineUnsupported, match="no --enable-hierarchical-cache: peers share"):
        sglang_plugin.radix_cache(context)


def fetch_from(address: str) -> Any:
    """The envelope of Dynamo's router, as SGLang has it."""
    envelopes: Any = import_module("sglang.srt.managers.kv_hints")
    payload = {"source_control_endpoint": f"tcp://{address}", "block_hashes": [17], "mode": "copy"}
    action = {"action_id": "f", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return envelopes.decode_kv_hints_envelope({"protocol_version": "0.1", "message_id": "m", "actions": [action]})


def llm_d(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"remote_kv_source": {"kv_request_id": "q", "remote_host": host, "remote_port": int(port)}}


@pytest.mark.parametrize("words", ["Dynamo", "llm-d"])
def test_a_source_that_only_the_router_knows_is_met_and_read(
    start: Callable[..., TieredServer], addresses: list[str], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("KVMOVER_PEERS_ENGINES", "")
    monkeypatch.setenv("KVMOVER_EXCHANGE_ALLOW", "127.0.0.0/8")
    accounts = with_accounts()
    first, second = start(4), start(8, accounts=accounts)
    served(first, list(range(40)), answer=0)
    first.settle()
    second.poison()
    assert second.fetch([*range(40), 7]).storage_hit_length == 0  # nobody is asked unless a request names somebody
    said: dict[str, Any] = {"kv_hints": fetch_from(addresses[0])} if words == "Dynamo" else {}
    req = second.request([*range(40), 8], **said)
    if words == "llm-d":
        req.sampling_params.custom_params = llm_d(addresses[0])
    req = second.fetched(*second.sought(req))
    assert (req.storage_hit_length, req.storage_hit_start) == (40, 0)
    run_request(second, req)
    second.settle()
    assert accounts.ledger.total().first.peer_tokens == 40
    assert {key[1:]: count for key, count in accounts.ledger.hints.items()} == {("fetch", "met"): 1}
    accounts.close()


def test_a_source_that_brings_nothing_is_counted_by_its_reason_and_its_request_is_computed(
    start: Callable[..., TieredServer], addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = with_accounts()
    first, second = start(4), start(8, accounts=accounts)
    met(first, second)
    for number, address in enumerate((addresses[0], "192.0.2.7:8400", addresses[1])):
        req = second.fetch([*range(100 * number, 100 * number + 40), 7], kv_hints=fetch_from(address))
        assert req.storage_hit_length == 0
        run_request(second, req)
    second.settle()
    outcomes = {outcome: count for (_, _, outcome), count in accounts.ledger.hints.items()}
    assert outcomes == {"absent": 1, "not_allowed": 1, "needless": 1}
    assert accounts.ledger.total().first.peer_tokens == 0
    accounts.close()
