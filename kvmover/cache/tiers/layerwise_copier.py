"""LayerwiseCopier copies pages between device and host by groups of layers: a forward pass starts after the first.

A GPU has a stream for each direction, and an event a group. On a CPU one group is copied a poll, or when a reader waits
for its layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmover.cache.prefix import InvariantBroken, Tier
from kvmover.cache.tiers.tiered_pool import TieredPool
from kvmover.host_copies import timed
from kvmover.kernels.region import Region
from kvmover.layout import Span
from kvmover.regions import CopyStream, page_region

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The host and device page ids of one tiered pool, pairwise."""

    tiered_pool: TieredPool
    host_ids: Sequence[int]
    device_ids: Sequence[int]

    def regions(self, dst: Tier, layers: Span) -> Region:
        """Return the move of `layers` of the rank's part. Raises PlanError for ids outside a pool."""
        host, device = (self.tiered_pool.host, self.host_ids), (self.tiered_pool.device, self.device_ids)
        (src, src_ids), (to, dst_ids) = (host, device) if dst is Tier.DEVICE else (device, host)
        return page_region(src, src_ids, to, dst_ids, layers)

    @property
    def nbytes(self) -> int:
        """Returns the payload of all layers."""
        return len(self.host_ids) * self.tiered_pool.part.nbytes


@dataclass(slots=True, eq=False)
class LayerwiseCopy:
    """A transfer under way. `poll` calls `done` once all groups have landed."""

    groups: deque[list[Region]]
    sizes: list[int]
    done: Callable[[], None]
    events: deque[torch.cuda.Event] = field(default_factory=deque["torch.cuda.Event"])
    landed: int = 0


@dataclass(slots=True)
class LayerGate:
    """A gate for the forward pass, before a layer of the rank's part reads loaded pages."""

    copies: LayerwiseCopier
    copy: LayerwiseCopy
    group_layers: int

    def wait(self, layer: int) -> None:
        """Wait for the layer: on a GPU the current stream does; else the host copies it."""
        self.copies.reach(self.copy, layer // self.group_layers)

    def open(self, layer: int) -> bool:
        """Return True if the layer has landed."""
        return self.copy.landed > layer // self.group_layers


@dataclass(slots=True)
class LayerwiseCopier:
    """A copier for one rank. `group_layers`: layers a group.

    `fences`: streams that a copy follows, beside the current one.
    """

    device: torch.device
    group_layers: int = 8
    fences: Sequence[torch.cuda.Stream] = ()
    _under_way: list[LayerwiseCopy] = field(default_factory=list[LayerwiseCopy])
    _streams: dict[Tier, CopyStream] = field(default_factory=dict[Tier, CopyStream])

    def __post_init__(self) -> None:
        timed(self.device)

    def begin(self, batches: Sequence[Batch], dst: Tier, done: Callable[[], None]) -> LayerGate:
        """Begin to copy after the streams' work so far. Raises PlanError for wrong ids."""
        most = max((batch.tiered_pool.part.box.layers.count for batch in batches), default=1)
        groups = deque(
            [
                batch.regions(dst, Span(first, min(self.group_layers, count - first)))
                for batch in batches
                if (count := batch.tiered_pool.part.box.layers.count) > first and len(batch.host_ids)
            ]
            for first in range(0, most, self.group_layers)
        )
        copy = LayerwiseCopy(groups, [len(group) for group in groups], done)
        self._under_way.append(copy)
        if self.device.type != "cpu":
            self._launch(copy, dst)
        return LayerGate(self, copy, self.group_layers)

    def at_once(self, batches: Sequence[Batch], dst: Tier) -> None:
        """Copy, and return when the bytes are there."""
        gate = self.begin(batches, dst, lambda: None)
        while gate.copy in self._under_way:
            if gate.copy.events:
                gate.copy.events[-1].synchronize()
            self.poll()

    def poll(self) -> None:
        """Go on, and call `done` of finished copies, oldest first."""
        for copy in list(self._under_way):
            if self.device.type == "cpu":
                self._step(copy)
            else:
                while copy.events and copy.events[0].query():
                    copy.events.popleft()
                    copy.landed += 1
            if copy.landed == len(copy.sizes):
                self._under_way.remove(copy)
                copy.done()

    def reach(self, copy: LayerwiseCopy, group: int) -> None:
        """Wait for a group: see `LayerGate.wait`."""
        if self.device.type == "cpu":
            while copy.landed <= group and copy.groups:
                self._step(copy)
            return
        import torch

        if copy.landed <= group:
            torch.cuda.current_stream().wait_event(copy.events[min(group - copy.landed, len(copy.events) - 1)])

    @property
    def busy(self) -> bool:
        """Returns True if a copy has not landed."""
        return bool(self._under_way)

    def check(self) -> None:
        """Raise InvariantBroken for a lost group of layers."""
        for copy in self._under_way:
            if copy.landed + len(copy.events) + len(copy.groups) != len(copy.sizes):
                raise InvariantBroken(f"{copy.landed} of {len(copy.sizes)} groups have landed, {len(copy.groups)} wait")

    def _step(self, copy: LayerwiseCopy) -> None:
        from kvmover.kernels import cpu

        if copy.groups:
            cpu.move(copy.groups.popleft())
            copy.landed += 1

    def _launch(self, copy: LayerwiseCopy, dst: Tier) -> None:
        stream = self._streams.setdefault(dst, CopyStream(self.device))
        stream.follow(*self.fences)
        while copy.groups:
            event = stream.launch(copy.groups.popleft())
            assert event is not None
            copy.events.append(event)
