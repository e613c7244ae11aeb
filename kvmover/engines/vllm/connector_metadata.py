"""Connector metadata carries the scheduler's orders to the workers in a step; a Tally counts how transfers ended.

vLLM pickles both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmover.engines.common import Remote
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.result import Service

#: Block ids of a request, one table a cache group, from its first token on.
Tables = tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class SendSpec:
    """An offer of a request, or of its beginning if it is prefilled in chunks.

    `computed` positions are in its pages before this step (None: all), those below `stop` after it (None: all).
    `keep_s`: seconds to keep the pages, None for the configured time. `service`: REPEATED if several engines may ask.
    `way`: "moved" if the request is decoded here and may move. `content`: the whole prompt's; `contents`: those of
    longer prefixes.
    """

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
    """The next chunk of an offered request: block ids behind those named before, and the position below which its pages
    are complete after this step (None: all). `contents`: of each prefix that this step adds to a request that may move.
    """

    request: str
    tables: Tables
    stop: int | None
    contents: tuple[Content, ...] = ()


@dataclass(frozen=True, slots=True)
class AttachSpec:
    """The first token of a request that is sent: `payload` goes beside the KV."""

    request: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReceiveSpec:
    """An order to fetch positions [start, stop) of a request into its pages. The source must have `content`."""

    request: str
    remote: Remote
    start: int
    stop: int
    tables: Tables
    content: Content | None = None


@dataclass(frozen=True, slots=True)
class ReleaseSpec:
    """A notice that decode needs no KV of a request: the prefill engine may free its pages."""

    remote: Remote
    tokens: int
    content: Content | None = None


@dataclass(frozen=True, slots=True)
class RefuseSpec:
    """A request that will not be sent, and the reason given to any engine that asks for it."""

    transfer: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortSpec:
    """An order to abort a request's transfer, in either direction."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """An order to store blocks that are complete once this step has been computed."""

    request: str
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """An order to load blocks from the store."""

    request: str
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(slots=True)
class KvmoverConnectorMetadata:
    """The orders of one step. `preempted` requests lose their pages in this step: no read of them may be open when the
    forward pass begins. `delayed` requests have finished and keep their pages until each rank reports them as sent.
    """

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
    """The end of one rank's part of a request.

    `way` is "sent", "received", or "moved" for a request decoded here, which another engine has taken if it landed.
    `microseconds` is the duration of a part that landed.
    """

    way: str
    request: str
    landed: bool
    microseconds: int


@dataclass(slots=True)
class Tally:
    """The counts of requests over `ranks` ranks. A request landed if its part did on each rank, and took as long as on
    the slowest.
    """

    ranks: int
    _counts: Counter[str] = field(default_factory=Counter[str])
    _open: dict[tuple[str, str], list[RankEnding]] = field(default_factory=dict[tuple[str, str], list[RankEnding]])

    def hear(self, endings: Iterable[RankEnding]) -> None:
        """Note parts of requests that have ended, each from one rank and once."""
        for ending in endings:
            key = ending.way, ending.request
            parts = self._open.setdefault(key, [])
            parts.append(ending)
            if len(parts) == self.ranks:
                self._count(ending.way, self._open.pop(key))

    def take(self) -> Counter[str]:
        """Returns the counts since the last call."""
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
