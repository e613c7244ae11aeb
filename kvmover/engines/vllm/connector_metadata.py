"""Orders: what the scheduler's half of the connector tells the workers' halves in a step. vLLM pickles them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.engines.vllm.params import Remote

#: Block ids of a request, one table a cache group, from the request's beginning.
Tables = tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Offer a request. `computed` positions are in its pages before this step, all of it after; None: all of it is."""

    request: str
    transfer: str
    tables: Tables
    computed: int | None


@dataclass(frozen=True, slots=True)
class Receive:
    """Fetch positions [start, stop) of a request into its pages."""

    request: str
    remote: Remote
    start: int
    stop: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing of a request is wanted: its other half may let go of its pages."""

    remote: Remote
    tokens: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """A request that will not be sent, to whoever asks for it."""

    transfer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Give a transfer of a request up, in whichever direction."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class Save:
    """Store blocks that are whole once this step has been computed."""

    request: str
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Read blocks from the store."""

    request: str
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Orders:
    """A step's. `preempted` requests lose their pages in this step: nothing may read them when the forward pass begins.
    `delayed` requests have finished and keep their pages until each rank reports them as sent."""

    sends: list[Send] = field(default_factory=list[Send])
    receives: list[Receive] = field(default_factory=list[Receive])
    releases: list[Release] = field(default_factory=list[Release])
    refusals: list[Refuse] = field(default_factory=list[Refuse])
    aborts: list[Abort] = field(default_factory=list[Abort])
    saves: list[Save] = field(default_factory=list[Save])
    loads: list[Load] = field(default_factory=list[Load])
    preempted: set[str] = field(default_factory=set[str])
    delayed: set[str] = field(default_factory=set[str])
