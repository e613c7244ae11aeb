"""A pool's planes and strides are the addresses that numpy computes, however its memory is split up."""

from __future__ import annotations

from itertools import permutations, product

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError
from kvmover.layout import (
    AXES,
    PACKED_AXES,
    PACKED_ORDER,
    Codec,
    CodecPart,
    Component,
    Coordinate,
    CpOrder,
    Fleet,
    Layout,
    Pool,
    PoolSpec,
    Shard,
    Span,
    axes_of,
)

SEPARATE = [(), ("layer",), ("layer", "kv"), ("kv",), ("kv", "layer")]
SEPARATE_IDS = ["-".join(axes) or "one-allocation" for axes in SEPARATE]
DIM_LAST = [" ".join(axes) for axes in permutations(AXES) if axes[-1] == "dim"]
SHARD = Shard(Span(4, 3), Span(2, 2), None)


def arrays(spec: PoolSpec) -> dict[tuple[int, int], tuple[int, np.ndarray]]:
    """(layer, kv) -> its allocation, and the byte offsets of its rows [page, token, head], from dense numpy arrays."""
    layout = spec.layout
    extents = {axis: layout.extent_of(axis) for axis in AXES}
    together = [axis for axis in layout.axes if axis not in spec.separate]
    sizes = [extents[axis] for axis in together]
    row = spec.component.element_bytes
    offsets = (np.arange(np.prod(sizes)) * row).reshape(sizes)
    planes: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
    owners = list(product(*(range(extents[axis]) for axis in spec.separate)))
    for layer, kv in product(range(extents["layer"]), range(extents["kv"])):
        at = {"layer": layer, "kv": kv}
        owner = owners.index(tuple(at[axis] for axis in spec.separate))
        chosen = offsets[tuple(at.get(axis, slice(None)) if axis != "dim" else 0 for axis in together)]
        rest = [axis for axis in together if axis not in ("layer", "kv", "dim")]
        planes[layer, kv] = owner, chosen.transpose([rest.index(axis) for axis in ("page", "token", "head")])
    return planes


@pytest.mark.parametrize("separate", SEPARATE, ids=SEPARATE_IDS)
def test_every_row_of_a_dense_pool_lies_where_numpy_puts_it_in_all_orders(separate: tuple[str, ...]) -> None:
    component = Component("a", 9, 2, 6, 5, "float32")
    for order in DIM_LAST:
        spec = PoolSpec.dense(component, SHARD, pages=4, page_tokens=3, order=order, separate=separate)
        planes = spec.planes()
        assert len(planes) == 3 * 2
        assert spec.allocation_bytes * spec.allocations == 3 * 2 * 4 * 3 * 2 * 5 * 4
        for (layer, kv), (allocation, rows) in arrays(spec).items():
            assert planes[layer * 2 + kv] == (allocation, rows[0, 0, 0])
            page, token, head = np.ogrid[:4, :3, :2]
            strides = (spec.stride_bytes(axis) for axis in ("page", "token", "head"))
            ours = planes[layer * 2 + kv][1] + sum(
                index * stride for index, stride in zip((page, token, head), strides, strict=True)
            )
            assert (ours == rows).all(), order
    assert (spec.pages, spec.page_tokens) == (4, 3)


@pytest.mark.parametrize("separate", SEPARATE, ids=SEPARATE_IDS)
@pytest.mark.parametrize("order", ["NHD", "HND", PACKED_ORDER], ids=["NHD", "HND", "packed"])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "int64"])
def test_planes_are_views_of_the_pools_memory_that_never_overlap(
    separate: tuple[str, ...], order: str, dtype: str
) -> None:
    component = Component("a", 9, 2, 6, 5, dtype)
    spec = PoolSpec.dense(component, SHARD, pages=4, page_tokens=3, order=order, separate=separate)
    pool = Pool.zeros(spec)
    rows = arrays(spec)
    for number, (layer, kv) in enumerate(product(range(3), range(2))):
        plane = pool.plane(layer, kv)
        assert list(plane.shape) == [4, 3, 2, 5]
        assert plane.dtype == getattr(torch, dtype)
        assert not plane.any()
        plane.view(torch.uint8).fill_(number + 1)
        allocation, offsets = rows[layer, kv]
        row = np.arange(component.row_bytes)
        assert (pool.tensors[allocation].numpy()[offsets[..., None] + row] == number + 1).all()
    assert all(tensor.all() for tensor in pool.tensors)


def test_a_pool_with_gaps_between_its_pages_has_planes_too() -> None:
    layout = Layout(AXES, (2, 2, 3, 1, 4, 8), (3 * 100, 40, 100, 8, 8, 1))
    spec = PoolSpec(Component.attention(2, 1, 8, "bfloat16"), layout)
    assert spec.planes() == [(0, 0), (0, 80), (0, 600), (0, 680)]
    assert spec.allocation_bytes == 2 * (300 + 40 + 200 + 24 + 7 + 1)
    pool = Pool.zeros(spec)
    pool.plane(1, 1)[2, 3, 0] = 1
    assert torch.nonzero(pool.tensors[0].view(torch.bfloat16)).flatten().tolist() == list(range(564, 572))


def test_pools_that_share_an_allocation_are_views_of_their_own_part_of_it() -> None:
    conv = torch.arange(2 * 3 * 24).to(torch.int16).reshape(2, 3, 24)  # [layer, state, elements of q, k and v]
    flat = conv.view(torch.uint8).flatten()
    for first, heads, dim in ((0, 2, 4), (8, 2, 4), (16, 4, 2)):
        component = Component.state("conv", 2, heads, dim, "int16")
        layout = Layout(AXES, (2, 1, 3, heads, 1, dim), (72, 0, 24, dim, 0, 1))
        pool = Pool(PoolSpec(component, layout), (flat[first * 2 :],))
        for layer in range(2):
            assert torch.equal(pool.plane(layer, 0).reshape(3, 8), conv[layer, :, first : first + 8])


def test_a_pool_gives_views_of_the_engines_own_tensors() -> None:
    spec = PoolSpec.dense(
        Component.attention(2, 2, 4, "bfloat16"), Shard(Span(0, 2), Span(0, 2), None), 3, 2, "NHD", ("layer",)
    )
    theirs = [torch.randn(2, 3, 2, 2, 4).to(torch.bfloat16) for _ in range(2)]
    pool = Pool(spec, tuple(tensor.view(torch.uint8).flatten() for tensor in theirs))
    for layer, kv in product(range(2), range(2)):
        assert torch.equal(pool.plane(layer, kv), theirs[layer][kv])
        assert pool.plane(layer, kv).data_ptr() == theirs[layer][kv].data_ptr()


WORDS = st.text(max_size=8), *(st.integers(1, 1 << 10),) * 4, st.sampled_from(["int8", "bfloat16", "int64"])
SPECS = st.builds(
    PoolSpec.dense,
    st.builds(Component, *WORDS, st.none() | st.integers(1, 1 << 20)),
    st.builds(
        Shard,
        st.builds(Span, st.integers(0, 9), st.integers(1, 9)),
        st.builds(Span, st.just(0), st.integers(1, 9)),
        st.none(),
    ),
    st.integers(1, 1 << 20),
    st.integers(1, 512),
    st.sampled_from(DIM_LAST),
    st.sampled_from(SEPARATE),
)
STATES = st.builds(Component, *WORDS, states=st.integers(1, 1 << 10))
FLEETS = st.builds(Fleet, *(st.integers(1, 64),) * 3, st.integers(1, 512), st.sampled_from(CpOrder))


@given(SPECS, STATES, FLEETS)
def test_specs_survive_json_and_msgpack(spec: PoolSpec, states: Component, fleet: Fleet) -> None:
    for value in (spec, spec.layout, spec.component, states, fleet, Coordinate(1, 2, 3)):
        for codec in (msgspec.json, msgspec.msgpack):
            back = codec.decode(codec.encode(value), type=type(value))
            assert back == value
            assert hash(back) == hash(value)


@pytest.mark.parametrize("tokens", [1, 70, 1000])
@pytest.mark.parametrize("order", list(CpOrder))
def test_shards_survive_json_and_msgpack(order: CpOrder, tokens: int) -> None:
    fleet = Fleet(tp=2, cp=3, page_tokens=16, cp_order=order)
    for rank in range(fleet.size):
        shard = fleet.shard(Component.attention(3, 4, 8, "int8"), rank, tokens)
        for codec in (msgspec.json, msgspec.msgpack):
            assert codec.decode(codec.encode(shard), type=Shard) == shard


def test_a_component_written_before_there_were_windows_is_read_as_one_without() -> None:
    old = {"name": "attention", "layers": 2, "kv": 2, "heads": 8, "dim": 64, "dtype": "bfloat16"}
    assert msgspec.convert(old, Component) == Component.attention(2, 8, 64, "bfloat16")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "component attention has window = 0"),
        ({"states": -1}, "component attention has states = -1"),
        ({"window": 4, "states": 2}, "component attention has a window of 4 and 2 states"),
    ],
    ids=["window", "states", "both"],
)
def test_a_component_that_cannot_exist_is_refused_when_it_is_decoded(fields: dict[str, int], message: str) -> None:
    sent = msgspec.to_builtins(Component.attention(2, 8, 64, "bfloat16")) | fields
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Component)


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
def test_a_spec_that_cannot_exist_is_refused_when_it_is_decoded(codec) -> None:
    fleet = codec.decode(codec.encode(Fleet(tp=2)))
    fleet["tp"] = 0
    with pytest.raises(msgspec.ValidationError, match="fleet has tp = 0"):
        codec.decode(codec.encode(fleet), type=Fleet)


def flat(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


SPEC = PoolSpec.dense(
    Component.attention(2, 2, 4, "bfloat16"), Shard(Span(0, 2), Span(0, 2), None), 3, 2, "NHD", ("layer",)
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PoolSpec(SPEC.component, Layout.dense("dim token head page kv layer", **dict.fromkeys(AXES, 2))),
            "axis dim has stride 32",
        ),
        (
            lambda: PoolSpec.dense(
                Component.state("s", 2, 2, 4, "int8"), Shard(Span(0, 2), Span(0, 2), None), 3, 2, "NHD"
            ),
            "pool of s has page_tokens = 2; a page of states has 1",
        ),
        (lambda: PoolSpec(SPEC.component, SPEC.layout, ("page",)), r"pool has separate = \('page',\); only"),
        (lambda: Pool(SPEC, (flat(192),)), "pool has 1 tensors; its spec has 2 allocations"),
        (lambda: Pool(SPEC, (flat(192), flat(191))), "tensor has 191 bytes; its spec needs 192"),
        (
            lambda: Pool(SPEC, (flat(192), torch.zeros(96, dtype=torch.bfloat16))),
            r"flat uint8, got torch.bfloat16 \[96\]",
        ),
        (lambda: Pool(SPEC, (flat(192), flat(192).view(2, 96))), r"flat uint8, got torch.uint8 \[2, 96\]"),
        (lambda: Pool(SPEC, (flat(192), flat(384)[::2])), "flat uint8"),
        (lambda: Pool(SPEC, (flat(192), torch.zeros(192, dtype=torch.uint8, device="meta"))), "on cpu and meta"),
    ],
    ids=[
        "dim-strided",
        "pages-of-states",
        "pages-apart",
        "too-few",
        "too-small",
        "not-bytes",
        "not-flat",
        "not-contiguous",
        "two-devices",
    ],
)
def test_an_impossible_pool_is_refused_with_its_values(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_a_pool_is_packed_if_a_page_of_it_is_the_object_that_a_store_has() -> None:
    component = Component.attention(2, kv_heads=3, head_dim=4, dtype="float16")
    shard = Fleet(page_tokens=5).shard(component, 0, 5)
    orders = [" ".join([*axes, "dim"]) for axes in permutations(axis for axis in AXES if axis != "dim")]
    packed = [order for order in orders if PoolSpec.dense(component, shard, 7, 5, order).is_packed]
    assert packed == [PACKED_ORDER]
    assert axes_of(PACKED_ORDER) == PACKED_AXES


def test_a_packed_pool_of_the_same_pages_holds_as_many_bytes_without_gaps() -> None:
    component = Component.attention(2, kv_heads=3, head_dim=4, dtype="float16")
    shard = Fleet(tp=3, page_tokens=5).shard(component, 1, 5)
    spec = PoolSpec.dense(component, shard, 7, 5, "NHD", ("layer", "kv")).packed(4)
    assert spec == PoolSpec.dense(component, shard, 4, 5, PACKED_ORDER)
    assert (spec.is_packed, spec.pages, spec.stride_bytes("page")) == (True, 4, 1 * 2 * 2 * 5 * 4 * 2)


def test_axes_of_extent_one_may_lie_anywhere_in_a_packed_pool() -> None:
    latent = Component("latent", 2, 1, 1, 12, "bfloat16")
    shard = Fleet(page_tokens=5).shard(latent, 0, 5)
    for order, is_packed in (
        ("head page layer kv token dim", True),
        ("page kv layer token head dim", True),
        ("layer page kv token head dim", False),
    ):
        assert PoolSpec.dense(latent, shard, 7, 5, order).is_packed is is_packed, order
    assert not PoolSpec.dense(latent, shard, 7, 5, PACKED_ORDER, ("layer",)).is_packed


@pytest.mark.parametrize(
    ("layer", "kv", "reason"),
    [
        (0, 2, "kv 2 is outside a pool of attention with 2"),
        (3, 0, "layer 3 is outside a pool of attention with 3"),
        (-1, 0, "layer of a pool of attention = -1; it must not be negative"),
        (0, -1, "kv of a pool of attention = -1; it must not be negative"),
        (0.0, 0, "layer of a pool of attention = 0.0; it must be a whole number"),
    ],
)
def test_a_plane_that_a_pool_does_not_have_is_refused(layer: int, kv: int, reason: str):
    """Planes lie one behind another: the third of a layer's two would be the next layer's first."""
    component = Component.attention(3, 2, 8, "uint8")
    pool = Pool.zeros(PoolSpec.dense(component, Fleet().shard(component, 0, 1), 2, 4, "NHD"))
    with pytest.raises(LayoutError) as refused:
        pool.plane(layer, kv)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("codec", "axis", "stride", "width"),
    [
        (Codec.fp8_ds_mla(), "token", 657, 4),
        (Codec.fp8_ds_mla(), "page", 4 * 656 + 2, 4),
        (Codec.fp8_ds_mla(), "layer", 7 * 4 * 656 + 1, 4),
        (Codec("bfloat16", (CodecPart(512, "float8_e4m3fn"), CodecPart(64, "bfloat16"))), "token", 641, 2),
    ],
)
def test_rows_off_the_width_of_their_widest_element_are_refused_where_their_pool_is_described(
    codec: Codec, axis: str, stride: int, width: int
):
    """No transfer that converts them could read them; whole bytes may lie anywhere, and so may what is of one index."""
    component = Component.mla(3, 576, "bfloat16").kept_as(codec)
    dense = PoolSpec.dense(component, Fleet(page_tokens=4).shard(component, 0, 1), 7, 4, "NHD").layout
    strides = tuple(stride if each == axis else at for each, at in zip(dense.axes, dense.stride, strict=True))
    odd = Layout(dense.axes, dense.shape, strides)
    with pytest.raises(LayoutError, match=f"pool of mla has {axis} stride {stride} bytes; .* at multiples of {width}"):
        PoolSpec(component, odd)
    PoolSpec(Component.mla(3, component.dim, "uint8"), odd)
    spec = PoolSpec(component, dense)
    memory = torch.zeros(spec.allocation_bytes + 1, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=f"pool tensor of mla begins at address .* at multiples of {width} bytes"):
        Pool(spec, (memory[1:],))
