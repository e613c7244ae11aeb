"""Weight updates in a running vLLM: connectors and tiers hear of each, and of the caller's name of the new weights.

vLLM has no hook for that. Every call to its workers from outside goes through EngineCore.collective_rpc, in the
scheduler's process: three methods of EngineCore are wrapped, and in each worker those that change weights.

From the first change on no engine is met. The caller's name counts as soon as no block is in use: then the prefix cache
is emptied, so that no KV of earlier weights is left.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Protocol
from weakref import WeakSet

from kvmover.engines.vllm.vllm_contract import VLLM, tell_scheduler

log = logging.getLogger(__name__)

#: Methods of vLLM's worker that change weights; and the models' method that a trainer's own extension calls.
_OF_WORKER = (
    *("reload_weights", "reset_weights", "update_weights"),
    *("start_weight_update", "start_draft_weight_update", "finish_weight_update"),
)
_OF_MODEL = "load_weights"


class ServesWeights(Protocol):
    """A half of a connector, or a tier, which shares KV of the weights with other engines."""

    def updated(self, version: str | None) -> None:
        """Switch to other weights, named `version` by the caller; with None meet no engine."""
        ...


@dataclass(slots=True)
class WeightUpdate:
    """The last update of an engine's weights.

    `version`: the caller's name for them, "" until it gives one. `served`: the version under which KV is shared with
    other engines, "" while it is shared with none.

    >>> update = WeightUpdate()
    >>> update.version = "7"
    >>> update.is_due
    True
    """

    version: str = ""
    served: str = ""

    @property
    def is_due(self) -> bool:
        """Returns True if another version is to take effect."""
        return self.version != self.served


#: Halves and tiers by the engine's id: in the process of its scheduler, and in those of its workers.
_beside_scheduler: defaultdict[str, WeakSet[ServesWeights]] = defaultdict(WeakSet)
_beside_worker: defaultdict[str, WeakSet[ServesWeights]] = defaultdict(WeakSet)

#: By engine, if its weights were changed since the start.
_updates: dict[str, WeightUpdate] = {}

#: vLLM's workers whose methods are wrapped, and those whose weights have changed since the last question.
_watched: WeakSet[Any] = WeakSet()
_changed: WeakSet[Any] = WeakSet()


def follow_in_scheduler(engine_id: str, half: ServesWeights) -> None:
    """Report each update to `half`, in the process of an engine's scheduler."""
    _beside_scheduler[engine_id].add(half)
    _wrap_engine_core()


def follow_in_worker(engine_id: str, half: ServesWeights) -> None:
    """Report each update to `half`, in the process of a worker."""
    _beside_worker[engine_id].add(half)


# In the process of the scheduler


@cache
def _wrap_engine_core() -> None:
    """Wrap all engine cores of this process: they report changes and versions, and meet engines again when possible."""
    core: Any = VLLM.find("vllm.v1.engine.core:EngineCore")
    rpc, name, after_step = core.collective_rpc, core.set_weight_version, core.post_step

    @wraps(rpc)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if not _beside_scheduler.get(_engine(self)):
            return rpc(self, method, *args, **kwargs)
        self.model_executor.collective_rpc(watch)
        try:
            return rpc(self, method, *args, **kwargs)
        finally:
            if any(self.model_executor.collective_rpc(take_changed)):
                _change(self)

    @wraps(name)
    def set_weight_version(self: Any, weight_version: str) -> None:
        name(self, weight_version)
        update = _updates.get(_engine(self))
        if update is not None:  # else the checkpoint says which weights these are
            update.version = weight_version
            if not _meet(self):
                log.info("the weights are version %s as soon as no block is in use", weight_version)

    @wraps(after_step)
    def post_step(self: Any, *args: Any, **kwargs: Any) -> None:
        after_step(self, *args, **kwargs)
        _meet(self)

    core.collective_rpc, core.set_weight_version, core.post_step = collective_rpc, set_weight_version, post_step


def _engine(core: Any) -> str:
    transfer = core.vllm_config.kv_transfer_config
    return "" if transfer is None else transfer.engine_id


def _change(core: Any) -> None:
    """Meet no engine until the caller names the weights."""
    known = _updates.get(_engine(core))
    _updates[_engine(core)] = WeightUpdate()
    if known is None or known.served:
        _tell(core, None)


def _meet(core: Any) -> bool:
    """Meet engines as the version that is due, once no KV from before is left. Returns True if none is due any more."""
    update = _updates.get(_engine(core))
    if update is None or not update.is_due:
        return True
    if _holds_kv(core.scheduler):
        return False
    if not update.served:
        core.scheduler.reset_prefix_cache(reset_connector=True)
    _tell(core, update.version or None)
    update.served = update.version
    return True


def _holds_kv(scheduler: Any) -> bool:
    """Returns True if a block is in use, or a connector still works on blocks' contents."""
    pool, connector = scheduler.kv_cache_manager.block_pool, scheduler.get_kv_connector()
    if pool.get_num_free_blocks() < pool.num_gpu_blocks - 1:  # one stands for no block
        return True
    return connector is not None and connector.has_pending_push_work()


def _tell(core: Any, version: str | None) -> None:
    """Report a version to halves and tiers in all processes, and serve the new cards."""
    engine_id = _engine(core)
    for half in list(_beside_scheduler[engine_id]):
        half.updated(version)
    core.model_executor.collective_rpc(tell, args=(engine_id, version))
    tell_scheduler(core)


# In the process of a worker, where vLLM calls these with its wrapper of the worker


def watch(wrapper: Any) -> None:
    """Note from now on all changes to a worker's weights."""
    worker = _worker(wrapper)
    if worker in _watched:
        return
    _watched.add(worker)
    for owner, name in _changing(worker):
        if (method := getattr(owner, name, None)) is not None:
            setattr(owner, name, _noting(worker, method))


def take_changed(wrapper: Any) -> bool:
    """Returns True if a worker's weights have, or may have, changed since the last call."""
    worker = _worker(wrapper)
    changed = worker in _changed
    _changed.discard(worker)
    return changed


def tell(wrapper: Any, engine_id: str, version: str | None) -> None:
    """Report a version to an engine's halves in this process."""
    for half in list(_beside_worker[engine_id]):
        half.updated(version)


def _worker(wrapper: Any) -> Any:
    return getattr(wrapper, "worker", wrapper)


def _changing(worker: Any) -> Iterator[tuple[Any, str]]:
    """Yield the owners and names of all methods that change a worker's weights."""
    for name in _OF_WORKER:
        yield worker, name
    for model in (worker.get_model(), getattr(worker, "get_draft_model", lambda: None)()):
        yield model, _OF_MODEL


def _noting(worker: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _changed.add(worker)
        return method(*args, **kwargs)

    return noted
