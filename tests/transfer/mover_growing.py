"""A request of three kinds of component that is computed and gets its pages part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from mover_fleets import CONFIG, POISON, SMALL_CHUNKS, Bench, Pair, Tables, Truth

from kvmover.layout import Component, CpOrder, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.protocol.wire import Verb

LAYERS, TOKENS, WINDOW = 4, 24, 6
MODEL = (
    Component("attention", LAYERS, 2, 2, 8, "bfloat16"),
    Component("sliding", LAYERS, 1, 2, 8, "bfloat16", window=WINDOW),
    Component("state", LAYERS, 1, 2, 16, "uint8", states=2),
)


@dataclass(eq=False)
class Event:
    """Stands in for a CUDA event that passes when it is told to."""

    passed: bool = False

    def query(self) -> bool:
        return self.passed


def growing(
    route: Route = Route.PACKED,
    verb: Verb = Verb.PUSH,
    src: Fleet | None = None,
    chunk_layers: int = 2,
    dst: Fleet | None = None,
    **more: float,
) -> Pair:
    """A model with a window and states, of which nothing is computed; pages before the window are no pages."""
    costs = replace(SMALL_CHUNKS, chunk_bytes=512)
    config = replace(CONFIG, route=route, verb=verb, chunk_layers=chunk_layers, costs=costs, **more)
    bench = Bench(MODEL, config)
    source = bench.engine("prefill", src or Fleet(page_tokens=4))
    target = bench.engine("decode", dst or Fleet(page_tokens=4), "HND")
    target.connect(source)
    bench.turn()
    pair = Pair.request(bench, source, target, TOKENS)
    for tables in pair.src_tables if source.fleet.cp == 1 else ():
        tables[1] = np.array(tables[1])
        tables[1][: (TOKENS - WINDOW) // 4] = -1
    compute(pair, set())
    return pair


def compute(pair: Pair, done: set[tuple[int, int]]) -> None:
    """Let the source's pages hold these (layer, token), and states of layers that have seen all tokens; poison else."""
    for pools in pair.src.pools:
        for pool in pools:
            for tensor in pool.tensors:
                tensor.fill_(POISON)
    truth: Truth = [torch.full_like(rows, POISON) for rows in pair.truth]
    for component, mine, rows in zip(MODEL, truth, pair.truth, strict=True):
        for layer, token in done:
            if not component.states:
                mine[layer, :, :, token] = rows[layer, :, :, token]
            elif token == TOKENS - 1:
                mine[layer] = rows[layer]
    pair.src.fill(pair.src_tables, truth)


def before(layers: int, tokens: int) -> set[tuple[int, int]]:
    return {(layer, token) for layer in range(min(layers, LAYERS)) for token in range(min(tokens, TOKENS))}


def part(tables: Tables, first: list[int], stop: list[int]) -> Tables:
    return [table[a:b] for table, a, b in zip(tables, first, stop, strict=True)]


def landed_rows(pair: Pair) -> int:
    """How many rows of the first component's first plane are in the destination's pages."""
    pool, table = pair.dst.pools[0][0], pair.dst_tables[0][0]
    plane = pool.plane(0, 0).view(torch.uint8)
    return sum(not bool((plane[int(table[t // 4]), t % 4] == POISON).all()) for t in range(TOKENS))


#: What sources and destinations of it may be.
FLEETS = (
    Fleet(page_tokens=4),
    Fleet(tp=2, page_tokens=4),
    Fleet(pp=2, page_tokens=2),
    Fleet(cp=2, page_tokens=4, cp_order=CpOrder.PAGE),
)


def kept(corners: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without those of fewer tokens than one before of as many layers: nothing that was promised is taken back."""
    found = list[tuple[int, int]]()
    for layers, tokens in corners:
        if not (layers and tokens and any(t > tokens and n >= layers for n, t in found)):
            found.append((layers, tokens))
    return found
