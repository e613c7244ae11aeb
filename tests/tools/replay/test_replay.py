"""A replay conserves pages and tokens whatever the tiers, is the same every time, and refuses what it cannot read."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmover.cache.ledger import Loss
from kvmover.cache.prefix import LRU, POLICIES, Tier, WriteBack, WriteThrough
from kvmover.tools.replay import (
    ReplayConfig,
    ReplayConfigError,
    ReplayRequest,
    ReplayTraceError,
    Server,
    read_trace,
    replay,
)
from kvmover.tools.replay.replay_command import capacities, sweep
from kvmover.tools.replay.simulated_tiers import (
    PageIdSeries,
    PagesExhausted,
    SimulatedPages,
    SimulatedStorage,
    multiples,
    new_storage,
)
from tests.tools.replay.made import generated

pytestmark = pytest.mark.usefixtures("used_core")
LONGEST = max(request.input_length for request in generated(1))
SETUPS = [
    ReplayConfig(64),
    ReplayConfig(64, 2 * LONGEST),
    ReplayConfig(16, 2 * LONGEST, 4 * LONGEST),
    ReplayConfig(64, 2 * LONGEST, 4 * LONGEST, 16 * LONGEST),
    ReplayConfig(64, LONGEST + 64, LONGEST + 64, 16 * LONGEST),
    ReplayConfig(64, 2 * LONGEST, LONGEST, 64 * LONGEST),
    ReplayConfig(64, 4 * LONGEST, LONGEST // 2, 64 * LONGEST),
]
SETUPS += [replace(each, writes=WriteThrough()) for each in SETUPS if each.host_tokens]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.device_tokens}-{setup.host_tokens}-{setup.writes}")
def test_pages_are_conserved_after_every_request(setup: ReplayConfig) -> None:
    server = Server(setup)
    for request in generated(1):
        server.serve(request)
        device, host = server.tree.sizes(), server.tree.sizes(tier=Tier.HOST)
        assert server.device.taken == device.evictable + device.protected
        assert device.protected == 0, "nothing stays locked"
        assert server.host.taken == host.evictable + host.protected
        assert len(server.ledger) == 0
        server.tree.check()


@pytest.mark.parametrize(("device", "host"), [(1, 1), (2, 1), (2, 0.5), (4, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_storage_may_know_more_of_a_prompt_than_a_full_host_can_take(device: int, host: float, seed: int) -> None:
    """The best node is then on the device alone, and no room on the host backs it: what storage has is lost for that.

    Sizes are multiples of the longest prompt.
    """
    requests = generated(seed, 200)
    longest = max(request.input_length for request in requests) + 64
    server = Server(ReplayConfig(64, device * longest, int(host * longest), 64 * longest, writes=WriteThrough()))
    for request in requests:
        server.serve(request)
    server.tree.check()
    assert server.tree.sizes().protected == 0
    assert server.ledger.total().first.lost[Loss.HOST_CAPACITY] > 0


def test_what_was_evicted_is_a_loss_only_where_something_was() -> None:
    roomy = Server(ReplayConfig(64, 10**6))
    for request in generated(1):
        roomy.serve(request)
    assert roomy.evicted_pages == 0
    assert Loss.CAPACITY_EVICTED not in roomy.ledger.total().first.lost
    tight = Server(ReplayConfig(64, LONGEST + 64))
    for request in generated(1):
        tight.serve(request)
    assert tight.evicted_pages * 64 >= tight.ledger.total().first.lost[Loss.CAPACITY_EVICTED] > 0


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.device_tokens}-{setup.host_tokens}-{setup.writes}")
def test_every_token_has_a_source_and_every_lost_one_a_reason(setup: ReplayConfig) -> None:
    requests = generated(1)
    data = replay(requests, setup).as_data()
    sources = ("device_hit_tokens", "host_hit_tokens", "storage_hit_tokens", "computed_tokens")
    assert data["prompt_tokens"] == sum(request.input_length for request in requests) == sum(map(data.get, sources))
    best = replay(requests, ReplayConfig(setup.page_tokens)).as_data()
    lost = sum(tokens for reason, tokens in data["losses"].items() if reason in ("capacity_evicted", "host_capacity"))
    assert sum(map(data.get, sources[:3])) + lost == best["device_hit_tokens"]


def test_a_smaller_tier_below_serves_what_the_device_gave_up() -> None:
    requests = generated(1)
    alone = replay(requests, ReplayConfig(64, 2 * LONGEST)).totals
    hosted = replay(requests, ReplayConfig(64, 2 * LONGEST, 64 * LONGEST)).totals
    stored = replay(requests, ReplayConfig(64, 2 * LONGEST, 4 * LONGEST, 64 * LONGEST)).totals
    best = replay(requests, ReplayConfig(64)).totals
    assert alone.lost[Loss.CAPACITY_EVICTED] > 0
    assert hosted.device_tokens + hosted.host_tokens == best.device_tokens
    assert hosted.host_tokens > 0
    assert stored.storage_tokens > 0
    assert stored.credited_tokens > alone.credited_tokens


def test_a_host_full_of_second_copies_is_a_loss_by_its_own_name() -> None:
    """sglang#33862: a host smaller than the device starves under write-through."""
    through = ReplayConfig(64, 4 * LONGEST, LONGEST // 2, 64 * LONGEST, writes=WriteThrough())
    starved, mended = (
        replay(generated(1), replace(through, writes=each)).totals for each in (WriteThrough(), WriteBack())
    )
    assert starved.lost[Loss.HOST_CAPACITY] > mended.lost.get(Loss.HOST_CAPACITY, 0)
    assert starved.hit_rate < mended.hit_rate


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 6), st.sampled_from([0, 2, 64]))
@settings(max_examples=40)
def test_more_of_a_tier_loses_no_hits(seed: int, device: int, host: int, storage: int) -> None:
    """A host beside a device loses none; more of a device, of a host or of storage no more than 5 % of the prompts.

    In halves of the longest prompt. A host that is all taken by one prompt on its way lets others go.
    """
    requests = generated(seed)
    half = -(-max(request.input_length for request in requests) // 128) * 64
    fewer = ReplayConfig(64, (device + 1) * half, host * half, storage * half if host else 0)

    def hits(config: ReplayConfig) -> int:
        return replay(requests, config).totals.credited_tokens

    least = hits(fewer)
    assert least >= hits(ReplayConfig(64, fewer.device_tokens))
    least -= sum(request.input_length for request in requests) // 20
    assert hits(replace(fewer, device_tokens=(device + 2) * half)) >= least
    assert hits(replace(fewer, host_tokens=(host + 1) * half)) >= least
    if host:
        assert hits(replace(fewer, storage_tokens=(storage + 1) * half)) >= least


def test_an_equal_prompt_is_computed_to_its_last_page_only() -> None:
    twice = [ReplayRequest(0, 1024, 1, (1, 2)), ReplayRequest(1, 1024, 1, (1, 2)), ReplayRequest(2, 1023, 1, (1, 2))]
    totals = replay(twice, ReplayConfig(64)).totals
    assert totals.lost == {Loss.LAST_TOKEN: 64, Loss.PARTIAL_PAGE: 1023 - 960}
    assert totals.device_tokens == 960 + 960
    assert totals.computed_tokens == 1024 + 64 + 63


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("host_tokens", [0, 8 * LONGEST])
def test_every_policy_balances_and_comes_out_the_same_again(name: str, host_tokens: int) -> None:
    setup = ReplayConfig(64, LONGEST + 64, host_tokens, policy=POLICIES[name])
    first, second = (replay(generated(5), setup).as_data() for _ in range(2))
    timed = {"seconds", "tokens_per_second", "requests_per_second"}
    assert {key: first[key] for key in first.keys() - timed} == {key: second[key] for key in second.keys() - timed}
    assert (first["host_hit_tokens"] > 0) == (host_tokens > 0)
    assert first["device_hit_tokens"] > 0


def test_lru_by_pages_hits_as_often_as_a_naive_lru_of_pages() -> None:
    """Pages by their whole prefix, the deepest of a prompt the first to go: what the tree does, in ten lines."""
    requests, limit = generated(9, count=80), 3 * LONGEST // 64
    pages, hits = OrderedDict[tuple[int, ...], None](), 0
    for request in requests:
        tokens = request.tokens().tolist()
        names = [tuple(tokens[: end + 64]) for end in range(0, len(tokens) - 63, 64)]
        found = 0
        while found < (len(tokens) - 1) // 64 and names[found] in pages:
            found += 1
        hits += found * 64
        for name in reversed(names[:found]):
            pages.move_to_end(name)
        needed = -(-len(tokens) // 64) - found
        while len(pages) + needed > limit:
            pages.popitem(last=False)
        for name in reversed(names):
            pages[name] = None
            pages.move_to_end(name)
    assert replay(requests, ReplayConfig(64, limit * 64)).totals.device_tokens == hits > 0


def test_the_sweep_goes_up_to_all_of_the_trace() -> None:
    requests = generated(3)
    reports = sweep(requests, ReplayConfig(64))
    rates = [report.totals.hit_rate for report in reports]
    assert [report.config.device_tokens for report in reports] == capacities(requests, 64)
    assert rates[-1] == pytest.approx(reports[-1].ideal_hit_rate)
    assert rates[0] < rates[-1]


def test_progress_comes_to_the_number_of_requests() -> None:
    done: list[int] = []
    replay(generated(1, count=457), ReplayConfig(64), done.append)
    assert sum(done) == 457
    assert len(done) <= 230


def test_residency_is_in_the_time_of_the_trace() -> None:
    page = 64 * 61
    blocks = tuple(range(page * 3 // 512))
    requests = [
        ReplayRequest(0, page, 1, blocks[: page // 512 + 1]),
        ReplayRequest(7000, page, 1, blocks[: page // 512 + 1]),
    ]
    report = replay(requests, ReplayConfig(64))
    assert report.residency.gaps.count == 1
    assert report.residency.gaps.sum_s == 7.0


def test_pages_beyond_the_limit_of_a_tier_are_refused_and_so_are_more_than_are_out() -> None:
    pages = SimulatedPages(10)
    pages.take(7)
    assert (pages.taken, pages.short(3), pages.short(5)) == (7, 0, 2)
    with pytest.raises(PagesExhausted, match="4 pages asked for, 7 of 10 are taken"):
        pages.take(4)
    with pytest.raises(PagesExhausted, match="8 pages come back, 7 are taken"):
        pages.give(8)
    pages.give(7)
    assert pages.taken == 0
    endless = SimulatedPages()
    endless.take(10**9)
    assert endless.short(10**9) == 0


def test_page_ids_are_32_bits_and_come_again_only_after_all_others() -> None:
    ids = PageIdSeries()
    assert [ids.take(count).tolist() for count in (3, 0, 2)] == [[0, 1, 2], [], [3, 4]]
    ids._next = 2**31 - 2
    assert [ids.take(count).tolist() for count in (2, 2)] == [[2**31 - 2, 2**31 - 1], [0, 1]]


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32])
def test_multiples_are_found_in_rows_of_any_width(kind: type) -> None:
    row = np.random.default_rng(3).integers(0, 2**31, 500).astype(kind)
    row[::50] = np.arange(10) * 61
    assert multiples(row, 61) == [page for page in row.tolist() if page % 61 == 0]
    assert multiples(row[:0], 61) == []


def test_storage_keeps_what_was_read_or_written_last_and_prefixes_before_their_ends() -> None:
    storage, pages = new_storage(4), np.arange(9)
    storage.put(pages[:3])
    storage.put(pages[5:7])
    assert storage.leading(pages[:3]) == 2, "the end of the older prompt went first"
    storage.put(pages[8:])
    assert (storage.leading(pages[5:7]), storage.leading(pages[:3]), len(storage)) == (1, 2, 4)
    assert storage.leading(pages[[4, 0]]) == 0


@given(st.integers(1, 30), st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 40)), max_size=60))
@settings(max_examples=80)
def test_storage_is_an_lru_of_pages_however_short_its_log(limit: int, calls: list[tuple[bool, int, int]]) -> None:
    storage, known = new_storage(limit), OrderedDict[int, None]()
    if isinstance(storage, SimulatedStorage):
        storage._log = storage._log[:8]
    for writes, first, count in calls:
        pages = list(range(first, first + count))
        if not writes:
            pages = pages[: next((at for at, page in enumerate(pages) if page not in known), count)]
            assert storage.leading(np.arange(first, first + count)) == len(pages)
        else:
            storage.put(np.array(pages))
        for page in reversed(pages):
            known[page] = None
            known.move_to_end(page)
        while len(known) > limit:
            known.popitem(last=False)
        assert len(storage) == len(known)
    assert [page for page in range(120) if storage.leading(np.array([page]))] == sorted(known)


@pytest.mark.parametrize("far", [10**5, 10**6])
def test_a_storage_takes_pages_of_any_number_and_forgets_none_for_it(far: int) -> None:
    storage = new_storage(4)
    storage.put(np.array([3, 5]))
    assert storage.leading(np.array([far])) == 0
    storage.put(np.array([far, far + 1], np.int32))
    assert [storage.leading(np.array(row)) for row in ([3, 5], [far, far + 1], [5, far + 2])] == [2, 2, 1]


def test_a_setup_that_cannot_be_is_refused_with_its_values() -> None:
    with pytest.raises(ReplayConfigError, match="a device of 63 tokens holds no page of 64"):
        ReplayConfig(64, 63)
    with pytest.raises(ReplayConfigError, match="storage of 640 tokens"):
        ReplayConfig(64, 6400, storage_tokens=640)
    with pytest.raises(ReplayConfigError, match="a device of 512 tokens cannot hold the prompt of 700 of request 1"):
        replay([ReplayRequest(0, 512, 1, (1,)), ReplayRequest(0, 700, 1, (1, 2))], ReplayConfig(64, 512))
    assert ReplayConfig().policy is LRU


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({**GOOD, "hash_ids": [3]}, "line 2: 1 hash_ids for input_length 600, so 2 blocks"),
        ({**GOOD, "input_length": 0, "hash_ids": []}, r"line 2: Expected `int` >= 1 - at `\$\.input_length`"),
        ({**GOOD, "hash_ids": [3, -1]}, "line 2: Expected `int` >= 0"),
        ({**GOOD, "timestamp": -1}, r"line 2: Expected `float` >= 0"),
        ({**GOOD, "timestamp": "x"}, "line 2: Expected `float"),
        ({"timestamp": 0}, "line 2: Object missing required field"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, bad: dict[str, object], message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(bad)}\n")
    with pytest.raises(ReplayTraceError, match=message):
        read_trace(path)


def test_a_trace_is_read_in_order_and_a_missing_or_empty_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps({**GOOD, 'hash_ids': [2**22 - 1, 0]})}\n")
    first, second = read_trace(path)
    assert first.tokens().tolist() == [*range(3 * 512, 4 * 512), *range(4 * 512, 4 * 512 + 88)]
    assert second.tokens()[511] == 2**31 - 1
    path.write_text("\n")
    with pytest.raises(ReplayTraceError, match="holds no request"):
        read_trace(path)
    with pytest.raises(ReplayTraceError, match="cannot read .*absent.*No such file"):
        read_trace(tmp_path / "absent")
