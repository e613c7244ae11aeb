"""Windows, histograms, metrics and files say what the accounts said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.ledger import (
    Account,
    AccountGroup,
    AttemptPhase,
    Credit,
    DurationHistogram,
    FaultPolicy,
    JsonLines,
    Ledger,
    LedgerCollector,
    LedgerError,
    Loss,
    Prediction,
    PredictionTotals,
    Predictor,
    Residency,
    Totals,
    read_accounts,
)
from kvmover.cache.ledger.ledger_collector import STAY_BOUNDS_S
from kvmover.errors import KvmoverError
from tests.test_imports import modules_after

LLAMA = AccountGroup("gold", "llama")


def serve(ledger: Ledger, request: int | str, device: int, now_s: float, group: AccountGroup = LLAMA) -> None:
    """A prompt of 100, of which 90 are reusable: `device` of them are hits, the others came too late."""
    ledger.matched(request, 100, 90, now_s, group)
    ledger.admitted(request, Credit(device), {Loss.LATE: 90 - device})
    ledger.computed(request, 100 - device)
    ledger.finished(request, now_s)


@pytest.mark.parametrize(
    ("part", "unwanted"),
    [("cache.ledger", ("numpy", "prometheus_client", "torch")), ("tools.replay", ("torch", "matplotlib", "nixl"))],
)
def test_importing_a_part_loads_only_what_it_needs(part: str, unwanted: tuple[str, ...]) -> None:
    assert not modules_after(f"import kvmover.{part}") & set(unwanted)


def test_windows_hold_what_ended_in_them_and_the_total_holds_all() -> None:
    ledger = Ledger(window_s=60.0, keep_windows=2)
    for number, (now_s, device) in enumerate([(5.0, 10), (59.9, 20), (60.0, 30), (200.0, 40), (301.0, 50)]):
        serve(ledger, number, device, now_s)
    windows = [(each.start_s, each.books[LLAMA].first.device_tokens) for each in ledger.windows()]
    assert windows == [(60.0, 30), (180.0, 40), (300.0, 50)], "two closed ones are kept, and the open one"
    assert ledger.total().first.device_tokens == 150
    assert ledger.total().first.lost == {Loss.LATE: 300}


def test_a_clock_that_goes_back_loses_nothing() -> None:
    ledger = Ledger(window_s=60.0)
    for number, now_s in enumerate([100.0, 10.0, 130.0]):
        serve(ledger, number, 10, now_s)
    assert [(each.start_s, each.books[LLAMA].first.attempts) for each in ledger.windows()] == [(60.0, 2), (120.0, 1)]


def test_groups_are_apart_and_their_bytes_are_those_of_their_model() -> None:
    ledger = Ledger(token_bytes={"llama": 1000})
    serve(ledger, 1, 10, 0.0)
    serve(ledger, 2, 20, 0.0, AccountGroup("silver", "llama"))
    serve(ledger, 3, 40, 0.0, AccountGroup("gold", "unknown"))
    assert ledger.groups() == (LLAMA, AccountGroup("gold", "unknown"), AccountGroup("silver", "llama"))
    assert [ledger.total(group).first.device_tokens for group in ledger.groups()] == [10, 40, 20]
    assert [ledger.saved_bytes(group) for group in ledger.groups()] == [10_000, 0, 20_000]


def test_a_total_is_a_copy() -> None:
    ledger = Ledger()
    serve(ledger, 1, 10, 0.0)
    ledger.total().first.merge(ledger.total().first)
    assert ledger.total().first.prompt_tokens == 100


def test_totals_as_data_say_losses_by_name_and_leave_out_zeros() -> None:
    ledger = Ledger()
    ledger.matched(1, 100, 90, 0.0)
    ledger.admitted(1, Credit(60), {Loss.LATE: 30, Loss.BUSY: 0})
    ledger.computed(1, 40)
    ledger.finished(1, 1.0)
    data = ledger.total().first.as_data()
    assert (data["hit_rate"], data["losses"], data["computed_tokens"]) == (0.6, {"late": 30}, 40)
    assert msgspec.json.decode(msgspec.json.encode(data)) == data


def test_what_was_predicted_is_compared_with_what_was_delivered() -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    accounts = list[Account]()
    ledger = Ledger(sink=accounts.append)
    router, inventory = Predictor.ROUTER, Predictor.INVENTORY
    told_and_found = [(64, router, 64), (64, router, 16), (0, router, 48), (32, inventory, 32)]
    for number, (told, by, device) in enumerate(told_and_found):
        ledger.matched(number, 100, 90, 0.0, LLAMA)
        ledger.predicted(number, Prediction(told, by))
        ledger.admitted(number, Credit(device), {Loss.LATE: 90 - device})
        ledger.computed(number, 100 - device)
        ledger.finished(number, 0.0)
    serve(ledger, "nobody predicted this", 90, 0.0)
    assert ledger.total().first.predictions[router] == PredictionTotals(
        3, foreseen_tokens=64 + 16, missed_tokens=48, unforeseen_tokens=48
    )
    registry = prometheus.CollectorRegistry()
    registry.register(LedgerCollector(ledger))
    labels = {"tenant": "gold", "model": "llama", "by": "router"}
    for outcome, tokens in (("foreseen", 80), ("missed", 48), ("unforeseen", 48)):
        assert registry.get_sample_value("kvmover_predicted_tokens_total", {**labels, "outcome": outcome}) == tokens
    assert registry.get_sample_value("kvmover_predicted_requests_total", labels) == 3
    assert [account.prediction and account.prediction.tokens for account in accounts] == [64, 64, 0, 32, None]
    assert ledger.total().first.as_data()["predictions"]["inventory"]["foreseen_tokens"] == 32


def test_hints_are_counted_by_what_became_of_them() -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    ledger = Ledger()
    for action, outcome in (("pin", "met"), ("pin", "met"), ("pin", "share_taken"), ("demote", "no_host")):
        ledger.hinted(action, outcome, LLAMA)
    ledger.check()
    registry = prometheus.CollectorRegistry()
    registry.register(LedgerCollector(ledger))
    labels = {"tenant": "gold", "model": "llama"}
    for action, outcome, count in (("pin", "met", 2), ("pin", "share_taken", 1), ("demote", "no_host", 1)):
        found = {**labels, "action": action, "outcome": outcome}
        assert registry.get_sample_value("kvmover_hints_total", found) == count


@pytest.mark.parametrize("tokens", [-1, 101])
def test_a_prediction_that_no_prompt_can_hold_is_refused_with_the_numbers(tokens: int) -> None:
    ledger = Ledger()
    ledger.matched("r", 100, 90, 0.0)
    with pytest.raises(LedgerError, match=f"{tokens} tokens predicted of a prompt of 100"):
        ledger.predicted("r", Prediction(tokens, Predictor.ROUTER))


def test_no_prompt_is_a_hit_rate_of_zero() -> None:
    assert Totals().hit_rate == 0.0


@given(st.lists(st.floats(0, 1e9), max_size=50))
def test_a_histogram_counts_every_time_at_its_bound(times: list[float]) -> None:
    histogram = DurationHistogram(STAY_BOUNDS_S)
    for seconds in times:
        histogram.add(seconds)
    rows = histogram.cumulative()
    assert rows[-1] == ("+Inf", len(times))
    assert histogram.count == len(times)
    for (label, count), bound in zip(rows, STAY_BOUNDS_S, strict=False):
        assert float(label) == bound
        assert count == sum(seconds <= bound for seconds in times)


def test_residency_follows_each_stay_of_a_page_on_its_own() -> None:
    residency = Residency()
    residency.stored([1, 2], 0.0)
    residency.used([1, 99], 4.0)
    residency.removed([1], 10.0)
    residency.stored([1], 20.0)
    residency.removed([1, 2, 77], 21.0)
    assert (residency.lifetimes.count, residency.lifetimes.sum_s) == (3, 10.0 + 1.0 + 21.0)
    assert (residency.idles.count, residency.idles.sum_s) == (3, 6.0 + 1.0 + 21.0)
    assert (residency.gaps.count, residency.gaps.sum_s) == (1, 4.0)
    assert len(residency) == 0


def test_accounts_come_back_from_a_file_as_they_went_in(tmp_path: Path) -> None:
    path, seen = tmp_path / "accounts.jsonl", list[Account]()
    with JsonLines(path) as lines:

        def both(account: Account) -> None:
            seen.append(account)
            lines.write(account)

        ledger = Ledger(sink=both)
        for number in range(500):
            serve(ledger, number if number % 2 else f"request-{number}", number % 90, float(number))
        ledger.matched("last", 10, 0, 1.0)
        ledger.admitted("last", Credit())
        ledger.retracted("last", 2.0)
    assert len(seen) == 501
    assert list(read_accounts(path)) == seen
    first = msgspec.json.decode(path.read_bytes().splitlines()[0])
    assert (first["request"], first["phase"], first["lost"]) == ("request-0", AttemptPhase.FINISHED, {"late": 90})


def test_a_bad_line_of_accounts_and_a_file_that_cannot_be_are_named(tmp_path: Path) -> None:
    path = tmp_path / "accounts.jsonl"
    path.write_text('{"request": 1}\n')
    with pytest.raises(KvmoverError, match="accounts.jsonl line 1"):
        list(read_accounts(path))
    with pytest.raises(KvmoverError, match="cannot write .*No such file"):
        JsonLines(tmp_path / "absent" / "accounts.jsonl")


def test_metrics_are_the_ledgers_sums_whenever_they_are_read() -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    ledger, residency = Ledger(fault=FaultPolicy.COUNT, token_bytes={"llama": 10}), Residency()
    registry = prometheus.CollectorRegistry()
    registry.register(LedgerCollector(ledger, {"device": residency}))
    residency.stored([1], 0.0)
    residency.removed([1], 3.0)
    for number in range(3):
        serve(ledger, number, 30, 0.0)
    ledger.finished("absent", 0.0)
    labels = {"tenant": "gold", "model": "llama", "attempt": "first"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, more)

    for _ in range(2):
        assert value("kvmover_prompt_tokens_total", **labels, source="device") == 90
        assert value("kvmover_prompt_tokens_total", **labels, source="computed") == 210
    assert value("kvmover_lost_tokens_total", **labels, reason="late") == 180
    assert value("kvmover_attempts_total", **labels, end="finished") == 3
    assert value("kvmover_saved_bytes_total", tenant="gold", model="llama") == 900
    assert value("kvmover_ledger_faults_total") == 1
    assert value("kvmover_page_lifetime_seconds_bucket", tier="device", le="4.096") == 1
    assert value("kvmover_page_lifetime_seconds_bucket", tier="device", le="1.024") == 0
    assert value("kvmover_page_idle_seconds_sum", tier="device") == 3
    serve(ledger, 9, 30, 0.0)
    assert value("kvmover_prompt_tokens_total", **labels, source="device") == 120
    sources = ("device", "host", "storage", "computed", "abandoned")
    total = sum(value("kvmover_prompt_tokens_total", **labels, source=source) or 0 for source in sources)
    assert total == ledger.total().first.prompt_tokens
