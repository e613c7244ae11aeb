"""What a caller hands in is taken in every sensible form, and refused at the call, by its value, in all others."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from mover_fleets import CONFIG, POISON, Bench, Pair
from progress_cases import Threads

from kvmover.errors import KvmoverError, LayoutError, PeerRefused, PlanError, TransportError
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.cost import Route
from kvmover.transfer import AsyncMover, Gate, Model, Mover, MoverConfig, Place, Progress, SharedMover
from kvmover.transfer.config import Integrity
from kvmover.transport import LoopbackNetwork, LoopbackTransport

ATTENTION = Component.attention(2, 2, 8, "float32")

#: Tables that no request can have, whichever way it goes.
NO_TABLES: list[tuple[object, str]] = [
    ([[5.5, 1.7]], "page table 0 names page 5.5; page ids are whole numbers"),
    ([[5.0]], "page table 0 names page 5.0; page ids are whole numbers"),
    ([np.array([1.0, 2.0])], "page table 0 names page 1.0"),
    ([torch.tensor([1.5])], "page table 0 names page 1.5"),
    ([[True, False]], "names page True"),
    ([["1", "2"]], "names page '1'"),
    ([[2**70]], f"page id {2**70} of page table 0 is outside every pool"),
    ([[np.uint64(2**63)]], f"page id {2**63} of page table 0 is outside every pool"),
    ([5, 9], "page table 0 is 5; give one list of page ids a component, as [[0, 1]]"),
    ([[[1, 2], [3, 4]]], "page table 0 is [[1, 2], [3, 4]]"),
    ([[1, [2]]], "page table 0 cannot be read"),
    (7, "pages = 7; give one list of page ids a component"),
    ("12", "pages = '12'"),
]


@pytest.mark.parametrize(("tables", "reason"), NO_TABLES, ids=[reason for _, reason in NO_TABLES])
def test_page_ids_that_are_no_whole_numbers_are_refused_where_they_are_given(tables: Any, reason: str):
    pair = Pair.of()
    with pytest.raises(PlanError) as refused:
        pair.src.movers[0].send("request", tables)
    assert reason in str(refused.value)
    with pytest.raises(PlanError) as refused:
        pair.dst.movers[0].receive("request", "prefill", range(pair.tokens), tables)
    assert reason in str(refused.value)
    pair.bench.assert_nothing_is_left()


def test_no_tables_at_all_are_refused_but_of_a_receive_whose_pages_come_later():
    pair = Pair.of()
    absent: Any = None
    with pytest.raises(PlanError, match="pages = None"):
        pair.src.movers[0].send("request", absent)
    asked = pair.dst.movers[0].receive("request", "prefill", range(pair.tokens), absent)
    with pytest.raises(PlanError, match="pages = None"):
        pair.dst.movers[0].allocated(asked, absent)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ([5, 99], "page id 99 is outside a pool of 64 pages of attention"),
        ([5, 64], "page id 64 is outside a pool of 64 pages"),
        ([5, -1], "page id -1 is outside a pool of 64 pages"),
        ([-1, 5, -1], "page id -1 is outside a pool of 64 pages"),
        ([], "page table of attention is empty"),
    ],
)
def test_pages_that_are_not_of_the_pool_are_refused_by_send(table: list[int], reason: str):
    pair = Pair.of()
    with pytest.raises(PlanError, match=reason):
        pair.src.movers[0].send("request", [table])
    pair.bench.assert_nothing_is_left()
    transfers = [*pair.send(), *pair.receive()]
    pair.bench.ended(transfers)
    pair.assert_landed()


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)]
)
def test_page_tables_are_taken_as_lists_arrays_and_tensors(form: Any):
    pair = Pair.of()
    sent = pair.src.movers[0].send("request", [form(pair.src_tables[0][0].tolist())])
    landed = pair.dst.movers[0].receive(
        "request", "prefill", range(pair.tokens), (form(pair.dst_tables[0][0].tolist()),)
    )
    pair.bench.ended([sent, landed])
    pair.assert_landed()


def test_page_tables_are_taken_as_ranges():
    pair = Pair.of()
    pages = -(-pair.tokens // pair.src.fleet.page_tokens)
    assert pair.src.movers[0].send("request", [range(pages)]).result is None


def test_a_page_that_two_parts_of_a_request_would_land_in_is_refused():
    pair = Pair.of()
    table = pair.dst_tables[0][0].tolist()
    with pytest.raises(PlanError, match=f"page id {table[0]} is twice in the page table of attention"):
        pair.dst.movers[0].receive("request", "prefill", range(pair.tokens), [[*table[:-1], table[0]]])
    pair.bench.assert_nothing_is_left()


def test_a_page_that_two_parts_of_a_sent_request_would_be_in_is_refused():
    """Whichever of them is in it, the other would be sent the wrong KV."""
    pair = Pair.of()
    (source, *_), table = pair.src.movers, pair.src_tables[0][0].tolist()
    page = f"page id {table[0]} is twice in the page table of attention"
    with pytest.raises(PlanError, match=page):
        source.send("request", [[*table[:-1], table[0]]])
    growing = source.send("request", [table[:1]], gates=[])
    with pytest.raises(PlanError, match=page):
        source.produced(growing, Gate(None, tokens=8), [[table[1], table[0]]])
    source.produced(growing, Gate(None), [table[1:]])
    others = [
        mover.send("request", tables) for mover, tables in zip(pair.src.movers[1:], pair.src_tables[1:], strict=True)
    ]
    pair.bench.ended([growing, *others, *pair.receive()])
    pair.assert_landed()


def test_states_and_pages_of_windows_may_repeat_in_what_is_sent():
    """Engines fill up with any page what lies before a window; only they know where it begins."""
    bench = Bench((Component.sliding(2, 2, 8, 8, "float32"), Component.state("state", 2, 2, 8, "float32", states=2)))
    source = bench.engine("prefill", Fleet(page_tokens=4)).movers[0]
    assert source.send("request", [[7, 7, 3, 4], [5, 5]]).result is None


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("route", list(Route))
def test_pages_that_fill_a_window_or_a_ring_up_land_where_they_stand_again(route: Route, integrity: Integrity):
    """A window of three pages of which an engine names the last two, and a ring of which it names one state."""
    components = (Component.sliding(2, 2, 32, 12, "uint8"), Component.state("ring", 2, 2, 32, "uint8", states=3))
    bench = Bench(components, replace(CONFIG, route=route, integrity=integrity))
    src, dst = (bench.engine(name, Fleet(page_tokens=4)) for name in ("prefill", "decode"))
    dst.connect(src)
    bench.turn()
    for pool in src.pools[0]:
        for tensor in pool.tensors:
            tensor.copy_(torch.arange(tensor.numel()) % 251)
    (sent,) = src.send("request", [[np.array([7, 7, 3]), np.array([5, 5, 5])]])
    (landed,) = dst.receive("request", "prefill", range(12), [[np.array([2, 2, 9]), np.array([4, 4, 4])]])
    bench.ended([sent, landed])
    assert landed.result
    assert landed.result.reason is None
    for ours, theirs, pages in zip(dst.pools[0], src.pools[0], ({2: 7, 9: 3}, {4: 5}), strict=True):
        for layer, kv in product(range(2), range(ours.spec.component.kv)):
            wanted = torch.full_like(ours.plane(layer, kv), POISON)
            wanted[[*pages]] = theirs.plane(layer, kv)[[*pages.values()]]
            assert torch.equal(ours.plane(layer, kv), wanted)


@pytest.mark.parametrize("wanted", ["some", "nothing"])
def test_pages_before_what_is_wanted_may_repeat(wanted: str):
    """Engines fill a table up with any page where they have the prefix, and a decode that leaves asks for nothing."""
    pair = Pair.of()
    page, tokens = pair.dst.fleet.page_tokens, pair.tokens
    table = pair.dst_tables[0][0].tolist()
    first = 2 * page if wanted == "some" else tokens
    filled = [table[-1]] * (first // page) + table[first // page :]
    sent = pair.src.movers[0].send("request", pair.src_tables[0])
    landed = pair.dst.movers[0].receive("request", "prefill", range(first, tokens), [filled])
    pair.bench.ended([sent, landed])
    assert landed.result is not None
    assert landed.result.reason is None


def test_what_a_destination_has_may_be_no_page_at_the_source_and_who_asks_for_it_is_refused():
    """A prefill that is told how long a prefix its decode has names no pages of that."""
    pair = Pair.of()
    page, tokens = pair.src.fleet.page_tokens, pair.tokens
    first = 2 * page
    tables = [[np.append([-1, -1], table[2:]) for table in of] for of in pair.src_tables]
    for name, positions, reason in (
        ("some", range(first, tokens), "None"),
        ("more", range(page, tokens), "page id -1"),
    ):
        sent = [mover.send(name, of) for mover, of in zip(pair.src.movers, tables, strict=True)]
        landed = [
            mover.receive(name, "prefill", positions, of)
            for mover, of in zip(pair.dst.movers, pair.dst_tables, strict=True)
        ]
        pair.bench.ended([*sent, *landed])
        assert all(transfer.result and reason in str(transfer.result.reason) for transfer in landed)


def test_what_lies_before_a_window_may_be_no_page_at_all():
    component = Component.sliding(2, 2, 8, 8, "float32")
    bench = Bench((component,))
    source = bench.engine("prefill", Fleet(page_tokens=4)).movers[0]
    source.send("request", [[-1, -1, 3, 4]])
    with pytest.raises(PlanError, match="page id -1 is outside"):
        source.send("another", [[-1, 3, -1, 4]])


def test_a_rank_may_hold_nothing_of_a_short_request_where_context_parallelism_divides_it():
    bench = Bench((ATTENTION,))
    ranks = bench.engine("prefill", Fleet(cp=2, page_tokens=16)).movers
    ranks[1].send("short", [[]])
    with pytest.raises(PlanError, match="2 page tables for 1 components"):
        ranks[0].send("request", [[1], [2]])


@pytest.mark.parametrize("positions", [20, [0, 1, 2], (0, 20), slice(0, 20), None, 1.5])
def test_positions_are_a_range(positions: Any):
    pair = Pair.of()
    with pytest.raises(LayoutError) as refused:
        pair.dst.movers[0].receive("request", "prefill", positions, pair.dst_tables[0])
    assert f"positions = {positions!r}; give a range of tokens" in str(refused.value)


@pytest.mark.parametrize("name", [7, None, b"request", ""])
def test_a_request_is_named_by_text(name: Any):
    pair = Pair.of()
    with pytest.raises(PlanError, match="a request is named by text"):
        pair.src.movers[0].send(name, pair.src_tables[0])
    with pytest.raises(PlanError, match="a request is named by text"):
        pair.dst.movers[0].receive(name, "prefill", range(8), pair.dst_tables[0])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Model("toy", cast(Any, ATTENTION)), "give a tuple of them, as (attention,)"),
        (lambda: Model("toy", cast(Any, ("attention",))), "has a component 'attention', which is no Component"),
        (lambda: Model(cast(Any, 7), (ATTENTION,)), "a model is named by text, got 7"),
        (lambda: Place("decode", Fleet(), 5), "rank 5 of a fleet of 1 ranks"),
        (lambda: Place("decode", Fleet(), -1), "rank -1 of a fleet of 1 ranks"),
        (lambda: Place("decode", Fleet(), cast(Any, 0.0)), "decode has rank = 0.0; it must be a whole number"),
        (lambda: Place("decode", cast(Any, 2), 0), "decode has fleet = 2, which is no Fleet"),
        (lambda: Place(cast(Any, None), Fleet(), 0), "an engine is named by text, got None"),
        (lambda: Place("", Fleet(), 0), "an engine is named by text, got ''"),
        (lambda: Place("a\nb", Fleet(), 0), r"an engine's name is of characters that print, got 'a\nb'"),
        (lambda: Model("", (ATTENTION,)), "a model is named by text, got ''"),
        (lambda: Model("toy", ()), "model toy has no components; a cache has one at least"),
        (
            lambda: Model("toy", (ATTENTION, Component.mla(1, 8, "uint8"), ATTENTION)),
            "model toy has 2 components of the name attention",
        ),
    ],
)
def test_a_model_and_a_place_are_checked_when_they_are_made(make: Any, reason: str):
    with pytest.raises(LayoutError) as refused:
        make()
    assert reason in str(refused.value)


def test_components_may_come_in_a_list_and_a_rank_as_any_integer():
    model = Model("toy", cast(Any, [ATTENTION]))
    assert model == Model("toy", (ATTENTION,))
    assert model.fields() == Model("toy", (ATTENTION,)).fields()
    place = Place("decode", Fleet(tp=2), cast(Any, np.int64(1)))
    assert type(place.rank) is int


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        (range(257), "positions 0 to 257 take 65 pages of attention, of which there are 64"),
        (range(10**15), "positions 0 to 1000000000000000 take 250000000000000 pages of attention, of which"),
        (range(10**30, 10**30 + 4), "do not fit 63 bits"),
    ],
)
@pytest.mark.parametrize("tables", [None, [[3]]], ids=["named later", "named"])
def test_more_positions_than_a_pool_has_are_refused_before_anything_is_worked_out_of_them(
    positions: range, reason: str, tables: Any
):
    pair = Pair.of()
    with pytest.raises((PlanError, LayoutError)) as refused:
        pair.dst.movers[0].receive("request", "prefill", positions, tables)
    assert reason in str(refused.value)
    pair.bench.assert_nothing_is_left()


def test_what_lies_far_into_a_request_is_no_more_to_work_out():
    """A page that begins 10**15 tokens into a request: its table will be longer than any message, and is not sent."""
    pair = Pair.of()
    asked = pair.dst.movers[0].receive("request", "prefill", range(10**15, 10**15 + 4), None)
    assert not asked.ended
    with pytest.raises(PlanError, match="page table of 1 pages is too short"):
        pair.dst.movers[0].receive("other", "prefill", range(10**15, 10**15 + 4), [[3]])


def test_all_pages_of_a_pool_may_be_asked_for_and_of_parts_and_windows_one_more_may_be_touched():
    bench = Bench((ATTENTION, Component.sliding(2, 2, 8, 8, "float32")))
    for cp, tokens in ((1, 16), (2, 32), (3, 48)):
        source = bench.engine(f"prefill{cp}", Fleet(page_tokens=4))
        (mover, *_) = (target := bench.engine(f"decode{cp}", Fleet(cp=cp, page_tokens=4), pages=4)).movers
        target.connect(source)
        assert not mover.receive("request", source.name, range(tokens), None).ended
        with pytest.raises(PlanError, match=f"of attention, of which there are {4 * cp}"):
            mover.receive("larger", source.name, range(tokens + 4 * cp + 4), None)


POOL = Pool.zeros(PoolSpec.dense(ATTENTION, Fleet().shard(ATTENTION, 0, 1), 8, 64, "NHD"))


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ([], "0 pools for 1 components of toy"),
        ([POOL, POOL], "2 pools for 1 components of toy"),
        (POOL, "pools are given one a component, as [pool]; got Pool"),
        ([POOL.tensors[0]], "pool 0 is no Pool but tensor"),
    ],
)
def test_a_mover_refuses_what_is_not_one_pool_a_component(pools: Any, reason: str):
    transport = LoopbackTransport(LoopbackNetwork(), "decode-0")
    with pytest.raises(LayoutError) as refused:
        Mover(transport, Model("toy", (ATTENTION,)), Place("decode", Fleet(), 0), pools, CONFIG)
    assert reason in str(refused.value)


def test_a_mover_refuses_arguments_in_another_order():
    transport = LoopbackTransport(LoopbackNetwork(), "decode-0")
    model, place = Model("toy", (ATTENTION,)), Place("decode", Fleet(), 0)
    with pytest.raises(LayoutError, match="a mover takes a Model, got Place"):
        Mover(transport, cast(Any, place), cast(Any, model), [POOL], CONFIG)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sms": 0}, "mover config has sms = 0; it must be at least 1"),
        ({"sms": 1.5}, "mover config has sms = 1.5; it must be a whole number"),
        ({"arena_bytes": 1}, "mover config has arena_bytes = 1; it must be at least 256"),
        ({"arena_bytes": 1e9}, "mover config has arena_bytes = 1000000000.0; it must be a whole number"),
        ({"arena_bytes": "64MiB"}, "mover config has arena_bytes = '64MiB'; it must be a whole number"),
        ({"chunk_layers": -1}, "mover config has chunk_layers = -1; it must not be negative"),
        ({"chunk_layers": True}, "mover config has chunk_layers = True; it must be a whole number"),
        ({"deadline_s": "5"}, "mover config has deadline_s = '5'; it must be positive"),
        ({"deadline_s": float("nan")}, "mover config has deadline_s = nan; it must be positive"),
        ({"linger_s": float("inf")}, "mover config has linger_s = inf; it must be positive"),
        ({"costs": None}, "mover config has costs = None; it must be a Costs"),
        ({"backoff": 3}, "mover config has backoff = 3; it must be a Backoff"),
        ({"keys": b"secret"}, "mover config has keys = b'secret'; it must be a Keys"),
    ],
)
def test_a_mover_config_refuses_sizes_and_times_that_cannot_be(settings: dict[str, Any], reason: str):
    with pytest.raises(LayoutError) as refused:
        MoverConfig(**settings)
    assert str(refused.value) == reason


def test_what_belongs_to_a_request_is_refused_at_the_call_if_it_is_of_another_kind():
    pair = Pair.of()
    source, table = pair.src.movers[0], pair.src_tables[0]
    no: Any = 5
    for gates in (no, [no], ["layer 3"]):
        with pytest.raises(PlanError, match=r"gates = 5; give a list of Gate|a gate is a Gate\(event\), got"):
            source.send("request", table, gates=cast(Any, gates))
    with pytest.raises(PlanError, match="aux = 'token'; it must be bytes"):
        source.send("request", table, aux=cast(Any, "token"))
    with pytest.raises(PlanError, match="aux_from = 0; give a list of ranks"):
        pair.dst.movers[0].receive("request", "prefill", range(8), None, aux_from=cast(Any, 0))
    with pytest.raises(PlanError, match=r"a rank of aux_from = 0\.0; it must be a whole number"):
        pair.dst.movers[0].receive("request", "prefill", range(8), None, aux_from=cast(Any, [0.0]))
    calls: list[Any] = [
        lambda: source.produced(no, Gate(None)),
        lambda: source.attach(no, b"token"),
        lambda: source.allocated(no, [[1]]),
        lambda: source.abort(no, "enough"),
    ]
    for call in calls:
        with pytest.raises(PlanError, match="a transfer is what send or receive returned, got 5"):
            call()
    pair.bench.assert_nothing_is_left()
    growing = source.send("request", table, gates=[])
    with pytest.raises(PlanError, match=r"a gate is a Gate\(event\), got 5"):
        source.produced(growing, no)
    with pytest.raises(PlanError, match="aux = 5; it must be bytes"):
        source.attach(growing, no)


def test_a_payload_and_a_card_are_taken_as_any_bytes():
    pair = Pair.of()
    sent = [
        mover.send("request", table, aux=cast(Any, bytearray(b"token")))
        for mover, table in zip(pair.src.movers, pair.src_tables, strict=True)
    ]
    landed = pair.dst.movers[0].receive("request", "prefill", range(pair.tokens), pair.dst_tables[0], aux_from=[0])
    pair.bench.ended([landed, *sent])
    assert landed.landed().aux == {0: b"token"}
    assert pair.dst.movers[0].connect(cast(Any, memoryview(pair.src.movers[0].card))).startswith("prefill0")
    with pytest.raises(PeerRefused, match="a card is bytes, got 'prefill-0'"):
        pair.dst.movers[0].connect(cast(Any, "prefill-0"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"event": 5}, "gate has event = 5; it must have query(), as a CUDA event has, or be None"),
        ({"event": None, "layers": -1}, "gate has layers = -1; it must not be negative"),
        ({"event": None, "tokens": 1.5}, "gate has tokens = 1.5; it must be a whole number"),
    ],
)
def test_a_gate_is_checked_when_it_is_made(settings: dict[str, Any], reason: str):
    with pytest.raises(PlanError) as refused:
        Gate(**settings)
    assert str(refused.value) == reason


def test_a_shared_mover_takes_a_mover_and_drives_it():
    with Threads.of() as threads:
        source, target = (SharedMover(mover) for mover in threads.pair.bench.movers)
        with source, target:
            sent = source.send("request", threads.pair.src_tables[0])
            landed = target.receive("request", "prefill", range(threads.pair.tokens), threads.pair.dst_tables[0])
            source.wait([sent], 30)
            target.wait([landed], 30)
        threads.pair.assert_landed()


@pytest.mark.parametrize("kind", [Progress, SharedMover, AsyncMover])
def test_nothing_but_a_mover_is_driven(kind: Any):
    with pytest.raises(LayoutError, match="a Progress drives a Mover, got None"):
        kind(None)


def test_a_mover_with_a_thread_of_its_own_is_driven_by_nobody_else():
    with Threads.of() as threads:
        mover = threads.pair.bench.movers[0]
        first = Progress(mover)
        for call in (
            lambda: Progress(mover),
            mover.poll,
            lambda: mover.send("request", threads.pair.src_tables[0]),
            lambda: mover.receive("request", "prefill", range(8), threads.pair.src_tables[0]),
        ):
            with pytest.raises(KvmoverError, match="the mover of prefill rank 0"):
                call()
        first.close()


def test_a_mover_is_a_context_and_is_closed_behind_it():
    pair = Pair.of()
    with pair.src.movers[0] as mover:
        assert mover is pair.src.movers[0]
        sent = mover.send("request", pair.src_tables[0])
    assert sent.result is not None
    assert sent.result.reason == "this side closed"


def test_an_async_mover_has_what_a_collector_reads():
    with Threads.of() as threads:
        mover = AsyncMover(Progress(threads.pair.bench.movers[0]))
        assert (mover.snapshot().engine, mover.snapshot().rank) == ("prefill", 0)
        vars(mover)["_progress"].close()


@pytest.mark.parametrize("kind", [Mover, SharedMover, AsyncMover])
def test_a_mover_that_is_closed_begins_nothing(kind: Any):
    with Threads.of() as threads:
        pair = threads.pair
        mover: Any = pair.bench.movers[0]
        if kind is Mover:
            mover.close("it is taken out of service")
        else:
            progress = Progress(mover)
            mover = kind(progress)
            progress.close()
        for call in (
            lambda: mover.send("request", pair.src_tables[0]),
            lambda: mover.receive("request", "decode", range(8), pair.src_tables[0]),
        ):
            with pytest.raises(
                TransportError, match="the mover of prefill rank 0 is closed|the mover of rank 0 of pref"
            ):
                call()


def test_a_gate_of_fewer_tokens_than_one_before_is_refused_and_adds_nothing():
    pair = Pair.of()
    source, table = pair.src.movers[0], pair.src_tables[0][0]
    sent = source.send("request", [table[:5]], gates=[Gate(None, tokens=8)])
    source.produced(sent, Gate(None, layers=1, tokens=20))
    source.produced(sent, Gate(None, tokens=12))  # more of all layers, less of the first
    with pytest.raises(PlanError, match="a gate of 8 tokens of request request after one of 12 tokens: what was"):
        source.produced(sent, Gate(None, tokens=8), [table[5:]])
    with pytest.raises(PlanError, match="a gate of 16 tokens of 1 layers of request request after one of 20 tokens"):
        source.produced(sent, Gate(None, layers=1, tokens=16))
    source.produced(sent, Gate(None, tokens=12), [table[5:6]])  # the same again, with pages
    source.produced(sent, Gate(None, 0, 0), [table[6:7]])
    source.produced(sent, Gate(None), [table[7:]])
    pair.bench.ended([sent, *pair.receive()])
    pair.assert_landed()
