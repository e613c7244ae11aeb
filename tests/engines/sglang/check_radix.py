"""SGLang's requests over kvmover's prefix tree: nothing is lost, and what is found is what SGLang's own cache finds."""

from __future__ import annotations

import io
import random
from array import array
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client as prometheus
import pytest
import torch
from rich.console import Console
from scheduling import Server, base, parameters, publish, radix, unified

from kvmover.cache.ledger import AccountGroup, Credit, Loss, PredictionTotals, Predictor
from kvmover.cache.prefix import StaleHandle
from kvmover.config import Settings
from kvmover.config.settings import RecordSettings
from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.engines.sglang import sglang_plugin
from kvmover.engines.sglang.radix_accounts import Lookup, RadixAccounts
from kvmover.engines.sglang.radix_cache import KvmoverRadixCache
from kvmover.tools.report.run_summary import report_run
from kvmover.tools.top import show

PAGES = [1, 4]


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish(tmp_path_factory.mktemp("serving"))


def ours(page: int, size: int = 512, **more: Any) -> Server:
    return Server(KvmoverRadixCache(parameters(page, size, **more)))


def theirs(page: int, size: int = 512, **more: Any) -> Server:
    return Server(unified.UnifiedRadixCache(parameters(page, size, **more)))


def served(server: Server, tokens: list[int], answer: int = 3, **more: Any) -> Any:
    """A request from its prompt to its end."""
    return served_again(server, server.request(tokens, **more), answer)


def served_again(server: Server, req: Any, answer: int = 0) -> Any:
    """The same of a request that was made, or has been looked up."""
    assert server.prefill(req)
    for _ in range(answer):
        assert server.decode(req)
    server.finish(req)
    server.check()
    return req


def found(server: Server, tokens: list[int], **more: Any) -> int:
    return server.match(server.request(tokens, **more))


@pytest.mark.parametrize("page", PAGES)
def test_a_finished_request_is_found_with_its_answer(page: int) -> None:
    server = ours(page)
    req = served(server, list(range(20)), answer=9)
    # The last token of an answer was never computed.
    whole = [*range(20), *req.output_ids]
    assert found(server, [*whole, 7]) == (len(whole) - 1) // page * page
    assert found(server, [*range(12), 99]) == 12
    assert server.cache.protected_size() == 0


@pytest.mark.parametrize("page", PAGES)
def test_a_request_computes_at_least_its_last_token(page: int) -> None:
    server = ours(page)
    served(server, list(range(16)), answer=0)
    assert found(server, list(range(16))) == (15 if page == 1 else 12)


@pytest.mark.parametrize("page", PAGES)
def test_chunks_of_a_prompt_are_shared_before_the_last_is_computed(page: int) -> None:
    server = ours(page)
    first, second = server.request(list(range(40))), server.request([*range(40), 77])
    assert server.prefill(first, chunk=16)
    assert server.match(second) == 16
    assert server.prefill(first, chunk=16)
    server.check()
    assert server.match(second) == 32
    assert server.prefill(first, chunk=16)
    server.check()
    server.finish(first)
    server.check()


@pytest.mark.parametrize("page", PAGES)
def test_a_prompt_that_another_has_kept_meanwhile_is_given_back(page: int) -> None:
    """Both are admitted before either is computed, as in one batch."""
    server = ours(page)
    first, second = server.request(list(range(34))), server.request([*range(34), 6])
    for req in (first, second):
        server.match(req)
        req.lock = server.cache.lock(req.last_node)
        req.extend_end = len(req.full_untruncated_fill_ids)
        server.running.append(req)
        server.extend(req)
    server.check()
    free = server.allocator.available_size()
    for req in (first, second):
        server.checkpoint(req)
        server.check()
    assert server.allocator.available_size() == free + 34 // page * page
    rows = [server.rows.req_to_token[req.kv.req_pool_idx, : 34 // page * page] for req in (first, second)]
    assert torch.equal(*rows)
    for req in (first, second):
        server.finish(req)
        server.check()


@pytest.mark.parametrize("page", PAGES)
def test_aborted_and_retracted_requests_leave_what_was_kept_and_nothing_else(page: int) -> None:
    server = ours(page)
    aborted, retracted = server.request(list(range(40))), server.request(list(range(100, 140)))
    assert server.prefill(aborted, chunk=16)
    assert server.prefill(retracted)
    assert server.decode(retracted)
    server.abort(aborted)
    server.check()
    server.retract(retracted)
    server.check()
    assert server.cache.protected_size() == 0
    assert found(server, list(range(41))) == 16
    assert server.prefill(retracted)
    assert server.hits == 40 // page * page
    server.finish(retracted)
    server.check()


def test_what_a_request_is_told_apart_by_is_told_apart() -> None:
    server = ours(4)
    prompt = list(range(17))
    kinds: list[dict[str, Any]] = [{}, {"extra_key": ""}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "s"}]
    for number, kind in enumerate(kinds):
        assert [found(server, prompt, **other) for other in kinds] == [16] * number + [0] * (len(kinds) - number)
        served(server, prompt, **kind)
    assert found(server, prompt, cache_salt="") == 16


def test_a_locked_prefix_stays_and_the_least_recent_goes() -> None:
    server = ours(4, size=96)
    running = server.request(list(range(32)))
    assert server.prefill(running)
    served(server, list(range(100, 124)), answer=0)
    assert found(server, [*range(100, 124), 0]) == 24
    served(server, list(range(200, 224)), answer=0)
    assert found(server, [*range(100, 124), 0]) == 24
    assert server.cache.evict(base.EvictParams(num_tokens=24)).num_tokens_evicted == 24
    server.check()
    assert (found(server, [*range(100, 124), 0]), found(server, [*range(200, 224), 0])) == (24, 0)
    assert server.cache.evict(base.EvictParams(num_tokens=1000)).num_tokens_evicted == 24
    assert found(server, [*range(32), 0]) == 32
    server.finish(running)
    server.check()


def test_by_priority_answers_go_before_prompts_and_low_before_high() -> None:
    server = ours(4, eviction_policy="priority")
    served(server, list(range(16)), answer=9, priority=1)
    served(server, list(range(100, 116)), answer=9, priority=5)
    evictable = server.cache.evictable_size()
    server.cache.evict(base.EvictParams(num_tokens=8))
    assert (found(server, [*range(17)]), server.cache.evictable_size()) == (16, evictable - 8)
    server.cache.evict(base.EvictParams(num_tokens=16))
    assert (found(server, [*range(17)]), found(server, [*range(100, 117)])) == (0, 16)


def test_a_waiting_requests_prefix_is_kept_by_a_touch() -> None:
    server = ours(4)
    for head in (0, 100):
        served(server, list(range(head, head + 16)), answer=0)
    server.cache.touch_prefix(radix.RadixKey(array("q", range(16))))
    server.cache.evict(base.EvictParams(num_tokens=16))
    assert (found(server, [*range(17)]), found(server, [*range(100, 117)])) == (16, 0)


@pytest.mark.parametrize("bad", [-1, 1 << 32, 1 << 40])
def test_a_token_of_more_than_32_bits_is_served_and_not_kept(bad: int) -> None:
    server = ours(4)
    served(server, [*range(10), bad, *range(10)])
    assert server.cache.total_size() == 0
    assert server.allocator.available_size() == server.size


def test_a_lock_is_given_back_once_and_by_its_own_receipt() -> None:
    server = ours(4)
    served(server, list(range(16)), answer=0)
    req = server.request(list(range(17)))
    server.match(req)
    lock = server.cache.lock(req.last_node)
    assert server.cache.protected_size() == 16
    server.cache.unlock(lock)
    with pytest.raises(StaleHandle):
        server.cache.unlock(lock)
    with pytest.raises(StaleHandle):
        server.cache.dec_lock_ref(req.last_node)
    assert server.cache.protected_size() == 0


def test_waiting_requests_go_by_the_weight_of_what_they_share() -> None:
    """As SGLang orders them over its own tree."""
    heads = [list(range(8)), list(range(100, 108))]
    prompts = [heads[1] + [1] * 9, heads[0] + [1] * 9, heads[0] + [2] * 9, heads[1] + [3] * 9, heads[0] + [2] * 5]
    orders = []
    for server in (ours(4), Server(radix.RadixCache(parameters(4, 512)))):
        for prompt in prompts[:4]:
            req = server.request(prompt)
            assert server.prefill(req)
            server.finish(req)
        matched = [server.request(prompt) for prompt in prompts]
        for req in matched:
            server.match(req)
        orders.append(server.cache.dfs_weight_order([req.last_node for req in matched]))
    assert orders[0] == orders[1]


def test_everything_is_forgotten_at_a_flush() -> None:
    server = ours(4, enable_kv_cache_events=True)
    served(server, list(range(16)), answer=0)
    server.cache.reset()
    server.rows.clear()
    server.allocator.clear()
    assert found(server, [*range(17)]) == 0
    server.check()
    assert [type(event).__name__ for event in server.cache.take_events()] == ["BlockStored", "AllBlocksCleared"]


@pytest.mark.parametrize("page", PAGES)
def test_events_name_the_same_pages_as_sglangs_own(page: int) -> None:
    told = []
    for server in (ours(page, enable_kv_cache_events=True), theirs(page, enable_kv_cache_events=True)):
        served(server, list(range(24)), answer=0)
        served(server, [*range(12), *range(50, 62)], answer=0)
        server.cache.evict(base.EvictParams(num_tokens=1000))
        stored, removed = {}, set()
        for event in server.cache.take_events():
            if type(event).__name__ == "BlockStored":
                parents = [event.parent_block_hash, *event.block_hashes]
                for place, name in enumerate(event.block_hashes):
                    part = event.token_ids[place * page : (place + 1) * page]
                    stored[name] = (parents[place], tuple(part), event.medium)
            elif type(event).__name__ == "BlockRemoved":
                removed |= set(event.block_hashes)
        assert removed == set(stored)
        told.append(stored)
    assert told[0] == told[1]


def test_events_are_encoded_as_sglang_encodes_its_own() -> None:
    encoding: Any = import_module("msgspec").msgpack
    decoded = []
    for server in (ours(4, enable_kv_cache_events=True), theirs(4, enable_kv_cache_events=True)):
        served(server, list(range(8)), answer=0, cache_salt="salt")
        events = [event for event in server.cache.take_events() if type(event).__name__ == "BlockStored"]
        decoded.append(encoding.decode(encoding.encode(events)))
    for event in (each for told in decoded for each in told):
        for name in ("block_hashes", "parent_block_hash"):  # a salt is another name for us
            event.pop(name)
    mine, other = decoded
    assert [mine[0]["token_ids"], mine[0]["medium"], mine[0]["cache_salt"], mine[0]["block_size"]] == [
        other[0]["token_ids"],
        other[0]["medium"],
        other[0]["cache_salt"],
        other[0]["block_size"],
    ]


def prompts_of(chance: random.Random) -> Iterator[list[int]]:
    """Prompts that begin like one before, more often than not."""
    before: list[list[int]] = []
    while True:
        head = chance.choice(before) if before and chance.random() < 0.7 else []
        tail = [chance.randrange(3) for _ in range(chance.randrange(1, 40))]
        prompt = (head[: chance.randrange(len(head) + 1)] + tail)[:120]
        before.append(prompt)
        yield prompt


def history(servers: list[Server], seed: int, steps: int) -> None:
    """The same requests and steps in every server, checked after each; `Server.hits` say what was found."""
    chance = random.Random(seed)
    prompts = prompts_of(chance)
    live: list[list[Any]] = []
    unfinished: list[list[Any]] = []
    for _ in range(steps):
        kind = chance.random()
        if (kind < 0.4 and len(live) < 6) or not live:
            more = {"extra_key": chance.choice([None, None, None, "a"]), "priority": chance.choice([None, 0, 2])}
            prompt, chunk = next(prompts), chance.choice([8, 16, 1 << 20])
            fresh = [server.request(prompt, **more) for server in servers]
            took = [server.prefill(req, chunk) for server, req in zip(servers, fresh, strict=True)]
            assert len(set(took)) == 1, "one had room, and the other had not"
            if took[0]:
                live.append(fresh)
                unfinished += [fresh] * any(req.extend_end < len(prompt) for req in fresh)
        else:
            chosen = chance.choice(live)
            if chosen in unfinished:
                # Who found more has fewer chunks.
                whole = len(chosen[0].origin_input_ids)
                took = [
                    server.prefill(req, 16)
                    for server, req in zip(servers, chosen, strict=True)
                    if req.extend_end < whole
                ]
                if all(req.extend_end == whole for req in chosen):
                    unfinished.remove(chosen)
                ended = not all(took)
            elif kind < 0.6 and len(chosen[0].output_ids) < 30:
                took = [server.decode(req) for server, req in zip(servers, chosen, strict=True)]
                assert len(set(took)) == 1
                ended = not took[0]
            else:
                ended = True
            if ended:
                end = chance.choice(["finish", "finish", "finish", "abort", "retract"])
                end = "abort" if chosen in unfinished else end
                for server, req in zip(servers, chosen, strict=True):
                    getattr(server, end)(req)
                live.remove(chosen)
                unfinished = [each for each in unfinished if each is not chosen]
        for server in servers:
            server.check()
    for server in servers:
        for req in list(server.running):
            server.abort(req)
        assert server.cache.protected_size() == 0
        server.cache.evict(base.EvictParams(num_tokens=server.size))
        server.check()
        assert server.room() == server.allocator.available_size() == server.allocator.size


@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "bigrams"])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(3))
def test_with_room_for_all_a_history_finds_what_sglangs_own_cache_finds(page: int, seed: int, eagle: bool) -> None:
    servers = [ours(page, 16384, is_eagle=eagle), theirs(page, 16384, is_eagle=eagle)]
    history(servers, seed, 400)
    assert servers[0].hits == servers[1].hits > 200


@pytest.mark.parametrize("policy", ["lru", "hazard", "lfu", "slru", "fifo", "priority"])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(2))
def test_a_history_in_little_room_loses_no_page(page: int, seed: int, policy: str) -> None:
    server = ours(page, 320, eviction_policy=policy)
    history([server], seed, 400)
    assert server.hits > 50


def test_with_little_room_at_least_as_much_is_found_as_by_sglangs_own_cache() -> None:
    hits = [0, 0]
    for seed in range(20):
        for place, make in enumerate((ours, theirs)):
            server = make(4, 640)
            sequence(server, seed)
            hits[place] += server.hits
    assert hits[0] >= hits[1] > 10_000


def sequence(server: Server, seed: int) -> None:
    """Requests one after the other, which need no more room than there is."""
    chance = random.Random(seed)
    prompts = prompts_of(chance)
    for _ in range(120):
        req = server.request(next(prompts))
        assert server.prefill(req)
        for _ in range(chance.randrange(6)):
            assert server.decode(req)
        server.finish(req)
    server.check()


@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize("page", PAGES)
def test_windows_that_were_left_are_given_up_and_prefixes_are_found_where_one_is_whole(page: int, window: int) -> None:
    server = ours(page, window=window)
    req = served(server, list(range(24)), answer=20)
    whole = [*range(24), *req.output_ids]

    def lengths() -> list[int]:
        return [found(server, [*whole[:length], 7]) for length in (16, 24, 44)]

    assert lengths() == [16, 24, 44]
    tokens, windows = server.cache.evictable_size(), server.cache.swa_evictable_size()
    assert server.cache.evict(base.EvictParams(swa_num_tokens=16)).swa_num_tokens_evicted >= 16
    server.check()
    # The oldest window went, and no attention KV.
    assert lengths() == [0, 24, 44]
    assert server.cache.evictable_size() == tokens
    assert server.cache.swa_evictable_size() <= windows - 16
    served(server, list(range(16)), answer=0)
    assert lengths() == [16, 24, 44]


@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "bigrams"])
@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(2))
def test_a_history_with_windows_and_room_for_all_finds_what_sglangs_own_cache_finds(
    page: int, seed: int, window: int, eagle: bool
) -> None:
    servers = [make(page, 16384, window=window, is_eagle=eagle) for make in (ours, theirs)]
    history(servers, seed, 400)
    assert servers[0].hits >= servers[1].hits > 100


@pytest.mark.parametrize("policy", ["lru", "slru", "priority"])
@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(2))
def test_a_history_with_windows_in_little_room_loses_no_page(page: int, seed: int, window: int, policy: str) -> None:
    server = ours(page, 512, window=window, window_size=320, eviction_policy=policy)
    history([server], seed, 400)
    assert server.hits > 30


def with_accounts(page: int, size: int) -> tuple[Server, RadixAccounts]:
    accounts = RadixAccounts("m", Settings(), ParallelRank(0, 1))
    return Server(KvmoverRadixCache(parameters(page, size), accounts)), accounts


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(4))
def test_the_ledger_balances_over_a_history(page: int, seed: int) -> None:
    server, accounts = with_accounts(page, 1024)
    history([server], seed, 400)
    for req in [each for each in server.given if not each.finished()]:  # retracted, and never taken again
        server.cache.finish(req.cache_request_handle, base.CacheRequestOutcome.ABORT)
    ledger = accounts.ledger
    ledger.check()
    assert (len(ledger), ledger.faults, ledger.last_fault) == (0, 0, None)
    totals = ledger.total().first
    assert totals.device_tokens == server.hits > 50
    assert totals.attempts == sum(req.extend_end is not None or req.is_retracted for req in server.given)
    assert min(totals.finished, totals.retracted, totals.aborted) > 0


def test_the_ledger_says_why_a_known_prompt_was_computed() -> None:
    server, accounts = with_accounts(4, 512)
    served(server, list(range(16)), answer=0)
    served(server, list(range(16)), answer=0)
    totals = accounts.ledger.total().first
    assert (totals.prompt_tokens, totals.device_tokens, totals.computed_tokens) == (32, 12, 20)
    assert totals.lost == {Loss.LAST_TOKEN: 4}


def test_the_ledger_counts_what_two_computed_at_once() -> None:
    server, accounts = with_accounts(4, 512)
    both = [server.request([*range(32), last]) for last in (1, 2)]
    for req in both:
        server.match(req)
        req.lock, req.extend_end = server.cache.lock(req.last_node), 33
        server.running.append(req)
        server.extend(req)
    for req in both:
        server.checkpoint(req)
        server.finish(req)
    assert accounts.ledger.total().first.lost == {Loss.CONCURRENT: 32}


def test_what_a_router_predicted_stands_beside_what_was_found() -> None:
    server, accounts = with_accounts(4, 512)
    served(server, list(range(16)), answer=0)
    for said in (
        {"kvmover_predicted_tokens": 1000, "kvmover_tenant": "gold"},
        {"kvmover_predicted_tokens": "no"},
        None,
    ):
        req = server.request([*range(12), 77, *range(20)])
        req.sampling_params.custom_params = said
        served_again(server, req)
    predictions = accounts.ledger.total().first.predictions
    assert predictions[Predictor.ROUTER] == PredictionTotals(1, 12, 33 - 12, 0)
    # What was there when each came is what each got: 0 of the first prompt, 12 and then 32 of the others.
    assert predictions[Predictor.INVENTORY] == PredictionTotals(3, 32 + 32, 0, 0)
    assert accounts.ledger.groups() == (AccountGroup(model="m"), AccountGroup("gold", "m"))
    assert accounts.ledger.total(AccountGroup("gold", "m")).first.prompt_tokens == 33


def test_tokens_that_a_peer_did_not_bring_and_another_request_computed_meanwhile_are_lost_once() -> None:
    """The peer died as it lent 320 tokens; a request with the same prefix kept them before this one did."""
    accounts = RadixAccounts("m", Settings(), ParallelRank(0, 1))
    accounts.matched("r", Lookup(343, left={Loss.READ_FAILED: 320}))
    accounts.admitted("r", Credit())
    accounts.concurrent("r", 320)
    accounts.answered("r")
    assert (accounts.ledger.faults, accounts.ledger.last_fault) == (0, None)
    totals = accounts.ledger.total().first
    assert (totals.prompt_tokens, totals.computed_tokens, totals.lost) == (343, 343, {Loss.READ_FAILED: 320})


def test_top_and_the_report_show_the_ledger_of_the_cache(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    accounts = RadixAccounts("m", Settings(record=RecordSettings(run_log=log)), ParallelRank(0, 1))
    server = Server(KvmoverRadixCache(parameters(4, 512), accounts))
    history([server], 3, 200)
    for req in [each for each in server.given if not each.finished()]:
        server.cache.finish(req.cache_request_handle, base.CacheRequestOutcome.ABORT)
    registry, out = prometheus.CollectorRegistry(), io.StringIO()
    registry.register(accounts)
    show(["here"], Console(file=out, width=200), get=lambda _: prometheus.generate_latest(registry).decode())
    accounts.close()
    totals, rows = accounts.ledger.total().first, [line.split() for line in out.getvalue().splitlines()]
    assert totals.device_tokens == server.hits > 50
    (device,) = [row for row in rows if row[:1] == ["device"]]
    assert device[1] == f"{totals.device_tokens:,}"
    for reason, tokens in totals.lost.items():
        assert any(row[:3] == ["lost:", str(reason), f"{tokens:,}"] for row in rows)
    (group,) = [row for row in rows if row[:3] == ["no", "tenant,", "m"]]
    assert group[3] == f"{totals.prompt_tokens:,}"
    assert group[5:9] == [f"{totals.device_tokens:,}", "0", "0", "0"]
    assert group[9:11] == [f"{totals.computed_tokens:,}", f"{totals.abandoned_tokens:,}"]
    out = io.StringIO()
    report_run([log], None, 1, Console(file=out, width=200))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert any(row[:3] == ["m", f"{totals.prompt_tokens:,}", f"{totals.device_tokens:,}"] for row in rows)
    sums = totals.predictions[Predictor.INVENTORY]
    cells = ["inventory", f"{sums.requests:,}", f"{sums.foreseen_tokens + sums.missed_tokens:,}"]
    assert any(row[:3] == cells for row in rows)


def test_an_inventory_that_is_evicted_while_a_request_waits_was_predicted_and_missed() -> None:
    server, accounts = with_accounts(4, 512)
    served(server, list(range(16)), answer=0)
    req = server.request([*range(16), 77])
    assert server.match(req) == 16
    server.cache.evict(base.EvictParams(num_tokens=8))
    served_again(server, req)
    assert accounts.ledger.total().first.predictions[Predictor.INVENTORY] == PredictionTotals(2, 8, 8, 0)


def test_a_request_that_is_given_up_while_it_waits_has_no_tokens_in_the_ledger() -> None:
    server, accounts = with_accounts(4, 512)
    req = server.request(list(range(9)))
    server.match(req)
    server.match(req)
    server.cache.finish(req.cache_request_handle, base.CacheRequestOutcome.ABORT)
    server.cache.finish(req.cache_request_handle, base.CacheRequestOutcome.ABORT)
    ledger = accounts.ledger
    assert (len(ledger), ledger.never_admitted, ledger.faults, ledger.total().first.attempts) == (0, 1, 0, 0)


def context_of(**more: Any) -> Any:
    told = {
        "params": parameters(4, 64),
        "disable_radix_cache": False,
        "enable_hierarchical_cache": False,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "full_tokens_per_layer": 64,
        "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(prefill_aware_swa=False)),
    }
    return SimpleNamespace(**{**told, **more})


def test_the_plug_in_registers_a_factory_that_makes_the_cache() -> None:
    registry: Any = import_module("sglang.srt.mem_cache.registry")
    sglang_plugin.register_radix_cache()
    sglang_plugin.register_radix_cache()
    assert type(registry.get_radix_cache_factory("kvmover")(context_of())) is KvmoverRadixCache


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"is_hybrid_swa": True, "full_tokens_per_layer": 0}, "not windows only"),
        ({"is_hybrid_swa": True}, "SWATokenToKVPoolAllocator of its own page size"),
        ({"is_hybrid_ssm": True}, "states"),
        ({"params": parameters(4, 64, eviction_policy="mru")}, "not by mru"),
        (
            {"params": parameters(4, 64, eviction_policy="slru", eviction_policy_config={"protected_threshold": 3})},
            "without options",
        ),
    ],
)
def test_what_needs_sglangs_own_cache_is_refused_in_a_sentence(asked: dict[str, Any], word: str) -> None:
    with pytest.raises(EngineUnsupported, match=word):
        sglang_plugin.radix_cache(context_of(**asked))
