"""Two engines that store the same numbers in other forms, and what the one must hold of what the other holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from mover_fleets import CONFIG, Bench, Engine, poisoned

from kvmover.kernels.convert_reference import decode, encode
from kvmover.layout import Codec, Component, Fleet, PoolSpec
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.protocol.handshake import Place
from kvmover.transfer.result import Transfer

#: Lets any two forms meet.
TOLERANT = replace(CONFIG, lossy=0.2)


@dataclass(frozen=True)
class Stored:
    """How an engine holds the cache of a model: its fleet and order, and a codec for each component, None: as it is
    meant. `scale`: of the first plane; every other one has another, unless it is 1.
    """

    fleet: Fleet
    codecs: tuple[Codec | None, ...]
    order: str = "NHD"
    scale: float = 1.0

    def components(self, meant: Sequence[Component]) -> tuple[Component, ...]:
        pairs = zip(meant, self.codecs, strict=True)
        return tuple(component.kept_as(codec) if codec else component for component, codec in pairs)

    def scales(self, component: Component) -> np.ndarray:
        """Of all planes of the model [plane, part]."""
        each = component.codec.scales if component.codec else 0
        planes = np.arange(component.layers * component.kv * each, dtype=np.float32)
        factors = np.ones_like(planes) if self.scale == 1 else 1 + planes / 7
        return (factors * np.float32(self.scale)).reshape(component.layers * component.kv, each)

    def spec(self, component: Component, rank: int, pages: int) -> PoolSpec:
        shard, rows = self.fleet.shard(component, rank, 1), self.fleet.page_rows(component)
        spec = PoolSpec.dense(component, shard, pages, rows, self.order)
        scales = self.scales(component)
        if not scales.size:
            return spec
        by_layer = scales.reshape(component.layers, -1)
        return replace(spec, scales=tuple(by_layer[list(shard.layers)].reshape(-1).tolist()))


class Unlike:
    """A prefill and a decode engine over one network, and a request whose bytes in each are known."""

    def __init__(
        self, meant: Sequence[Component], src: Stored, dst: Stored, tokens: int = 100, config: MoverConfig = TOLERANT
    ) -> None:
        self.tokens, self.bench = tokens, Bench(src.components(meant), config)
        self.src, self.dst = self._engine("prefill", src, meant), self._engine("decode", dst, meant)
        self.src_tables, self.dst_tables = self.src.tables(tokens, 1), self.dst.tables(tokens, 2)
        self.numbers = [random_numbers(component, tokens, seed) for seed, component in enumerate(meant)]
        self.sent = [
            each_plane(rows, lambda plane, scales, c=component: _encoded(c, plane, scales), src.scales(component))
            for component, rows in zip(self.src.components, self.numbers, strict=True)
        ]
        self.truth = [
            recoded(rows, held, src.scales(held), kept, dst.scales(kept))
            for rows, held, kept in zip(self.sent, self.src.components, self.dst.components, strict=True)
        ]
        self.src.fill(self.src_tables, self.sent)
        self.before = self.dst.snapshot()

    def _engine(self, name: str, stored: Stored, meant: Sequence[Component], pages: int = 64) -> Engine:
        self.bench.components = components = stored.components(meant)
        ranks = range(stored.fleet.size)
        pools = [[poisoned(stored.spec(component, rank, pages)) for component in components] for rank in ranks]
        movers = [self.bench.mover(Place(name, stored.fleet, rank), pools[rank]) for rank in ranks]
        return Engine(name, stored.fleet, components, movers, pools)

    def connect(self) -> Unlike:
        self.dst.connect(self.src)
        self.bench.turn()
        return self

    def send(self) -> list[Transfer]:
        return self.src.send("request", self.src_tables)

    def receive(self, start: int = 0) -> list[Transfer]:
        return self.dst.receive("request", "prefill", range(start, self.tokens), self.dst_tables)

    def assert_landed(self, start: int = 0) -> None:
        self.dst.assert_holds(self.dst.landed(self.before, self.dst_tables, self.truth, start))


def random_numbers(meant: Component, tokens: int, seed: int) -> torch.Tensor:
    """[layer, kv, head, position, dim] in float32, of all magnitudes that a cache has, some rows of zeros."""
    random = torch.Generator().manual_seed(seed)
    shape = meant.layers, meant.kv, meant.heads, meant.extent(tokens), meant.dim
    magnitude = torch.exp2(torch.randint(-6, 5, (*shape[:-1], 1), generator=random).float())
    rows = torch.randn(shape, generator=random) * magnitude
    rows[..., torch.randint(0, 17, shape[3:4], generator=random) == 0, :] = 0
    return rows


def each_plane(rows: torch.Tensor, change, *scales: np.ndarray) -> torch.Tensor:
    """`change` of the rows [row, ..] of each plane with its scales, in the shape that they had."""
    planes = rows.flatten(0, 1)
    changed = [
        change(plane.flatten(0, -2), *(each[number].tolist() for each in scales)).view(*plane.shape[:-1], -1)
        for number, plane in enumerate(planes)
    ]
    return torch.stack(changed).unflatten(0, rows.shape[:2])


def _encoded(component: Component, rows: torch.Tensor, scales: list[float]) -> torch.Tensor:
    if component.form is None:  # any bytes
        return (rows * 64).to(torch.int64).to(torch.uint8)
    return encode(component.form, rows, scales)


def recoded(
    rows: torch.Tensor, held: Component, held_scales: np.ndarray, kept: Component, kept_scales: np.ndarray
) -> torch.Tensor:
    """The bytes [layer, kv, head, position, byte] that a pool must hold of those that another holds."""
    if held.form == kept.form and np.array_equal(held_scales, kept_scales):
        return rows

    def change(plane: torch.Tensor, before: list[float], after: list[float]) -> torch.Tensor:
        assert held.form is not None
        return _encoded(kept, decode(held.form, plane, before), after)

    return each_plane(rows, change, held_scales, kept_scales)
