"""At the end of a play both sides agree on how the request ended, and why."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Result
from kvmover.transfer.tombstones import SERVED
from tests.sim import endings
from tests.sim.scene import Broken, Scene
from tests.sim.seats import Order
from tests.states.stages import MENDED

#: Reasons of a side that was left alone: by a destination that never asked, or a peer that did not answer.
ALONE = ("deadline passed", "has answered nothing", "is lost", "restarted as")
LEFT = "the user left"


def check_outcome(scene: Scene, spent: AbstractSet[str]) -> None:
    """Raise Broken unless the ends of a request agree, for the faults that came."""
    ended = [order for order in scene.orders if order.seat.alive]
    for order in ended:
        result = order.transfer.result
        if result is None:
            raise Broken(f"{order.name} has not ended")
        if result.reason is not None and not _may_fail(scene, order, result, spent):
            raise Broken(f"{order.name} failed after {sorted(spent) or 'no fault'}: {result.reason}")
    if scene.scenario.config.verb is Verb.PUSH and not spent & {"crash", "kill"}:
        _check_told(ended)


def _may_fail(scene: Scene, order: Order, result: Result, spent: AbstractSet[str]) -> bool:
    """Whether the faults that came explain a reason."""
    reason = str(result.reason)
    if reason == SERVED and endings.came_late(scene, order, result):
        return True
    if "abort" in spent and (LEFT in reason or "before every destination" in reason):
        return True
    return not spent <= {*MENDED, "abort"} and any(each in reason for each in ALONE)


def _check_told(ended: list[Order]) -> None:
    """A source that lands was told so by a destination that has landed."""
    landed = {order.verb for order in ended if order.transfer.result is not None and order.transfer.result.landed}
    if landed == {"send"}:
        raise Broken(f"{[order.name for order in ended]}: the source was told that it landed, at no destination")
