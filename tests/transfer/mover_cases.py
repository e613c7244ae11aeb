"""Strategies: two fleets of any shape that serve one model, a request between them, and messages of any kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from hypothesis import strategies as st

from kvmover.layout import Component, CpOrder, Fleet
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.content import Content
from kvmover.vocabulary import AXES

numbers = st.integers(0, 4) | st.integers(0, 2**63 - 1)
ranges = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)


def kinds_of_messages(requests: list[str] | None = None) -> dict[type, st.SearchStrategy[wire.AnyMessage]]:
    """Well-formed messages of every kind, about anything or about some requests."""
    about = (st.text(max_size=40) if requests is None else st.sampled_from(requests), numbers)
    grants = st.lists(st.builds(wire.Grant, numbers, numbers, numbers), max_size=5).map(tuple)
    tables = st.lists(st.binary(max_size=64), max_size=3).map(tuple)
    digest = st.none() | st.integers(0, 2**64 - 1)
    positive, ranks = st.integers(1, 4) | st.integers(1, wire.MOST), st.integers(0, wire.MAX_RANKS - 1)
    content = st.none() | st.builds(
        Content, numbers, st.binary(min_size=16, max_size=16) | st.just(b""), st.text(max_size=9)
    )
    said = (st.builds(wire.WriteLease), st.none(), content)
    choices = (st.sampled_from(Route), st.sampled_from(Replicas), positive, tables, numbers, st.sampled_from(wire.Verb))
    fields: dict[type, tuple[st.SearchStrategy[Any], ...]] = {
        wire.Hello: (st.binary(max_size=100),),
        wire.Ping: (),
        wire.Pong: (),
        wire.NoSeat: (st.text(max_size=64),),
        wire.Registered: (st.binary(max_size=64), numbers),
        wire.Query: (about[0], st.binary(max_size=96), numbers),
        wire.Holding: (about[0], numbers),
        wire.Want: (*about, numbers, numbers, *choices, st.booleans(), st.lists(ranks, max_size=2).map(tuple), *said),
        wire.Noted: (*about, numbers),
        wire.Offered: (*about, ranges),
        wire.Granted: (*about, grants),
        wire.Chunk: (*about, numbers, numbers, digest),
        wire.Staged: (*about, numbers, numbers, numbers, digest, tables),
        wire.Taken: (*about, numbers, numbers),
        wire.Aux: (*about, st.binary(max_size=64)),
        wire.Done: about,
        wire.Kept: about,
        wire.Abort: (*about, st.text(min_size=1, max_size=40)),
        wire.Drained: about,
    }
    return {kind: st.builds(kind, *values) for kind, values in fields.items()}


def messages(requests: list[str] | None = None) -> st.SearchStrategy[wire.AnyMessage]:
    return st.one_of(list(kinds_of_messages(requests).values()))


ORDERS = [" ".join(axes) for axes in permutations(AXES) if axes[-1] == "dim"]
SEPARATE = [(), ("layer",), ("layer", "kv")]


#: Components of the cases whose pages no fleet's size gives.
OWN_PAGES = ("every 4", "every 7", "sliding")


@dataclass(frozen=True)
class Shape:
    """How one engine lays the model out."""

    fleet: Fleet
    order: str
    separate: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """Positions from `start` on of a request of `tokens` tokens go from `src` to `dst`."""

    components: tuple[Component, ...]
    src: Shape
    dst: Shape
    tokens: int
    start: int
    replicas: Replicas
    chunk_bytes: int

    def pages(self, shape: Shape) -> int:
        """Of each pool: twice what the request needs of the smallest, and some."""
        of_page = (shape.fleet.page_rows(c) * c.row_tokens for c in self.components if not c.states)
        return 2 * (2 * self.tokens // min(of_page)) + 9


@st.composite
def components(draw: st.DrawFn) -> tuple[Component, ...]:
    """Attention or a latent, sometimes with what newer models have beside it, of other heads and row sizes."""
    layers = draw(st.integers(2, 4))
    kv, heads, dim = draw(st.integers(1, 2)), draw(st.integers(1, 6)), draw(st.sampled_from([2, 8, 9]))
    dtype = draw(st.sampled_from(["bfloat16", "uint8", "float64"]))
    beside = {
        "keys": Component("keys", layers, 1, 1, draw(st.sampled_from([3, 16])), "uint8"),
        "sliding": Component.sliding(draw(st.integers(2, 5)), heads, 2, draw(st.sampled_from([1, 7, 40])), "uint8"),
        "every 4": Component("every 4", layers, 1, heads, 5, "uint8", row_tokens=4),
        "every 7": Component("every 7", layers, 2, 1, 8, "float32", row_tokens=7),
        "temporal": Component.state("temporal", layers, heads, 8, "float32"),
        "steps": Component("steps", layers, 3, 2, 4, "bfloat16", states=draw(st.sampled_from([1, 3]))),
    }
    names = draw(
        st.sampled_from([(), ("keys",), ("sliding",), ("temporal", "steps"), ("every 4", "sliding"), tuple(beside)])
    )
    return (Component("main", layers, kv, heads, dim, dtype), *(beside[name] for name in names))


shapes = st.builds(
    Shape,
    st.builds(
        Fleet,
        tp=st.integers(1, 4),
        pp=st.integers(1, 2),
        cp=st.integers(1, 2),
        page_tokens=st.sampled_from([1, 3, 4, 16, 24]),
        cp_order=st.sampled_from(CpOrder),
        pages=st.fixed_dictionaries({name: st.sampled_from([1, 2, 5, 16]) for name in OWN_PAGES}),
    ),
    st.sampled_from(ORDERS),
    st.sampled_from(SEPARATE),
)


@st.composite
def cases(draw: st.DrawFn, most_tokens: int = 150) -> Case:
    tokens = draw(st.integers(1, most_tokens))
    start = draw(st.sampled_from([0, tokens // 3, tokens]) | st.integers(0, tokens))
    chunk_bytes = draw(st.sampled_from([1, 100, 1 << 10, 1 << 12, 1 << 20]))
    model = draw(components())
    src, dst = (_fit(draw(shapes), model) for _ in range(2))
    return Case(model, src, dst, tokens, start, draw(st.sampled_from(Replicas)), chunk_bytes)


def _fit(shape: Shape, model: tuple[Component, ...]) -> Shape:
    """Without pages of components that the model does not have."""
    names = {component.name for component in model}
    pages = tuple(each for each in shape.fleet.pages if each[0] in names)
    return replace(shape, fleet=replace(shape.fleet, pages=pages))
