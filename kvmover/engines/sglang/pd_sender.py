"""KvmoverSender is a request that SGLang's prefill sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmover.engines.sglang import engine_pd
from kvmover.engines.sglang.pd import LastChunk
from kvmover.engines.sglang.sglang_contract import status_on_stages
from kvmover.transfer import Content


class KvmoverSender(engine_pd.CommonKVSender):
    """A sender of SGLang's that leaves the collecting of pages to the manager."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *more: Any, **named: Any) -> None:
        own = mgr.enter(bootstrap_room)
        engine_pd.CommonKVSender.__init__(self, mgr, bootstrap_addr, own, *more, **named)
        if own != bootstrap_room:
            self.conclude_state = mgr.turn_away(own, bootstrap_room)

    def begin(self, content: Content) -> None:
        """Send the request, of this prompt, as soon as decode has pages for it."""
        if self.conclude_state is None:
            self.kv_mgr.expect(self.bootstrap_room, content)
            self.kv_mgr.opened(self.bootstrap_room)

    def send(self, kv_indices: Any, state_indices: Any = None, *_: Any, **__: Any) -> None:
        """Send the next chunk of the request: `kv_indices` [page], and states with the last one."""
        if self.conclude_state is not None:
            return
        pages, _, is_last, is_skipped = self._prepare_send_indices(kv_indices, state_indices)
        if not is_skipped:
            computed, self._early_send_wait_event = getattr(self, "_early_send_wait_event", None), None
            ending = LastChunk(self.aux_index, state_indices) if is_last else None
            self.kv_mgr.send_chunk(self.bootstrap_room, pages, computed, ending)
            self._record_transfer_indices(pages, state_indices)

    def poll(self) -> Any:
        """Returns the request's status on this rank."""
        return self._concluded(self.kv_mgr.check_status)

    def poll_pp_consensus(self) -> Any:
        """Returns the request's status on all pipeline stages."""
        return self._concluded(status_on_stages(self.kv_mgr))

    def _concluded(self, check: Callable[[int], Any]) -> Any:
        if self.conclude_state is None:
            is_known = self.bootstrap_room in self.kv_mgr.request_status
            status = check(self.bootstrap_room) if is_known else engine_pd.FAILED
            late = self._check_bootstrap_timeout() if status == engine_pd.BOOTSTRAPPING else None
            status = status if late is None else late
            if status not in (engine_pd.SUCCESS, engine_pd.FAILED):
                return status
            self.conclude_state = status
        return self.conclude_state

    def failure_exception(self) -> None:
        """Forget the request. Raises SGLang's error with the reason of its failure."""
        engine_pd.raise_failure(self)

    def abort(self) -> None:
        """Give up the request for the scheduler. It is over when its pages are no longer read."""
        engine_pd.CommonKVSender.abort(self)
        self.kv_mgr.give_up(self.bootstrap_room, "aborted by the scheduler")

    def clear(self) -> None:
        """Forget the data collected for a request that has ended."""
        engine_pd.CommonKVSender.clear(self)
        self.kv_mgr.forget(self.bootstrap_room)
