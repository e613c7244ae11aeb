"""Pins keep prefixes on the device for a time, in a bounded share of the pool, while every request can still run.

A state machine: pins are made, replaced and ended; time passes; a request comes that would not fit beside them. Ranks
make and end the same pins in the same order without comparing clocks: each says which of its pins are over, and those
end that are over on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvmover.cache.hints.actions import HintAnswer, HintMet, HintRefusal, HintRefused
from kvmover.cache.prefix import FULL, InvariantBroken
from kvmover.errors import HintError

#: A pool's lock on a prefix.
Handle = TypeVar("Handle")


class PinnedPool(Protocol[Handle]):
    """A pool of lockable pages: a PrefixTree, or the blocks of an engine."""

    def lock(self, prefix: Any, /) -> Handle:
        """Keep a prefix's pages until the returned handle is given back."""
        ...

    def unlock(self, handle: Handle, /) -> None:
        """Give a handle back, once."""
        ...

    def locked_pages(self, handles: Iterable[Handle], /) -> Mapping[str, int]:
        """Return the device pages that these handles keep, by component, each counted once."""
        ...


@dataclass(frozen=True, slots=True)
class PinLimits:
    """The limits of all pins together. Raises HintError for values out of range.

    `share`: the fraction, from 0 to 1, of each component's device pages. `longest_s`: the longest pin. `most`: pins at
    a time.
    """

    share: float = 0.25
    longest_s: float = 600.0
    most: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not self.longest_s >= 0 or self.most < 0:
            raise HintError(f"pins of a share that is not within 0 and 1, or of a number or time below 0: {self}")


@dataclass(frozen=True, slots=True)
class Pin(Generic[Handle]):
    """A pinned prefix of `tokens` tokens, until `until_s` of this rank's clock."""

    handle: Handle
    tokens: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix to pin: its first `tokens` tokens are on the device, and the pool locks it `by` this."""

    by: Any
    tokens: int


class Pins(Generic[Handle]):
    """The pins of one rank's pool. `pages`: device pages of each component.

    >>> from kvmover.cache.prefix import PrefixTree
    >>> tree = PrefixTree(page_tokens=2)
    >>> kept, other = tree.insert([1, 2, 3, 4], [10, 11]), tree.insert([5, 6], [12])
    >>> pins = Pins(tree, {FULL: 8}, PinLimits(share=0.25))
    >>> pins.pin("session", Prefix(kept.node, 4), 30.0, now_s=0.0)
    HintMet(tokens=4)
    >>> tree.evict(3).page_ids().tolist()
    [12]
    >>> pins.end(pins.over(now_s=30.0)), tree.evict(3).page_ids().tolist()
    (('session',), [10, 11])
    """

    def __init__(self, pool: PinnedPool[Handle], pages: Mapping[str, int], limits: PinLimits) -> None:
        self._pool, self._all, self.limits = pool, dict(pages), limits
        self._pins: dict[str, Pin[Handle]] = {}
        #: Pinned pages by component, each once.
        self._taken: Mapping[str, int] = dict.fromkeys(self._all, 0)

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def pages(self) -> int:
        """Pinned pages of attention KV, each once."""
        return self._taken[FULL]

    def pin(self, name: str, prefix: Prefix, ttl_s: float, now_s: float, largest: int = 0) -> HintAnswer:
        """Keep a prefix, with the window or state at its end, in place of an older pin of this name.

        The older pin stays if this one is refused. `largest`: pages of attention KV of the largest open request, which
        must be able to finish beside all pins.
        """
        limits, before = self.limits, self._pins.get(name)
        if ttl_s > limits.longest_s:
            words = f"{name}: a pin of {ttl_s} s; the longest is {limits.longest_s} s"
            return HintRefused(HintRefusal.TOO_LONG, words)
        if not prefix.tokens:
            return HintRefused(HintRefusal.ABSENT, f"{name}: no whole page of the prefix is on the device")
        if before is None and len(self._pins) >= limits.most:
            words = f"{name}: {len(self._pins)} prefixes are pinned, of {limits.most}"
            return HintRefused(HintRefusal.SHARE_TAKEN, words)
        handle = self._pool.lock(prefix.by)
        taken = self._pool.locked_pages([*(pin.handle for other, pin in self._pins.items() if other != name), handle])
        refused = self._refused(name, taken, largest)
        if refused is not None:
            self._pool.unlock(handle)
            return refused
        if before is not None:
            self._pool.unlock(self._pins.pop(name).handle)
        self._pins[name], self._taken = Pin(handle, prefix.tokens, now_s + ttl_s), taken
        return HintMet(prefix.tokens)

    def unpin(self, name: str) -> HintAnswer:
        """End the pin of this name."""
        pin = self._pins.get(name)
        if pin is None:
            return HintRefused(HintRefusal.ABSENT, f"{name}: nothing is pinned by this name")
        self._drop([name])
        return HintMet(pin.tokens)

    def over(self, now_s: float) -> list[int]:
        """Return for each pin, in the order of their making, 1 if its time is over by this rank's clock, else 0."""
        return [int(now_s >= pin.until_s) for pin in self._pins.values()]

    def end(self, over: Sequence[int]) -> tuple[str, ...]:
        """End the pins that are over on all ranks, and return their names.

        `over`: the minimum of the ranks' `over`, with no pin made since. Raises HintError for a row of another length.
        """
        if len(over) != len(self._pins):
            raise HintError(f"{len(over)} answers for {len(self._pins)} pins")
        return self._drop([name for name, is_over in zip(self._pins, over, strict=True) if is_over])

    def give_way(self, pages: int) -> tuple[str, ...]:
        """End the oldest pins until a request of `pages` pages of attention KV could run alone beside the rest.

        So no request waits for a pin for ever, and a request that fits ends no pin. Returns the ended names.
        """
        given = list[str]()
        for name in list(self._pins):
            if min(pages, self._all[FULL]) + self._taken[FULL] <= self._all[FULL]:
                break
            given += self._drop([name])
        return tuple(given)

    def forget(self) -> None:
        """End all pins, before the pool is reset."""
        self._drop(list(self._pins))

    def check(self) -> None:
        """Raise InvariantBroken if counted and locked pages differ, or exceed the limits. O(nodes)."""
        taken = self._pool.locked_pages([pin.handle for pin in self._pins.values()])
        if any(taken[name] != self._taken[name] for name in self._all):
            raise InvariantBroken(f"pins keep {taken} pages, and {self._taken} are counted")
        if len(self._pins) > self.limits.most:
            raise InvariantBroken(f"{len(self._pins)} prefixes are pinned, of {self.limits.most}")
        for name, pages in self._all.items():
            if taken[name] > int(self.limits.share * pages):
                raise InvariantBroken(f"pins keep {taken[name]} pages of {name}, of {pages} and {self.limits}")

    def _refused(self, name: str, taken: Mapping[str, int], largest: int) -> HintRefused | None:
        for component, pages in self._all.items():
            room = int(self.limits.share * pages)
            if taken[component] > room:
                words = f"{taken[component]} pages of {component} with the other pins; they may have {room} of {pages}"
                return HintRefused(HintRefusal.SHARE_TAKEN, f"{name}: {words}")
        if taken[FULL] + min(largest, self._all[FULL]) > self._all[FULL]:
            words = f"{taken[FULL]} pages pinned beside a request of {largest}; there are {self._all[FULL]}"
            return HintRefused(HintRefusal.BUSY, f"{name}: {words}")
        return None

    def _drop(self, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            self._pool.unlock(self._pins.pop(name).handle)
        if names:
            self._taken = self._pool.locked_pages([pin.handle for pin in self._pins.values()])
        return tuple(names)
