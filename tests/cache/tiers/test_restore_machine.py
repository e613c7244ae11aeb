"""The state machine of a restore, by hand: what it asks for, what it answers, and what it says is lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rig import Rank

from kvmover.cache.ledger import Account, AccountGroup, AttemptPhase, LedgerError, Loss, Totals
from kvmover.cache.prefix import FULL, InvariantBroken, Tier
from kvmover.cache.tiers import RestorePhase, TierPolicy, Timeout
from kvmover.cache.tiers.agreement import CollectiveOps, PartialWork
from kvmover.cache.tiers.restore_machine import (
    STORAGE,
    Abandon,
    AskToStop,
    BeginFetch,
    BeginLoad,
    BeginNothing,
    Decline,
    DeviceFull,
    EndCopy,
    FetchBegun,
    FetchEnded,
    GivenUp,
    HostFull,
    LetGo,
    LookedUp,
    LookUp,
    RanksAgreed,
    ReadSource,
    Rematch,
    Rematched,
    RestoreTerms,
    Restoring,
    TimePassed,
    Vote,
    start,
    step,
)

POLICY = TierPolicy(prefetch=Timeout(1.0, 0.0), least_tokens=1, least_load_tokens=1)


def terms(partial: PartialWork = PartialWork.KEPT) -> RestoreTerms:
    return RestoreTerms(page_tokens=4, token_bytes=2, policy=POLICY, partial=partial, stored=True)


def reading(partial: PartialWork = PartialWork.KEPT) -> Restoring:
    """Four pages that all ranks read."""
    state, _ = start(terms(partial), 16, 0, 0, now=0.0)
    state, _ = step(state, LookedUp((0, 1, 2, 3, 4)), 0.0)
    state, _ = step(state, RanksAgreed((0, 1, 1, 1, 1)), 0.0)
    state, _ = step(state, FetchBegun(7, 4), 0.0)
    return state


def test_the_longest_prefix_that_all_would_read_is_read():
    state, actions = start(terms(), 16, 0, 0, now=0.0)
    assert actions == [LookUp(4)]
    state, actions = step(state, LookedUp((0, 1, 2, 3)), 0.0)
    assert actions == [Vote((0, 1, 1, 1, 0))]
    state, actions = step(state, RanksAgreed((0, 1, 1, 0, 0)), 0.0)
    assert actions == [BeginFetch(2)]
    assert state.reasons == {Loss.RANK_MINIMUM: 4}


@pytest.mark.parametrize(("partial", "pages", "lost_tokens"), [(PartialWork.KEPT, 3, 4), (PartialWork.DROPPED, 0, 16)])
def test_a_part_of_a_read_counts_where_it_is_of_use(partial: PartialWork, pages: int, lost_tokens: int):
    state, actions = step(reading(partial), FetchEnded(3, Loss.POISONED), 0.0)
    assert actions == [Vote((pages, 4, -4))]
    assert state.reasons == {Loss.POISONED: lost_tokens}
    state, actions = step(state, RanksAgreed((pages, 4, -4)), 0.0)
    assert actions == [EndCopy(7, pages), Rematch()]
    assert Loss.RANK_MINIMUM not in state.reasons


def with_peers(stored: bool = True) -> RestoreTerms:
    return replace(terms(), stored=stored, peers=2)


def test_of_equal_lengths_a_peers_is_read_and_what_it_fails_to_bring_the_next_is():
    state, actions = start(with_peers(), 16, 0, 0, now=0.0)
    assert actions == [LookUp(4)]
    state, actions = step(state, LookedUp((0, 1, 2, 3), peers=(2, 3)), 0.0)
    assert actions == [Vote((0, 1, 1, 1, 0, 2, 3, 0, 0))]
    state, actions = step(state, RanksAgreed((0, 1, 1, 1, 0, 2, 3, 0, 0)), 0.0)
    assert actions == [BeginFetch(3, 1)]
    state, _ = step(state, FetchBegun(7, 3), 0.0)
    state, actions = step(state, FetchEnded(0, Loss.READ_FAILED), 0.0)
    state, actions = step(state, RanksAgreed((0, 3, -3)), 0.0)
    assert actions == [Abandon(7), Decline(), BeginFetch(3, STORAGE)]
    state, _ = step(state, FetchBegun(8, 3), 0.0)
    state, _ = step(state, FetchEnded(3), 0.0)
    state, actions = step(state, RanksAgreed((3, 3, -3)), 0.0)
    assert actions == [EndCopy(8, 3), Rematch()]
    state.check()


def test_who_was_told_to_stop_reads_from_nobody_else():
    state, _ = start(with_peers(), 16, 0, 0, now=0.0)
    state, _ = step(state, LookedUp((0, 1, 2, 3), peers=(2, 3)), 0.0)
    state, _ = step(state, RanksAgreed((0, 1, 1, 1, 0, 2, 3, 0, 0)), 0.0)
    state, _ = step(state, FetchBegun(7, 3), 0.0)
    state, _ = step(state, FetchEnded(0, Loss.LATE), 0.0)
    state, actions = step(state, RanksAgreed((0, 3, -3), stopped=True), 0.0)
    assert actions == [Abandon(7), Rematch()]


def test_ranks_that_voted_for_other_peers_read_from_one_that_all_have():
    state, _ = start(with_peers(stored=False), 16, 0, 0, now=0.0)
    state, actions = step(state, LookedUp((0,), peers=(4, 1)), 0.0)
    assert actions == [Vote((0, 0, 0, 0, 0, 4, 1, 0, 0))]
    state, actions = step(state, RanksAgreed((0, 0, 0, 0, 0, 0, 1, 0, 0)), 0.0)
    assert actions == [BeginFetch(1, 1)]
    assert state.reasons == {Loss.RANK_MINIMUM: 12}
    state, actions = step(state, HostFull(4), 0.0)
    state, actions = step(state, RanksAgreed((0, 0, -1)), 0.0)
    assert actions == [Abandon(0), Rematch()]


def test_ranks_that_asked_other_engines_read_from_none_of_them():
    state, _ = start(with_peers(), 16, 0, 0, now=0.0)
    state, actions = step(state, LookedUp((0, 1, 2), peers=(4, 1), mark=7), 0.0)
    assert actions == [Vote((0, 1, 1, 0, 0, 4, 1, 7, -7))]
    alike, _ = step(state, RanksAgreed((0, 1, 1, 0, 0, 4, 1, 7, -7)), 0.0)
    assert alike.reading == ReadSource(4, 0)
    other, actions = step(state, RanksAgreed((0, 1, 1, 0, 0, 4, 1, 5, -7)), 0.0)
    assert other.reading == ReadSource(2, STORAGE)
    assert actions == [Decline(), BeginFetch(2)]


def test_nothing_that_all_peers_have_is_declined():
    state, _ = start(with_peers(stored=False), 16, 0, 0, now=0.0)
    state, _ = step(state, LookedUp((0,), peers=(4, 1)), 0.0)
    _, actions = step(state, RanksAgreed((0,) * 9), 0.0)
    assert actions == [Decline(), Rematch()]


def test_a_rank_without_room_takes_part_in_what_the_others_do():
    state = replace(reading(), op=0, op_pages=0)
    state, actions = step(state, HostFull(16), 0.0)
    assert actions == [BeginNothing(), Vote((0, 0, 0))]
    assert state.reasons == {Loss.HOST_CAPACITY: 16}


def test_a_read_is_stopped_once_when_its_time_is_up():
    state, actions = step(reading(), TimePassed(), 0.9)
    assert actions == []
    state, actions = step(state, TimePassed(), 1.0)
    assert actions == [AskToStop()]
    assert step(state, TimePassed(), 2.0) == (state, [])


def test_what_is_given_up_keeps_its_pages_until_all_ranks_have_ended():
    state, actions = step(reading(), GivenUp(), 0.0)
    assert actions == [AskToStop(), LetGo()]
    assert (state.phase, state.op, state.over) == (RestorePhase.ABORTED, 7, False)
    state, _ = step(state, FetchEnded(1, Loss.LATE), 0.0)
    state, actions = step(state, RanksAgreed((1, 4, -4)), 0.0)
    assert actions == [EndCopy(7, 1)]
    assert state.over


def test_as_much_is_loaded_as_there_is_room_for_and_each_token_is_lost_once():
    state, _ = start(replace(terms(), stored=False), 16, 0, 16, now=0.0)
    state, actions = step(state, Rematched(0, 16), 0.0)
    assert actions == [BeginLoad(16)]
    state, actions = step(state, DeviceFull(0, 16, 8), 0.0)
    assert actions == [BeginLoad(8)]
    state, actions = step(state, DeviceFull(0, 8, 0), 0.0)
    assert actions == [BeginNothing(), Vote((0, 0, 0))]
    assert state.reasons == {Loss.DEVICE_CAPACITY: 16}


@pytest.mark.parametrize(
    "wrong",
    [
        {"best_tokens": -4},
        {"device_tokens": 3, "best_tokens": 4, "reusable_tokens": 4},
        {"done_pages": 5},
        {"asked": None},
        {"loads": 2},
        {"phase": RestorePhase.READY},
    ],
    ids=str,
)
def test_a_state_that_cannot_be_is_found_out(wrong: dict[str, object]):
    state = reading()
    state.check()
    with pytest.raises(InvariantBroken):
        replace(state, **wrong).check()


def test_a_page_that_nobody_has_or_two_have_is_found_out():
    rank = Rank(None)
    taken = rank.taken(2)
    rank.controller.check({(FULL, Tier.DEVICE): taken})
    with pytest.raises(InvariantBroken, match=r"\[0, 1\] are lost"):
        rank.controller.check({})
    rank.controller.give(taken)
    with pytest.raises(InvariantBroken, match=r"\[0, 1\] are in two places"):
        rank.controller.check({(FULL, Tier.DEVICE): taken})
    rank.close()


def test_an_operation_that_is_open_out_of_order_is_found_out():
    ops = CollectiveOps()
    for _ in range(2):
        ops.begin(lambda agreed: None)
    ops.check()
    ops.open.reverse()
    with pytest.raises(InvariantBroken, match="operations"):
        ops.check()


def test_a_book_that_does_not_balance_is_found_out():
    account = Account("r", AccountGroup(), 1, AttemptPhase.FINISHED, 0.0, 1.0, 8, 4, 4, computed_tokens=4)
    account.check()
    totals = Totals()
    totals.add(account)
    totals.check()
    for wrong in ({"reusable_tokens": 5}, {"computed_tokens": 3}):
        bad = replace(account, **wrong)
        with pytest.raises(LedgerError, match="is not credited"):
            bad.check()
        totals = Totals()
        totals.add(bad)
        with pytest.raises(LedgerError, match="not credited"):
            totals.check()
