"""Other engines' host memory as a tier of vLLM's own TieringOffloadingManager: unlike block sizes and axis orders."""

# vLLM is in its engine's own environment, which no type checker looks into.
# pyright: reportMissingImports=false

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from engine_core import by_a_trainers_extension, core_of_manager, flushed, has_sources
from offload_manager import Managed
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvmover.config import ConfigError
from kvmover.engines.common import EngineUnsupported, WeightSource, outcome_of
from kvmover.engines.vllm.peer_offloading import ChunkLayout, TokenOrder
from kvmover.engines.vllm.served_model import ServedModel
from kvmover.engines.vllm.vllm_contract import VLLM
from kvmover.layout import Component, Pool
from kvmover.transport import Memory, MemoryKind

CacheHitSource = VLLM.find("vllm.v1.metrics.cache_hit_source:CacheHitSource")

KV = Component.attention(layers=3, kv_heads=2, head_dim=8, dtype="float32")
TOKEN_BYTES = 3 * 2 * 2 * 8 * 4
CHUNKS = 16

_ids = count()


@dataclass(eq=False)
class Prompt:
    """A request, as far as the tier reads one."""

    request_id: str
    all_token_ids: list[int]
    kv_hints: Any = None
    kv_transfer_params: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def key_of(tokens: Sequence[int]) -> OffloadKey:
    """vLLM's own hash of a prefix is nothing that others know: any will do."""
    return make_offload_key(hash(("vllm", *tokens)).to_bytes(8, signed=True) * 4, 0)


class Served(ServedModel):
    """Of no connector."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def component(self) -> Component:
        return KV

    def weight_sources(self) -> list[WeightSource]:
        return [WeightSource("nowhere", form="dummy")]


def config_of(block: int, layout: str, tier: dict[str, Any], **options: Any) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(block, tuple(f"layers.{n}" for n in range(3)), 0),),
        worker_kv_bytes_per_block=block * TOKEN_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": CHUNKS * -(-block * TOKEN_BYTES // 4096) * 4096,
            "eviction_policy": "LendingPolicy",
            "cache_policy_module_path": "kvmover.engines.vllm",
            "secondary_tiers": [
                {"type": "KvmoverPeerTier", "module_path": "kvmover.engines.vllm", "weights": "tiny", **tier}
            ],
            **options,
        },
        engine_id=f"peers-{next(_ids)}-{time.monotonic_ns()}",
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(block, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        canonical_layout=True,
        kv_cache_layout=layout,
    )


class Offload(Managed):
    """vLLM's manager over memory of its own, driven as its scheduler does, for chunks of `block` tokens."""

    def __init__(self, block: int, layout: str, tier: dict[str, Any], **options: Any) -> None:
        self.block, self.served = block, Served()
        self.spec = TieringOffloadingSpec(config_of(block, layout, tier, **options))
        with self.served:
            self.manager: Any = self.spec.get_manager()
        region: Any = self.spec._scheduler_mmap
        memory = region.base_tensor.view(torch.uint8).flatten()
        where = Memory(MemoryKind.HOST, memory.data_ptr(), memory.numel())
        self.pool: Pool = ChunkLayout(KV, block, memory.numel() // CHUNKS, TokenOrder(layout)).pool(where)
        self.tier = self.manager.secondary_tiers[0]
        self.counts: dict[str, float] = {}
        self.answers: list[tuple[str, str]] = []
        self.served.hinted = lambda request, kind, answer: self.answers.append((kind, outcome_of(answer)))

    def met(self, address: str) -> None:
        stop = time.monotonic() + 30
        while not self.tier._remote.peers.ranks(address):
            assert time.monotonic() < stop
            time.sleep(0.01)

    def told(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        for labels, value in values.items() if name == "vllm:kvmover_peer_loads" else ():
            self.counts[labels[0]] = self.counts.get(labels[0], 0) + value

    def begin(self, tokens: Sequence[int], **hinted: Any) -> tuple[ReqContext, list[OffloadKey], Prompt]:
        prompt = Prompt(f"r{next(_ids)}", list(tokens), **hinted)
        self.served.seen(prompt)
        context = ReqContext(prompt.request_id)
        ends = range(self.block, len(tokens) + 1, self.block)
        keys = [key_of(tokens[:end]) for end in ends]
        for key, end in zip(keys, ends, strict=True):
            context.set_offload_key_position(key, end)
        self.manager.on_new_request(context)
        return context, keys, prompt

    def rows(self, row: int) -> torch.Tensor:
        """[layer, kv, token, head, dim] of a chunk."""
        return torch.stack([torch.stack([self.pool.plane(layer, kv)[row] for kv in range(2)]) for layer in range(3)])

    def compute(self, tokens: Sequence[int]) -> None:
        """A request whose chunks come from the device."""
        context, keys, _prompt = self.begin(tokens)
        placed = self.manager.prepare_store(keys, context)
        for key, row in zip(placed.keys_to_store, placed.store_spec.chunk_ids.tolist(), strict=True):
            first = keys.index(key) * self.block
            truth = meant(tokens[first : first + self.block])
            for layer in range(3):
                for kv in range(2):
                    self.pool.plane(layer, kv)[row] = truth[layer, kv]
        self.manager.complete_store(placed.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.finish()

    def ask(self, tokens: Sequence[int], **hinted: Any) -> int:
        """Tokens at the beginning that vLLM has for a request, and whether they are right is checked."""
        context, keys, _prompt = self.begin(tokens, **hinted)
        stop, hits = time.monotonic() + 60, 0
        while hits < len(keys):
            assert time.monotonic() < stop
            found = self.manager.lookup(keys[hits], context)
            if found is LookupResult.HIT:
                hits += 1
            elif found is LookupResult.MISS:
                break
            else:
                for key in keys[hits + 1 :]:  # as vLLM, which looks at all of a prompt in a step
                    self.manager.lookup(key, context)
                self.step()
                time.sleep(0.001)
        if hits:
            rows = self.manager.prepare_load(keys[:hits], context).chunk_ids.tolist()
            for chunk, row in enumerate(rows):
                wanted = meant(tokens[chunk * self.block : (chunk + 1) * self.block])
                assert torch.equal(self.rows(row), wanted), (chunk, row)
            if has_sources(self.manager):
                self.sources = {self.manager.get_load_source(key, context) for key in keys[:hits]}
            self.manager.complete_load(keys[:hits], context)
        self.manager.on_request_finished(context)
        self.finish()
        return hits * self.block

    def close(self) -> None:
        self.manager.shutdown()

    def core(self) -> Any:
        """The engine's, by which its weights are updated."""
        return core_of_manager(self.spec.config.engine_id, self.manager)


def meant(tokens: Sequence[int]) -> torch.Tensor:
    """[layer, kv, token, head, dim] of KV that says which token, layer, side and head it is of."""
    rows = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1, 1) * 1000
    layer = torch.arange(3).view(3, 1, 1, 1, 1) * 100
    side = torch.arange(2).view(1, 2, 1, 1, 1) * 10
    head = torch.arange(2).view(1, 1, 1, 2, 1)
    return rows + layer + side + head + torch.arange(8).view(1, 1, 1, 1, 8) / 10


def addresses(amount: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(amount)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Offload]]:
    monkeypatch.setenv("KVMOVER_PEERS_ASK_S", "2")
    monkeypatch.setenv("KVMOVER_PEERS_MEET_S", "0.05")
    monkeypatch.setenv("KVMOVER_PEERS_SILENCE_S", "0.5")
    with ExitStack() as stack:

        def begun(*given: Any, **more: Any) -> Offload:
            made = Offload(*given, **more)
            stack.callback(made.close)
            return made

        yield begun


def pair(start: Callable[..., Offload], *shapes: tuple[int, str]) -> list[Offload]:
    every = addresses(len(shapes))
    made = [
        start(block, layout, {"address": address, "engines": every})
        for (block, layout), address in zip(shapes, every, strict=True)
    ]
    for engine, own in zip(made, every, strict=True):
        for address in every:
            if address != own:
                engine.met(address)
    return made


PROMPT = list(range(7, 7 + 136))


def test_what_an_engine_of_another_block_size_has_is_read_from_its_host(
    start: Callable[..., Offload],
) -> None:
    first, second = pair(start, (16, "LBHNC"), (32, "LBNHC"))
    assert second.ask(PROMPT) == 0
    first.compute(PROMPT)
    assert second.ask(PROMPT) == 128
    assert not has_sources(second.manager) or second.sources == {CacheHitSource.P2P}
    assert second.counts == {"read": 4}
    assert second.ask(PROMPT) == 128  # from the host
    assert second.counts == {"read": 4}
    assert not has_sources(second.manager) or second.sources == {CacheHitSource.HOST}


def test_only_what_the_host_lacks_is_asked_for_and_what_was_read_is_lent_on(start: Callable[..., Offload]) -> None:
    first, second, third = pair(start, (32, "LBNHC"), (16, "LBHNC"), (16, "LBNHC"))
    first.compute(PROMPT)
    second.compute(PROMPT[:48])
    assert second.ask(PROMPT) == 128
    assert second.counts == {"read": 5}
    first.close()
    assert third.ask(PROMPT) == 128
    assert third.counts == {"read": 8}


def test_chunks_that_were_evicted_are_not_lent(start: Callable[..., Offload]) -> None:
    first, second = pair(start, (16, "LBHNC"), (16, "LBHNC"))
    first.compute(PROMPT)
    first.compute(range(1000, 1000 + 16 * CHUNKS))
    assert second.ask(PROMPT) == 0
    assert second.ask(range(1000, 1000 + 16 * CHUNKS)) == 16 * CHUNKS
    first.manager.reset_cache()
    flushed(first.manager)
    second.manager.reset_cache()
    flushed(second.manager)
    assert second.ask(range(1000, 1000 + 16 * CHUNKS)) == 0


def test_a_peer_that_went_away_costs_a_miss(start: Callable[..., Offload]) -> None:
    first, second = pair(start, (16, "LBHNC"), (32, "LBNHC"))
    first.compute(PROMPT)
    context, keys, prompt = second.begin(PROMPT)
    found, stop = LookupResult.RETRY, time.monotonic() + 30
    while found is LookupResult.RETRY:
        assert time.monotonic() < stop
        found = second.manager.lookup(keys[0], context)
        if found is LookupResult.RETRY:
            second.step()
            second.tier._remote.peers.wait(0.01)
    assert found is LookupResult.HIT_PENDING  # the peer offers it
    first.close()
    second.step()  # the read begins
    second.finish()
    assert second.manager.lookup(keys[0], context) is LookupResult.MISS
    second.manager.on_request_finished(context)
    assert second.counts == {"failed": 1}
    assert second.ask(PROMPT) == 0
    assert prompt.num_tokens == 136


def test_a_request_of_more_than_tokens_is_neither_lent_nor_asked_for(start: Callable[..., Offload]) -> None:
    first, second = pair(start, (16, "LBHNC"), (16, "LBHNC"))
    prompt = Prompt("salted", PROMPT)
    prompt.cache_salt = "salt"  # type: ignore[attr-defined]
    plain = Prompt("plain", PROMPT)
    for engine in (first, second):
        engine.served.seen(prompt)
        engine.served.seen(plain)
        assert engine.tier.begun(ReqContext("salted")).pages is None
        assert engine.tier.begun(ReqContext("plain")).pages is not None


def test_an_engine_that_cannot_lend_says_so(start: Callable[..., Offload]) -> None:
    (address,) = addresses(1)
    tier = {"address": address}
    with pytest.raises(ConfigError, match="LendingPolicy"):
        start(16, "LBHNC", tier, eviction_policy="lru")
    with pytest.raises(ConfigError, match="KVMOVER_PEERS_ADDRESS"):
        start(16, "LBHNC", {})
    with pytest.raises(EngineUnsupported, match="BLHNC"):
        start(16, "BLHNC", tier)
    with pytest.raises(ConfigError, match="unknown"):
        start(16, "LBHNC", {**tier, "unknown": 1})


def test_an_engine_whose_weights_are_updated_shares_chunks_of_its_version_alone(start: Callable[..., Offload]) -> None:
    first, second = pair(start, (16, "LBHNC"), (32, "LBNHC"))
    first.compute(PROMPT)
    own = first.tier._remote.peers.engine, second.tier._remote.peers.engine
    first.core().collective_rpc(by_a_trainers_extension)
    assert second.ask(PROMPT) == 0
    assert not second.tier._remote.peers.ranks(own[0])
    second.core().collective_rpc(by_a_trainers_extension)
    for engine in (first, second):
        engine.core().set_weight_version("7")
    first.met(own[1])
    second.met(own[0])
    assert second.ask(PROMPT) == 0  # what the first had was of weights before
    first.compute(PROMPT)
    assert second.ask(PROMPT) == 128
    assert second.counts == {"read": 4}


def named(address: str) -> dict[str, Any]:
    """Dynamo's words for a source."""
    payload = {"source_control_endpoint": f"tcp://{address}", "block_hashes": [17], "mode": "copy"}
    fetch = {"action_id": "f", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [fetch]}


def llm_d(address: str, key: str = "remote_kv_source") -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {key: {"kv_request_id": "q", "remote_host": host, "remote_port": int(port)}}


def test_a_source_that_only_the_router_knows_is_met_and_read_whoever_names_it(
    start: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lender's address is what Dynamo's worker tells its router of the tier, and no list has it."""
    monkeypatch.setenv("KVMOVER_EXCHANGE_ALLOW", "127.0.0.0/8")
    source, *own = addresses(4)
    told = {
        "router_capabilities": ["router_hint"],
        "control_ports": [source.rpartition(":")[2]],
        "control_advertise_host": "127.0.0.1",
    }
    first = start(16, "LBHNC", told)
    first.compute(PROMPT)
    words: list[dict[str, Any]] = [
        {"kv_hints": named(source)},
        {"kv_transfer_params": llm_d(source)},
        {"kv_transfer_params": llm_d(source, "remote_prefiller")},
    ]
    for address, said in zip(own, words, strict=True):
        second = start(32, "LBNHC", {"address": address})
        assert second.ask(PROMPT) == 0  # nobody is asked unless a request names somebody
        assert second.ask(PROMPT, **said) == 128
        assert second.counts == {"read": 4}
        assert second.ask(PROMPT, **said) == 128  # from the host
        assert second.answers == [("fetch", "met"), ("fetch", "needless")]


def test_a_source_that_brings_nothing_is_computed_and_counted_and_others_are_served(
    start: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair(start, (16, "LBHNC"), (32, "LBNHC"))
    away, strange, dead = addresses(3)
    start(16, "LBHNC", {"address": strange, "weights": "other"}).compute(PROMPT)
    first.compute(PROMPT)
    other = list(range(5000, 5128))
    assert second.ask(other, kv_hints=named(away)) == 0
    assert second.ask(other, kv_hints=named(first.tier._remote.peers.engine)) == 0  # it is in the list, and has none
    assert second.answers == [("fetch", "not_allowed"), ("fetch", "absent")]
    monkeypatch.setenv("KVMOVER_EXCHANGE_ALLOW", "127.0.0.1")
    third = start(32, "LBNHC", {"address": away, "engines": [first.tier._remote.peers.engine]})
    third.met(first.tier._remote.peers.engine)
    assert third.ask(PROMPT, kv_hints=named(dead)) == 0
    assert third.ask(PROMPT, kv_hints=named(strange)) == 0
    assert third.ask(PROMPT) == 128
    assert third.answers == [("fetch", "unreachable"), ("fetch", "not_a_peer")]


def test_what_is_told_to_a_router_is_the_address_that_is_served(start: Callable[..., Offload]) -> None:
    (address,) = addresses(1)
    tier = {"address": address, "router_capabilities": ["router_hint"]}
    with pytest.raises(ConfigError, match="control_advertise_host"):
        start(16, "LBHNC", tier)
    with pytest.raises(ConfigError, match="leave one out"):
        start(16, "LBHNC", {**tier, "control_ports": [1], "control_advertise_host": "127.0.0.1"})
    with pytest.raises(ConfigError, match="router_capabilities"):
        start(16, "LBHNC", {**tier, "router_capabilities": ["teleport"]})
