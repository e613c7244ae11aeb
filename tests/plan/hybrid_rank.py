"""One rank of a hybrid model: every kind of component, with the convolution states of q, k and v in one allocation.

The bytes that a rank must hold are written by slicing the whole model's tensors, without any of the code under test but
the shards' spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvmover.layout import AXES, Component, Fleet, Layout, Pool, PoolSpec, Shard

LAYERS, SLOTS, WIDTH, CHANNELS = 4, 5, 3, 2
#: Heads of the sub-projections, `CHANNELS` channels a head.
PARTS = {"q": 4, "k": 4, "v": 8}
TOKENS = 45
WINDOW = 13

ROWS = (
    Component.attention(LAYERS, 4, 3, "bfloat16"),
    Component.sliding(LAYERS, 4, 3, WINDOW, "bfloat16"),
    Component("index", LAYERS, 1, 1, 5, "uint8"),
    Component.state("temporal", LAYERS, 8, 6, "float32", states=2),
)


@dataclass(frozen=True, slots=True)
class ConvOrder:
    """How an engine stores `channels` x `WIDTH` elements of a state: strides of a channel and of a step."""

    name: str

    def strides(self, channels: int) -> tuple[int, int]:
        return {"channels": (WIDTH, 1), "width": (1, channels)}[self.name]


CHANNELS_OUT, WIDTH_OUT = ConvOrder("channels"), ConvOrder("width")


def conv_components(src: ConvOrder, dst: ConvOrder) -> tuple[Component, ...]:
    """One a sub-projection, in the longest rows that both orders hold: kv counts steps that are not in a row."""

    def part(name: str, heads: int) -> Component:
        if src != dst:
            return Component(f"conv.{name}", LAYERS, WIDTH, heads * CHANNELS, 1, "bfloat16", states=1)
        if src == CHANNELS_OUT:
            return Component.state(f"conv.{name}", LAYERS, heads, CHANNELS * WIDTH, "bfloat16")
        return Component(f"conv.{name}", LAYERS, WIDTH, heads, CHANNELS, "bfloat16", states=1)

    return tuple(part(name, heads) for name, heads in PARTS.items())


def whole_model(seed: int) -> dict[str, torch.Tensor]:
    """Rows [layer, kv, head, position, byte] by component, and conv [layer, head, channel, step] by sub-projection."""
    random = torch.Generator().manual_seed(seed)
    rows = {
        c.name: torch.randint(
            0, 256, (c.layers, c.kv, c.heads, c.extent(TOKENS), c.row_bytes), dtype=torch.uint8, generator=random
        )
        for c in ROWS
    }
    conv = {
        f"conv.{name}": torch.randint(
            -30_000, 30_000, (LAYERS, heads, CHANNELS, WIDTH), dtype=torch.int16, generator=random
        )
        for name, heads in PARTS.items()
    }
    return {**rows, **conv}


@dataclass
class HybridRank:
    """Pools and page tables of one rank, `conv` [layer, slot, byte] being the memory of three of the pools."""

    fleet: Fleet
    rank: int
    order: ConvOrder
    components: tuple[Component, ...]
    pools: dict[str, Pool]
    pages: dict[str, np.ndarray]
    conv: torch.Tensor

    @classmethod
    def of(
        cls, fleet: Fleet, rank: int, order: ConvOrder, components: tuple[Component, ...], pool_order: str, seed: int
    ) -> HybridRank:
        """Random bytes everywhere, page tables that skip what lies before a window. The same for the same seed."""
        random = np.random.default_rng(seed + rank)
        noise = torch.Generator().manual_seed(seed + rank)
        made = cls(fleet, rank, order, (*ROWS, *components), {}, {}, torch.empty(0))
        for component in ROWS:
            shard, page_tokens = made.shard(component), fleet.page_rows(component)
            held = np.array(list(shard.positions or ()))
            needed = -(-len(held) // page_tokens)
            table = random.permutation(needed) * 2 + 1
            before = held[page_tokens - 1 :: page_tokens] < component.wanted(range(TOKENS)).start
            table[: before.sum()] = -1
            spec = PoolSpec.dense(component, shard, 2 * needed + 1, page_tokens, pool_order)
            made.pages[component.name] = table
            made.pools[component.name] = Pool(
                spec, (torch.randint(0, 256, (spec.allocation_bytes,), dtype=torch.uint8, generator=noise),)
            )
        made._add_conv(components, noise)
        return made

    def _add_conv(self, components: tuple[Component, ...], noise: torch.Generator) -> None:
        """The one allocation, and a pool a sub-projection that starts where its channels do."""
        shards = [self.shard(component) for component in components]
        heads = [self.local_heads(name)[1] for name in PARTS]
        channels = sum(heads) * CHANNELS
        state = channels * WIDTH
        layers = shards[0].layers.count
        self.conv = torch.randint(0, 256, (layers, SLOTS, 2 * state), dtype=torch.uint8, generator=noise)
        channel, step = self.order.strides(channels)
        first, slot = 0, torch.randint(SLOTS, (1,), generator=noise).numpy()
        for component, shard, count in zip(components, shards, heads, strict=True):
            head = channel * (count * CHANNELS // shard.heads.count)
            layout = Layout(
                AXES,
                (layers, component.kv, SLOTS, shard.heads.count, 1, component.dim),
                (SLOTS * state, step, state, head, 0, 1),
            )
            flat = self.conv.view(-1)[2 * first * channel :]
            self.pools[component.name] = Pool(PoolSpec(component, layout), (flat,))
            self.pages[component.name] = slot
            first += count * CHANNELS

    def shard(self, component: Component) -> Shard:
        return self.fleet.shard(component, self.rank, TOKENS)

    def local_heads(self, name: str) -> tuple[int, int]:
        """First head and heads of a sub-projection on this rank: shared out, or a copy where there are too few."""
        tp, at = self.fleet.tp, self.fleet.coordinate(self.rank).tp
        return (at * PARTS[name] // tp, max(1, PARTS[name] // tp))

    def memory(self) -> Iterator[torch.Tensor]:
        yield self.conv
        yield from (self.pools[component.name].tensors[0] for component in ROWS)

    def put(self, whole: dict[str, torch.Tensor]) -> None:
        """Write what this rank holds of the wanted positions, by slicing `whole`."""
        for component in ROWS:
            shard, page_tokens = self.shard(component), self.fleet.page_rows(component)
            layers, heads = (slice(span.start, span.stop) for span in (shard.layers, shard.heads))
            wanted = component.wanted(range(TOKENS))
            here = whole[component.name][layers, :, heads]
            for place, position in enumerate(shard.positions or ()):
                if position in wanted:
                    page, token = self.pages[component.name][place // page_tokens], place % page_tokens
                    for layer in range(shard.layers.count):
                        for kv in range(component.kv):
                            plane = self.pools[component.name].plane(layer, kv).view(torch.uint8)
                            plane[page, token] = here[layer, kv, :, position]
        stage = self.shard(ROWS[0]).layers
        cut: list[torch.Tensor] = []
        for name in PARTS:
            first, count = self.local_heads(name)
            cut.append(whole[f"conv.{name}"][stage.start : stage.stop, first : first + count].flatten(1, 2))
        state = torch.cat(cut, 1)
        stored = state if self.order == CHANNELS_OUT else state.transpose(1, 2)
        self.conv[:, self.pages["conv.q"][0]] = stored.flatten(1).contiguous().view(torch.uint8)
