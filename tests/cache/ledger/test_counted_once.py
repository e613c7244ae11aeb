"""Every prompt token is counted once, in each of the ways in which others counted it twice or not at all.

The numbers are those of issues of SGLang, and of one of Megatron-LM.
"""

from __future__ import annotations

import pytest

from kvmover.cache.ledger import (
    Account,
    AccountGroup,
    AttemptPhase,
    Book,
    Credit,
    FaultPolicy,
    Ledger,
    LedgerError,
    Loss,
    Totals,
)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def sources(totals: Totals) -> tuple[int, int, int, int, int]:
    return (
        totals.prompt_tokens,
        totals.device_tokens,
        totals.host_tokens,
        totals.storage_tokens,
        totals.computed_tokens,
    )


def serve(ledger: Ledger, request: int, prompt: int, device: int = 0) -> None:
    ledger.matched(request, prompt, device, 0.0)
    ledger.admitted(request, Credit(device))
    ledger.computed(request, prompt - device)
    ledger.finished(request, 1.0)


def test_a_retracted_request_is_not_cached_twice(ledger: Ledger) -> None:
    """sglang#11900: 122,884 cached tokens of a prompt of 59,946."""
    ledger.matched(1, 59_946, 58_000, 0.0)
    ledger.admitted(1, Credit(58_000))
    ledger.computed(1, 1_946)
    ledger.retracted(1, 1.0)
    ledger.matched(1, 59_950, 59_900, 2.0)
    ledger.admitted(1, Credit(59_900))
    ledger.computed(1, 50)
    ledger.finished(1, 3.0)
    book = ledger.total()
    assert sources(book.first) == (59_946, 58_000, 0, 0, 1_946)
    assert sources(book.again) == (59_950, 59_900, 0, 0, 50)
    assert (book.first.attempts, book.first.retracted, book.first.finished) == (1, 1, 0)
    assert (book.again.attempts, book.again.finished) == (1, 1)


def test_a_chunk_is_no_hit_of_the_next_one(ledger: Ledger) -> None:
    """sglang#2555: a lookup before chunk 2 finds chunk 1 in the tree."""
    ledger.matched(1, 300, 0, 0.0)
    ledger.admitted(1, Credit())
    ledger.computed(1, 100)
    for event in (lambda: ledger.matched(1, 300, 100, 0.1), lambda: ledger.admitted(1, Credit(100))):
        with pytest.raises(LedgerError, match="request 1 is admitted: it cannot be"):
            event()
    ledger.computed(1, 200)
    ledger.finished(1, 1.0)
    assert sources(ledger.total().first) == (300, 0, 0, 0, 300)


def test_matching_again_and_again_while_waiting_counts_once(ledger: Ledger) -> None:
    """sglang#8533: a waiting request is looked up at every step of the scheduler."""
    for found in (64, 64, 128, 96):
        ledger.matched(1, 200, found, 0.0)
    assert ledger.total().first == Totals()
    ledger.admitted(1, Credit(96))
    ledger.computed(1, 104)
    ledger.finished(1, 1.0)
    total = ledger.total().first
    assert (total.attempts, total.reusable_tokens, total.device_tokens) == (1, 96, 96)


def test_host_tokens_that_were_matched_and_not_loaded_are_no_hits(ledger: Ledger) -> None:
    """Scenario 59: host hit 40, load-back declined. Without a reason for the 40 the account does not balance."""
    ledger.matched(1, 100, 60, 0.0)
    tiers = "device 20 \\+ host 0 \\+ storage 0 \\+ peer 0 \\+ lost 0"
    with pytest.raises(LedgerError, match=f"60 reusable tokens are not {tiers}"):
        ledger.admitted(1, Credit(20))
    ledger.admitted(1, Credit(20), {Loss.THRESHOLD: 40})
    ledger.computed(1, 80)
    ledger.finished(1, 1.0)
    assert sources(ledger.total().first) == (100, 20, 0, 0, 80)
    assert ledger.total().first.lost == {Loss.THRESHOLD: 40}


def test_a_failed_admission_and_its_retry_count_once(ledger: Ledger) -> None:
    """Megatron-LM#6416, first half: the match of an admission that failed had been counted already."""
    ledger.matched(1, 100, 50, 0.0)
    with pytest.raises(LedgerError):
        ledger.admitted(1, Credit(60))
    ledger.matched(1, 100, 50, 1.0)
    ledger.admitted(1, Credit(50))
    ledger.computed(1, 50)
    ledger.finished(1, 2.0)
    assert sources(ledger.total().first) == (100, 50, 0, 0, 50)
    assert ledger.total().first.attempts == 1


def test_attention_that_was_matched_without_its_state_is_no_hit(ledger: Ledger) -> None:
    """Megatron-LM#6416, second half: credited by the attention match although the state forced a recompute."""
    ledger.matched(1, 100, 96, 0.0)
    ledger.admitted(1, Credit(), {Loss.COMPONENT_MISSING: 96})
    ledger.computed(1, 100)
    ledger.finished(1, 1.0)
    assert ledger.total().first.hit_rate == 0


def test_tiers_are_credited_by_where_each_token_came_from(ledger: Ledger) -> None:
    """SGLang's example: of a prefix of 100 the last 40 came from the host, and 30 of them from storage before."""
    ledger.matched(1, 120, 100, 0.0)
    ledger.admitted(1, Credit(60, 10, 30))
    ledger.computed(1, 20)
    ledger.finished(1, 1.0)
    assert sources(ledger.total().first) == (120, 60, 10, 30, 20)


def test_a_load_that_fails_after_admission_is_lost_and_computed(ledger: Ledger) -> None:
    ledger.matched(1, 100, 80, 0.0)
    ledger.admitted(1, Credit(30, 50))
    ledger.computed(1, 10)
    ledger.withdrawn(1, Credit(host_tokens=20), Loss.LOAD_FAILED)
    ledger.withdrawn(1, Credit(host_tokens=5), Loss.LOAD_FAILED)
    ledger.withdrawn(1, Credit(device_tokens=1), Loss.POISONED)
    with pytest.raises(LedgerError, match="a prompt of 100 is not 54 credited \\+ 10 computed"):
        ledger.finished(1, 1.0)
    ledger.computed(1, 36)
    ledger.finished(1, 1.0)
    total = ledger.total().first
    assert sources(total) == (100, 29, 25, 0, 46)
    assert total.lost == {Loss.LOAD_FAILED: 25, Loss.POISONED: 1}


@pytest.mark.parametrize("missing", [1, 2, 20])
def test_a_request_that_lacks_even_one_token_has_not_finished(ledger: Ledger, missing: int) -> None:
    ledger.matched(1, 100, 80, 0.0)
    ledger.admitted(1, Credit(30, 50))
    ledger.computed(1, 20 - missing)
    with pytest.raises(LedgerError, match=f"a prompt of 100 is not 80 credited \\+ {20 - missing} computed"):
        ledger.finished(1, 1.0)
    ledger.computed(1, missing)
    ledger.finished(1, 1.0)
    assert sources(ledger.total().first) == (100, 30, 50, 0, 20)


def test_a_page_of_a_peer_that_was_no_good_is_lost_and_computed(ledger: Ledger) -> None:
    ledger.matched(1, 100, 80, 0.0)
    ledger.admitted(1, Credit(30, peer_tokens=50))
    ledger.withdrawn(1, Credit(peer_tokens=20), Loss.LOAD_FAILED)
    with pytest.raises(LedgerError, match="leaves \\(30, 0, 0, -1\\) for device, host, storage, peer"):
        ledger.withdrawn(1, Credit(peer_tokens=31), Loss.LOAD_FAILED)
    ledger.computed(1, 40)
    ledger.finished(1, 1.0)
    total = ledger.total().first
    assert (total.device_tokens, total.peer_tokens, total.computed_tokens) == (30, 30, 40)
    assert total.lost == {Loss.LOAD_FAILED: 20}


def test_a_cut_to_the_rank_that_holds_least_is_a_loss(ledger: Ledger) -> None:
    ledger.matched(1, 100, 64, 0.0)
    ledger.admitted(1, Credit(storage_tokens=48), {Loss.RANK_MINIMUM: 16})
    ledger.computed(1, 52)
    ledger.finished(1, 1.0)
    assert ledger.total().first.lost == {Loss.RANK_MINIMUM: 16}
    assert ledger.total().first.storage_tokens == 48


def test_an_abort_during_prefill_leaves_the_rest_abandoned(ledger: Ledger) -> None:
    ledger.matched(1, 100, 20, 0.0)
    ledger.admitted(1, Credit(20))
    ledger.computed(1, 30)
    over = ledger.aborted(1, 1.0)
    assert over is not None
    assert (over.phase, over.abandoned_tokens) == (AttemptPhase.ABORTED, 50)
    assert sources(ledger.total().first) == (100, 20, 0, 0, 30)
    assert ledger.total().first.abandoned_tokens == 50


def test_an_abort_before_admission_is_in_no_sum_of_tokens(ledger: Ledger) -> None:
    ledger.matched(1, 100, 20, 0.0)
    ledger.aborted(1, 1.0)
    assert (ledger.never_admitted, len(ledger), ledger.total()) == (1, 0, Book())


def test_an_abort_while_waiting_after_a_retraction_keeps_the_first_attempt(ledger: Ledger) -> None:
    ledger.matched(1, 100, 20, 0.0)
    ledger.admitted(1, Credit(20))
    ledger.computed(1, 80)
    ledger.retracted(1, 1.0)
    ledger.aborted(1, 2.0)
    book = ledger.total()
    assert sources(book.first) == (100, 20, 0, 0, 80)
    assert (book.first.attempts, book.first.aborted, book.again) == (1, 0, Totals())


def test_tokens_that_another_request_inserted_first_are_lost_to_concurrency(ledger: Ledger) -> None:
    ledger.matched(1, 100, 0, 0.0)
    ledger.admitted(1, Credit())
    ledger.computed(1, 100)
    with pytest.raises(LedgerError, match="101 concurrent tokens after 0 reusable"):
        ledger.finished(1, 1.0, concurrent_tokens=101)
    ledger.finished(1, 1.0, concurrent_tokens=64)
    total = ledger.total().first
    assert (total.reusable_tokens, total.lost, total.computed_tokens) == (64, {Loss.CONCURRENT: 64}, 100)


@pytest.mark.parametrize("event", ["admitted", "computed", "withdrawn", "finished", "retracted", "aborted"])
def test_an_event_of_a_request_that_is_over_counts_nothing(ledger: Ledger, event: str) -> None:
    serve(ledger, 1, 100)
    before = ledger.total()
    events = {
        "admitted": lambda: ledger.admitted(1, Credit()),
        "computed": lambda: ledger.computed(1, 1),
        "withdrawn": lambda: ledger.withdrawn(1, Credit(1), Loss.LATE),
        "finished": lambda: ledger.finished(1, 2.0),
        "retracted": lambda: ledger.retracted(1, 2.0),
        "aborted": lambda: ledger.aborted(1, 2.0),
    }
    with pytest.raises(LedgerError, match="request 1 is not open"):
        events[event]()
    assert ledger.total() == before


def test_an_id_that_is_used_again_is_another_request(ledger: Ledger) -> None:
    serve(ledger, 1, 100)
    serve(ledger, 1, 100, device=64)
    assert sources(ledger.total().first) == (200, 64, 0, 0, 136)
    assert ledger.total().again.attempts == 0


@pytest.mark.parametrize(
    ("credit", "lost", "message"),
    [
        (Credit(-10, 60), {}, "device -10"),
        (Credit(60), {Loss.LATE: -10}, "lost late -10"),
        (Credit(50), {Loss.LATE: 10, Loss.BUSY: -10}, "lost late 10, busy -10"),
        (Credit(51), {}, "50 reusable tokens are not device 51"),
    ],
)
def test_an_admission_that_does_not_balance_is_refused_and_may_be_corrected(
    ledger: Ledger, credit: Credit, lost: dict[Loss, int], message: str
) -> None:
    ledger.matched(1, 100, 50, 0.0)
    with pytest.raises(LedgerError, match=message):
        ledger.admitted(1, credit, lost)
    ledger.admitted(1, Credit(50))
    assert ledger.account(1).device_tokens == 50


@pytest.mark.parametrize("reusable", [-1, 101])
def test_a_match_of_more_than_the_prompt_is_refused(ledger: Ledger, reusable: int) -> None:
    with pytest.raises(LedgerError, match=f"{reusable} reusable tokens of a prompt of 100"):
        ledger.matched(1, 100, reusable, 0.0)
    assert len(ledger) == 0


def test_more_chunks_than_prompt_are_refused(ledger: Ledger) -> None:
    ledger.matched(1, 100, 40, 0.0)
    ledger.admitted(1, Credit(40))
    ledger.computed(1, 50)
    with pytest.raises(LedgerError, match="11 more tokens after 40 credited and 50 computed, of a prompt of 100"):
        ledger.computed(1, 11)
    ledger.computed(1, 10)
    assert ledger.finished(1, 1.0)


def test_in_production_a_fault_is_counted_named_and_changes_nothing() -> None:
    seen: list[Account] = []
    ledger = Ledger(fault=FaultPolicy.COUNT, sink=seen.append)
    ledger.matched(1, 100, 40, 0.0)
    ledger.admitted(1, Credit(30))
    ledger.computed(1, 10)
    assert ledger.faults == 2
    assert "request 1 is matched" in str(ledger.last_fault)
    assert ledger.account(1).phase is AttemptPhase.MATCHED
    ledger.admitted(1, Credit(40))
    ledger.computed(1, 60)
    assert ledger.finished(1, 1.0) == seen[0]
    assert ledger.total().first.prompt_tokens == 100


def test_in_production_an_attempt_that_does_not_balance_is_in_no_sum_and_not_kept() -> None:
    ledger = Ledger(fault=FaultPolicy.COUNT)
    ledger.matched(1, 100, 40, 0.0)
    ledger.admitted(1, Credit(40))
    assert ledger.finished(1, 1.0) is None
    assert ledger.finished(1, 1.0) is None
    assert (ledger.faults, len(ledger), ledger.total().first) == (2, 0, Totals())


def test_losses_handed_in_are_copied(ledger: Ledger) -> None:
    lost = {Loss.LATE: 10}
    ledger.matched(1, 20, 10, 0.0)
    ledger.admitted(1, Credit(), lost)
    lost[Loss.LATE] = 99
    assert ledger.account(1).lost == {Loss.LATE: 10}


def test_a_group_is_the_one_of_the_first_match(ledger: Ledger) -> None:
    group = AccountGroup("tenant", "model")
    ledger.matched(1, 10, 0, 0.0, group)
    ledger.matched(1, 10, 0, 0.0)
    ledger.admitted(1, Credit())
    ledger.computed(1, 10)
    ledger.finished(1, 1.0)
    assert ledger.groups() == (group,)


def test_an_abort_after_a_retraction_is_not_one_of_a_request_that_never_began(ledger: Ledger) -> None:
    ledger.matched(1, 100, 20, 0.0)
    ledger.admitted(1, Credit(20))
    ledger.retracted(1, 1.0)
    ledger.aborted(1, 2.0)
    total = ledger.total()
    assert (ledger.never_admitted, ledger.never_resumed) == (0, 1)
    assert (total.first.retracted, total.again.attempts) == (1, 0)
    ledger.check()
