"""SGLang and vLLM describe one model alike: their cards agree, each reads the other's bytes, the rest is refused."""

from __future__ import annotations

import math
import socket
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvmover.cache.prefix import chain
from kvmover.config.settings import StoreSettings
from kvmover.engines.common import (
    BounceBuffer,
    Cards,
    CardServer,
    EngineMake,
    FirstToken,
    PackedBackend,
    ParallelRank,
    ToldLogprobs,
    open_store,
    told_logprobs,
)
from kvmover.engines.sglang.page_parts import PoolRows, part_of_rows
from kvmover.engines.sglang.pd_aux import AuxRows
from kvmover.engines.sglang.pd_cache import CacheTotals, RankCache, caches_of, pool_of
from kvmover.engines.sglang.pd_exchange import CardTable, Exchange, Met, RankCard, exchanged_caches, foreign_cards
from kvmover.engines.sglang.sglang_options import ModelFacts
from kvmover.engines.vllm import caches as vllm
from kvmover.engines.vllm.block_store import BlockStore
from kvmover.engines.vllm.connector_metadata import LoadSpec
from kvmover.engines.vllm.scheduler import Live
from kvmover.engines.vllm.vllm_content import token_hashes
from kvmover.errors import PeerRefused, ProtocolError
from kvmover.kernels import reference
from kvmover.layout import Component, Pool
from kvmover.store import Namespace
from kvmover.transfer import Content, Model, Mover, MoverConfig, Place
from kvmover.transport import LoopbackNetwork, LoopbackTransport, memory_of

LAYERS, HEADS, DIM, LATENT = 3, 4, 8, 24
NAMES = tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS))
PAGES, PAGE, BLOCKS, BLOCK = 5, 16, 12, 8
GQA, MLA = (2, HEADS, DIM), (1, 1, LATENT)


def told(buffers: list[torch.Tensor], dtype: str) -> Any:
    """`KVArgs` of SGLang's buffers [slot, head, dim], all K before all V."""
    return SimpleNamespace(
        kv_data_ptrs=[buffer.data_ptr() for buffer in buffers],
        kv_data_lens=[buffer.nbytes for buffer in buffers],
        kv_item_lens=[buffer[0].nbytes * PAGE for buffer in buffers],
        page_size=PAGE,
        kv_cache_dtype_str=dtype,
        num_draft_entries=0,
        mla_compression_ratios=None,
        state_types=[],
    )


def sglangs(model: tuple[int, int, int], dtype: str, place: ParallelRank) -> tuple[list[torch.Tensor], list[RankCache]]:
    """A rank's buffers and caches, in SGLang's words."""
    kv, heads, dim = model
    held = place.heads(heads).count if kv == 2 else 1
    buffers = [torch.zeros(PAGES * PAGE, held, dim, dtype=getattr(torch, dtype)) for _ in range(kv * LAYERS)]
    return buffers, caches_of(told(buffers, dtype), CacheTotals(kv, heads), place)


def vllms(
    model: tuple[int, int, int], dtype: str, place: ParallelRank, block: int = BLOCK
) -> tuple[torch.Tensor, list[vllm.ComponentCache], vllm.CacheGroup]:
    """A rank's allocation [layer, block, head, token, content] and caches, in vLLM's words."""
    kv, heads, dim = model
    held = place.heads(heads).count if kv == 2 else 1
    memory = torch.zeros(LAYERS, BLOCKS, held, block, kv * dim, dtype=getattr(torch, dtype))
    layers = [
        vllm.LayerCache(name, memory[n].data_ptr(), tuple(memory.shape[1:]), memory.stride()[1:], dtype)
        for n, name in enumerate(NAMES)
    ]
    group = vllm.CacheGroup(NAMES, "full_attention" if kv == 2 else "mla_attention", block, sides=kv)
    whole = vllm.ModelTotals(heads, LAYERS)
    return memory, vllm.component_caches([group], layers, BLOCKS, whole, place), group


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "word"), [(GQA, "attention"), (MLA, "mla")], ids=["gqa", "mla"])
def test_both_engines_have_the_same_words_for_a_model(model: tuple[int, int, int], word: str, dtype: str) -> None:
    """Whatever their parallelism: names, dtype, heads, layers, K and V, and so the digest of the handshake."""
    models: set[Model] = set()
    for place in (ParallelRank(0, 1), ParallelRank(1, 2)):
        ours = exchanged_caches(sglangs(model, dtype, place)[1], dtype)
        _, theirs, group = vllms(model, dtype, place)
        found = vllm.exchanged_caches(theirs, [group])
        assert ours
        assert found
        models |= {Model("tiny", (ours[0].component(LAYERS),)), Model("tiny", (found[0].component,))}
    (only,) = models
    assert only.components == (Component(word, LAYERS, *model, dtype),)


def test_caches_without_a_common_word_stay_in_the_words_of_their_engine() -> None:
    _, (cache,) = sglangs(GQA, "bfloat16", ParallelRank(0, 1))
    assert exchanged_caches([cache], "fp8_e4m3") is None
    assert exchanged_caches([cache, replace(cache, name="draft bfloat16")], "bfloat16") is None
    assert exchanged_caches([replace(cache, window=64)], "bfloat16") is None
    assert exchanged_caches([replace(cache, states=1)], "bfloat16") is None
    _, made, group = vllms(GQA, "bfloat16", ParallelRank(0, 1))
    assert vllm.exchanged_caches(made, [replace(group, sides=0)]) is None
    assert vllm.exchanged_caches([*made, *made], [group]) is None
    windowed = replace(made[0], component=replace(made[0].component, window=64))
    assert vllm.exchanged_caches([windowed], [group]) is None


def movers(model: tuple[int, int, int], page: int = PAGE) -> tuple[Mover, list[torch.Tensor], Mover, torch.Tensor]:
    """A rank of SGLang and one of vLLM, of one machine, each with its memory."""
    network, place, config = LoopbackNetwork(), ParallelRank(0, 1), MoverConfig(arena_bytes=1 << 20, sandbox_bytes=0)
    buffers, own = sglangs(model, "bfloat16", place)
    ours = exchanged_caches(own, "bfloat16")
    memory, made, group = vllms(model, "bfloat16", place)
    theirs = vllm.exchanged_caches(made, [group])
    assert ours
    assert theirs
    component = ours[0].component(LAYERS)
    pool = pool_of(ours[0], component, page, torch.device("cpu"))
    one = Mover(
        LoopbackTransport(network, "sglang"),
        Model("tiny", (component,)),
        Place("s", place.fleet(page), 0),
        [pool],
        config,
    )
    flat = memory.view(-1).view(torch.uint8)
    other = Mover(
        LoopbackTransport(network, "vllm"),
        Model("tiny", (theirs[0].component,)),
        Place("v", vllm.fleet_of(theirs, place, 1), 0),
        [
            Pool(
                theirs[0].spec,
                tuple(flat[start - flat.data_ptr() :][: theirs[0].spec.allocation_bytes] for start in theirs[0].starts),
            )
        ],
        config,
    )
    one.connect(other.card)
    while not other.ranks("s"):
        one.poll()
        other.poll()
    return one, buffers, other, memory


def rows_of_vllm(memory: torch.Tensor, blocks: list[int], kv: int, tokens: int) -> torch.Tensor:
    """[kv, layer, token, head, dim] of a request."""
    held = memory[:, blocks].transpose(2, 3).flatten(1, 2)[:, :tokens]
    return torch.stack(held.chunk(kv, dim=-1))


def rows_of_sglang(buffers: list[torch.Tensor], pages: list[int], kv: int, tokens: int) -> torch.Tensor:
    slots = [page * PAGE + token for page in pages for token in range(PAGE)][:tokens]
    return torch.stack([buffer[slots] for buffer in buffers]).unflatten(0, (kv, LAYERS))


@pytest.mark.parametrize("model", [GQA, MLA], ids=["gqa", "mla"])
def test_what_one_engine_computes_the_other_reads(model: tuple[int, int, int]) -> None:
    """37 tokens in SGLang's pages of 16 and vLLM's blocks of 8, there and back: keys are keys, values are values."""
    kv, tokens = model[0], 37
    one, buffers, other, memory = movers(model)
    pages, blocks = [4, 0, 2], [11, 3, 7, 0, 5]
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape))
    wanted = rows_of_sglang(buffers, pages, kv, tokens).clone()
    sent = one.send("7", [pages])
    got = other.receive("7", "s", range(tokens), [blocks])
    while not (sent.ended and got.ended):
        one.poll()
        other.poll()
    assert got.result is not None
    assert got.result.reason is None
    assert torch.equal(rows_of_vllm(memory, blocks, kv, tokens), wanted)
    for buffer in buffers:
        buffer.zero_()
    sent = other.send("8", [blocks])
    got = one.receive("8", "v", range(tokens), [[1, 3, 0]])
    while not (sent.ended and got.ended):
        one.poll()
        other.poll()
    assert torch.equal(rows_of_sglang(buffers, [1, 3, 0], kv, tokens), wanted)


def test_who_waits_for_a_request_is_known_before_it_is_sent() -> None:
    """By this a prefill that is told of no pages begins: of vLLM's ranks nobody speaks to SGLang's sockets."""
    one, _, other, _ = movers(GQA)
    content = Content(37, b"d" * 16)
    other.receive("7", "s", range(8, 37), [[11, 3, 7, 0, 5]], content=content)
    while not one.waiting("7"):
        one.poll()
        other.poll()
    ((place, positions, meant),) = one.waiting("7")
    assert (place.engine, place.rank, positions, meant) == ("v", 0, range(8, 37), content)
    one.send("7", [[4, 0, 2]])
    assert one.waiting("7") == []


def test_models_that_differ_refuse_each_other_with_both_lists() -> None:
    network, place = LoopbackNetwork(), ParallelRank(0, 1)
    _, own = sglangs(GQA, "bfloat16", place)
    cache = (exchanged_caches(own, "bfloat16") or own)[0]
    made: list[Mover] = []
    for number, (name, layers) in enumerate((("tiny", LAYERS), ("tiny", LAYERS), ("other", LAYERS))):
        component = cache.component(layers) if number != 1 else own[0].component(layers)
        pool = pool_of(cache if number != 1 else own[0], component, PAGE, torch.device("cpu"))
        seat = Place(f"e{number}", place.fleet(PAGE), 0)
        made.append(
            Mover(
                LoopbackTransport(network, f"r{number}"),
                Model(name, (component,)),
                seat,
                [pool],
                MoverConfig(arena_bytes=1 << 20, sandbox_bytes=0),
            )
        )
    with pytest.raises(
        PeerRefused, match=r"peer holds tiny \(kv bfloat16 3x2x4x16 uint8\).*holds tiny \(attention 3x2x4x8"
    ):
        made[0].connect(made[1].card)
    with pytest.raises(PeerRefused, match=r"peer holds other \(attention .*this side holds tiny \(attention"):
        made[0].connect(made[2].card)


def aux(rows: int = 3) -> tuple[list[torch.Tensor], AuxRows]:
    """SGLang's buffers beside the cache, in its order: token, cached, log probabilities, then others, then rooms."""
    kinds = [(torch.int32, 16), (torch.int32, 16), (torch.float32, 16), (torch.int32, 16), (torch.float32, 8)]
    kinds += [(torch.int32, 8), (torch.float32, 16), (torch.int64, 16), (torch.float32, 4), (torch.int64, 8)]
    buffers = [torch.full((rows, width), 9, dtype=dtype) for dtype, width in kinds]
    return buffers, AuxRows(told_of(buffers))


def told_of(buffers: list[torch.Tensor]) -> Any:
    return SimpleNamespace(aux_data_ptrs=[b.data_ptr() for b in buffers], aux_item_lens=[b[0].nbytes for b in buffers])


def test_a_first_token_stands_where_sglang_looks_for_it() -> None:
    buffers, rows = aux()
    rows.put_first(1, FirstToken(77, 32, -0.5, ((77, -0.5), (3, -2.0))), room=1 << 61)
    token, cached, logprob, logprob_token, top, top_tokens, *others, room = (buffer[1].tolist() for buffer in buffers)
    assert (token[0], cached[0], logprob[0], logprob_token[0], room[0]) == (77, 32, -0.5, 77, 1 << 61)
    assert (top[:2], top_tokens[:2]) == ([-0.5, -2.0], [77, 3])
    assert all(map(math.isnan, top[2:]))
    assert not any(map(any, others))
    assert all((buffer[[0, 2]] == 9).all() for buffer in buffers)
    AuxRows(told_of(buffers), rooms=-2).land(0, ToldLogprobs(), 8, FirstToken(5).encode())
    assert math.isnan(buffers[2][0, 0])
    assert buffers[0][0, 0] == 5
    assert (buffers[-2].view(torch.int64)[0, 0], buffers[-1][0, 0]) == (8, 0)


def test_a_first_token_comes_back_as_it_was_and_bytes_that_are_none_are_refused() -> None:
    first = FirstToken(7, 3, -0.25, ((1, -1.0),))
    assert FirstToken.decode(first.encode()) == first
    for bad in (b"", b"\xc1", msgspec.msgpack.encode({"type": "FirstToken", "token": -1}), b"x" * 100):
        with pytest.raises(ProtocolError, match="are no first token"):
            FirstToken.decode(bad)


def test_log_probabilities_that_a_router_hands_on_fill_what_the_prefill_did_not_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = told_logprobs({"kvmover_first_logprob": -0.5, "kvmover_first_top_logprobs": [[4, -0.5]], "x": 1}, "r")
    assert told.beside(FirstToken(4)) == FirstToken(4, 0, -0.5, ((4, -0.5),))
    assert told.beside(FirstToken(4, logprob=-0.1)) == FirstToken(4, logprob=-0.1)
    assert told_logprobs(None, "r") == ToldLogprobs()
    assert told_logprobs({"kvmover_first_logprob": []}, "r") == ToldLogprobs()
    assert "the first token's log probabilities of r" in caplog.text


def test_a_bootstrap_server_hands_out_cards_when_all_ranks_of_one_engine_have_laid_theirs() -> None:
    table = CardTable()
    assert table.answer()[0] == 503
    table.put(msgspec.msgpack.encode(RankCard("s", 1, 2, b"one")))
    assert table.answer() == (503, b"1 of 2 ranks have laid their cards here")
    table.put(msgspec.msgpack.encode(RankCard("s", 0, 2, b"zero")))
    assert table.answer() == (200, Cards("s", (b"zero", b"one"), EngineMake.SGLANG).encode())
    table.put(msgspec.msgpack.encode(RankCard("another", 0, 1, b"a")))
    assert table.answer()[0] == 409
    with pytest.raises(msgspec.MsgspecError):
        table.put(b"junk")


def test_an_engine_that_has_started_again_at_an_address_is_another() -> None:
    desk, met = CardServer("127.0.0.1", 0), list[bytes]()
    try:
        address, exchange = f"127.0.0.1:{desk.port}", Exchange("tiny")
        desk.lay_out("v-1", [b"one", b"two"])
        assert Exchange(None).meet(address, met.append) is None
        assert not exchange.has_changed(address)
        assert exchange.meet(address, met.append) == Met("v-1")
        assert (met, exchange.foreign.keys(), exchange.has_changed(address)) == ([b"one", b"two"], {address}, False)
        for name, card in (("v-1", b"one again"), ("v-2", b"three")):
            desk.lay_out(name, [card])
            assert exchange.has_changed(address)

        def refuse(card: bytes) -> None:
            raise PeerRefused(f"not {card!r}")

        assert exchange.meet(address, refuse) == Met("v-2", "not b'three'")
    finally:
        desk.close()
    assert not exchange.has_changed(address)


def test_a_burst_of_ranks_is_let_in_while_the_desk_is_busy() -> None:
    desk, busy = CardServer("127.0.0.1", 0), Event()
    accept = desk._server.get_request

    def late() -> Any:
        busy.wait(60)
        return accept()

    with closing(desk), ExitStack() as clients:
        desk._server.get_request = late
        for _ in range(256):
            clients.enter_context(socket.create_connection(("127.0.0.1", desk.port), timeout=5))
        busy.set()


def test_a_prefill_of_another_make_is_known_by_its_cards_and_sglangs_own_is_left_to_sglang() -> None:
    desk = CardServer("127.0.0.1", 0)
    try:
        assert foreign_cards(f"127.0.0.1:{desk.port}") is None  # not ready
        desk.lay_out("v", [b"one"])
        found = foreign_cards(f"127.0.0.1:{desk.port}")
        assert found is not None
        assert (found.engine, found.cards) == ("v", (b"one",))
        desk._body = Cards("s", (b"one",), EngineMake.SGLANG).encode()
        assert foreign_cards(f"127.0.0.1:{desk.port}") is None
    finally:
        desk.close()
    assert foreign_cards(f"127.0.0.1:{desk.port}") is None


@pytest.mark.parametrize("model", [GQA, MLA], ids=["gqa", "mla"])
def test_pages_that_one_engine_stores_the_other_reads(model: tuple[int, int, int], tmp_path: Path) -> None:
    """Keys of SGLang's are hashes that vLLM's scheduler takes of the same tokens; the bytes are those of the model."""
    kv, heads, dim = model
    space, settings, place = Namespace("tiny", "", PAGE), StoreSettings(root=tmp_path), ParallelRank(0, 1)
    buffers, own = sglangs(model, "bfloat16", place)
    cache = (exchanged_caches(own, "bfloat16") or own)[0]
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape))
    rows = PoolRows("kv", LAYERS, kv, heads, dim, "bfloat16")
    part = part_of_rows(rows, place, ModelFacts(heads, LAYERS, exchange="tiny"), PAGE)
    tokens = list(range(100, 100 + 3 * PAGE))
    keys = chain(b"", tokens, PAGE)
    memory, made, group = vllms(model, "bfloat16", place, PAGE)
    (theirs,) = vllm.exchanged_caches(made, [group]) or made
    assert theirs.component == part.component == cache.component(LAYERS)
    bounce = BounceBuffer.of(part.nbytes)
    with closing(open_store(settings, space)) as store:
        store.register(memory_of(bounce.memory))
        pool = pool_of(cache, part.component, PAGE, torch.device("cpu"))
        backend = PackedBackend(pool, store.view(space, part), 1, bounce, bounce, reference.move)
        assert backend.put(keys, np.array([4, 0, 2])) == [True] * 3
    flat = memory.view(-1).view(torch.uint8)
    blocks = BlockStore.open(settings, space, place.fleet(PAGE), 0, [(theirs, flat)])
    with closing(blocks.store):
        request = SimpleNamespace(all_token_ids=tokens, prompt_embeds=None)
        names = token_hashes(Live(request, None, 0), PAGE)
        assert blocks.get(LoadSpec("r", tuple(names), (1, 5, 3))) == [True] * 3
    wanted = rows_of_sglang(buffers, [4, 0, 2], kv, 3 * PAGE)
    assert torch.equal(rows_of_vllm(memory, [1, 5, 3], kv, 3 * PAGE), wanted)


def test_a_request_of_more_than_tokens_has_no_pages_that_others_find() -> None:
    request = SimpleNamespace(all_token_ids=list(range(40)), lora_request=object())
    assert token_hashes(Live(request, None, 0), PAGE) == ()
    request.lora_request, known = None, Live(request, None, 0)
    first = list(token_hashes(known, PAGE))
    request.all_token_ids += range(40, 70)
    assert (len(first), token_hashes(known, PAGE)) == (2, chain(b"", request.all_token_ids, PAGE))
