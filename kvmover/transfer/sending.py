"""What the source's state machine is made of: one destination's state, what happens to it, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.transfer import wire
from kvmover.transfer.receiving import Patience
from kvmover.transfer.wire import Verb


@dataclass(frozen=True, slots=True)
class Asked:
    """The destination said what it wants again: it may not have heard what was said since."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has produced some chunks."""

    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """The destination wants a chunk now, at `offset` of its arena where the route is packed."""

    chunk: int
    offset: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class Posted:
    """A chunk's write is on its way, or its gather is: either touches memory."""

    chunk: int
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk's write ended well on this side."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk waits at `offset` of our arena (0: in its pages) to be read."""

    chunk: int
    offset: int
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The destination has read a chunk."""

    chunk: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A chunk's write ended badly. `quiescent`: it cannot touch memory any more."""

    chunk: int
    reason: str
    quiescent: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """A write that failed without quiescence cannot touch memory any more."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Attached:
    """The engine hands over the payload that goes beside the cache."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class PeerDone:
    """The destination has everything."""


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """The destination gives this attempt up and wants to hear when nothing is in flight."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The transport lost the destination."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The engine gives the request up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Asked
    | Ready
    | Granted
    | Posted
    | Written
    | Staged
    | Taken
    | WriteFailed
    | Settled
    | Attached
    | PeerDone
    | PeerAborted
    | PeerGone
    | Cancel
    | Tick
)


@dataclass(frozen=True, slots=True)
class Post:
    """Gather a chunk and write it to `offset`, or write it straight; in a pull, gather it. Then report how it went."""

    chunk: int
    offset: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class Unstage:
    """Nobody reads the chunk's staging memory any more."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Say:
    """Send `message` to the destination."""

    message: wire.AnyMessage


@dataclass(frozen=True, slots=True)
class Finish:
    """This destination is served, or failed for `reason`. `held`: writes may still read the pages."""

    reason: str | None
    held: bool = False


Action = Post | Unstage | Say | Finish


@dataclass(frozen=True, slots=True)
class Sending:
    """One attempt of one destination rank.

    `granted` [chunk]: (offset, round) that may be posted. `in_flight` chunks touch memory of ours; `staged` [chunk]
    wait to be read, at an offset; `written` ended well. `pages`: what an offer of a direct pull carries.
    """

    request: str
    generation: int
    chunks: int
    patience: Patience
    deadline: float
    direct: bool = False
    verb: Verb = Verb.PUSH
    pages: tuple[bytes, ...] = ()
    quiet_since: float = 0.0
    ready: frozenset[int] = frozenset()
    granted: dict[int, tuple[int, int]] = field(default_factory=dict[int, "tuple[int, int]"])
    digests: dict[int, int] = field(default_factory=dict[int, int])
    in_flight: frozenset[int] = frozenset()
    staged: dict[int, int] = field(default_factory=dict[int, int])
    written: frozenset[int] = frozenset()
    aux: bytes | None = None
    reason: str | None = None
    peer_waits: bool = False
    finished: bool = False
