"""The cost model takes the cheaper route, says why, and never finds more runs cheaper."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import PlanError
from kvmover.layout import Component, Fleet
from kvmover.plan import HOST, RDMA, Costs, Plan, Posting, Route
from kvmover.plan.explain import explain
from kvmover.plan.fleet_text import FleetText

NBYTES = st.integers(1, 1 << 40)
RATES = st.floats(1, 1e6)
COSTS = st.builds(
    Costs,
    descriptor_us=st.floats(0.01, 100),
    wire_rate=RATES,
    gather_rate=RATES,
    scatter_rate=RATES,
    chunk_us=st.floats(0.1, 1000),
    chunk_bytes=st.integers(1 << 10, 1 << 30),
    posting=st.sampled_from(Posting),
)


@given(COSTS, NBYTES, st.integers(1, 1 << 30))
def test_the_cheaper_route_is_chosen_and_direct_when_they_tie(costs: Costs, nbytes: int, runs: int) -> None:
    choice = costs.choose(nbytes, runs)
    assert choice.direct_us == costs.direct_us(nbytes, runs)
    assert choice.packed_us == costs.packed_us(nbytes, costs.chunks(nbytes))
    assert (choice.route is Route.DIRECT) == (choice.direct_us <= choice.packed_us)
    assert (choice.nbytes, choice.runs) == (nbytes, runs)


def test_a_tie_goes_direct() -> None:
    costs = Costs(1.0, 1.0, 4.0, 4.0, 1.0, 100)
    assert costs.direct_us(100, 150) == costs.packed_us(100, 1) == 150
    assert costs.choose(100, 150).route is Route.DIRECT
    assert costs.choose(100, 151).route is Route.PACKED


@pytest.mark.parametrize("posting", [Posting.INLINE, Posting.SOCKET])
def test_a_window_is_two_chunks_and_what_the_latency_hides_and_a_nic_has_none(posting: Posting) -> None:
    costs = Costs(2.0, 10.0, 40.0, 40.0, 1.0, 100, posting, latency_us=7.0)
    assert costs.window_bytes == 2 * 100 + 7 * 10
    assert replace(costs, posting=Posting.AHEAD).window_bytes == math.inf


@given(COSTS, NBYTES, st.integers(1, 1 << 30), st.sampled_from(Route))
def test_through_a_socket_a_transfer_takes_as_long_as_by_a_nic_of_that_rate(
    costs: Costs, nbytes: int, runs: int, route: Route
) -> None:
    ahead, socket = (replace(costs, posting=posting) for posting in (Posting.AHEAD, Posting.SOCKET))
    assert ahead.us(route, nbytes, runs) == socket.us(route, nbytes, runs)


@given(COSTS, st.integers(1, 40))
def test_the_packed_route_takes_as_long_as_its_chunks_step_by_step(costs: Costs, chunks: int) -> None:
    """Chunks of equal size go through gather, wire and scatter, of which each has one chunk at a time."""
    costs = replace(costs, posting=Posting.AHEAD, chunk_us=1e-6)
    ended = [0.0, 0.0, 0.0]
    for _ in range(chunks):
        before = 0.0
        for stage, rate in enumerate((costs.gather_rate, costs.wire_rate, costs.scatter_rate)):
            before = ended[stage] = max(before, ended[stage]) + costs.chunk_bytes / rate
    assert costs.packed_us(chunks * costs.chunk_bytes, chunks) == pytest.approx(ended[-1], rel=1e-6)


def test_posting_adds_to_the_wire_inline_and_hides_behind_it_ahead() -> None:
    ahead = Costs(2.0, 10.0, 40.0, 40.0, 1.0, 100)
    inline = replace(ahead, posting=Posting.INLINE)
    assert (ahead.direct_us(1000, 30), ahead.direct_us(1000, 80)) == (100, 160)
    assert (inline.direct_us(1000, 30), inline.direct_us(1000, 80)) == (160, 260)


def test_a_core_that_posts_and_copies_gathers_and_writes_one_after_the_other() -> None:
    ahead = Costs(1.0, 10.0, 5.0, 20.0, 3.0, 100)
    inline = replace(ahead, posting=Posting.INLINE)
    # Ahead: 20 + 10 + 5 for one chunk, and 20 to gather each of three more. Inline: 80 + 40 + 4 * 3, and 5.
    assert (ahead.packed_us(400, 4), inline.packed_us(400, 4)) == (95, 137)
    slow = replace(inline, scatter_rate=1.0)
    # The other side's core is the slower: it begins when the first chunk is there, and scatters without a rest.
    assert slow.packed_us(400, 4) == 20 + 10 + 400


def test_processes_of_one_host_pack_sooner_because_the_same_core_posts_and_copies() -> None:
    ahead = replace(HOST, posting=Posting.AHEAD)
    nbytes, runs = 8 << 20, 750
    assert (ahead.choose(nbytes, runs).route, HOST.choose(nbytes, runs).route) == (Route.DIRECT, Route.PACKED)


@pytest.mark.parametrize(
    "name", ["descriptor_us", "wire_rate", "gather_rate", "scatter_rate", "chunk_us", "chunk_bytes"]
)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_costs_that_divide_by_nothing_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"{name} = {value}"):
        replace(RDMA, **{name: value})


@given(COSTS, NBYTES, st.integers(1, 1 << 30), st.integers(0, 1 << 30))
def test_more_runs_never_make_the_direct_route_cheaper_or_more_likely(
    costs: Costs, nbytes: int, runs: int, more: int
) -> None:
    assert costs.direct_us(nbytes, runs) <= costs.direct_us(nbytes, runs + more)
    if costs.choose(nbytes, runs).route is Route.PACKED:
        assert costs.choose(nbytes, runs + more).route is Route.PACKED


@given(COSTS, NBYTES, st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_more_bytes_are_never_cheaper(costs: Costs, nbytes: int, more: int, runs: int) -> None:
    assert costs.direct_us(nbytes, runs) <= costs.direct_us(nbytes + more, runs)
    chunks = costs.chunks(nbytes), costs.chunks(nbytes + more)
    assert chunks[0] <= chunks[1]
    assert costs.packed_us(nbytes, chunks[0]) <= costs.packed_us(nbytes + more, chunks[1]) * (1 + 1e-12)


@given(COSTS, NBYTES)
def test_chunks_cover_the_bytes_and_none_is_empty(costs: Costs, nbytes: int) -> None:
    chunks = costs.chunks(nbytes)
    assert (chunks - 1) * costs.chunk_bytes < nbytes <= chunks * costs.chunk_bytes


@pytest.mark.parametrize(
    ("runs", "route", "words"),
    [
        (131_072, Route.PACKED, ["131072 runs of 512 B", "131.1 ms to post", "1.4 ms"]),
        (8, Route.DIRECT, ["8 runs of 8388608 B", "1.3 ms as they are", "1.4 ms"]),
    ],
    ids=["packed", "direct"],
)
def test_a_choice_says_why_in_numbers(runs: int, route: Route, words: list[str]) -> None:
    choice = RDMA.choose(64 << 20, runs)
    why = choice.why()
    assert choice.route is route
    assert why.startswith(f"{route}: ")
    assert "\n" not in why
    for word in words:
        assert word in why


@given(st.sampled_from([RDMA, HOST]), NBYTES, st.integers(1, 1 << 30))
def test_every_reason_holds_both_estimates(costs: Costs, nbytes: int, runs: int) -> None:
    choice = costs.choose(nbytes, runs)
    numbers = re.findall(r"([\d.]+) ms", choice.why())
    assert numbers == [f"{choice.direct_us / 1e3:.1f}", f"{choice.packed_us / 1e3:.1f}"]


@pytest.mark.parametrize(("order", "route"), [("NHD", Route.PACKED), ("HND", Route.PACKED)], ids=["NHD", "HND"])
def test_head_slices_of_llama_are_packed_on_a_fast_wire(order: str, route: Route) -> None:
    plan = Plan(Component.attention(80, 8, 128, "bfloat16"), Fleet(tp=8), Fleet(tp=2), 0, 32_768)
    assert {
        each.choice.route for each in explain(plan, *(FleetText(each, order) for each in (plan.src, plan.dst)), RDMA)
    } == {route}


def test_equal_fleets_with_long_runs_go_direct() -> None:
    plan = Plan(Component.mla(61, 576, "bfloat16"), Fleet(page_tokens=256), Fleet(page_tokens=256), 0, 32_768)
    (each,) = explain(plan, FleetText(plan.src, "NHD"), FleetText(plan.dst, "NHD"), RDMA)
    assert each.choice.route is Route.DIRECT
    assert each.choice.runs == 61 * 128


@pytest.mark.parametrize(
    ("held", "kept", "row"), [("auto", "fp8", 576), ("fp8_ds_mla", "auto", 656), ("fp8", "fp8", 576)]
)
def test_the_narrower_of_two_forms_is_what_costs(held: str, kept: str, row: int) -> None:
    plan = Plan(Component.mla(61, 576, "bfloat16"), Fleet(page_tokens=256), Fleet(page_tokens=256), 0, 32_768)
    (each,) = explain(plan, FleetText(plan.src, "NHD", held), FleetText(plan.dst, "NHD", kept), RDMA)
    assert each.nbytes == each.choice.nbytes == 61 * 32_768 * row
    assert each.choice.route is (Route.DIRECT if held == kept else Route.PACKED)
    assert (each.error == 0) == (held == kept)
