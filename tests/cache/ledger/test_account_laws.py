"""Each law of accounts, of one attempt and of sums, is broken by one token more in any of its terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from kvmover.cache.ledger import (
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
from kvmover.cache.ledger.account import Account, OpenAccount, Prediction, Predictor

GROUP = AccountGroup("", "")
CREDITED = {"device_tokens": 3, "host_tokens": 5, "storage_tokens": 7, "peer_tokens": 11}
LOST = {Loss.LATE: 13, Loss.BUSY: 17}
REUSABLE, COMPUTED, ABANDONED = 26 + 30, 19, 23
#: Phases with both laws; an aborted attempt may never have been admitted.
WHOLE = (AttemptPhase.FINISHED, AttemptPhase.RETRACTED)
ENDED = (*WHOLE, AttemptPhase.ABORTED)
TERMS = (*CREDITED, "prompt_tokens", "computed_tokens", "abandoned_tokens")


def account(phase: AttemptPhase, abandoned: int = ABANDONED, computed: int = COMPUTED) -> Account:
    prompt = 26 + computed + abandoned
    terms = {"reusable_tokens": REUSABLE, "computed_tokens": computed, "abandoned_tokens": abandoned}
    return Account("r", GROUP, 1, phase, 0.0, 1.0, prompt, **CREDITED, **terms, lost=LOST)


@pytest.mark.parametrize(
    ("phase", "term"),
    [*((phase, term) for phase in ENDED for term in TERMS), *((phase, "reusable_tokens") for phase in WHOLE)],
)
def test_an_ended_attempt_balances_and_not_with_a_token_more_anywhere(phase: AttemptPhase, term: str) -> None:
    honest = account(phase)
    honest.check()
    assert (honest.credited_tokens, honest.lost_tokens) == (26, 30)
    with pytest.raises(LedgerError, match="is not credited"):
        msgspec.structs.replace(honest, **{term: getattr(honest, term) + 1}).check()


def test_a_lost_token_is_a_term_too_and_an_open_attempt_has_no_sum_of_its_prompt() -> None:
    for phase in (AttemptPhase.ADMITTED, *WHOLE):
        with pytest.raises(LedgerError, match="reusable is not credited"):
            msgspec.structs.replace(account(phase), lost={Loss.LATE: 31}).check()
    msgspec.structs.replace(account(AttemptPhase.ADMITTED), prompt_tokens=1000).check()
    for phase in (AttemptPhase.WAITING, AttemptPhase.MATCHED):
        msgspec.structs.replace(account(phase), prompt_tokens=1000, reusable_tokens=900).check()


def sums() -> Totals:
    """The sums of an attempt of each ending, with losses and abandoned tokens."""
    found = Totals()
    for phase in ENDED:
        found.add(account(phase))
    return found


@pytest.mark.parametrize(
    ("term", "words"),
    [
        *((term, "attempts are not finished") for term in ("attempts", "finished", "retracted", "aborted")),
        *((term, "reusable is not credited") for term in (*CREDITED, "reusable_tokens")),
        *((term, "prompts are not credited") for term in ("prompt_tokens", "computed_tokens", "abandoned_tokens")),
    ],
)
def test_sums_balance_and_not_with_one_more_anywhere(term: str, words: str) -> None:
    honest = sums()
    honest.check()
    assert (honest.credited_tokens, honest.hit_rate) == (78, 26 / 68)
    with pytest.raises(LedgerError, match=words):
        dataclasses.replace(honest, **{term: getattr(honest, term) + 1}).check()
    with pytest.raises(LedgerError, match="reusable is not credited"):
        dataclasses.replace(honest, lost={Loss.LATE: 1000}).check()


def retracted_once() -> Ledger:
    """A ledger whose request was retracted, came again, and has ended in a later window; another one is open."""
    ledger = Ledger(window_s=10.0)
    for now_s in (0.0, 20.0):
        ledger.matched(1, 100, 50, now_s)
        ledger.admitted(1, Credit(20, 10), {Loss.LATE: 20})
        ledger.computed(1, 70)
        (ledger.finished if now_s else ledger.retracted)(1, now_s + 1)
    ledger.matched(2, 100, 50, 22.0)
    ledger.admitted(2, Credit(50))
    return ledger


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ledger: setattr(ledger._open[2], "host_tokens", 1),
        lambda ledger: setattr(ledger.windows()[0].books[ledger.groups()[0]].first, "host_tokens", 11),
        lambda ledger: setattr(ledger._closed[ledger.groups()[0]].first, "host_tokens", 11),
        lambda ledger: [setattr(ledger._books[ledger.groups()[0]].again, each, 2) for each in ("attempts", "finished")],
    ],
    ids=["an open account", "a window", "a sum", "an attempt that comes again without a retraction"],
)
def test_a_ledger_finds_what_does_not_balance(spoil: Callable[[Ledger], object]) -> None:
    ledger = retracted_once()
    ledger.check()
    spoil(ledger)
    with pytest.raises(LedgerError):
        ledger.check()


def test_an_attempt_comes_again_as_often_as_it_was_retracted() -> None:
    ledger = retracted_once()
    assert (ledger.total().again.attempts, ledger.total().first.retracted) == (1, 1)
    ledger.aborted(2, 23.0)
    for now_s in (30.0, 31.0):
        ledger.matched(3, 10, 0, now_s)
        ledger.admitted(3, Credit())
        ledger.computed(3, 10)
        ledger.retracted(3, now_s)
    ledger.matched(3, 10, 0, 32.0)
    ledger.admitted(3, Credit())
    ledger.aborted(3, 33.0)
    ledger.check()
    total = ledger.total()
    assert (total.again.attempts, total.first.retracted, total.again.retracted) == (3, 2, 1)


def matched() -> OpenAccount:
    found = OpenAccount("r", GROUP, 0, 0.0)
    found.matched(100, 60)
    return found


def admitted() -> OpenAccount:
    found = matched()
    found.admitted(Credit(10, 20, 15, 5), {Loss.LATE: 10})
    found.computed(20)
    return found


@pytest.mark.parametrize(
    ("made", "step", "words"),
    [
        (admitted, lambda each: each.matched(100, 60), "is admitted: it cannot be matched"),
        (admitted, lambda each: each.admitted(Credit(60), {}), "is admitted: it cannot be admitted"),
        *(
            (made, step, f"is {phase}: it cannot be {event}")
            for made, phase in ((lambda: OpenAccount("r", GROUP, 1, 0.0), "waiting"), (matched, "matched"))
            for event, step in {
                "computed": lambda each: each.computed(0),
                "withdrawn": lambda each: each.withdrawn(Credit(), Loss.LATE),
                "finished": lambda each: each.ended(AttemptPhase.FINISHED, 1.0),
                "retracted": lambda each: each.ended(AttemptPhase.RETRACTED, 1.0),
            }.items()
        ),
        (lambda: OpenAccount("r", GROUP, 1, 0.0), lambda each: each.admitted(Credit(), {}), "cannot be admitted"),
        (matched, lambda each: each.matched(100, 101), "101 reusable tokens of a prompt of 100"),
        (matched, lambda each: each.matched(100, -1), "-1 reusable tokens"),
        *(
            (matched, lambda each, credit=credit: each.admitted(credit, {}), "60 reusable tokens are not device")
            for credit in (Credit(-1, 61), Credit(61, -1), Credit(61, 0, -1), Credit(61, 0, 0, -1))
        ),
        (admitted, lambda each: each.computed(-1), "-1 more tokens after 50 credited and 20 computed"),
        (admitted, lambda each: each.computed(31), "31 more tokens"),
        *(
            (admitted, lambda each, credit=credit: each.withdrawn(credit, Loss.LATE), "withdrawing")
            for tokens in ((11, 0, 0, 0), (0, 21, 0, 0), (0, 0, 16, 0), (0, 0, 0, 6))
            for credit in (Credit(*tokens), Credit(*(-bool(each) for each in tokens)))
        ),
        (admitted, lambda each: each.ended(AttemptPhase.FINISHED, 1.0), "is not 50 credited \\+ 20 computed"),
        (admitted, lambda each: each.ended(AttemptPhase.ABORTED, 1.0, -1), "-1 concurrent tokens"),
        (admitted, lambda each: each.ended(AttemptPhase.ABORTED, 1.0, 41), "41 concurrent tokens after 60"),
        *(
            (made, lambda each: each.predicted(Prediction(1, next(iter(Predictor)))), "predicted once")
            for made in (admitted, lambda: OpenAccount("r", GROUP, 0, 0.0))
        ),
        (matched, lambda each: each.predicted(Prediction(101, next(iter(Predictor)))), "101 tokens predicted"),
        (matched, lambda each: each.predicted(Prediction(-1, next(iter(Predictor)))), "-1 tokens predicted"),
    ],
)
def test_a_step_that_breaks_a_law_is_refused_and_changes_nothing(
    made: Callable[[], OpenAccount], step: Callable[[OpenAccount], object], words: str
) -> None:
    found = made()
    before = found.frozen()
    with pytest.raises(LedgerError, match=words):
        step(found)
    assert found.frozen() == before
    before.check()


def test_steps_at_the_ends_of_their_ranges_are_taken() -> None:
    for reusable in (0, 100):
        each = OpenAccount("r", GROUP, 0, 0.0)
        each.matched(100, reusable)
        each.predicted(Prediction(reusable, next(iter(Predictor))))
        each.admitted(Credit(reusable), {})
        each.computed(100 - reusable)
        each.computed(0)
        assert each.frozen().abandoned_tokens == 0
        over = each.ended(AttemptPhase.FINISHED, 1.0, 100 - reusable)
        assert (over.reusable_tokens, over.lost_tokens) == (100, 100 - reusable)
        over.check()


def test_a_retraction_that_is_counted_as_a_fault_leaves_no_request_behind() -> None:
    ledger = Ledger(FaultPolicy.COUNT)
    ledger.matched(1, 100, 50, 0.0)
    assert ledger.retracted(1, 1.0) is None
    assert (ledger.faults, len(ledger), ledger.total()) == (1, 0, Book())


def test_the_first_attempt_is_in_the_first_window_however_early_it_ends() -> None:
    for now_s in (0.0, 5.0, 59.0, 61.0):
        ledger = Ledger(window_s=60.0)
        ledger.matched(1, 10, 0, 0.0)
        ledger.admitted(1, Credit())
        ledger.aborted(1, now_s)
        (window,) = ledger.windows()
        assert (window.start_s, window.books) == (now_s // 60 * 60, {AccountGroup(): ledger.total()})
