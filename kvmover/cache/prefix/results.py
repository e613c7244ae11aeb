"""Tree calls return these frozen values, some with actions that the caller carries out in the order given."""

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

#: The node of the empty prefix in every namespace. Locking it has no effect.
ROOT = 0


class Tier(IntEnum):
    """A place that holds pages, nearest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class FreePages(msgspec.Struct, frozen=True, gc=False, eq=False):
    """An action that returns page ids to the caller: neither tree nor operations use them."""

    component: str
    tier: Tier
    page_ids: PageArray


class CopyLeg(msgspec.Struct, frozen=True, eq=False):
    """One component's part of a copy: page `positions` from the root, source ids, destination ids.

    Storage has no ids: the array is empty.
    """

    component: str
    positions: PageArray
    src_page_ids: PageArray
    dst_page_ids: PageArray


class CopyOut(msgspec.Struct, frozen=True, eq=False):
    """An action that copies a victim to the host, before any action that follows."""

    legs: tuple[CopyLeg, ...]


Action: TypeAlias = FreePages | CopyOut


class ActionList(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The actions to carry out, in order; copies come before the frees of their source pages."""

    actions: tuple[Action, ...] = ()

    def page_ids(self, component: str = FULL, tier: Tier = Tier.DEVICE) -> PageArray:
        """Returns all ids freed of a component on a tier, int32, [page]. Raises PrefixError if `tier` is no Tier."""
        if tier.__class__ is not Tier:
            tier = member(Tier, tier, "tier", PrefixError)
        found = NO_IDS
        for action in self.actions:
            if isinstance(action, FreePages) and action.component == component and action.tier is tier:
                found = np.concatenate([found, action.page_ids]) if len(found) else action.page_ids
        return found


class Inserted(ActionList, frozen=True, gc=False, eq=False):
    """The result of an insert, or of pages landing on the host: `tokens` are cached, `known_tokens` were before.

    `node` is the path's end. `actions` free duplicates. `backups` are nodes due for write-through: call `begin_backup`
    for each.
    """

    node: int = ROOT
    tokens: int = 0
    known_tokens: int = 0
    backups: tuple[int, ...] = ()


class LockHandle(msgspec.Struct, frozen=True, gc=False):
    """A lock. The tree records the pages it covers, across splits."""

    number: int
    node: int
    tier: Tier


class Extended(Inserted, frozen=True, gc=False, eq=False):
    """The result of `extend`: `handle` locks old prefix and new pages; `kept_page_ids` are the tree's, [page]."""

    handle: LockHandle = LockHandle(0, ROOT, Tier.DEVICE)
    kept_page_ids: PageArray = NO_IDS


class LoadBack(msgspec.Struct, frozen=True, eq=False):
    """The pages of one component to load from the host before a match is usable up to its best node."""

    component: str
    positions: PageArray
    host_page_ids: PageArray


class Match(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The prefix of a prompt usable now, and the longest usable after loads. It locks no page and counts no hit.

    `tokens`, `page_ids` and `device_node` describe the prefix with every component on the device; `best_tokens` and
    `best_node` the prefix usable after loading `loads`. A prefetch continues at `host_node`. `full_tokens` have
    attention KV on some tier, regardless of other components. `branches` are (component, tokens) to keep, so that the
    next prompt of this kind can start there. `held` are other components' page ids at `device_node`: the window's, or
    the state to copy. `waits` are operations whose end makes more usable.
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
    """The pages of one component on one tier: evictable; locked or, on the host, also on the device."""

    evictable: int
    protected: int
