"""vLLM's own EngineCore and worker, around a scheduler that steps elsewhere and a model that is none: for updates."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

EngineCore: Any = import_module("vllm.v1.engine.core").EngineCore
Worker: Any = import_module("vllm.v1.worker.gpu_worker").Worker


class Model:
    """As far as a worker reloads one."""

    def load_weights(self, weights: Any) -> None:
        """They are here."""


class Runner:
    """The runner of a worker, whose model is not computed with."""

    def __init__(self) -> None:
        self.model = Model()

    def get_model(self) -> Model:
        return self.model

    def get_draft_model(self) -> None:
        return None

    def reload_weights(self, **_: Any) -> None:
        """From wherever."""

    def reset_lora_state(self) -> None:
        """There is none."""


class Sender:
    """A weight transfer engine whose trainer sends at once."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def flushed(manager: Any) -> None:
    """Tell an offloading manager that its reset is over, which 0.32 and before take for granted."""
    getattr(manager, "on_reset_flushed", lambda: None)()


def has_sources(manager: Any) -> bool:
    """Returns True if a manager says where each hit came from, as since 0.32."""
    return hasattr(manager, "get_load_source")


def worker_of(config: Any) -> Any:
    """vLLM's own, as it is once it has loaded a model."""
    worker = Worker.__new__(Worker)
    worker.vllm_config, worker.model_runner, worker.weight_transfer_engine = config, Runner(), Sender()
    worker._weight_update_active = worker._weight_update_is_draft = False
    return worker


class Executor:
    """Runs what it is told on the worker of this process, behind which are all ranks of the bench."""

    def __init__(self, config: Any, introductions: Callable[[], list[Any]]) -> None:
        self.wrapper = SimpleNamespace(worker=worker_of(config))
        self.get_kv_connector_handshake_metadata = introductions

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        call = (
            getattr(self.wrapper.worker, method)
            if isinstance(method, str)
            else lambda *a, **k: method(self.wrapper, *a, **k)
        )
        return [call(*args, **(kwargs or {}))]


def core_of(config: Any, scheduler: Any, introductions: Callable[[], list[Any]]) -> Any:
    """vLLM's own engine core around a scheduler that steps elsewhere."""
    core = EngineCore.__new__(EngineCore)
    core.vllm_config, core.scheduler, core.check_for_draft_tokens = config, scheduler, False
    core.model_executor = Executor(config, introductions)
    return core


def by_a_trainers_extension(wrapper: Any) -> None:
    """Load weights as trainers' own code does, which vLLM calls in its workers."""
    wrapper.worker.get_model().load_weights([])


def core_of_manager(engine_id: str, manager: Any) -> Any:
    """An engine core whose connector is vLLM's own offloading, and in which no block is in use."""

    def reset(reset_connector: object) -> None:
        manager.reset_cache()
        flushed(manager)

    pool = SimpleNamespace(num_gpu_blocks=1, get_num_free_blocks=lambda: 0)
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        reset_prefix_cache=reset,
        get_kv_connector=lambda: SimpleNamespace(has_pending_push_work=manager.has_pending_work),
    )
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id))
    return core_of(config, scheduler, list)
