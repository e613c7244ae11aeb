"""Advice is the replay's hits, the plan's bytes and the cost model's times, and the waits between them add up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.layout import Component
from kvmover.observe.formats import bytes_in_words
from kvmover.plan import RDMA, Plan, Route
from kvmover.plan.explain import explain
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.advise import (
    AdviseError,
    Candidate,
    LinkCosts,
    Prefills,
    TierRates,
    advice,
    cheapest,
    prefills,
    transfer_table,
    waits,
)
from kvmover.tools.advise.prefill_replay import PrefixRouter
from kvmover.tools.advise.transfer_table import rank_token_bytes
from kvmover.tools.replay import ReplayConfig, replay
from tests.tools.replay.made import generated

LLAMA = Component.attention(80, 8, 128, "bfloat16")
TP4, TP2 = FleetText.parse("tp=4,page=16"), FleetText.parse("tp=2,page=64,order=HND")


def slowest_us(tokens: int) -> tuple[float, int]:
    """By the plan itself: of the rank whose legs take longest, and all bytes."""
    legs = list(explain(Plan(LLAMA, TP4.fleet, TP2.fleet, 0, tokens), TP4, TP2, RDMA))
    ends = [("src", leg.leg.src_rank) for leg in legs] + [("dst", leg.leg.dst_rank) for leg in legs]
    times = {
        end: sum(each.choice.us for each in legs if end in (("src", each.leg.src_rank), ("dst", each.leg.dst_rank)))
        for end in ends
    }
    return max(times.values()), sum(leg.nbytes for leg in legs)


@pytest.mark.parametrize("tokens", [1, 64, 128, 4096, 5000])
def test_a_point_of_the_table_is_what_the_plan_says(tokens: int) -> None:
    table = transfer_table([LLAMA], TP4, TP2, LinkCosts(RDMA, request_us=7.0), 5000)
    took_us, nbytes = slowest_us(tokens)
    assert float(table.us(tokens)) == pytest.approx(took_us + 7)
    assert float(table.nbytes(tokens)) == nbytes == tokens * LLAMA.token_bytes


def test_between_two_points_times_are_within_a_tenth_of_the_plans() -> None:
    table = transfer_table([LLAMA], TP4, TP2, LinkCosts(RDMA), 32_768)
    for tokens in (100, 333, 1000, 3000, 10_000, 20_000):
        assert float(table.us(tokens)) == pytest.approx(slowest_us(tokens)[0], rel=0.1)


def test_the_line_gives_back_a_bandwidth_and_a_latency() -> None:
    """Packed chunks that the wire limits: the bytes take 50 GB/s a rank, and there are two at the narrow end."""
    table = transfer_table([LLAMA], TP4, TP2, LinkCosts(RDMA, request_us=400.0), 131_072)
    rate, latency_us = table.line()
    assert rate == pytest.approx(2 * RDMA.wire_rate, rel=0.05)
    assert 400 <= latency_us <= 900
    assert {point.route for point in table.points} == {Route.PACKED}


def test_the_rank_with_the_most_is_what_loads_are_counted_by() -> None:
    """3 of 8 heads on the fullest of TP3; a latent is whole on every rank."""
    assert rank_token_bytes([LLAMA], FleetText.parse("tp=3,page=16"), 64) == LLAMA.token_bytes * 3 / 8
    mla = Component.mla(61, 576, "bfloat16")
    assert rank_token_bytes([mla], FleetText.parse("tp=8,page=64"), 640) == mla.token_bytes


def test_one_engine_has_the_hits_of_a_replay() -> None:
    requests = generated(3)
    config = ReplayConfig(16, 20_000, 40_000)
    done, totals = prefills(requests, config, 1), replay(requests, config).totals
    assert (done.device_tokens.sum(), done.host_tokens.sum()) == (totals.device_tokens, totals.host_tokens)
    assert done.computed_tokens.sum() == totals.computed_tokens
    assert done.hit_rate == pytest.approx(totals.hit_rate)


@given(st.integers(1, 5), st.integers(0, 1000))
def test_no_engine_has_much_more_than_its_share(engines: int, seed: int) -> None:
    """All share a system prompt, which would draw every one of them to one engine."""
    rng, router, loads = Random(seed), PrefixRouter(engines), [0] * engines
    for _ in range(60):
        tokens = rng.randrange(1, 50)
        loads[router.choose((0, rng.randrange(1, 9)), tokens)] += tokens
    assert sum(loads) == sum(router._tokens)
    assert max(loads) <= 1.25 * sum(loads) / engines + 50


def test_a_chat_goes_back_to_the_engine_that_has_it() -> None:
    router = PrefixRouter(3)
    first = [router.choose((10 * chat,), 100) for chat in range(3)]
    assert sorted(first) == [0, 1, 2]
    assert [router.choose((10 * chat, 10 * chat + 1), 100) for chat in range(3)] == first


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=30),
    st.integers(1, 3),
)
def test_no_wire_carries_two_and_none_idles_while_one_waits(rows: list[tuple[int, int, int]], decodes: int) -> None:
    ready, took, engines = (np.array(column) for column in zip(*rows, strict=True))
    waited = waits(ready.astype(float), took.astype(float), engines, decodes)
    begins = ready + waited
    assert (waited >= 0).all()
    for at in begins.tolist():
        under_way = (begins <= at) & (at < begins + took)
        assert under_way.sum() <= decodes
        assert max(np.bincount(engines[under_way])) == 1
    if len(set(engines.tolist())) == 1 and decodes == 1:
        gaps = np.sort(begins)[1:] - np.sort(begins + took)[:-1]
        assert (gaps >= 0).all()
        assert all(gap == 0 or begin in ready for gap, begin in zip(gaps, np.sort(begins)[1:], strict=True))


def done(**given: list[int]) -> Prefills:
    count = len(given["tokens"])
    columns = {name: np.array(given.get(name, [0] * count)) for name in Prefills.__slots__}
    return Prefills(**columns)


def test_a_share_is_what_is_loaded_waited_for_and_sent() -> None:
    """Two requests at once on one wire: the second waits for the first, whose hits on the host load meanwhile."""
    one = FleetText.parse("tp=1,page=64")
    table = transfer_table([LLAMA], one, one, LinkCosts(RDMA), 6400)
    seen = done(tokens=[6400, 6400], host_tokens=[640, 640], device_tokens=[0, 0])
    found = advice(Candidate(1, 1, one, one, ReplayConfig()), seen, table, [LLAMA], TierRates(host_rate=1e3))
    load_us, sent_us = 640 * LLAMA.token_bytes / 1e3, float(table.us(6400))
    assert found.load.p50_us == pytest.approx(load_us)
    assert found.wait.p99_us == pytest.approx(0.99 * sent_us)
    assert found.share.p50_us == pytest.approx(load_us + 1.5 * sent_us)
    assert found.nbytes == 6400 * LLAMA.token_bytes
    rates = TierRates(host_rate=1e3, compute_rate=0.01)
    computing = advice(Candidate(1, 1, one, one, ReplayConfig()), seen, table, [LLAMA], rates)
    assert computing.share.p50_us == pytest.approx(found.share.p50_us + 5760 / 0.01)


def test_the_cheapest_has_the_fewest_ranks_then_the_least_host_memory() -> None:
    one, four = FleetText.parse("tp=1,page=64"), FleetText.parse("tp=4,page=64")
    table = transfer_table([LLAMA], one, one, LinkCosts(RDMA), 640)
    seen, config = done(tokens=[640]), ReplayConfig()
    small, large = (Candidate(1, 1, each, each, config) for each in (one, four))
    kept = replace(small, cache=ReplayConfig(64, None, 6400))
    found = [advice(each, seen, table, [LLAMA], TierRates()) for each in (large, kept, small)]
    assert cheapest(found, 1e9) is found[2]
    assert cheapest(found[:2], 1e9) is found[1]
    assert cheapest(found, 1.0) is None


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_refused_by_its_value(rate: float) -> None:
    with pytest.raises(AdviseError, match=str(rate)):
        TierRates(storage_rate=rate)


def test_no_engines_are_refused() -> None:
    one = FleetText.parse("tp=1")
    with pytest.raises(AdviseError, match="0 decodes"):
        Candidate(1, 0, one, one, ReplayConfig())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * n, "input_length": 2048, "output_length": 10, "hash_ids": [0, n % 3, 10 + n % 3, 100 + n]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_compares_all_products_and_names_the_cheapest(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvmover.cli import main

    table = tmp_path / "costs.json"
    words = ["advise", str(trace), "--model", "llama-3-70b", "--src", "tp=4,page=16", "--src", "tp=2,page=64"]
    words += ["--dst", "vllm -tp 2", "--ratio", "1:1", "--ratio", "2:1", "--target-ms", "1000", "--json"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--cost-table", str(table)])
    assert left.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(row["prefills"], row["src"], row["ranks"]) for row in answer["candidates"]] == [
        (1, "tp=4,page=16", 6),
        (1, "tp=2,page=64", 4),
        (2, "tp=4,page=16", 10),
        (2, "tp=2,page=64", 6),
    ]
    assert answer["cheapest"] == 1
    assert answer["candidates"][0]["bytes_a_request"] == 2048 * LLAMA.token_bytes
    costs = json.loads(table.read_text())["tables"]
    assert [(each["src"], each["dst"]) for each in costs] == [
        ("tp=4,page=16", "vllm -tp 2"),
        ("tp=2,page=64", "vllm -tp 2"),
    ]
    assert costs[0]["bytes_per_token"] == LLAMA.token_bytes
    assert costs[0]["points"][-1]["tokens"] == 2048


def test_the_table_has_one_number_a_cell_and_says_what_the_share_is(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvmover.cli import main

    words = ["advise", str(trace), "--model", "llama-3-70b", "--src", "tp=4,page=16", "--dst", "tp=2", "--target-ms"]
    with pytest.raises(SystemExit):
        main([*words, "1000"])
    heading, row, *notes = [
        re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines() if line.strip()
    ]
    cells = dict(zip(heading, row, strict=True))
    assert cells["KV a request"] == bytes_in_words(2048 * LLAMA.token_bytes)
    times = [f"{name} {q}" for name in ("load", "wait", "transfer", "share") for q in ("p50", "p99")]
    assert all(re.fullmatch(r"[\d,]+\.\d\d ms", cells[name]) for name in times)
    assert notes[0][0].startswith("share: what KV adds to the time to first token of a request: load from host")
    assert notes[1][0].startswith("the cheapest whose share p99 is below 1000 ms: 1 of tp=4,page=16 and 1 of tp=2")
    with pytest.raises(SystemExit):
        main([*words, "0.001"])
    assert "no share p99 is below 0.001 ms; the least of all is " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ratio", "1:0"], "--ratio 1:0"),
        (["--ratio", "2"], "--ratio 2 is not two numbers"),
        (["--src", "tp=0"], "--src tp=0"),
        (["--model", "nobody"], "nobody"),
        (["--device-tokens", "100"], "cannot hold the prompt of 2048"),
        (["--storage-tokens", "1000"], "storage of 1000 tokens"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(
    words: list[str], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvmover.cli import main

    given = {"--model": "llama-3-70b", "--src": "tp=1", "--dst": "tp=1"} | dict(
        zip(words[::2], words[1::2], strict=True)
    )
    with pytest.raises(SystemExit) as left:
        main(["advise", str(trace), *(word for pair in given.items() for word in pair)])
    err = capsys.readouterr().err
    assert left.value.code == 2
    assert said in err
    assert "\n" not in err.strip()
