"""HintedRequests carry hints out when it is time for them: some when their request comes, the others when it has ended.

Both engines bring them in their own envelope, `kv_hints`. Where a front end has no word for it, as OpenAI's endpoints,
the same envelope stands as `kvmover_hints` among a request's parameters, beside what a router says there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from kvmover.cache.hints import (
    Declined,
    HintAction,
    HintAnswer,
    HintError,
    HintMet,
    HintRefusal,
    HintRefused,
    PinLimits,
    read_hints,
)

if TYPE_CHECKING:
    from kvmover.config.settings import HintSettings

log = logging.getLogger(__name__)

#: Among the parameters of a request.
HINTS_KEY = "kvmover_hints"

#: One of the engine's own.
Request = TypeVar("Request")


class HintedRequests(Generic[Request]):
    """Of one engine's scheduler, from one thread. `carry_out` does what an action of a request asks; `told` counts the
    answers, by the kind of the action. No hint fails a request.
    """

    def __init__(
        self,
        carry_out: Callable[[Request, HintAction], HintAnswer],
        told: Callable[[Request, str, HintAnswer], None],
    ) -> None:
        self._carry_out, self._told = carry_out, told
        #: By name: of each request that has come, what waits for its end.
        self._open: dict[str, list[HintAction]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def came(self, name: str, request: Request, envelope: object, params: object) -> None:
        """A request is looked at. Only the first time counts."""
        if name in self._open:
            return
        later = self._open[name] = []
        for action in self._read(name, request, envelope, params):
            if isinstance(action, Declined):
                self._tell(name, request, action.kind, action.answer)
            elif action.is_due_at_once:
                self._tell(name, request, action.kind, self._carry_out(request, action))
            else:
                later.append(action)

    def ended(self, name: str, request: Request) -> None:
        """The request is answered, and its KV is what it will be."""
        for action in self._open.pop(name, ()):
            self._tell(name, request, action.kind, self._carry_out(request, action))

    def aborted(self, name: str, request: Request) -> None:
        """The request ends without an answer."""
        for action in self._open.pop(name, ()):
            words = f"{action.name}: the request was aborted"
            self._tell(name, request, action.kind, HintRefused(HintRefusal.ABORTED, words))

    def _read(self, name: str, request: Request, envelope: object, params: object) -> tuple[HintAction | Declined, ...]:
        if envelope is None and isinstance(params, Mapping):
            envelope = cast("Mapping[str, Any]", params).get(HINTS_KEY)
        if envelope is None:
            return ()
        try:
            return read_hints(envelope)
        except HintError as error:
            return (Declined("envelope", HintRefused(HintRefusal.MALFORMED, str(error))),)

    def _tell(self, name: str, request: Request, kind: str, answer: HintAnswer) -> None:
        if isinstance(answer, HintMet):
            log.debug("%s: %s is met for %d tokens", name, kind, answer.tokens)
        else:
            log.info("%s: %s is refused: %s", name, kind, answer.words)
        self._told(request, kind, answer)


def pin_limits(settings: HintSettings) -> PinLimits:
    """What the configuration allows."""
    return PinLimits(settings.pin_share, settings.longest_pin_s)


def outcome_of(answer: HintAnswer) -> str:
    """A word for metrics."""
    return "met" if isinstance(answer, HintMet) else str(answer.why)
