"""HintedRequests carry out hints at their time: some when their request comes, the others when it has ended.

Both engines pass their own envelope, `kv_hints`. Where a front end has no field for it, as OpenAI's endpoints, the same
envelope is `kvmover_hints` among a request's parameters, beside a router's hints.
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

#: The key among the parameters of a request.
HINTS_KEY = "kvmover_hints"

#: The engine's own request type.
Request = TypeVar("Request")


class HintedRequests(Generic[Request]):
    """The hints of one engine's requests. Used from the scheduler's thread.

    `carry_out` performs an action of a request; `told` counts answers by the kind of action. A hint never fails a
    request.
    """

    def __init__(
        self,
        carry_out: Callable[[Request, HintAction], HintAnswer],
        told: Callable[[Request, str, HintAnswer], None],
    ) -> None:
        self._carry_out, self._told = carry_out, told
        #: Actions waiting for the end of each open request, by its name.
        self._open: dict[str, list[HintAction]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def came(self, name: str, request: Request, envelope: object, params: object) -> None:
        """Read a request's hints and carry out those due at once. Repeated calls for a request do nothing."""
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
        """Carry out the remaining hints of an answered request, whose KV is final."""
        for action in self._open.pop(name, ()):
            self._tell(name, request, action.kind, self._carry_out(request, action))

    def aborted(self, name: str, request: Request) -> None:
        """Refuse the remaining hints of a request that ends without an answer."""
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
    """Returns the limits of pins in the settings."""
    return PinLimits(settings.pin_share, settings.longest_pin_s)


def outcome_of(answer: HintAnswer) -> str:
    """Returns the outcome of a hint as a metric label."""
    return "met" if isinstance(answer, HintMet) else str(answer.why)
