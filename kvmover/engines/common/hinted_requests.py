"""HintedRequests carry out hints at their time: some when their request comes, the others when it has ended.

Both engines pass their own envelope, `kv_hints`. Where a front end has no field for it, as OpenAI's endpoints, the same
envelope is `kvmover_hints` or KVCR's `kv_hint` among a request's parameters, beside a router's hints. llm-d's
`remote_kv_source` stands there too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from kvmover.cache.hints import (
    Declined,
    FetchHint,
    HintAction,
    HintAnswer,
    HintError,
    HintMet,
    HintRefusal,
    HintRefused,
    PinLimits,
    read_hints,
    read_source,
)
from kvmover.cache.peers import PeerMiss
from kvmover.config.settings import canonical_address

if TYPE_CHECKING:
    from kvmover.config.settings import HintSettings

log = logging.getLogger(__name__)

#: The keys of an envelope among the parameters of a request, the first that is there.
HINTS_KEYS = ("kvmover_hints", "kv_hint")

_FETCH_WORDS = {
    PeerMiss.ABSENT: "it holds no page that is missing here",
    PeerMiss.NEEDLESS: "no page had to be read there",
    PeerMiss.NOT_ALLOWED: "it is no engine of peers.engines or peers.directory, nor in exchange.allow",
    PeerMiss.NOT_A_PEER: "it serves another model, other weights or another tenant, or has another key",
    PeerMiss.UNREACHABLE: "it cannot be reached, or gave no answer within peers.ask_s",
    PeerMiss.READ_FAILED: "its pages did not come",
}

#: The engine's own request type.
Request = TypeVar("Request")


class HintedRequests(Generic[Request]):
    """The hints of one engine's requests. Used from the scheduler's thread.

    `carry_out` performs an action of a request, but a fetch: the adapter asks `source` when it looks for the prompt,
    and says what it `brought`, if `fetches` returns True. `told` counts answers by the kind of action. A hint never
    fails a request.
    """

    def __init__(
        self,
        carry_out: Callable[[Request, HintAction], HintAnswer],
        told: Callable[[Request, str, HintAnswer], None],
        fetches: Callable[[], bool] = lambda: False,
    ) -> None:
        self._carry_out, self._told, self._fetches = carry_out, told, fetches
        #: The fetch of each open request and its source's address, until it is answered.
        self._sources: dict[str, tuple[Request, HintAction, str]] = {}
        #: Actions waiting for the end of each open request, by its name.
        self._open: dict[str, list[HintAction]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def came(self, name: str, request: Request, envelope: object, params: object) -> None:
        """Read a request's hints and carry out those due at once. Repeated calls for a request do nothing."""
        if name in self._open:
            return
        later = self._open[name] = []
        for action in self._read(envelope, params):
            if isinstance(action, Declined):
                self._tell(name, request, action.kind, action.answer)
            elif isinstance(action.hint, FetchHint):
                self._fetch(name, request, action, action.hint.source)
            elif action.is_due_at_once:
                self._tell(name, request, action.kind, self._carry_out(request, action))
            else:
                later.append(action)

    def source(self, name: str) -> str | None:
        """Returns the address of the engine to read a request's prefix from, if it names one."""
        found = self._sources.get(name)
        return None if found is None else found[2]

    def brought(self, name: str, outcome: int | PeerMiss) -> None:
        """Answer a request's fetch: tokens, or why none. The first answer counts."""
        found = self._sources.pop(name, None)
        if found is not None:
            request, action, source = found
            if isinstance(outcome, int):
                answer = HintMet(outcome)
            else:
                answer = HintRefused(HintRefusal(outcome.value), f"{action.name}: {source}: {_FETCH_WORDS[outcome]}")
            self._tell(name, request, action.kind, answer)

    def ended(self, name: str, request: Request) -> None:
        """Carry out the remaining hints of an answered request, whose KV is final."""
        self.brought(name, PeerMiss.NEEDLESS)
        for action in self._open.pop(name, ()):
            self._tell(name, request, action.kind, self._carry_out(request, action))

    def aborted(self, name: str, request: Request) -> None:
        """Refuse the remaining hints of a request that ends without an answer."""
        fetch = self._sources.pop(name, None)
        for action in (*([] if fetch is None else [fetch[1]]), *self._open.pop(name, ())):
            words = f"{action.name}: the request was aborted"
            self._tell(name, request, action.kind, HintRefused(HintRefusal.ABORTED, words))

    def _fetch(self, name: str, request: Request, action: HintAction, source: str) -> None:
        if not self._fetches():
            answer = HintRefused(HintRefusal.NO_PEERS, f"{action.name}: no other engine's host memory is read here")
            self._tell(name, request, action.kind, answer)
        elif name in self._sources:
            words = f"{action.name}: a request is read from one source, and has one"
            self._tell(name, request, action.kind, HintRefused(HintRefusal.BUSY, words))
        else:
            self._sources[name] = request, action, canonical_address(source)

    def _read(self, envelope: object, params: object) -> tuple[HintAction | Declined, ...]:
        said: Mapping[str, Any] = cast("Mapping[str, Any]", params) if isinstance(params, Mapping) else {}
        source = read_source(said)
        named = () if source is None else (source,)
        if envelope is None:
            envelope = next((said[key] for key in HINTS_KEYS if said.get(key) is not None), None)
        if envelope is None:
            return named
        try:
            return (*read_hints(envelope), *named)
        except HintError as error:
            return (Declined("envelope", HintRefused(HintRefusal.MALFORMED, str(error))), *named)

    def _tell(self, name: str, request: Request, kind: str, answer: HintAnswer) -> None:
        if isinstance(answer, HintMet):
            log.debug("%s: %s is met for %d tokens", name, kind, answer.tokens)
        else:
            log.info("%s: %s is refused: %s", name, kind, answer.words)
        self._told(request, kind, answer)


def pin_limits(settings: HintSettings) -> PinLimits:
    """Returns the limits of pins in the settings."""
    return PinLimits(settings.pin_share, settings.longest_pin_s)


def outcome_of(answer: HintAnswer) -> str:
    """Returns the outcome of a hint as a metric label."""
    return "met" if isinstance(answer, HintMet) else str(answer.why)
