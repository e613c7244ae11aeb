"""Models and engines of more than one kind: hybrids, replicas that share the work, engines that share rank numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from mover_fleets import CONFIG, POISON, SMALL_CHUNKS, Bench, Engine, Pair, poisoned, truth_of

from kvmover.layout import AXES, Component, CpOrder, Fleet, Layout, Pool, PoolSpec
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.config import Integrity
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Place
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Transfer

ways = pytest.mark.parametrize(("verb", "route"), [(verb, route) for verb in Verb for route in Route])

#: Attention in some layers and sliding windows in others, keys of sparse attention, and the states of Mamba-2: the
#: temporal one, and the three steps of two sub-projections of the convolution.
HYBRID = (
    Component.attention(4, 2, 16, "bfloat16"),
    Component.sliding(4, 4, 8, 10, "bfloat16"),
    Component("index", 4, 1, 1, 12, "uint8"),
    Component("every 4", 4, 1, 1, 24, "uint8", row_tokens=4),
    Component.state("temporal", 4, 4, 32, "float32"),
    Component("conv x", 4, 3, 4, 8, "bfloat16", states=1),
    Component("conv b", 4, 3, 2, 8, "bfloat16", states=1),
)

KEYS = Component("keys", 3, 1, 1, 16, "float8_e4m3fn", row_tokens=4)
SCALES = Component("scales", 3, 1, 1, 1, "float32", row_tokens=4)
#: A window in small pages, rows of 4 and of 128 tokens, keys that choose among the rows of 4, with their scales beside
#: them in the same blocks, and what is not a full row yet: six pools, each with pages of its own.
COMPRESSED = (
    Component.sliding(4, 1, 96, 32, "uint8"),
    Component("c4", 3, 1, 1, 73, "uint8", row_tokens=4),
    Component("c128", 2, 1, 1, 73, "uint8", row_tokens=128),
    KEYS,
    SCALES,
    Component("c4 state", 3, 1, 2, 24, "float32", states=1),
)


def reasons(transfers: list[Transfer]) -> set[str | None]:
    assert all(transfer.result for transfer in transfers)
    return {transfer.result.reason for transfer in transfers if transfer.result}


def compressed_pools(fleet: Fleet, rank: int, pages: int) -> list[Pool]:
    """The pools of `COMPRESSED`, full of poison: keys and scales of a page in one block, one after the other."""
    pools: list[Pool] = []
    layers, rows = fleet.shard(KEYS, rank, 1).layers.count, fleet.page_rows(KEYS)
    block = rows * (KEYS.row_bytes + SCALES.row_bytes)
    blocks = torch.full((layers * pages * block,), POISON, dtype=torch.uint8)
    for component in COMPRESSED:
        spec = PoolSpec.dense(component, fleet.shard(component, rank, 1), pages, fleet.page_rows(component), "NHD")
        if component not in (KEYS, SCALES):
            pools.append(poisoned(spec))
            continue
        size = component.element_bytes
        stride = {"layer": pages * block // size, "page": block // size, "token": component.dim, "dim": 1}
        layout = Layout(AXES, tuple(map(spec.layout.extent_of, AXES)), tuple(stride.get(axis, 0) for axis in AXES))
        pools.append(Pool(PoolSpec(component, layout), (blocks[0 if component is KEYS else rows * KEYS.row_bytes :],)))
    return pools


@pytest.mark.parametrize(("verb", "route"), [(verb, route) for verb in Verb for route in (Route.PACKED, Route.DIRECT)])
@pytest.mark.parametrize("start", [0, 130])
def test_a_model_of_compressed_rows_moves_between_pages_of_unlike_sizes(verb: Verb, route: Route, start: int):
    """300 tokens: 75 rows of 4, 2 of 128, the last 32 of the window, a state. From 130 on: 43 rows of 4, one of 128."""
    bench = Bench(COMPRESSED, replace(CONFIG, verb=verb, route=route, costs=replace(SMALL_CHUNKS, chunk_bytes=1024)))
    fleets = {
        "prefill": Fleet(tp=2, page_tokens=256, pages={"sliding": 64}),
        "decode": Fleet(cp=2, page_tokens=32, pages={"c128": 1, "keys": 4, "scales": 4}),
    }
    engines: list[Engine] = []
    for name, fleet in fleets.items():
        pools = [compressed_pools(fleet, rank, 90) for rank in range(fleet.size)]
        movers = [bench.mover(Place(name, fleet, rank), pools[rank]) for rank in range(fleet.size)]
        engines.append(Engine(name, fleet, COMPRESSED, movers, pools))
    src, dst = engines
    dst.connect(src)
    bench.turn()
    src_tables, dst_tables = src.tables(300, 1), dst.tables(300, 2)
    for tables in (*src_tables, *dst_tables):
        tables[4] = tables[3]  # one table names the blocks that keys and scales share
    truth = truth_of(COMPRESSED, 300)
    src.fill(src_tables, truth)
    wanted = [component.wanted(range(start, 300)) for component in COMPRESSED]
    assert [len(rows) for rows in wanted] == {0: [32, 75, 2, 75, 75, 1], 130: [32, 43, 1, 43, 43, 1]}[start]
    expected = dst.landed(dst.snapshot(), dst_tables, truth, start)
    transfers = [*src.send("r", src_tables), *dst.receive("r", "prefill", range(start, 300), dst_tables)]
    bench.ended(transfers)
    assert reasons(transfers) == {None}
    for pools, others in zip(dst.pools, expected, strict=True):
        for pool, other in zip(pools, others, strict=True):
            for layer, kv in product(range(pool.spec.layout.extent_of("layer")), range(pool.spec.component.kv)):
                got, want = (each.plane(layer, kv).view(torch.uint8) for each in (pool, other))
                assert torch.equal(got, want), (pool.spec.component.name, layer, kv)
    bench.assert_nothing_is_left()


@ways
@pytest.mark.parametrize(("start", "chunk_layers"), [(0, 0), (21, 1)])
def test_a_hybrid_model_moves_from_tp2_pp2_to_tp1_cp2(verb: Verb, route: Route, start: int, chunk_layers: int):
    costs = replace(SMALL_CHUNKS, chunk_bytes=1024)
    config = replace(CONFIG, verb=verb, route=route, costs=costs, chunk_layers=chunk_layers, integrity=Integrity.DIGEST)
    bench = Bench(HYBRID, config)
    src = bench.engine("prefill", Fleet(tp=2, pp=2, page_tokens=8, pages={"sliding": 2}))
    dst = bench.engine("decode", Fleet(cp=2, page_tokens=4, cp_order=CpOrder.TOKEN), "HND", ("layer",))
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 53)
    offered = src.snapshot()
    transfers = [*pair.send(), *pair.receive(start=start)]
    bench.ended(transfers)
    assert reasons(transfers) == {None}
    pair.assert_landed(start)
    src.assert_holds(offered)
    bench.assert_nothing_is_left()


@ways
def test_a_hybrid_model_of_which_nothing_is_wanted_moves_nothing(verb: Verb, route: Route):
    bench = Bench(HYBRID, replace(CONFIG, verb=verb, route=route))
    src, dst = bench.engine("prefill", Fleet(tp=2, page_tokens=8)), bench.engine("decode", Fleet(page_tokens=8))
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 40)
    transfers = [*pair.send(), *pair.receive(start=40)]
    bench.ended(transfers)
    assert {transfer.landed().nbytes for transfer in transfers} == {0}
    dst.assert_holds(pair.before)


# Replicas


LATENT = Component.mla(2, 64, "bfloat16")


def sent_bytes(verb: Verb, replicas: Replicas, sources: int, destinations: int, tokens: int) -> list[int]:
    """Payload that left each source rank, whoever moved it."""
    config = replace(CONFIG, verb=verb, replicas=replicas, costs=replace(SMALL_CHUNKS, chunk_bytes=1024))
    bench = Bench((LATENT,), config)
    src = bench.engine("prefill", Fleet(tp=sources, page_tokens=4))
    dst = bench.engine("decode", Fleet(tp=destinations, page_tokens=4), "HND")
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, tokens)
    transfers = [*pair.send(), *pair.receive()]
    bench.ended(transfers)
    assert reasons(transfers) == {None}
    pair.assert_landed()
    received = sum(mover.meter.counts[Count.RECEIVED_BYTES] for mover in dst.movers)
    assert received == destinations * tokens * LATENT.token_bytes
    if verb is Verb.PUSH:
        sent = [mover.meter.counts[Count.SENT_BYTES] for mover in src.movers]
        assert sent == [transfer.landed().nbytes for transfer in transfers[:sources]]
    return [transfer.landed().nbytes for transfer in transfers[:sources]]


@pytest.mark.parametrize("verb", list(Verb))
@pytest.mark.parametrize(("sources", "destinations"), [(8, 1), (4, 2), (3, 1), (8, 4), (4, 8)])
def test_every_replica_sends_its_share_within_one_page(verb: Verb, sources: int, destinations: int):
    """DeepSeek's latent on TP8: eight NICs send a request, where peers send it from one."""
    tokens = 101  # 25 pages and a token
    sent = sent_bytes(verb, Replicas.STRIPE, sources, destinations, tokens)
    page_bytes = 4 * LATENT.token_bytes
    copies = max(destinations // sources, 1) if destinations % sources == 0 else 1
    assert sum(sent) == destinations * tokens * LATENT.token_bytes
    assert max(sent) - min(sent) <= page_bytes * copies


def test_elected_replicas_send_whole_requests():
    sent = sent_bytes(Verb.PUSH, Replicas.ELECT, 4, 2, 96)
    assert sorted(sent) == [0, 0, 96 * LATENT.token_bytes, 96 * LATENT.token_bytes]


# Data-parallel engines


def groups(bench: Bench) -> tuple[list[Engine], list[Engine]]:
    """Two prefill and two decode engines of two ranks each: four rank 0s and four rank 1s."""
    fleet = Fleet(tp=2, page_tokens=4)
    prefill = [bench.engine(f"prefill/{n}", fleet) for n in range(2)]
    decode = [bench.engine(f"decode/{n}", fleet, "HND") for n in range(2)]
    for target in decode:
        for source in prefill:
            target.connect(source)
    bench.turn()
    return prefill, decode


@ways
def test_requests_of_one_name_in_two_engines_never_mix(verb: Verb, route: Route):
    """Each data-parallel group numbers its requests itself."""
    bench = Bench((Component("attention", 2, 2, 4, 32, "bfloat16"),), replace(CONFIG, verb=verb, route=route))
    prefill, decode = groups(bench)
    pairs = [
        Pair.request(bench, src, dst, 60, seed) for seed, (src, dst) in enumerate(zip(prefill, decode, strict=True))
    ]
    transfers = [transfer for pair in pairs for transfer in (*pair.send(), *pair.receive())]
    bench.ended(transfers)
    assert reasons(transfers) == {None}
    for pair in pairs:
        pair.assert_landed()
    bench.assert_nothing_is_left()


def test_an_engine_that_fails_a_request_leaves_its_twin_s_alone():
    bench = Bench((Component("attention", 2, 2, 4, 32, "bfloat16"),))
    prefill, decode = groups(bench)
    pairs = [
        Pair.request(bench, src, dst, 60, seed) for seed, (src, dst) in enumerate(zip(prefill, decode, strict=True))
    ]
    failing, other = (pair.receive() for pair in pairs)
    bench.turn()
    for mover in prefill[0].movers:
        mover.refuse("request", "prefill/0 is out of memory")
    bench.turn()
    assert reasons(failing) == {"prefill/0 is out of memory"}
    assert not any(transfer.ended for transfer in other)
    sent = pairs[1].send()
    bench.ended([*sent, *other])
    assert reasons([*sent, *other]) == {None}
    pairs[1].assert_landed()
    decode[0].assert_holds(pairs[0].before)
    bench.assert_nothing_is_left()


def test_one_engine_serves_two_that_ask_for_the_same_request():
    """A prefill whose request is decoded twice, say for two samples in two groups."""
    bench = Bench((Component("attention", 2, 2, 4, 32, "bfloat16"),))
    (src, _), decode = groups(bench)
    truth, tables = truth_of(bench.components, 60), src.tables(60)
    src.fill(tables, truth)
    targets = [(dst, dst.tables(60, 7), dst.snapshot()) for dst in decode]
    received = [t for dst, dst_tables, _ in targets for t in dst.receive("request", src.name, range(60), dst_tables)]
    bench.turn()
    sent = src.send("request", tables)
    bench.ended([*sent, *received])
    assert reasons(received) == {None}
    for dst, dst_tables, before in targets:
        dst.assert_holds(dst.landed(before, dst_tables, truth))
    bench.assert_nothing_is_left()


def test_components_may_share_an_allocation_and_even_its_bytes_where_their_pages_differ():
    """As vLLM lays hybrids out: groups of layers own a page of one allocation by turns."""
    components = (Component.attention(2, 2, 16, "bfloat16"), Component.sliding(2, 2, 16, 64, "bfloat16"))
    fleet, bench = Fleet(page_tokens=8), Bench(components)
    memory: list[torch.Tensor] = []
    movers: list[Mover] = []
    for engine in ("prefill", "decode"):
        specs = [PoolSpec.dense(c, fleet.shard(c, 0, 1), 8, 8, "NHD") for c in components]
        flat = torch.full((specs[0].allocation_bytes,), POISON, dtype=torch.uint8)
        memory.append(flat)
        movers.append(bench.mover(Place(engine, fleet, 0), [Pool(spec, (flat,)) for spec in specs]))
    source, target = movers
    before = [torch.randint(0, POISON, flat.shape, dtype=torch.uint8) for flat in memory]
    for flat, content in zip(memory, before, strict=True):
        flat.copy_(content)
    target.connect(source.card)
    bench.turn()
    pages = [[1, 3], [4, 6]]
    transfers = [target.receive("request", "prefill", range(16), pages), source.send("request", pages)]
    bench.ended(transfers)
    assert reasons(transfers) == {None}
    (src, dst), planes = memory, len(specs[0].planes())
    expected = before[1].view(planes, 8, -1).clone()
    moved = sorted(page for table in pages for page in table)
    expected[:, moved] = before[0].view(planes, 8, -1)[:, moved]
    assert torch.equal(dst, expected.flatten())
    assert torch.equal(src, before[0])
    bench.assert_nothing_is_left()
