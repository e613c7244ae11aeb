"""KvmoverOffloadingConnector is vLLM's own OffloadingConnector with an account of every request's tokens beside it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvmover.cache.ledger import AccountGroup
from kvmover.config import load
from kvmover.engines.vllm import engine
from kvmover.engines.vllm.request_accounts import RequestAccounts
from kvmover.observe.observers import Observers

_offloading: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
OffloadingConnector: Any = _offloading.OffloadingConnector


class KvmoverOffloadingConnector(OffloadingConnector):
    """Offloads as vLLM does; the scheduler's half tells a ledger what it hears. Options are vLLM's own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError or KvmoverError for kvmover's configuration, and what vLLM's own raises."""
        OffloadingConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role is engine.SCHEDULER:
            ranks = vllm_config.parallel_config.world_size
            self._observers = Observers(load().settings, self._kv_transfer_config.engine_id, ranks)
            self._accounts = RequestAccounts(
                AccountGroup(model=vllm_config.model_config.model), self._observers.account
            )
            self._observers.serve(self._accounts)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's."""
        found, is_async = OffloadingConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        self._accounts.matched(request, num_computed_tokens, found)
        return found, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As vLLM's."""
        OffloadingConnector.update_state_after_alloc(self, request, blocks, num_external_tokens)
        if num_external_tokens:
            sources = self.get_external_cache_hit_sources(request, num_external_tokens)
            self._accounts.allocated(request, engine.external_of(sources))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM's."""
        self._accounts.scheduled(scheduler_output)
        return OffloadingConnector.build_connector_meta(self, scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's."""
        self._accounts.finished(request)
        return OffloadingConnector.request_finished(self, request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's."""
        self._accounts.finished(request)
        return OffloadingConnector.request_finished_all_groups(self, request, block_ids)

    def shutdown(self) -> None:
        """As vLLM's, and the ledger's metrics and run log end. Safe to call twice."""
        OffloadingConnector.shutdown(self)
        if self._role is engine.SCHEDULER:
            self._observers.close()
