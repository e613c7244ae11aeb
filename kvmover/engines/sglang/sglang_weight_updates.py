"""WeightUpdates tell the parts that go by SGLang's weights when it replaces them while it runs.

An update may name a version, and may leave KV of earlier weights in SGLang's cache. Until that is flushed, and while an
update is open, the weights of KV are unknown, so it is not shared. SGLang is not imported here: its plug-in hooks these
functions around its methods, all of which run in the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvmover.engines.common import NO_VERSION, ServedWeights
from kvmover.errors import KvmoverError

log = logging.getLogger(__name__)

#: Reasons, beside NO_VERSION, why the weights of an engine are no other engine's.
UNFLUSHED = "SGLang's cache may hold KV of those before: KV is shared with no engine and no store until /flush_cache"
BEING_UPDATED = "an update of them is under way: KV is shared with no engine and no store until /end_weight_update"


class WeightFollower(Protocol):
    """A part that goes by the weights: a rank of prefill or decode, a store, tiers."""

    def reweigh(self) -> None:
        """Go on with the weights of `WeightUpdates.current`. Raises KvmoverError or OSError if it then shares no KV."""
        ...


@dataclass(slots=True)
class WeightUpdates:
    """The changes of weights in one process since it started. For the scheduler's thread."""

    #: The caller's name of the last update; None without one.
    version: str | None = None
    is_changed: bool = False
    #: True if the cache may hold KV of other weights.
    is_stale: bool = False
    #: True between SGLang's begin and end of an update, while weights come bit by bit.
    is_open: bool = False
    #: True while an SGLang method puts weights in place; and the number of loads so far.
    is_loading: bool = False
    loads: int = 0
    _is_due: bool = False
    _depth: int = 0
    _followers: list[WeightFollower] = field(default_factory=list[WeightFollower])

    def follow(self, follower: WeightFollower) -> None:
        """Have `follower` told of every change until it leaves."""
        self._followers.append(follower)

    def leave(self, follower: WeightFollower) -> None:
        """Tell `follower` of no further change."""
        if follower in self._followers:
            self._followers.remove(follower)

    def current(self, weights: ServedWeights) -> ServedWeights:
        """Returns the engine's present weights; `weights`: those before any update."""
        if not self.is_changed:
            return weights
        if self.is_open:
            return weights.updated(None, BEING_UPDATED)
        if self.version is None:
            return weights.updated(None, NO_VERSION)
        return weights.updated(None, UNFLUSHED) if self.is_stale else weights.updated(self.version)

    # SGLang's actions

    @contextmanager
    def step(self) -> Generator[None]:
        """Have all changes within one call of SGLang's told once, at its end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and self._is_due:
                self._is_due = False
                self._tell()

    def loaded(self, version: str | None) -> None:
        """Record that weights were put in place. In an open update, a call without a version keeps the last version."""
        self._changed()
        self.loads += 1
        self.is_stale = True
        self.version = version or (self.version if self.is_open else None)

    def named(self, version: str) -> None:
        """Record the version of the weights in place."""
        if not self.is_changed or self.version != version:
            self._changed()
            self.version = version

    def flushed(self) -> None:
        """Record that the cache is empty."""
        if self.is_stale:
            self._changed()
            self.is_stale = False

    def opened(self) -> None:
        """Record that an update begins."""
        self._changed()
        self.is_open, self.is_stale, self.version = True, True, None

    def closed(self) -> None:
        """Record that the update is over."""
        self._changed()
        self.is_open = False

    def _changed(self) -> None:
        self.is_changed = self._is_due = True

    def _tell(self) -> None:
        """Tell every follower, even after one fails: a failed follower shares no KV, and the engine serves on."""
        for follower in list(self._followers):
            try:
                follower.reweigh()
            except (KvmoverError, OSError):
                log.exception("%s shares nothing since the weights were updated", type(follower).__name__)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

#: The method by which SGLang records the version of an update.
RECORD = f"{_SCHEDULER}.record_weight_version_change"

#: The weight updates of this process.
UPDATES = WeightUpdates()


@dataclass(frozen=True, slots=True)
class UpdateHooks:
    """The hooks around methods of SGLang: `around` has them by name.

    `is_recorded`: SGLang records the version of each update. Without it, before 0.5.19, updated weights are unknown.
    """

    updates: WeightUpdates
    is_recorded: bool = True

    @classmethod
    def of(cls, updates: WeightUpdates, has: Callable[[str], bool]) -> dict[str, Callable[..., Any]]:
        """Returns the hooks around the methods that a release `has`, by their full names: 0.5.20 opens no update."""
        return {name: hook for name, hook in cls(updates, has(RECORD)).around().items() if has(name)}

    def around(self) -> dict[str, Callable[..., Any]]:
        """Returns the hooks by the full name of the method."""
        updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        return {
            f"{updater}.update_weights_from_disk": self.from_disk,
            f"{updater}.update_weights_from_ipc": self.in_place,
            f"{updater}.update_weights_from_tensor": self.in_session,
            f"{updater}.update_weights_from_distributed": self.in_session,
            f"{updater}.begin_weight_update": self.begin,
            f"{updater}.end_weight_update": self.end,
            RECORD: self.record,
            f"{_SCHEDULER}.flush_cache": self.flush,
        }

    def from_disk(self, update: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
        """Take weights from disk. SGLang rolls a failed load back, unless a draft's fails after its model's."""
        return self._updating(update, manager, request, is_rolled_back=manager.draft_worker is None)

    def in_place(self, update: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
        """Take weights that come in one call."""
        return self._updating(update, manager, request, is_rolled_back=False)

    def in_session(self, update: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
        """Take weights that come bit by bit; SGLang refuses them outside an open update."""
        return self._updating(update, manager, request, is_rolled_back=getattr(manager, "_session", manager) is None)

    def begin(self, begin: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
        """Open an update: the weights are unknown from here on, also those written into this process's memory."""
        with self.updates.step():
            answer = begin(manager, request)
            if answer.success:
                self.updates.opened()
            return answer

    def end(self, end: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
        """Close the update: all its weights are in place."""
        with self.updates.step():
            answer = end(manager, request)
            if answer.success:
                self.updates.closed()
            return answer

    def _updating(self, update: Callable[[Any, Any], Any], manager: Any, request: Any, is_rolled_back: bool) -> Any:
        """Run an update. A failed update has no version, unless the weights are then as before: `is_rolled_back`."""
        updates, is_over = self.updates, False
        with updates.step():
            before, updates.is_loading = updates.loads, True
            try:
                answer = update(manager, request)
                is_over = self.is_recorded if answer.success else is_rolled_back
                return answer
            finally:
                updates.is_loading = False
                if not is_over and updates.loads == before:
                    updates.loaded(None)

    def record(self, record: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
        """Record the version of each successful update, None included, and a version that SGLang names later."""
        with self.updates.step():
            record(scheduler, new_version=new_version)
            if self.updates.is_loading:
                self.updates.loaded(new_version)
            elif new_version:
                self.updates.named(new_version)

    def flush(self, flush: Callable[..., bool], scheduler: Any, *given: Any, **options: Any) -> bool:
        """Record a flush, unless SGLang refuses it while requests run."""
        with self.updates.step():
            is_flushed = flush(scheduler, *given, **options)
            if is_flushed:
                self.updates.flushed()
            return is_flushed
