"""KvmoverSender is a request that SGLang's prefill sends."""

from __future__ import annotations

from typing import Any

from kvmover.engines.sglang import engine_pd
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

    def abort(self) -> None:
        """Give up the request for the scheduler. It is over when its pages are no longer read."""
        engine_pd.CommonKVSender.abort(self)
        self.kv_mgr.give_up(self.bootstrap_room, "aborted by the scheduler")

    def clear(self) -> None:
        """Forget the data collected for a request that has ended."""
        engine_pd.CommonKVSender.clear(self)
        self.kv_mgr.forget(self.bootstrap_room)
