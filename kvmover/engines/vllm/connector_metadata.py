"""Connector metadata is what the scheduler's half asks of the workers' halves in a step; a Tally counts their endings.

vLLM pickles both ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmover.engines.vllm.handshake import Remote
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.result import Service

#: Block ids of a request, one table a cache group, from the request's beginning.
Tables = tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class SendSpec:
    """Offer a request, or the beginning of one that is prefilled in chunks. `computed` positions are in its pages
    before this step, those below `stop` after it (None: all of it); `computed` None: all of it is there. `keep_s`: for
    how long; None: as configured. `service`: REPEATED where several may ask. `way`: "moved" of one that is decoded
    here and may move. `content`: the prompt as a whole; `contents`: what longer beginnings are of."""

    request: str
    transfer: str
    tables: Tables
    computed: int | None
    stop: int | None = None
    keep_s: float | None = None
    service: Service = Service.ONCE
    way: str = "sent"
    content: Content | None = None
    contents: tuple[Content, ...] = ()


@dataclass(frozen=True, slots=True)
class GrowSpec:
    """The next chunk of a request that was offered: block ids that come behind those named before, and below which
    position all is in its pages after this step (None: all of it). `contents`: what each beginning that this step adds
    is of, of a request that may move."""

    request: str
    tables: Tables
    stop: int | None
    contents: tuple[Content, ...] = ()


@dataclass(frozen=True, slots=True)
class AttachSpec:
    """A request that is sent has its first token: `payload` goes to whoever asks for it beside the KV."""

    request: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReceiveSpec:
    """Fetch positions [start, stop) of a request into its pages. `content`: what the source has to have."""

    request: str
    remote: Remote
    start: int
    stop: int
    tables: Tables
    content: Content | None = None


@dataclass(frozen=True, slots=True)
class ReleaseSpec:
    """Decode needs none of a request's KV: the prefill engine may free its pages."""

    remote: Remote
    tokens: int
    content: Content | None = None


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
    attaches: list[AttachSpec] = field(default_factory=list[AttachSpec])
    receives: list[ReceiveSpec] = field(default_factory=list[ReceiveSpec])
    releases: list[ReleaseSpec] = field(default_factory=list[ReleaseSpec])
    refusals: list[RefuseSpec] = field(default_factory=list[RefuseSpec])
    aborts: list[AbortSpec] = field(default_factory=list[AbortSpec])
    saves: list[SaveSpec] = field(default_factory=list[SaveSpec])
    loads: list[LoadSpec] = field(default_factory=list[LoadSpec])
    preempted: set[str] = field(default_factory=set[str])
    delayed: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, slots=True)
class RankEnding:
    """How one rank's part of a request ended. `way`: "sent", "received" or "moved", of one that was decoded here and
    which another engine has taken if it landed. `microseconds`: of one that landed."""

    way: str
    request: str
    landed: bool
    microseconds: int


@dataclass(slots=True)
class Tally:
    """Of `ranks` ranks. A request landed if its part did on each of them, and took as long as on the slowest."""

    ranks: int
    _counts: Counter[str] = field(default_factory=Counter[str])
    _open: dict[tuple[str, str], list[RankEnding]] = field(default_factory=dict[tuple[str, str], list[RankEnding]])

    def hear(self, endings: Iterable[RankEnding]) -> None:
        """Parts of requests that have ended, each from one rank and once."""
        for ending in endings:
            key = ending.way, ending.request
            parts = self._open.setdefault(key, [])
            parts.append(ending)
            if len(parts) == self.ranks:
                self._count(ending.way, self._open.pop(key))

    def take(self) -> Counter[str]:
        """What was counted since the last call."""
        taken, self._counts = self._counts, Counter[str]()
        return taken

    def _count(self, way: str, parts: list[RankEnding]) -> None:
        if way == "moved":
            self._counts["moved_requests"] += all(part.landed for part in parts)
        elif all(part.landed for part in parts):
            self._counts[f"{way}_requests"] += 1
            self._counts[f"{way}_microseconds"] += max(part.microseconds for part in parts)
        else:
            self._counts[f"{way}_failures"] += 1
