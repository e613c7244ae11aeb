"""Deliberate bugs, one rule of restores each. A simulator that finds none of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from kvmover.cache.ledger import Loss
from kvmover.cache.tiers import restore_machine
from kvmover.cache.tiers.agreement import CollectiveOps, PartialWork
from kvmover.cache.tiers.allocator import PageAllocator, PageListeners
from kvmover.cache.tiers.controller import Controller
from kvmover.cache.tiers.restore_driver import Restore, Restores
from kvmover.cache.tiers.restore_machine import EndCopy, RestoreStep, Restoring, Vote
from kvmover.cache.tiers.tier_storage import StorageRead
from tests.sim.mutations import around

Mutation = Callable[[pytest.MonkeyPatch], None]


# Agreement.


def a_rank_keeps_what_it_has_read(patch: pytest.MonkeyPatch) -> None:
    """Whatever the others have."""

    def agreed(honest: Any, state: Restoring, event: Any) -> RestoreStep:
        mine = state.done_pages or 0
        after, actions = honest(state, event)
        return after, [EndCopy(each.op, mine) if isinstance(each, EndCopy) else each for each in actions]

    around(patch, restore_machine, "_agreed", agreed)


def a_part_of_a_hybrid_prefix_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Attention KV without the window and the state at its end."""
    patch.setattr(PageAllocator, "partial", PartialWork.KEPT)


def all_of_an_operation_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A read that ended early is taken for a whole one."""

    def agreed(honest: Any, state: Restoring, event: Any) -> RestoreStep:
        pages = state.op_pages
        after, actions = honest(state, event)
        return after, [EndCopy(each.op, pages) if isinstance(each, EndCopy) else each for each in actions]

    around(patch, restore_machine, "_agreed", agreed)


def a_rank_without_room_says_nothing(patch: pytest.MonkeyPatch) -> None:
    """It does not begin what the others begin."""

    def step(honest: Any, state: Restoring, event: Any, now: float) -> RestoreStep:
        if isinstance(event, restore_machine.HostFull):
            return restore_machine._load(replace(state, asked=None))
        return honest(state, event, now)

    around(patch, restore_machine, "step", step)


def a_rank_whose_look_up_failed_says_nothing(patch: pytest.MonkeyPatch) -> None:
    def step(honest: Any, state: Restoring, event: Any, now: float) -> RestoreStep:
        if isinstance(event, restore_machine.LookedUp) and not any(event.pages):
            return state, []
        return honest(state, event, now)

    around(patch, restore_machine, "step", step)


def the_longest_of_one_rank_is_read(patch: pytest.MonkeyPatch) -> None:
    """The minimum of the votes is not waited for."""
    voted: list[tuple[Restoring, Vote]] = []

    def step(honest: Any, state: Restoring, event: Any, now: float) -> RestoreStep:
        if isinstance(event, restore_machine.RanksAgreed) and state.asked is restore_machine.RestorePhase.LOOK:
            event = next((restore_machine.RanksAgreed(vote.answer) for own, vote in voted if own is state), event)
        after, actions = honest(state, event, now)
        voted.extend((after, action) for action in actions if isinstance(action, Vote))
        return after, actions

    around(patch, restore_machine, "step", step)


def operations_end_where_they_are_done(patch: pytest.MonkeyPatch) -> None:
    """A rank ends its operation when it has answered, and not when all have."""

    def settle(honest: Any, self: CollectiveOps, agreed: Any) -> Any:
        over = honest(self, agreed)
        early = [each for each in self.open if each.answer is not None]
        self.open = [each for each in self.open if each.answer is None]
        return [*over, *((each, each.answer) for each in early)]

    around(patch, CollectiveOps, "settle", settle)


# Time.


def reads_have_all_the_time(patch: pytest.MonkeyPatch) -> None:

    def tick(honest: Any, state: Restoring, now: float) -> RestoreStep:
        after, actions = honest(state, now)
        return (state, []) if any(isinstance(each, restore_machine.AskToStop) for each in actions) else (after, actions)

    around(patch, restore_machine, "_tick", tick)


def nobody_hears_that_a_request_was_given_up(patch: pytest.MonkeyPatch) -> None:
    def given_up(honest: Any, state: Restoring) -> RestoreStep:
        after, actions = honest(state)
        return after, [each for each in actions if not isinstance(each, restore_machine.AskToStop)]

    around(patch, restore_machine, "_given_up", given_up)


def a_read_that_was_stopped_reads_on(patch: pytest.MonkeyPatch) -> None:
    def step(honest: Any, self: StorageRead) -> bool:
        heard, self.stopping = self.stopping, lambda: False
        over = honest(self)
        self.stopping = heard
        return over

    around(patch, StorageRead, "step", step)


def anothers_load_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    around(
        patch, restore_machine, "_rematched", lambda honest, state, event: honest(state, replace(event, waits=False))
    )


# Pages.


def a_restore_that_is_given_up_ends_at_once(patch: pytest.MonkeyPatch) -> None:
    """Its host pages come back while the storage thread still reads into them."""

    def given_up(honest: Any, state: Restoring) -> RestoreStep:
        after, actions = honest(state)
        ends = [EndCopy(state.op, 0)] if state.op and not state.done else []
        return replace(after, op=0, op_pages=0, done_pages=None), [*ends, *actions]

    around(patch, restore_machine, "_given_up", given_up)


def a_load_is_over_when_it_is_begun(patch: pytest.MonkeyPatch) -> None:
    """A rank answers before its copy has landed."""

    def step(honest: Any, state: Restoring, event: Any, now: float) -> RestoreStep:
        if isinstance(event, restore_machine.LoadEnded):
            return state, []
        after, actions = honest(state, event, now)
        if isinstance(event, restore_machine.LoadBegun):
            return restore_machine._vote(after, event.pages, [])
        return after, actions

    around(patch, restore_machine, "step", step)


def what_was_found_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Nothing is locked until it is ready: it may be evicted on the way."""
    patch.setattr(Restores, "_lock", lambda self, restore, match: None)


def locks_are_never_given_back(patch: pytest.MonkeyPatch) -> None:
    def let_go(honest: Any, self: Restores, restore: Restore) -> None:
        restore.keeps.clear()
        honest(self, restore)

    around(patch, Restores, "_let_go", let_go)


def what_is_ready_is_not_locked(patch: pytest.MonkeyPatch) -> None:
    def secure(honest: Any, self: Restores, restore: Restore) -> Any:
        event = honest(self, restore)
        handle = restore.handle
        if handle is not None:
            self.parts.allocator.tree.unlock(handle)
            restore.handle = self.parts.allocator.tree.lock(0)
        return event

    around(patch, Restores, "_secure", secure)


def a_poisoned_page_is_taken(patch: pytest.MonkeyPatch) -> None:
    def step(honest: Any, state: Restoring, event: Any, now: float) -> RestoreStep:
        if isinstance(event, restore_machine.FetchEnded) and event.loss is Loss.POISONED:
            event = restore_machine.FetchEnded(min(state.op_pages, event.pages + 1), event.loss)
        return honest(state, event, now)

    around(patch, restore_machine, "step", step)


# Peers.


def pages_of_a_read_that_hangs_come_back_at_once(patch: pytest.MonkeyPatch) -> None:
    """Whatever its peer may still write."""

    def abandon(self: Restores, restore: Restore, op: int) -> None:
        restore.borrow = None
        self.parts.collectives.begin(lambda agreed: self._abandoned(op)).done(1)

    patch.setattr(Restores, "_abandon", abandon)


def what_did_not_come_is_lent_again(patch: pytest.MonkeyPatch) -> None:
    def abandon(honest: Any, self: Restores, restore: Restore, op: int) -> None:
        self._lend(restore, op, len(restore.reads[1]))
        honest(self, restore, op)

    around(patch, Restores, "_abandon", abandon)


def nobody_hears_of_a_page_that_leaves_the_host(patch: pytest.MonkeyPatch) -> None:
    """It stays in the inventory, and what is put there next is lent under its name."""

    honest = Controller.__init__

    def init(self: Controller, *given: Any, **named: Any) -> None:
        honest(self, *given, **named)
        self.allocator.listeners = PageListeners(self.allocator.listeners.copied_out)

    patch.setattr(Controller, "__init__", init)


def ranks_with_unlike_lists_read_by_number(patch: pytest.MonkeyPatch) -> None:
    """A rank that has heard of an engine before another reads its own engine number so and so."""

    def step(honest: Any, state: Restoring, event: Any, now: float) -> RestoreStep:
        if isinstance(event, restore_machine.LookedUp):
            event = replace(event, mark=1)
        return honest(state, event, now)

    around(patch, restore_machine, "step", step)


# The account.


def losses_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore_machine, "balanced", lambda reasons, due: {})


def the_others_are_never_blamed(patch: pytest.MonkeyPatch) -> None:
    def short(honest: Any, state: Restoring, reason: Loss, tokens: int) -> Restoring:
        return honest(state, Loss.LATE if reason is Loss.RANK_MINIMUM else reason, tokens)

    around(patch, restore_machine, "_short", short)


def the_others_are_blamed_for_a_part_of_no_use(patch: pytest.MonkeyPatch) -> None:
    """What one rank alone read of a hybrid prefix, and could not have used, is lost to the other ranks."""

    def fetched(honest: Any, state: Restoring, pages: int, loss: Loss) -> RestoreStep:
        short = (state.op_pages - pages) * state.terms.page_tokens
        return restore_machine._vote(restore_machine._short(state, loss, short), pages, [])

    around(patch, restore_machine, "_fetched", fetched)


def what_was_found_is_credited(patch: pytest.MonkeyPatch) -> None:
    """sglang#8533: credit at the match, whatever comes of it."""

    def ready(honest: Any, state: Restoring, tokens: int) -> Restoring:
        after = honest(state, tokens)
        credit = replace(after.credit, storage_tokens=after.reusable_tokens - after.credit.device_tokens)
        return replace(after, credit=credit)

    around(patch, restore_machine, "_ready", ready)


#: With the profile that has what each is about.
MUTATIONS: Mapping[Mutation, str] = {
    a_rank_keeps_what_it_has_read: "rotten",
    a_part_of_a_hybrid_prefix_is_kept: "rotten",
    all_of_an_operation_is_kept: "rotten",
    a_rank_without_room_says_nothing: "short",
    a_rank_whose_look_up_failed_says_nothing: "rotten",
    the_longest_of_one_rank_is_read: "rotten",
    operations_end_where_they_are_done: "default",
    reads_have_all_the_time: "hasty",
    nobody_hears_that_a_request_was_given_up: "hasty",
    a_read_that_was_stopped_reads_on: "hasty",
    anothers_load_is_not_waited_for: "default",
    a_restore_that_is_given_up_ends_at_once: "hasty",
    a_load_is_over_when_it_is_begun: "default",
    what_was_found_is_not_kept: "default",
    locks_are_never_given_back: "default",
    what_is_ready_is_not_locked: "default",
    a_poisoned_page_is_taken: "rotten",
    pages_of_a_read_that_hangs_come_back_at_once: "lent",
    what_did_not_come_is_lent_again: "lent",
    nobody_hears_of_a_page_that_leaves_the_host: "lent",
    ranks_with_unlike_lists_read_by_number: "lent",
    losses_are_forgotten: "rotten",
    the_others_are_never_blamed: "rotten",
    the_others_are_blamed_for_a_part_of_no_use: "rotten",
    what_was_found_is_credited: "rotten",
}
