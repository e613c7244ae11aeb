"""The accounts under every loss: each prompt token is credited to one tier, lost for one reason or computed, once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace
from rig import EAGER, Rank, idle, until

import kvmover.cache.tiers
from kvmover.cache.ledger import Account, Credit, FaultPolicy, Ledger, LedgerError, Loss
from kvmover.cache.tiers import (
    ControllerConfig,
    CostAware,
    Restore,
    Storage,
    TierPolicy,
    Timeout,
    Wait,
    restore_machine,
)
from kvmover.cache.tiers.restore_machine import Restoring
from kvmover.layout import Fleet
from tests.store.segments import segments_of

PROMPT = list(range(33))
OTHERS = list(range(100, 133))


@dataclass(frozen=True)
class Scene:
    """Ranks and their restores of PROMPT, eight pages of which were stored, and what each must say is lost."""

    ranks: Sequence[Rank]
    restores: Sequence[Restore]
    lost: Sequence[dict[Loss, int]]


def stored(folder: Path, policy: TierPolicy = EAGER, fleet: Fleet | None = None, **more) -> list[Rank]:
    """Ranks that have the prompt in storage, and nowhere else."""
    setup = ControllerConfig(policy, clock=lambda: 0.0)
    fleet = fleet or Fleet(page_tokens=4)
    ranks = [Rank(folder, fleet=fleet, rank=rank, setup=setup, **more) for rank in range(fleet.size)]
    served(ranks)
    idle(ranks)
    for rank in ranks:
        rank.forget()
        rank.poison_free()
    return ranks


def served(ranks: Sequence[Rank]) -> list[Restore]:
    restores = restored(ranks)
    for rank, restore in zip(ranks, restores, strict=True):
        rank.compute(PROMPT, restore)
    return restores


def restored(ranks: Sequence[Rank]) -> list[Restore]:
    restores = [rank.controller.restore(PROMPT) for rank in ranks]
    until(ranks, lambda: all(restore.done for restore in restores))
    for rank, restore in zip(ranks, restores, strict=True):
        rank.look_at(PROMPT, restore)
    return restores


def step_by_step(rank: Rank) -> list[tuple]:
    """Storage jobs that come from here on, which the test carries out."""
    jobs: list[tuple] = []
    rank.controller.worker.begin = lambda job, urgency, ended: jobs.append((job, ended))
    return jobs


def done(jobs: list[tuple]) -> None:
    (job, ended) = jobs.pop()
    while not job.step():
        pass
    ended(None)


def storage_of(rank: Rank) -> Storage:
    storage = rank.controller._restores.parts.storage
    assert storage is not None
    return storage


def damage(rank: Rank, page: int) -> None:
    """One bit of a stored page."""
    found = segments_of(rank.store).catalog.index.get(rank.hashes(PROMPT)[page])
    assert found is not None
    each = found.objects[0]
    path = segments_of(rank.store).folder / f"{each.segment}.data"
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, each.offset)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), each.offset)


def it_does_not_pay(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    ranks = stored(folder, TierPolicy(prefetch=CostAware(1e12), least_tokens=1))
    storage_of(ranks[0]).reads.add(1 << 20, 1.0)
    return Scene(ranks, restored(ranks), [{Loss.THRESHOLD: 32}])


def too_few_to_load(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    ranks = stored(folder, TierPolicy(prefetch=Wait(), least_tokens=1, least_load_tokens=33))
    return Scene(ranks, restored(ranks), [{Loss.THRESHOLD: 32}])


def no_room_to_read_into(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    ranks = stored(folder, TierPolicy(prefetch=Wait(), least_tokens=1, reading_share=0.1))
    return Scene(ranks, restored(ranks), [{Loss.HOST_CAPACITY: 32}])


def no_room_on_the_device(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    ranks = stored(folder, pages=(10, 32))
    taken = ranks[0].controller.take(7)
    restores = restored(ranks)
    ranks[0].controller.give(taken)
    return Scene(ranks, restores, [{Loss.DEVICE_CAPACITY: 20}])


def it_takes_too_long(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    from kvmover.cache.tiers import tier_storage

    patch.setattr(tier_storage, "BATCH_PAGES", 3)
    ranks = stored(folder, TierPolicy(prefetch=Timeout(0.0, 0.0), least_tokens=1, least_load_tokens=1))
    jobs = step_by_step(ranks[0])
    restore = ranks[0].controller.restore(PROMPT)
    done(jobs)  # the look-up
    ranks[0].controller.poll()
    assert not jobs[0][0].step(), "three of eight pages"
    ranks[0].controller.poll()
    done(jobs)
    ranks[0].controller.wait(restore)
    return Scene(ranks, [restore], [{Loss.LATE: 20}])


def the_disk_fails(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    ranks = stored(folder)

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    storage_of(ranks[0]).stored_pools[0].view.get = fail
    return Scene(ranks, restored(ranks), [{Loss.READ_FAILED: 32}])


def a_page_is_bad(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    ranks = stored(folder)
    damage(ranks[0], 3)
    return Scene(ranks, restored(ranks), [{Loss.POISONED: 20}])


def a_page_goes_between_look_and_read(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    ranks = stored(folder)
    jobs = step_by_step(ranks[0])
    restore = ranks[0].controller.restore(PROMPT)
    done(jobs)
    ranks[0].store.clear()
    ranks[0].controller.poll()
    done(jobs)
    ranks[0].controller.wait(restore)
    return Scene(ranks, [restore], [{Loss.CAPACITY_EVICTED: 32}])


def another_rank_lacks_a_page(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    ranks = stored(folder, fleet=Fleet(tp=2, page_tokens=4))
    view, bad = storage_of(ranks[1]).stored_pools[0].view, ranks[1].hashes(PROMPT)[5]
    view.exists = lambda hashes, exists=view.exists: [
        there and page != bad for there, page in zip(exists(hashes), hashes, strict=True)
    ]
    return Scene(ranks, restored(ranks), [{Loss.RANK_MINIMUM: 12}, {}])


def two_losses_at_once(folder: Path, patch: pytest.MonkeyPatch) -> Scene:
    """A bad page, and then no room for all that was good before it."""
    ranks = stored(folder, pages=(10, 32))
    damage(ranks[0], 5)
    taken = ranks[0].controller.take(7)
    restores = restored(ranks)
    ranks[0].controller.give(taken)
    return Scene(ranks, restores, [{Loss.DEVICE_CAPACITY: 8, Loss.POISONED: 12}])


Make = Callable[[Path, pytest.MonkeyPatch], Scene]
SCENES: list[Make] = [
    it_does_not_pay,
    too_few_to_load,
    no_room_to_read_into,
    no_room_on_the_device,
    it_takes_too_long,
    the_disk_fails,
    a_page_is_bad,
    a_page_goes_between_look_and_read,
    another_rank_lacks_a_page,
    two_losses_at_once,
]


def accounts(scene: Scene) -> list[Account]:
    """Through a ledger that raises whatever does not balance, to the end of the request."""
    ledger, ended = Ledger(FaultPolicy.RAISE), list[Account]()
    for number, restore in enumerate(scene.restores):
        ledger.matched(str(number), len(PROMPT), restore.reusable_tokens, 0.0)
        ledger.admitted(str(number), restore.credit, restore.lost)
        ledger.computed(str(number), len(PROMPT) - restore.tokens)
        account = ledger.finished(str(number), 1.0)
        assert account is not None
        ended.append(account)
    return ended


def agree(scene: Scene) -> None:
    for account, restore, lost in zip(accounts(scene), scene.restores, scene.lost, strict=True):
        assert account.lost == lost
        assert account.credited_tokens == restore.tokens == 32 - max(sum(each.values()) for each in scene.lost)
        assert account.storage_tokens == restore.tokens, "nothing was anywhere else"


@pytest.mark.parametrize("make", SCENES, ids=lambda make: make.__name__)
def test_every_token_is_in_one_place_of_the_accounts(make: Make, tmp_path, monkeypatch):
    scene = make(tmp_path, monkeypatch)
    agree(scene)
    for rank, restore in zip(scene.ranks, scene.restores, strict=True):
        rank.controller.release(restore)
    idle(scene.ranks)
    for rank in scene.ranks:
        rank.conserved()
        rank.close()


def test_every_loss_that_tiers_know_has_a_scene(tmp_path_factory, monkeypatch):
    folder = Path(kvmover.cache.tiers.__file__).parent
    known = {Loss[name] for path in folder.glob("*.py") for name in re.findall(r"Loss\.([A-Z_]+)", path.read_text())}
    seen = set[Loss]()
    for make in SCENES:
        with monkeypatch.context() as patch:
            scene = make(tmp_path_factory.mktemp("scene"), patch)
            seen |= {loss for lost in scene.lost for loss in lost}
            for rank in scene.ranks:
                rank.close()
    assert seen == known


def credits_what_was_found(state: Restoring, tokens: int) -> Restoring:
    """sglang#8533: credit at the match, whatever comes of it."""
    return replace(READY(state, tokens), credit=Credit(0, 0, state.reusable_tokens), lost={})


def forgets_the_losses(state: Restoring, tokens: int) -> Restoring:
    return replace(READY(state, tokens), lost={})


def hides_what_was_not_brought(state: Restoring, tokens: int) -> Restoring:
    return replace(READY(state, tokens), reusable_tokens=tokens, lost={})


def blames_everybody(state: Restoring, tokens: int) -> Restoring:
    """Each reason with all that it explains: one token, two losses."""
    return replace(READY(state, tokens), lost={**state.reasons, Loss.LATE: 32})


def credits_the_host(state: Restoring, tokens: int) -> Restoring:
    """What passed through the host was found in storage."""
    return replace(READY(state, tokens), credit=Credit(0, tokens, 0))


READY = restore_machine._ready
MUTANTS = [
    credits_what_was_found,
    forgets_the_losses,
    hides_what_was_not_brought,
    blames_everybody,
    credits_the_host,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_accounts_that_are_kept_wrongly_are_noticed(mutant, tmp_path, monkeypatch):
    monkeypatch.setattr(restore_machine, "_ready", mutant)
    scene = a_page_is_bad(tmp_path, monkeypatch)
    with pytest.raises((LedgerError, AssertionError)):
        agree(scene)
    for rank in scene.ranks:
        rank.close()
