"""SGLang's requests over kvmover's tiers: what left the device comes back from host and storage, byte by byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import Shape, finish, ranks, start
from scheduling import NOTHING, Server, base, paged, parameters, pools, publish, tokens_of
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] (public by its docs)

from kvmover.cache.ledger import Loss
from kvmover.cache.prefix import AllBlocksCleared, BlockStored
from kvmover.cache.tiers import TierCount
from kvmover.config import Settings
from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.engines.sglang import engine_radix, sglang_plugin
from kvmover.engines.sglang.radix_accounts import RadixAccounts
from kvmover.engines.sglang.radix_tiers import DecodeRadixCache, TieredRadixCache
from kvmover.engines.sglang.sglang_options import StorageFlags, TierFlags
from kvmover.engines.sglang.tier_pools import open_tiers

#: Two groups of layers: a pass that reads the first does not wait for the second.
LAYERS = 10
PAGES = [1, 4]
KINDS = ["attention", "latent"]
POISON = 0x5A
ALONE = ParallelRank(0, 1)


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish(tmp_path_factory.mktemp("serving"))


class PoolContent:
    """The rows of SGLang's pool as numbers: each layer, K and V, and head has its own of a token's."""

    #: Ranks that divide the tokens of a page.
    shares = 1

    def __init__(self, pool: Any, layers: Sequence[int] = range(LAYERS), first_head: int = 0) -> None:
        self.pool, self.layers, self.first_head = pool, layers, first_head

    def planes(self, layer: int) -> list[torch.Tensor]:
        """As an attention backend reads them: behind the gate."""
        if hasattr(self.pool, "kv_buffer"):
            return [self.pool.get_key_buffer(layer).view(torch.int64).flatten(1)]
        both = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
        return [buffer.view(torch.int64).flatten(1) for buffer in both]

    def offsets(self, layer: int, kv: int, width: int) -> torch.Tensor:
        return 100 * layer + 10 * kv + self.first_head + torch.arange(width)

    def __setitem__(self, row: torch.Tensor, numbers: torch.Tensor) -> None:
        for layer in self.layers:
            for kv, plane in enumerate(self.planes(layer)):
                plane[row] = numbers[:, None] + self.offsets(layer, kv, plane.shape[1])

    def __getitem__(self, row: torch.Tensor) -> torch.Tensor:
        """Equal in all planes, or it is another's somewhere."""
        found = [
            plane[row] - self.offsets(layer, kv, plane.shape[1])
            for layer in self.layers
            for kv, plane in enumerate(self.planes(layer))
        ]
        numbers = found[0][:, 0]
        whole = all(torch.equal(each, numbers[:, None].expand_as(each)) for each in found)
        return numbers if whole else torch.full_like(numbers, NOTHING)


class SharedContent(PoolContent):
    """Of ranks that share the positions of every page: SGLang deals indices of all, and each has rows of its own."""

    def __init__(self, pool: Any, place: ParallelRank, group: Any, *given: Any) -> None:
        super().__init__(pool, *given)
        self.shares, self.place, self.group = place.cp_size, place, group

    def __setitem__(self, row: torch.Tensor, numbers: torch.Tensor) -> None:
        mine = row % self.shares == self.place.cp
        super().__setitem__(row[mine] // self.shares, numbers[mine])

    def __getitem__(self, row: torch.Tensor) -> torch.Tensor:
        """Its own, and what those with the first heads have of the others."""
        mine = row % self.shares == self.place.cp
        numbers, own = torch.zeros_like(row), super().__getitem__(row[mine] // self.shares)
        if not self.place.tp:
            numbers[mine] = own
        torch.distributed.all_reduce(numbers, group=self.group)
        numbers[mine] = own
        return numbers


class TieredServer(Server):
    """As Server, with pools that have bytes; requests load from the host when they are admitted."""

    content: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        pool = self.allocator.get_kvcache()
        self.content = PoolContent(pool, range(pool.start_layer, pool.start_layer + pool.layer_num))
        #: Requests' tokens by the tier they were found on.
        self.tiers = {"device": 0, "host": 0}

    @property
    def controller(self) -> Any:
        return self.cache._controller

    def poison(self) -> None:
        """Whoever reads a page that nobody wrote is found out."""
        page = self.cache.page_size // self.content.shares
        first = self.allocator.get_all_free_pages().long()
        rows = first if page == 1 else (first[:, None] * page + torch.arange(page)).flatten()
        for layer in self.content.layers:
            for plane in self.content.planes(layer):
                plane[rows] = POISON

    def match(self, req: Any) -> int:
        """As the scheduler admits a request: it matches, and loads what the host has."""
        super().match(req)
        self.tiers["device"] += req.prefix_len
        if req.needs_host_load_back():
            promised = req.host_hit_length
            given = base.InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
            req.host_loaded_length, req.last_node = self.cache.init_load_back(given)
            assert req.host_loaded_length in (0, promised)
            req.prefix_len += req.host_loaded_length
            req.kv.cache_protected_len = req.prefix_len
            self.tiers["host"] += req.host_loaded_length
        return req.prefix_len

    def settle(self) -> None:
        """Steps of the scheduler until nothing is on its way."""
        for _ in range(10_000):
            self.cache.check_hicache_events()
            if not self.cache.ongoing_write_through:
                return
            self.controller.worker.wait(0.001)
        raise AssertionError("it never ends")

    def evict_all(self) -> None:
        self.settle()
        self.cache.evict(base.EvictParams(num_tokens=self.size))
        assert self.cache.total_size() == 0
        self.poison()

    def fetch(self, tokens: list[int], **more: Any) -> Any:
        """A request that waits until storage has answered."""
        return self.fetched(*self.asked(tokens, **more))

    def asked(self, tokens: list[int], **more: Any) -> tuple[Any, Any]:
        """A request that waits, and under which handle."""
        return self.sought(self.request(tokens, **more))

    def sought(self, req: Any) -> tuple[Any, Any]:
        """A request that storage and peers are asked for, and under which handle."""
        handle = base.CacheRequestHandle(req.rid, 0)
        Server.match(self, req)
        known = req.prefix_len + req.host_hit_length
        self.cache.prefetch_from_storage(
            handle,
            req.last_host_node,
            req.full_untruncated_fill_ids[known:-1],
            None,
            None,
            matched_prefix_tokens=req.full_untruncated_fill_ids[:known],
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
        )
        return req, handle

    def fetched(self, req: Any, handle: Any) -> Any:
        while not self.cache.check_prefetch_progress(handle):
            self.cache.check_hicache_events()
        req.storage_hit_length, req.storage_hit_start = self.cache.pop_prefetch_loaded_span(handle)
        return req


def pool_of(kind: str, size: int, page: int, heads: int = 2, layers: range = range(LAYERS)) -> Any:
    span = {"start_layer": layers.start, "end_layer": layers.stop}
    if kind == "latent":
        return pools.MLATokenToKVPool(size, page, torch.float32, 2, 2, len(layers), "cpu", False, **span)
    return pools.MHATokenToKVPool(size, page, torch.float32, heads, 2, len(layers), "cpu", False, **span)


def serving(
    page: int,
    size: int = 256,
    kind: str = "attention",
    root: Path | None = None,
    place: ParallelRank = ALONE,
    group: Any = None,
    accounts: RadixAccounts | None = None,
    heads: int = 2,
    layers: range = range(LAYERS),
    made: type[TieredRadixCache] = TieredRadixCache,
    events: bool = False,
    **more: Any,
) -> TieredServer:
    pool = pool_of(kind, size // place.cp_size, page // place.cp_size, heads, layers)
    params = parameters(page, size, enable_kv_cache_events=events)
    one = [size, torch.float32, "cpu", pool, False]
    params.token_to_kv_pool_allocator = (
        tokens_of.TokenToKVPoolAllocator(*one) if page == 1 else paged.PagedTokenToKVPoolAllocator(size, page, *one[1:])
    )
    flags = flags_of(root, **more)
    tiers = open_tiers(params, flags, place, group)
    cache = made(params, flags, tiers, accounts)
    pool.register_layer_transfer_counter(cache.gates)
    server = TieredServer(cache)
    first_head = 0 if kind == "latent" else place.tp * heads
    if place.cp_size > 1:
        server.content = SharedContent(pool, place, group, layers, first_head)
    else:
        server.content.first_head = first_head
    return server


def flags_of(root: Path | None, **more: Any) -> TierFlags:
    """Room on the host for four times the device, and storage in `root` where there is one."""
    options = {"class_name": "KvmoverStore", "root": str(root), "upkeep_s": 0.01}
    storage = StorageFlags("dynamic", options, least_tokens=1) if root else None
    return TierFlags(**{"ratio": 4.0, "prefetch": "wait_complete", "storage": storage, **more})


def served(server: TieredServer, tokens: list[int], answer: int = 3, **more: Any) -> Any:
    """A request from its prompt to its end."""
    req = server.request(tokens, **more)
    run(server, req, answer)
    return req


def run(server: TieredServer, req: Any, answer: int = 3) -> None:
    assert server.prefill(req)
    server.check()
    for _ in range(answer):
        assert server.decode(req)
    server.finish(req)
    server.check()


def looked(server: TieredServer, tokens: list[int]) -> tuple[int, int]:
    """What a request would find on the device, and beyond that on the host."""
    req = server.request(tokens)
    Server.match(server, req)
    return req.prefix_len, req.host_hit_length


def test_a_router_hears_with_its_tokens_of_what_is_stored_and_a_late_one_all_that_is_there(tmp_path: Path) -> None:
    server = serving(4, root=tmp_path, events=True)
    prompt = list(range(40))
    served(server, prompt)
    server.evict_all()
    told = server.cache.take_events()
    for events in (told, list(told.resident())):
        disk = [event for event in events if isinstance(event, BlockStored) and event.medium == "DISK"]
        assert [token for event in disk for token in event.token_ids][:40] == prompt
    server.cache.reset()
    again = server.cache.take_events()
    assert isinstance(again[0], AllBlocksCleared)
    assert [token for event in again[1:] for token in event.token_ids][:40] == prompt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_what_left_the_device_comes_back_from_the_host(page: int, kind: str) -> None:
    server = serving(page, kind=kind)
    served(server, list(range(40)))
    served(server, [*range(20), *range(60, 92)])
    server.evict_all()
    assert looked(server, [*range(40), 7]) == (0, 40)
    # The check after the prefill reads every byte of what was found.
    again = served(server, [*range(40), 7])
    assert again.host_loaded_length == 40
    third = served(server, [*range(20), *range(60, 92), 1])
    assert third.host_loaded_length == 32
    server.settle()
    server.check()
    assert server.cache.protected_size() == 0
    assert not server.cache.ongoing_load_back


@pytest.mark.parametrize("page", PAGES)
def test_a_second_request_starts_at_once_behind_the_gates(page: int) -> None:
    server = serving(page)
    served(server, list(range(40)))
    server.evict_all()
    first, second = server.request([*range(40), 1]), server.request([*range(40), 2])
    assert server.match(first) == 40
    number = server.cache.ready_to_load_host_cache()
    assert number >= 0
    # Nothing has been copied yet, and the prefix is the device's.
    (load,) = server.cache.ongoing_load_back
    assert not load.gate.open(0)
    assert server.match(second) == 40
    assert (second.host_hit_length, server.tiers) == (0, {"device": 40, "host": 40})
    # A pass that reads the first layer has the first layers copied, and no others.
    server.content.pool.get_key_buffer(0)
    assert load.gate.open(0)
    assert not load.gate.open(LAYERS - 1)
    for req in (first, second):
        req.lock = server.cache.lock(req.last_node)
        req.extend_end = len(req.full_untruncated_fill_ids)
        server.running.append(req)
        server.extend(req)
    server.check()
    server.settle()
    assert server.cache.ready_to_load_host_cache() == -1
    for req in (first, second):
        server.finish(req)
        server.check()


def test_pages_under_a_load_do_not_leave_either_tier() -> None:
    server = serving(4, size=96, ratio=1.0)
    served(server, list(range(40)), answer=0)
    server.evict_all()
    req = server.request([*range(40), 1])
    assert server.match(req) == 40
    assert server.cache.evict(base.EvictParams(num_tokens=96)).num_tokens_evicted == 0
    assert not server.controller.tree.evict_host(100).actions
    server.settle()
    assert server.cache.evict(base.EvictParams(num_tokens=96)).num_tokens_evicted == 40


def test_a_load_that_finds_no_room_is_computed_and_the_ledger_says_why() -> None:
    accounts = with_accounts()
    server = serving(4, size=96, accounts=accounts)
    served(server, list(range(40)), answer=0)
    server.evict_all()
    running = server.request(list(range(100, 160)))
    assert server.prefill(running)
    server.settle()
    req = server.request([*range(40), 1])
    assert server.prefill(req, chunk=16)
    assert (req.host_loaded_length, server.tiers["host"]) == (0, 0)
    server.check()
    server.finish(running)
    run(server, req, answer=0)
    sums = accounts.ledger.total().first
    assert sums.lost == {Loss.DEVICE_CAPACITY: 40}
    assert (sums.computed_tokens, accounts.ledger.faults) == (40 + 60 + 41, 0)
    # What was computed again is the same prefix, on both tiers.
    server.evict_all()
    assert looked(server, [*range(40), 7]) == (0, 40)
    accounts.close()


def test_a_decode_promises_what_is_locked_and_on_its_way(tmp_path: Path) -> None:
    server = serving(4, size=96, root=tmp_path, made=DecodeRadixCache)
    served(server, list(range(40)), answer=0)
    server.evict_all()
    first, second = server.request([*range(40), 1]), server.request([*range(40), 2])
    assert [Server.match(server, req) for req in (first, second)] == [40, 40]
    assert (first.host_hit_length, first.best_match_node) == (0, first.last_node)
    assert server.cache.query_storage_hit_length(0, [1, 2, 3]) == 0
    number = server.cache.ready_to_load_host_cache()
    assert not server.cache.is_load_back_event_done(number)
    # What was promised stays, whoever wants its room.
    first.lock = server.cache.lock(first.last_node)
    server.settle()
    assert server.cache.is_load_back_event_done(number)
    server.cache.evict(base.EvictParams(num_tokens=96))
    assert server.cache.protected_size() == 40
    first.extend_end = len(first.full_untruncated_fill_ids)
    server.running.append(first)
    server.extend(first)
    server.check()
    server.finish(first)
    # Nothing is promised that finds no room.
    server.evict_all()
    running = server.request(list(range(100, 160)))
    assert server.prefill(running)
    third = server.request([*range(40), 3])
    assert Server.match(server, third) == 0
    assert third.host_hit_length == 0
    server.finish(running)
    server.settle()
    server.check()
    server.cache.release_host_resources()


def test_after_n_hits_only_what_was_used_again_is_written_through() -> None:
    server = serving(4, write="write_through_selective")
    served(server, list(range(40)), answer=0)
    served(server, list(range(100, 140)), answer=0)
    # All of it but the last token is found, so nothing is added.
    served(server, [*range(40), 5], answer=0)
    server.evict_all()
    assert looked(server, [*range(40), 7]) == (0, 40)
    assert looked(server, [*range(100, 140), 7]) == (0, 0)


@pytest.mark.parametrize("page", PAGES)
def test_what_is_written_back_goes_to_the_host_as_it_is_evicted(page: int) -> None:
    server = serving(page, write="write_back")
    served(server, list(range(40)), answer=0)
    server.settle()
    assert server.controller.meter.counts[TierCount.BACKED_PAGES] == 0
    server.evict_all()
    assert looked(server, [*range(40), 7]) == (0, 40)
    served(server, [*range(40), 7])
    assert server.tiers["host"] == 40


def test_a_node_that_is_split_while_it_is_written_through_is_on_the_host_whole() -> None:
    """sglang#16946."""
    server = serving(4)
    served(server, list(range(40)), answer=0)
    assert server.cache.ongoing_write_through
    served(server, [*range(20), *range(60, 84)], answer=0)
    served(server, [*range(8), *range(90, 98)], answer=0)
    server.evict_all()
    for prompt, tokens in (([*range(41)], 40), ([*range(20), *range(60, 85)], 44), ([*range(8), *range(90, 99)], 16)):
        assert looked(server, prompt) == (0, tokens)
        served(server, prompt, answer=0)
        server.evict_all()


def with_accounts(model: str = "m") -> RadixAccounts:
    return RadixAccounts(model, Settings(), ParallelRank(0, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", PAGES)
def test_storage_outlives_the_server(page: int, kind: str, tmp_path: Path) -> None:
    first = serving(page, kind=kind, root=tmp_path)
    served(first, list(range(40)), answer=0)
    served(first, [*range(20), *range(60, 92)], answer=0)
    first.settle()
    first.cache.release_host_resources()
    accounts = with_accounts()
    second = serving(page, kind=kind, root=tmp_path, accounts=accounts)
    second.poison()
    req = second.fetch([*range(40), 7])
    assert (req.storage_hit_length, req.storage_hit_start) == (40, 0)
    run(second, req)
    # Its first half is on the device by now.
    req = second.fetch([*range(20), *range(60, 92), 1])
    assert (req.storage_hit_length, req.storage_hit_start) == (32, 20)
    run(second, req)
    second.settle()
    sums = accounts.ledger.total().first
    assert (sums.storage_tokens, sums.device_tokens, accounts.ledger.faults) == (72, 20, 0)
    second.check()
    second.cache.release_host_resources()
    accounts.close()


@pytest.mark.parametrize("page", PAGES)
def test_the_ledger_says_from_which_tier_tokens_came_and_why_others_did_not(page: int) -> None:
    accounts = with_accounts()
    server = serving(page, accounts=accounts)
    served(server, list(range(40)))
    served(server, [*range(40), 5])
    server.evict_all()
    served(server, [*range(40), 7])
    sums = accounts.ledger.total().first
    assert (sums.device_tokens, sums.host_tokens, sums.storage_tokens) == (40, 40, 0)
    assert accounts.ledger.faults == 0
    assert sums.prompt_tokens == 40 + 41 + 41
    accounts.close()


def test_everything_is_forgotten_at_a_flush() -> None:
    server = serving(4)
    served(server, list(range(40)))
    server.evict_all()
    served(server, list(range(100, 140)))
    server.settle()
    server.cache.reset()
    server.rows.clear()
    server.allocator.clear()
    assert looked(server, [*range(41)]) == looked(server, [*range(100, 141)]) == (0, 0)
    server.check()
    served(server, list(range(40)))


def history(server: TieredServer, seed: int, steps: int) -> None:
    """Requests that begin like one before, in little room, with a step of the scheduler between."""
    chance, before, live = random.Random(seed), list[list[int]](), list[Any]()
    for _ in range(steps):
        kind = chance.random()
        if (kind < 0.4 and len(live) < 4) or not live:
            head = chance.choice(before) if before and chance.random() < 0.7 else []
            prompt = head[: chance.randrange(len(head) + 1)]
            prompt = (prompt + [chance.randrange(3) for _ in range(chance.randrange(1, 30))])[:90]
            before.append(prompt)
            server.poison()
            req = server.request(prompt, extra_key=chance.choice([None, None, "a"]))
            if server.prefill(req):
                live.append(req)
        elif kind < 0.6:
            req = chance.choice(live)
            if len(req.output_ids) > 20 or not server.decode(req):
                live.remove(req)
                server.finish(req)
        else:
            req = live.pop(chance.randrange(len(live)))
            getattr(server, chance.choice(["finish", "finish", "abort", "retract"]))(req)
        server.cache.check_hicache_events()
        server.check()
    for req in live:
        server.abort(req)
    server.settle()
    assert server.cache.protected_size() == 0
    server.check()


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(2))
def test_a_history_in_little_room_loses_no_page_and_reads_no_other(page: int, seed: int, write: str) -> None:
    server = serving(page, 192, write=write, ratio=2.0)
    history(server, seed, 300)
    assert server.tiers["host"] > 10


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_history_with_storage_loses_no_page(write: str, tmp_path: Path) -> None:
    server = serving(4, 192, write=write, ratio=1.5, root=tmp_path)
    history(server, 7, 300)
    assert server.controller.meter.counts[TierCount.STORED_PAGES] > 50
    server.cache.release_host_resources()


def replicas(rank: Any, kind: str, seed: int) -> dict[str, Any]:
    """One rank of a fleet: a history, and then everything from storage again."""
    place = ParallelRank(rank.number, rank.shape.tp)
    made = {"kind": kind, "place": place, "group": rank.group, "root": rank.root / "store", "heads": 2}
    first = serving(4, 192, **made)
    history(first, seed, 150)
    served(first, list(range(40)), answer=0)
    served(first, list(range(100, 140)), answer=0)
    first.settle()
    meter = first.controller.meter
    torch.distributed.barrier()
    first.cache.release_host_resources()
    second = serving(4, 192, **made)
    second.poison()
    req = second.fetch([*range(40), 7])
    run(second, req)
    second.settle()
    second.cache.release_host_resources()
    return {
        "host": first.tiers["host"],
        "backed": meter.counts[TierCount.BACKED_PAGES],
        "stored": meter.counts[TierCount.STORED_PAGES],
        "fetched": req.storage_hit_length,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_agree_and_a_latent_is_stored_once(kind: str, tmp_path: Path) -> None:
    """sglang#24376."""
    (tmp_path / "store").mkdir()
    told = ranks(Shape(kind="mla" if kind == "latent" else "mha", tp=2), tmp_path, replicas, kind, 3)
    assert told[0]["host"] == told[1]["host"] > 0
    assert told[0]["backed"] == told[1]["backed"] > 0
    assert told[0]["fetched"] == told[1]["fetched"] == 40
    if kind == "latent":
        # Each page by one of them.
        assert told[0]["stored"] > 0 < told[1]["stored"]
        assert sum(rank["stored"] for rank in told) < told[0]["backed"] * 1.2
    else:
        assert told[0]["stored"] == told[1]["stored"]


def in_turn(server: TieredServer, place: ParallelRank, steps: Any) -> None:
    """Each step of the scheduler is taken behind that of the stage before, which would wait for ever for this one's."""
    taken, step = server.cache.check_hicache_events, itertools.count()

    def check_hicache_events() -> None:
        number = next(step)
        if place.pp:
            steps.wait([f"{place.tp} {place.pp - 1} {number}"])
        taken()
        steps.set(f"{place.tp} {place.pp} {number}", "")

    server.cache.check_hicache_events = check_hicache_events


def stages(rank: Any, kind: str, name: str) -> dict[str, Any]:
    """One rank of a fleet with pipeline stages: a history, and then everything from storage again."""
    place = ParallelRank.from_rank(rank.number, rank.shape.tp, rank.shape.pp)
    size = rank.shape.tp * rank.shape.pp
    held = place.layers(4)
    layers = range(held.start, held.start + held.count)
    group = rank.group if size > 1 else None
    heads = 1 if kind == "latent" else 4 // rank.shape.tp
    made = {"kind": kind, "place": place, "group": group, "root": rank.root / "store", "heads": heads, "layers": layers}
    first, second = serving(4, 192, **made), serving(4, 192, **made)
    if size > 1:
        for number, server in enumerate((first, second)):
            in_turn(server, place, FileStore(str(rank.root / f"{name} {number}"), size))
    history(first, 3, 100)
    served(first, list(range(40)), answer=0)
    first.settle()
    torch.distributed.barrier()
    second.poison()
    req = second.fetch([*range(40), 7])
    run(second, req)
    second.settle()
    torch.distributed.barrier()
    first.cache.release_host_resources()
    second.cache.release_host_resources()
    return {
        "host": first.tiers["host"],
        "operations": first.controller.collectives.serial,
        "fetched": req.storage_hit_length,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_stages_that_run_apart_agree_and_share_their_pages_with_other_fleets(kind: str, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    shape = "mla" if kind == "latent" else "mha"
    told = ranks(Shape(kind=shape, tp=2, pp=2), tmp_path, stages, kind, "stages")
    assert all(rank == told[0] for rank in told)
    assert told[0]["host"] > 0
    assert told[0]["operations"] > 10
    assert told[0]["fetched"] == 40
    (alone,) = ranks(Shape(kind=shape), tmp_path, stages_read, kind)
    assert alone == 40


def stages_read(rank: Any, kind: str) -> int:
    """What one rank finds of what the stages stored."""
    heads = 1 if kind == "latent" else 4
    server = serving(4, 192, kind=kind, root=rank.root / "store", heads=heads, layers=range(4))
    server.poison()
    req = server.fetch([*range(40), 7])
    run(server, req)
    server.settle()
    server.cache.release_host_resources()
    return req.storage_hit_length


def of_sglang(rank: Any) -> tuple[ParallelRank, Any]:
    """Where SGLang says that a rank stands, and the group that it is agreed in."""
    place = engine_radix.place()
    return place, engine_radix.fleet_group(place, parameters(4, 64, attn_tp_cache_group=rank.group))


def context_parallel(rank: Any, kind: str) -> dict[str, Any]:
    """One rank: a history, and then everything from storage again."""
    place, group = of_sglang(rank)
    heads = 1 if kind == "latent" else 4 // place.tp_size
    made = {"kind": kind, "place": place, "group": group, "root": rank.root / "store", "heads": heads}
    first = serving(4, 192, **made, layers=range(4))
    history(first, 3, 100)
    served(first, list(range(40)), answer=0)
    served(first, list(range(100, 140)), answer=0)
    first.settle()
    torch.distributed.barrier()
    second = serving(4, 192, **made, layers=range(4))
    second.poison()
    req = second.fetch([*range(40), 7])
    run(second, req)
    second.settle()
    torch.distributed.barrier()
    for server in (first, second):
        server.cache.release_host_resources()
    counts = first.controller.meter.counts
    return {
        "grid": place.grid,
        "fetched": req.storage_hit_length,
        "backed": counts[TierCount.BACKED_PAGES],
        "stored": counts[TierCount.STORED_PAGES],
        "host": first.tiers["host"],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("option", "tp", "grid"),
    [
        ("dcp_size", 2, "TP1 CP2"),
        ("dcp_size", 4, "TP2 CP2"),
        ("attn_cp_size", 2, "TP1 x2"),
        ("attn_cp_size", 4, "TP2 x2"),
    ],
)
def test_context_parallel_ranks_bring_back_their_part_and_share_their_pages(
    kind: str, option: str, tp: int, grid: str, tmp_path: Path
) -> None:
    """sglang#22782: what a rank holds of a page, and which of equal ones writes it, are of one coordinate.

    Ranks that divide the tokens of a page, or that hold all of them; and one rank reads what they stored.
    """
    (tmp_path / "store").mkdir()
    shape = Shape(kind="mla" if kind == "latent" else "mha", tp=tp)
    told = finish(start(shape, tmp_path, context_parallel, kind, **{option: 2}))
    assert {rank["grid"] for rank in told} == {grid}
    assert [(rank["fetched"], rank["host"]) for rank in told] == [(40, told[0]["host"])] * tp
    assert told[0]["host"] > 0
    equal = tp // (2 if option == "dcp_size" else 1) if kind == "latent" else 2 if option == "attn_cp_size" else 1
    written = sum(rank["stored"] for rank in told)
    assert told[0]["backed"] * tp / equal * 0.6 < written < told[0]["backed"] * tp / equal * 1.2
    assert all(rank["stored"] > 0 for rank in told)
    assert ranks(Shape(kind=shape.kind), tmp_path, stages_read, kind) == [40]


def context_of(**more: Any) -> Any:
    """What SGLang builds a cache of, for a server with a hierarchical cache."""
    params = parameters(4, 64)
    pool = pool_of("attention", 64, 4)
    params.token_to_kv_pool_allocator = paged.PagedTokenToKVPoolAllocator(64, 4, torch.float32, "cpu", pool, False)
    registered: list[Any] = []
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(prefill_aware_swa=False, forward_stream=None),
        register_hicache_layer_transfer_counter=registered.append,
        registered=registered,
    )
    told = {
        "params": params,
        "disable_radix_cache": False,
        "enable_hierarchical_cache": True,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "full_tokens_per_layer": 64,
        "tp_worker": worker,
    }
    return SimpleNamespace(**{**told, **more})


def test_the_plug_in_makes_the_cache_with_tiers_where_sglang_is_asked_for_them() -> None:
    context = context_of()
    cache = sglang_plugin.radix_cache(context)
    assert type(cache) is TieredRadixCache
    assert context.tp_worker.registered == [cache.gates]
    assert cache.token_to_kv_pool_allocator.get_kvcache().layer_transfer_counter is cache.gates


def of_stages(**more: Any) -> Any:
    context = context_of()
    for name, value in more.items():
        setattr(context.params, name, value)
    return context


@pytest.mark.parametrize(
    ("context", "word"),
    [
        (lambda: of_stages(is_eagle=True), "not a draft's pools"),
        (lambda: context_of(params=parameters(4, 64)), "not pools of NoneType"),
    ],
)
def test_what_the_tiers_would_not_bring_back_whole_is_refused(context: Any, word: str) -> None:
    with pytest.raises(EngineUnsupported, match=word):
        sglang_plugin.radix_cache(context())


def test_a_decode_server_with_stages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loop for it asks no hierarchical cache to go on."""
    monkeypatch.setattr(engine_radix, "is_decode", lambda: True)
    with pytest.raises(EngineUnsupported, match="not pipeline stages of a decode server"):
        sglang_plugin.radix_cache(of_stages(pp_size=2))
