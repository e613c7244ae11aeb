"""Pins keep prefixes on the device for a time, in a bounded share of the pool, as long as everybody else can run.

A state machine: pins are made, replaced and ended; time passes; a request comes that would not fit beside them. Several
ranks make and end the same ones in the same order, and none compares its clock with another's: each says which of its
pins are over, and those end that are over everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmover.cache.hints.actions import HintAnswer, HintMet, HintRefusal, HintRefused
from kvmover.cache.prefix import FULL, ROOT, InvariantBroken, LockHandle, PrefixTree
from kvmover.errors import HintError


@dataclass(frozen=True, slots=True)
class PinLimits:
    """What pins may have together. `share`: the fraction, from 0 to 1, of each component's device pages. `longest_s`:
    more is refused. `most`: pins at a time.
    """

    share: float = 0.25
    longest_s: float = 600.0
    most: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not self.longest_s >= 0 or self.most < 0:
            raise HintError(f"pins of a share that is not within 0 and 1, or of a number or time below 0: {self}")


@dataclass(frozen=True, slots=True)
class Pin:
    """One prefix, of `tokens` tokens, until `until_s` of this rank's clock."""

    handle: LockHandle
    tokens: int
    until_s: float


class Pins:
    """Of one rank's tree. `pages`: how many device pages there are of each component.

    >>> tree = PrefixTree(page_tokens=2)
    >>> kept, other = tree.insert([1, 2, 3, 4], [10, 11]), tree.insert([5, 6], [12])
    >>> pins = Pins(tree, {FULL: 8}, PinLimits(share=0.25))
    >>> pins.pin("session", kept.node, 30.0, now_s=0.0)
    HintMet(tokens=4)
    >>> tree.evict(3).page_ids().tolist()
    [12]
    >>> pins.end(pins.over(now_s=30.0)), tree.evict(3).page_ids().tolist()
    (('session',), [10, 11])
    """

    def __init__(self, tree: PrefixTree, pages: Mapping[str, int], limits: PinLimits) -> None:
        self._tree, self._pages, self.limits = tree, dict(pages), limits
        self._pins: dict[str, Pin] = {}
        #: Pages that they keep, each once, by component.
        self._taken = dict.fromkeys(self._pages, 0)

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def tokens(self) -> int:
        """Tokens whose attention KV they keep, each once."""
        return self._taken[FULL] * self._tree.config.page_tokens

    def pin(self, name: str, node: int, ttl_s: float, now_s: float) -> HintAnswer:
        """Keep the path to `node`, with what its end needs of further components, in place of an older pin of this
        name, which stays where this one is refused.
        """
        limits, before = self.limits, self._pins.get(name)
        if ttl_s > limits.longest_s:
            return HintRefused(HintRefusal.TOO_LONG, f"{name}: a pin of {ttl_s} s; the longest is {limits.longest_s} s")
        if node == ROOT:
            return HintRefused(HintRefusal.ABSENT, f"{name}: no whole page of the prefix is on the device")
        if before is None and len(self._pins) >= limits.most:
            return HintRefused(
                HintRefusal.SHARE_TAKEN, f"{name}: {len(self._pins)} prefixes are pinned, of {limits.most}"
            )
        handle = self._tree.lock(node)
        others = [pin.handle for other, pin in self._pins.items() if other != name]
        taken = self._tree.locked_pages([*others, handle])
        for component, pages in self._pages.items():
            room = int(limits.share * pages)
            if taken[component] > room:
                self._tree.unlock(handle)
                words = f"{taken[component]} pages of {component} with the other pins; they may have {room} of {pages}"
                return HintRefused(HintRefusal.SHARE_TAKEN, f"{name}: {words}")
        if before is not None:
            self._tree.unlock(self._pins.pop(name).handle)
        tokens = len(self._tree.page_ids(node)) * self._tree.config.page_tokens
        self._pins[name], self._taken = Pin(handle, tokens, now_s + ttl_s), taken
        return HintMet(tokens)

    def unpin(self, name: str) -> HintAnswer:
        """End the pin of this name."""
        pin = self._pins.get(name)
        if pin is None:
            return HintRefused(HintRefusal.ABSENT, f"{name}: nothing is pinned by this name")
        self._drop([name])
        return HintMet(pin.tokens)

    def over(self, now_s: float) -> list[int]:
        """Of each pin, in the order of their making, 1 where its time is over by this rank's clock."""
        return [int(now_s >= pin.until_s) for pin in self._pins.values()]

    def end(self, over: Sequence[int]) -> tuple[str, ...]:
        """End the pins that are over on all ranks: the minimum of their `over`, of which no pin was made since.

        Returns the names. Raises HintError for a row of another length.
        """
        if len(over) != len(self._pins):
            raise HintError(f"{len(over)} answers for {len(self._pins)} pins")
        return self._drop([name for name, is_over in zip(self._pins, over, strict=True) if is_over])

    def give_way(self, pages: int) -> tuple[str, ...]:
        """End the oldest pins until a request of `pages` pages of attention KV could run beside the others, alone.

        So no request waits for a pin for ever, and none costs one that fits beside them, or that could never run.
        Returns the names.
        """
        given = list[str]()
        if pages > self._pages[FULL]:
            return ()
        for name in list(self._pins):
            if pages + self._taken[FULL] <= self._pages[FULL]:
                break
            given += self._drop([name])
        return tuple(given)

    def forget(self) -> None:
        """End all: the tree is to be reset."""
        self._drop(list(self._pins))

    def check(self) -> None:
        """Raise InvariantBroken where what is counted is not what is locked, or more than pins may have. O(nodes)."""
        taken = self._tree.locked_pages([pin.handle for pin in self._pins.values()])
        if {name: taken[name] for name in self._pages} != {name: self._taken[name] for name in self._pages}:
            raise InvariantBroken(f"pins keep {taken} pages, and {self._taken} are counted")
        if len(self._pins) > self.limits.most:
            raise InvariantBroken(f"{len(self._pins)} prefixes are pinned, of {self.limits.most}")
        for name, pages in self._pages.items():
            if taken[name] > int(self.limits.share * pages):
                raise InvariantBroken(f"pins keep {taken[name]} pages of {name}, of {pages} and {self.limits}")

    def _drop(self, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            self._tree.unlock(self._pins.pop(name).handle)
        if names:
            self._taken = self._tree.locked_pages([pin.handle for pin in self._pins.values()])
        return tuple(names)
