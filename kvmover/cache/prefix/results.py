"""The tree answers with these frozen values, and with actions that the caller carries out in the order given."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.keys import NO_IDS
from kvmover.errors import PrefixError
from kvmover.fields import member

PageArray: TypeAlias = npt.NDArray[np.int32]

#: The node of the empty prefix, in every namespace. It can be locked, to no effect.
ROOT = 0


class Tier(IntEnum):
    """Where pages are, nearest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class FreePages(msgspec.Struct, frozen=True, gc=False, eq=False):
    """These page ids are the caller's again: nothing in the tree or in flight uses them."""

    component: str
    tier: Tier
    page_ids: PageArray


class CopyLeg(msgspec.Struct, frozen=True, eq=False):
    """One component's part of a copy: page `positions`, from the root, and the ids to copy from and to, in that order.

    A tier without page ids, storage, has none.
    """

    component: str
    positions: PageArray
    src_page_ids: PageArray
    dst_page_ids: PageArray


class CopyOut(msgspec.Struct, frozen=True, eq=False):
    """Copy from device to host before anything that follows: a victim that was not backed."""

    legs: tuple[CopyLeg, ...]


Action: TypeAlias = FreePages | CopyOut


class ActionList(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What is to be done, in order; copies come before the frees of what they read."""

    actions: tuple[Action, ...] = ()

    def page_ids(self, component: str = FULL, tier: Tier = Tier.DEVICE) -> PageArray:
        """All that is freed of one component on one tier."""
        if tier.__class__ is not Tier:
            tier = member(Tier, tier, "tier", PrefixError)
        if not self.actions:
            return NO_IDS
        found = [
            a.page_ids for a in self.actions if isinstance(a, FreePages) and a.component == component and a.tier == tier
        ]
        return NO_IDS if not found else found[0] if len(found) == 1 else np.concatenate(found)


class Inserted(ActionList, frozen=True, gc=False, eq=False):
    """An insert, or the landing of pages on the host: `tokens` are kept now, of which `known_tokens` were before.

    `node` is the end of the path. `actions` free the duplicates. `backups` are nodes that are due to be written
    through: call `begin_backup` for each.
    """

    node: int = ROOT
    tokens: int = 0
    known_tokens: int = 0
    backups: tuple[int, ...] = ()


class LockHandle(msgspec.Struct, frozen=True, gc=False):
    """A lock. What it covers is noted in the tree, and follows splits."""

    number: int
    node: int
    tier: Tier


class Extended(Inserted, frozen=True, gc=False, eq=False):
    """Pages below a prefix that was locked; `handle` locks both now. `kept_page_ids` are the tree's, [page]."""

    handle: LockHandle = LockHandle(0, ROOT, Tier.DEVICE)
    kept_page_ids: PageArray = NO_IDS


class LoadBack(msgspec.Struct, frozen=True, eq=False):
    """What one component must bring from the host for a match to be of use up to its best node."""

    component: str
    positions: PageArray
    host_page_ids: PageArray


class Match(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Two prefixes of a prompt, and what lies between them. Nothing is locked and nothing is credited.

    `tokens`, `page_ids` and `device_node` are the prefix that can be used as it is: every component stands on the
    device. `best_tokens` and `best_node` are what could be used after a load-back of `loads`; `host_node` is where a
    prefetch goes on. `full_tokens` have attention KV on some tier, whatever other components say; `branches` are tokens
    at which a component should be kept, so that the next prompt of this kind can start there. `held` are page ids of
    other components at `device_node`: the window's, or the state to copy. `waits` are operations whose end will make
    more of it usable.
    """

    tokens: int
    page_ids: PageArray
    device_node: int
    best_tokens: int
    best_node: int
    full_tokens: int
    host_node: int
    loads: tuple[LoadBack, ...] = ()
    branches: tuple[tuple[str, int], ...] = ()
    held: tuple[tuple[str, PageArray], ...] = ()
    waits: tuple[int, ...] = ()


class Sizes(msgspec.Struct, frozen=True):
    """Pages of one component on one tier: free for eviction, and locked."""

    evictable: int
    protected: int
