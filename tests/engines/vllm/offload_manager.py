"""A Managed offload is vLLM's TieringOffloadingManager, driven by a check as vLLM's scheduler does."""

# vLLM is in its engine's own environment, which no type checker looks into.
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import ScheduleEndContext


class Managed:
    """`manager`: as its `spec` makes it. What the tiers count reaches `told`."""

    manager: Any

    def step(self) -> None:
        """A scheduling step ends."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        stats = self.manager.get_stats()
        for name, values in (stats.data["data"] if stats else {}).items():
            self.told(name, values)

    def told(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """A counter of a tier, by its labels, since the last step."""
        raise NotImplementedError

    def finish(self) -> None:
        """Step until nothing is under way."""
        stop = time.monotonic() + 60
        while self.manager.has_pending_work():
            assert time.monotonic() < stop
            self.step()
            time.sleep(0.001)
        self.step()
