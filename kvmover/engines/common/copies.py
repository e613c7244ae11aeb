"""Copies between an engine's pools and the host, made by one thread on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.region import Region


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies between a device and pinned memory from one thread, which waits for them; between hosts, plain copies."""

    stream: torch.cuda.Stream | None

    @classmethod
    def on(cls, device: torch.device) -> Copies:
        import torch

        return cls(torch.cuda.Stream(device) if device.type == "cuda" else None)

    def __call__(self, regions: Sequence[Region]) -> None:
        import torch

        from kvmover.kernels import bulk

        if self.stream is None:
            bulk.move(regions)
            return
        with torch.cuda.stream(self.stream):
            bulk.move(regions)
        self.stream.synchronize()
