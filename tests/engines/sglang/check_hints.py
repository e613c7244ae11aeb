"""Hints with SGLang's own requests and pools: what is pinned stays, window and state too, and all others run on."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from check_states import parameters_of
from check_states import served as served_with_states
from scheduling import Server, parameters, publish
from states import StateServer

from kvmover.config import Settings
from kvmover.engines.common import ParallelRank
from kvmover.engines.sglang.radix_accounts import RadixAccounts
from kvmover.engines.sglang.radix_cache import KvmoverRadixCache

envelopes: Any = import_module("sglang.srt.managers.kv_hints")

PROMPT = list(range(40))


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish(tmp_path_factory.mktemp("serving"))


def said(kind: str, payload: dict[str, Any]) -> Any:
    """SGLang's own envelope, as it comes from its front end."""
    action = {"action_id": "session", "action_type": kind, "action_version": "1.0", "payload": payload}
    return envelopes.decode_kv_hints_envelope({"protocol_version": "0.1", "message_id": "m", "actions": [action]})


def served(server: Server, tokens: list[int], **more: Any) -> Any:
    req = server.request(tokens, **more)
    assert server.prefill(req)
    for _ in range(3):
        assert server.decode(req)
    server.finish(req)
    server.check()
    return req


def crowd(server: Server, serve: Any = served) -> None:
    for number in range(1, 12):
        serve(server, list(range(100 * number, 100 * number + 40)))


@pytest.mark.parametrize("window", [None, 8], ids=["attention", "windows"])
@pytest.mark.parametrize("page", [1, 4])
def test_a_pinned_session_is_found_after_a_crowd_and_another_is_not(page: int, window: int | None) -> None:
    shape = {} if window is None else {"window": window, "window_size": 256}
    server = Server(KvmoverRadixCache(parameters(page, 256, **shape)))
    first = served(server, PROMPT, kv_hints=said("kv.pin", {"ttl_seconds": 300}))
    served(server, list(range(60, 100)))
    crowd(server)
    whole = [*PROMPT, *first.output_ids]
    assert server.match(server.request([*whole, 7])) == (len(whole) - 1) // page * page
    assert server.match(server.request([*range(60, 100), 7])) == 0
    served(server, [*whole, 8], kv_hints=said("kv.pin", {"ttl_seconds": 0}))
    assert server.cache.protected_size() == 0
    crowd(server)
    assert server.match(server.request([*whole, 7])) == 0


def test_a_pinned_state_stays_with_its_prefix() -> None:
    server = StateServer(KvmoverRadixCache(parameters_of("none", 1, 256, 16)))
    first = served_with_states(server, PROMPT, kv_hints=said("kv.pin", {"ttl_seconds": 300}))
    whole = [*PROMPT, *first.output_ids]
    crowd(server, served_with_states)
    assert server.match(server.request([*whole, 7])) == len(whole) - 1
    server.cache._hints.pins.check()


def test_a_retained_session_goes_after_those_of_lower_priority() -> None:
    server = Server(KvmoverRadixCache(parameters(4, 256, eviction_policy="priority")))
    served(server, PROMPT, kv_hints=said("kv.retain", {"priority": 9}))
    crowd(server)
    assert server.match(server.request([*PROMPT, 7])) == len(PROMPT)
    assert server.cache.protected_size() == 0


def test_a_flush_ends_pins() -> None:
    server = Server(KvmoverRadixCache(parameters(4, 256)))
    served(server, PROMPT, kv_hints=said("kv.pin", {"ttl_seconds": 300}))
    server.cache.reset()
    assert server.cache.total_size() == 0
    assert len(server.cache._hints.pins) == 0


def test_hints_are_counted_in_the_ledger_and_shown() -> None:
    accounts = RadixAccounts("m", Settings(), ParallelRank(0, 1))
    server = Server(KvmoverRadixCache(parameters(4, 256), accounts))
    served(server, PROMPT, kv_hints=said("kv.pin", {"ttl_seconds": 300}))
    served(server, PROMPT, kv_hints=said("kv.demote", {}))
    counts = {(action, outcome): count for (_, action, outcome), count in accounts.ledger.hints.items()}
    assert counts == {("pin", "met"): 1, ("demote", "no_host"): 1}
    samples = {each.name: each.value for family in accounts.collect() for each in family.samples}
    assert (samples["kvmover_pinned_prefixes"], samples["kvmover_pinned_pages"]) == (1, 10)
    accounts.close()
