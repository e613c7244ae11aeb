"""Connector metadata is what the scheduler's half asks of the workers' halves in a step. vLLM pickles it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.engines.vllm.params import Remote

#: Block ids of a request, one table a cache group, from the request's beginning.
Tables = tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class SendSpec:
    """Offer a request, or the beginning of one that is prefilled in chunks. `computed` positions are in its pages
    before this step, those below `stop` after it (None: all of it); `computed` None: all of it is there."""

    request: str
    transfer: str
    tables: Tables
    computed: int | None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class GrowSpec:
    """The next chunk of a request that was offered: block ids that come behind those named before, and below which
    position all is in its pages after this step (None: all of it)."""

    request: str
    tables: Tables
    stop: int | None


@dataclass(frozen=True, slots=True)
class ReceiveSpec:
    """Fetch positions [start, stop) of a request into its pages."""

    request: str
    remote: Remote
    start: int
    stop: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class ReleaseSpec:
    """Decode needs none of a request's KV: the prefill engine may free its pages."""

    remote: Remote
    tokens: int


@dataclass(frozen=True, slots=True)
class RefuseSpec:
    """A request that will not be sent, to whoever asks for it."""

    transfer: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortSpec:
    """Give a transfer of a request up, in whichever direction."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """Store blocks that are whole once this step has been computed."""

    request: str
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Read blocks from the store."""

    request: str
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(slots=True)
class KvmoverConnectorMetadata:
    """A step's. `preempted` requests lose their pages in this step: nothing may read them when the forward pass begins.
    `delayed` requests have finished and keep their pages until each rank reports them as sent."""

    sends: list[SendSpec] = field(default_factory=list[SendSpec])
    growths: list[GrowSpec] = field(default_factory=list[GrowSpec])
    receives: list[ReceiveSpec] = field(default_factory=list[ReceiveSpec])
    releases: list[ReleaseSpec] = field(default_factory=list[ReleaseSpec])
    refusals: list[RefuseSpec] = field(default_factory=list[RefuseSpec])
    aborts: list[AbortSpec] = field(default_factory=list[AbortSpec])
    saves: list[SaveSpec] = field(default_factory=list[SaveSpec])
    loads: list[LoadSpec] = field(default_factory=list[LoadSpec])
    preempted: set[str] = field(default_factory=set[str])
    delayed: set[str] = field(default_factory=set[str])
