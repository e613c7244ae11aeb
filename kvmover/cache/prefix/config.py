"""TreeConfig says what a tree is made for: page size, units, components, tiers, policy. It never changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kvmover.cache.prefix.components import FULL, Sidecar, TreeComponent
from kvmover.cache.prefix.keys import WORD_BYTES, KeyUnits
from kvmover.cache.prefix.policy import LRU, EvictionPolicy
from kvmover.errors import PrefixError
from kvmover.fields import settle, settle_whole


class EvictionGranularity(Enum):
    """What one eviction takes of a leaf: pages from its tail, no more than asked for, or always all of it.

    vLLM evicts single pages and keeps 0.2 points more of the Mooncake conversation trace at 3M tokens for it.
    """

    PAGE = "page"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class DeviceOnly:
    """One tier. What is evicted is gone."""


@dataclass(frozen=True, slots=True)
class WriteThrough:
    """Pages are copied to the host when `after_hits` requests have inserted them; a victim that was not is gone.

    What is backed is backed from the root on, so a prefix on the host never has a hole.
    """

    after_hits: int = 1

    def __post_init__(self) -> None:
        if self.after_hits < 1:
            raise PrefixError(f"pages are written through after at least one hit, got {self.after_hits}")


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Pages are copied to the host when they are evicted, leaves first: what is above may not be backed yet."""


#: Which tiers a tree knows of, and when pages are copied to the host.
Tiers: TypeAlias = DeviceOnly | WriteThrough | WriteBack


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """See the module. `components` are those that keep ids of their own, in the order in which nodes hold them."""

    page_tokens: int
    components: tuple[TreeComponent, ...] = ()
    sidecars: tuple[Sidecar, ...] = ()
    policy: EvictionPolicy = LRU
    grain: EvictionGranularity = EvictionGranularity.PAGE
    tiers: Tiers = DeviceOnly()
    units: KeyUnits = KeyUnits.PLAIN

    def __post_init__(self) -> None:
        settle_whole(self, "tree", PrefixError, page_tokens=0)
        if not 0 < self.page_tokens < 1 << 31:
            raise PrefixError(f"a page holds at least one token, and fewer than 2**31, got {self.page_tokens}")
        settle(self, "tree", PrefixError, grain=EvictionGranularity, units=KeyUnits)
        own = [FULL, *(component.name for component in self.components)]
        names = [*own, *(sidecar.name for sidecar in self.sidecars)]
        if len(set(names)) < len(names):
            raise PrefixError(f"components need names of their own, got {names}")
        for sidecar in self.sidecars:
            if sidecar.of not in own:
                raise PrefixError(f"sidecar {sidecar.name} shares the ids of {sidecar.of}, which is none of {own}")
        if self.units is KeyUnits.BIGRAM and not all(component.per_page for component in self.components):
            raise PrefixError("states stand at tokens, and a tree of bigrams has none")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's key: four a word."""
        return self.page_words * WORD_BYTES

    @property
    def page_words(self) -> int:
        """32-bit words of a page's key."""
        return self.page_tokens * self.units

    def index(self, component: str) -> int:
        """The place of a component in `components`; -1 is attention KV."""
        for i, known in enumerate(self.components):
            if known.name == component:
                return i
        if component == FULL:
            return -1
        raise PrefixError(f"no component {component}: there are {[FULL, *(c.name for c in self.components)]}")

    def name(self, index: int) -> str:
        """The inverse of `index`."""
        return self.components[index].name if index >= 0 else FULL
