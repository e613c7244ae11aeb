"""Whole pages between pools in any two orders, through packed memory and the store too, byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmover.bounce import PageBounce
from kvmover.errors import PlanError
from kvmover.kernels import reference
from kvmover.kernels.region import Region, RegionError
from kvmover.layout import ORDERS, PACKED_ORDER, Component, Fleet, Pool, PoolSpec, Span
from kvmover.plan import page_box
from kvmover.regions import CopyStream, page_region
from kvmover.store import Got, Namespace, PagePart, PageStore, Put
from kvmover.tools.conformance import page_hash
from kvmover.transport import memory_of

PAGE, PAGES, POISON = 4, 6, 0xA5
KV = Component.attention(3, kv_heads=2, head_dim=4, dtype="int16")
SHARD = Fleet(page_tokens=PAGE).shard(KV, 0, PAGE)
HASHES = [page_hash(number) for number in range(PAGES)]

orders = st.sampled_from([*ORDERS, PACKED_ORDER, "kv page layer token head dim"])
apart = st.sampled_from([(), ("layer",), ("layer", "kv")])
some_pages = st.lists(st.integers(0, PAGES - 1), unique=True, min_size=1)


def pool_of(order: str = "NHD", separate: tuple[str, ...] = ("layer", "kv"), component: Component = KV) -> Pool:
    pool = Pool.zeros(PoolSpec.dense(component, SHARD, PAGES, PAGE, order, separate))
    for tensor in pool.tensors:
        tensor.fill_(POISON)
    return pool


def planes(pool: Pool) -> torch.Tensor:
    """[layer, kv, page, token, head, dim], a copy."""
    layout = pool.spec.layout
    rows = [[pool.plane(layer, kv) for kv in range(KV.kv)] for layer in range(layout.extent_of("layer"))]
    return torch.stack([torch.stack(row) for row in rows])


def filled(pool: Pool) -> Pool:
    for layer in range(KV.layers):
        for kv in range(KV.kv):
            plane = pool.plane(layer, kv)
            plane.copy_(torch.randint(-(2**15), 2**15, plane.shape, dtype=torch.int16))
    return pool


@settings(max_examples=60)
@given(orders, apart, orders, apart, some_pages, st.data())
def test_pages_and_layers_go_where_they_are_sent_and_nowhere_else(
    order: str, separate: tuple[str, ...], other: str, other_apart: tuple[str, ...], ids: list[int], data: st.DataObject
) -> None:
    src, dst = filled(pool_of(order, separate)), pool_of(other, other_apart)
    places = data.draw(st.permutations(range(PAGES)))[: len(ids)]
    first = data.draw(st.integers(0, KV.layers - 1))
    layers = Span(first, data.draw(st.integers(1, KV.layers - first)))
    wanted = planes(dst)
    wanted[layers.start : layers.stop, :, places] = planes(src)[layers.start : layers.stop, :, ids]
    CopyStream(torch.device("cpu")).move([page_region(src, ids, dst, places, layers)])
    assert torch.equal(planes(dst), wanted)


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "says"),
    [
        ([0, PAGES], [0, 1], f"page id {PAGES} is outside a pool of {PAGES} pages"),
        ([0, 1], [0, -1], f"page id -1 is outside a pool of {PAGES} pages"),
        ([0, 1], [0], "2 pages of a pool do not pair with 1 of another"),
    ],
    ids=["above", "below", "unpaired"],
)
def test_pages_that_cannot_be_are_refused(src_ids: list[int], dst_ids: list[int], says: str) -> None:
    spec = pool_of().spec
    with pytest.raises(PlanError, match=says):
        page_box(spec, src_ids, spec, dst_ids)


def test_pools_of_other_heads_or_components_do_not_exchange_pages() -> None:
    half = Fleet(tp=2, page_tokens=PAGE).shard(KV, 0, PAGE)
    narrow = PoolSpec.dense(KV, half, PAGES, PAGE, "NHD")
    latent = Component.attention(3, kv_heads=2, head_dim=4, dtype="float16")
    for other in (narrow, pool_of(component=latent).spec):
        with pytest.raises(PlanError, match="pages of attention with .3, 2, 4. layers, heads and tokens"):
            page_box(pool_of().spec, [0], other, [0])


def test_a_copy_within_the_same_pages_is_refused_before_a_byte_moves() -> None:
    pool = filled(pool_of())
    before = planes(pool)
    with pytest.raises(RegionError, match="share the byte"):
        CopyStream(torch.device("cpu")).move([page_region(pool, [0, 1], pool, [1, 2])])
    assert torch.equal(planes(pool), before)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
    with PageStore.open(tmp_path, SPACE) as opened:
        yield opened


SPACE = Namespace("model", "1", PAGE)


def bounce_of(store: PageStore, pool: Pool, pages: int, moved: list[int]) -> PageBounce:
    """Room for `pages` pages; how many each call moved is noted."""
    packed = Pool.zeros(pool.spec.packed(pages))
    store.register(memory_of(packed.tensors[0]))

    def move(regions: Sequence[Region]) -> None:
        moved.append(sum(region.units for region in regions))
        reference.move(regions)

    return PageBounce(pool, packed, store.view(SPACE, PagePart.whole(KV, PAGE)), move)


def test_more_pages_than_the_packed_memory_has_go_in_turns(store: PageStore) -> None:
    pool, moved = filled(pool_of()), list[int]()
    before, bounce = planes(pool), bounce_of(store, pool, 2, moved)
    ids = [5, 0, 2, 4, 1]
    assert [result.outcome for result in bounce.put(HASHES[:5], ids)] == [Put.WRITTEN] * 5
    assert moved == [2, 2, 1]
    for tensor in pool.tensors:
        tensor.fill_(POISON)
    assert [result.outcome for result in bounce.get(HASHES[:5], ids)] == [Got.READ] * 5
    assert moved == [2, 2, 1] * 2
    assert torch.equal(planes(pool)[:, :, ids], before[:, :, ids])
    assert (planes(pool)[:, :, 3].view(torch.uint8) == POISON).all()


def test_a_page_that_fails_leaves_its_place_as_it_was(store: PageStore) -> None:
    pool = filled(pool_of("HND", ()))
    bounce = bounce_of(store, pool, 4, [])
    bounce.put([HASHES[0], HASHES[2]], [0, 2])
    before = planes(pool)
    results = bounce.get(HASHES[:3], [3, 4, 5])
    assert [result.outcome for result in results] == [Got.READ, Got.ABSENT, Got.READ]
    before[:, :, [3, 5]] = before[:, :, [0, 2]]
    assert torch.equal(planes(pool), before)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([2, 1, 2], "two pages would go into page 2 of attention"),
        (np.array([3, 3, 3]), "two pages would go into page 3 of attention"),
        ([0.0, 1.0, 2.7], r"page ids are whole numbers, got \[0.0, 1.0, 2.7\]"),
    ],
)
def test_pages_that_would_go_into_one_and_ids_that_are_fractions_are_refused(ids: Any, reason: str):
    component = Component.attention(2, 2, 8, "bfloat16")
    spec = PoolSpec.dense(component, Fleet().shard(component, 0, 1), 4, 4, "NHD")
    src, dst = Pool.zeros(spec), Pool.zeros(spec)
    with pytest.raises(PlanError, match=reason):
        page_region(src, [0, 1, 2], dst, ids)
    if "whole" not in reason:
        page_region(src, ids, dst, [0, 1, 2])  # one page may go to several


def test_memory_of_a_copy_that_raises_is_written_by_no_part_of_it_that_was_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU some regions are under way when another is refused, and the caller may use their memory at once."""
    memory, queued = torch.zeros(8, dtype=torch.uint8), list[Callable[[], object]]()

    def device_goes_on() -> None:
        while queued:
            queued.pop()()

    def move(regions: Sequence[Region]) -> None:
        queued.append(lambda: memory.fill_(POISON))
        raise RegionError("the second region is refused")

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    copies = CopyStream(torch.device("cuda", 0), SimpleNamespace(synchronize=device_goes_on))
    with pytest.raises(RegionError, match="the second region is refused"):
        copies.launch([], move)
    memory.fill_(7)
    device_goes_on()
    assert memory.eq(7).all()
