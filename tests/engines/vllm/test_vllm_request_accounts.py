"""The ledger of vLLM's requests, by the calls of a scheduler: whatever comes of a promise, the sums balance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.ledger import Account, AccountGroup, Loss, PredictionTotals, Predictor, Totals
from kvmover.engines.vllm.request_accounts import ExternalTokens, RequestAccounts


@dataclass
class Request:
    """What is read of vLLM's."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    kv_transfer_params: Mapping[str, object] | None = None


@dataclass
class Step:
    """What is read of vLLM's scheduler output."""

    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: set[str] | None = None


class Scheduler:
    """One request after the other, in chunks of 32 tokens."""

    def __init__(self) -> None:
        self.told: list[Account] = []
        self.accounts = RequestAccounts(AccountGroup(), self.told.append, clock=lambda: 1.0)

    def admit(self, request: Request, device: int, external: ExternalTokens, there: int) -> None:
        """`there`: of what was promised, what the request begins with."""
        self.accounts.matched(request, device, None)  # the store has yet to look
        self.accounts.matched(request, device, external.total)
        self.accounts.matched(request, device, external.total)  # no room for it yet
        self.accounts.allocated(request, external)
        self.accounts.allocated(request, ExternalTokens())  # its first step, when the load has ended
        request.num_computed_tokens = there

    def compute(self, request: Request, stop: int) -> None:
        while request.num_computed_tokens < stop:
            count = min(32, stop - request.num_computed_tokens)
            self.accounts.scheduled(Step({request.request_id: count, "unknown": 1}))
            request.num_computed_tokens += count

    def total(self) -> Totals:
        self.accounts.ledger.check()
        assert not self.accounts.ledger.faults, self.accounts.ledger.last_fault
        return self.accounts.ledger.total().first


@given(
    prompt=st.integers(1, 200),
    parts=st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100)),
    there=st.integers(0, 199),
    stop=st.integers(1, 260),
)
def test_whatever_comes_of_a_promise_the_account_balances(
    prompt: int, parts: tuple[int, int, int], there: int, stop: int
) -> None:
    device = min(parts[0], prompt - 1)
    host = min(parts[1], prompt - device)
    storage = min(parts[2], prompt - device - host)
    there = min(there, prompt - 1, device + host + storage)
    scheduler, request = Scheduler(), Request("r", prompt)
    scheduler.admit(request, device, ExternalTokens(host, storage), there)
    scheduler.compute(request, max(stop, there + 1))
    scheduler.accounts.finished(request)
    total = scheduler.total()
    assert total.prompt_tokens == prompt
    assert total.credited_tokens == there
    assert total.device_tokens == min(device, there)
    assert total.reusable_tokens == device + host + storage
    assert total.finished == (stop >= prompt or there + 1 >= prompt)
    assert len(scheduler.told) == 1


def test_of_a_load_that_failed_in_part_the_farthest_is_missing() -> None:
    scheduler, request = Scheduler(), Request("r", 100)
    scheduler.admit(request, 16, ExternalTokens(host=32, storage=32), there=64)
    scheduler.compute(request, 100)
    scheduler.accounts.finished(request)
    total = scheduler.total()
    assert (total.device_tokens, total.host_tokens, total.storage_tokens) == (16, 32, 16)
    assert total.lost == {Loss.READ_FAILED: 16}


def test_a_load_that_failed_as_a_whole_is_told_though_the_request_asks_again() -> None:
    scheduler, request = Scheduler(), Request("r", 100)
    scheduler.admit(request, 0, ExternalTokens(storage=96), there=0)
    scheduler.accounts.matched(request, 0, 0)
    scheduler.compute(request, 100)
    scheduler.accounts.finished(request)
    assert scheduler.total().computed_tokens == 100
    assert scheduler.total().lost == {Loss.READ_FAILED: 96}


def test_a_tail_of_a_block_that_vllm_has_by_itself_is_of_the_device() -> None:
    """It asks a connector for what follows its last whole block, and may begin behind that."""
    scheduler, request = Scheduler(), Request("r", 100)
    scheduler.admit(request, 48, ExternalTokens(), there=55)
    scheduler.compute(request, 100)
    scheduler.accounts.finished(request)
    assert scheduler.total().device_tokens == 55


def test_what_another_engine_computed_is_in_no_account() -> None:
    scheduler, request = Scheduler(), Request("r", 100)
    scheduler.admit(request, 0, ExternalTokens(elsewhere=100), there=99)
    scheduler.compute(request, 100)
    scheduler.accounts.finished(request)
    assert scheduler.total().prompt_tokens == 0
    assert not scheduler.told


def test_what_the_last_turns_decode_had_is_a_hit_of_a_peer() -> None:
    scheduler, request = Scheduler(), Request("r", 200)
    scheduler.admit(request, 32, ExternalTokens(peer=88), there=120)
    scheduler.compute(request, 200)
    scheduler.accounts.finished(request)
    total = scheduler.total()
    assert (total.device_tokens, total.peer_tokens, total.computed_tokens) == (32, 88, 80)
    assert not total.lost


def test_a_peer_that_was_lost_costs_what_it_had() -> None:
    scheduler, request = Scheduler(), Request("r", 200)
    scheduler.admit(request, 32, ExternalTokens(peer=88), there=64)
    scheduler.compute(request, 200)
    scheduler.accounts.finished(request)
    total = scheduler.total()
    assert (total.device_tokens, total.peer_tokens) == (32, 32)
    assert total.lost == {Loss.READ_FAILED: 56}


def test_a_preempted_request_begins_again_in_other_sums() -> None:
    scheduler, request = Scheduler(), Request("r", 100)
    scheduler.admit(request, 0, ExternalTokens(), there=0)
    scheduler.compute(request, 64)
    scheduler.accounts.scheduled(Step({}, {"r"}))
    request.num_tokens = 103  # with what it had said
    scheduler.admit(request, 64, ExternalTokens(), there=64)
    scheduler.compute(request, 103)
    scheduler.accounts.finished(request)
    assert scheduler.total().retracted == 1
    again = scheduler.accounts.ledger.total().again
    assert (again.prompt_tokens, again.device_tokens, again.computed_tokens) == (103, 64, 39)


@pytest.mark.parametrize("matched", [False, True])
def test_a_request_that_never_began_is_in_no_sum(matched: bool) -> None:
    scheduler, request = Scheduler(), Request("r", 100)
    if matched:
        scheduler.accounts.matched(request, 16, 0)
    scheduler.accounts.finished(request)
    assert scheduler.total().attempts == 0
    assert not scheduler.told


def test_what_a_router_said_is_compared_with_what_came() -> None:
    scheduler = Scheduler()
    said = {"kvmover_predicted_tokens": 80, "kvmover_tenant": "gold"}
    for name, params in (("r", said), ("nobody said anything", None)):
        request = Request(name, 100, kv_transfer_params=params)
        scheduler.admit(request, 16, ExternalTokens(storage=48), there=32)
        scheduler.compute(request, 100)
        scheduler.accounts.finished(request)
    total = scheduler.total()
    assert total.predictions[Predictor.ROUTER] == PredictionTotals(1, 32, 80 - 32, 0)
    assert total.predictions[Predictor.INVENTORY] == PredictionTotals(1, 32, 64 - 32, 0)
    assert scheduler.accounts.ledger.groups() == (AccountGroup(), AccountGroup("gold"))


def test_a_scrape_shows_the_sums() -> None:
    scheduler, request = Scheduler(), Request("r", 100)
    scheduler.admit(request, 32, ExternalTokens(storage=32), there=64)
    scheduler.compute(request, 100)
    scheduler.accounts.finished(request)
    families = {family.name: family for family in scheduler.accounts.collect()}
    tokens = {
        sample.labels["source"]: sample.value
        for sample in families["kvmover_prompt_tokens"].samples
        if sample.labels["attempt"] == "first"
    }
    assert tokens == {"device": 32, "host": 0, "storage": 32, "peer": 0, "computed": 36, "abandoned": 0}
