"""A PeerQuestion says which engines are asked for a prompt's pages; a PeerAnswer is one engine's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256


class PeerMiss(StrEnum):
    """The reason why a named source brought no page of a prompt.

    ABSENT: it holds none that is missing here. NEEDLESS: none was missing, or another tier had as much.
    """

    ABSENT = "absent"
    NEEDLESS = "needless"
    NOT_ALLOWED = "not_allowed"
    NOT_A_PEER = "not_a_peer"
    UNREACHABLE = "unreachable"
    READ_FAILED = "read_failed"


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The prompt's length readable from one engine, in tokens, and the reason if it is 0."""

    tokens: int
    miss: PeerMiss | None = None


@dataclass(frozen=True, slots=True)
class PeerQuestion:
    """A look-up by a `request` unique in this engine, and the engines asked. All ranks ask the same.

    `source`: the engine that the request named, which is then the only one.
    """

    request: str
    engines: tuple[str, ...]
    source: str | None = None

    @property
    def mark(self) -> int:
        """Returns a digest of the engines, below 2^62: ranks compare theirs.

        >>> PeerQuestion("r", ("a:1", "b:1")).mark == PeerQuestion("s", ("a:1", "b:1")).mark
        True
        """
        return int.from_bytes(sha256("\n".join(self.engines).encode()).digest()[:8]) >> 2


def question_of(
    request: str, page_hash: bytes, standing: Sequence[str], most: int, source: str | None = None
) -> PeerQuestion:
    """Returns the question for a prompt: to its `source`, or to `most` of the `standing` engines.

    `page_hash`, that of the prompt's first page, selects them, so that one prefix is always looked for at the same.

    >>> question_of("r", b"", ["a:1", "b:1"], most=16).engines, question_of("r", b"", ["a:1"], 16, "c:1").engines
    (('a:1', 'b:1'), ('c:1',))
    """
    if source is not None:
        return PeerQuestion(request, (source,), source)
    if len(standing) > most:
        ranked = sorted(standing, key=lambda engine: sha256(page_hash + engine.encode()).digest())
        chosen = frozenset(ranked[:most])
        standing = [engine for engine in standing if engine in chosen]
    return PeerQuestion(request, tuple(standing))
