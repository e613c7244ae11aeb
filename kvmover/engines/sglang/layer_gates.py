"""LayerGates hold a forward pass of SGLang before each layer whose KV is still on its way from the host."""

from __future__ import annotations

from kvmover.cache.tiers import GatedLoads


class LayerGates:
    """What SGLang's pools call a layer transfer counter. Whoever reads a layer waits for every load that was begun."""

    def __init__(self, loads: GatedLoads, layers: int) -> None:
        self._loads, self.num_layers = loads, layers

    @property
    def consumer_index(self) -> int:
        """0 while something is on its way, else -1: SGLang asks before it replays a graph."""
        return 0 if self._loads.closed else -1

    def set_consumer(self, index: int) -> None:
        """SGLang's own counter waits for the loads of one batch; here a batch waits for all before it too."""

    def wait_until(self, layer: int) -> None:
        """`layer` counts within the rank's own. On a GPU the current stream waits, and the host does not."""
        self._loads.wait(layer)
