"""Caches as vLLM's configuration describes them are those that its own arithmetic makes, in all of its six layouts."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

from kvmover.engines.vllm.caches import LayerCache
from kvmover.engines.vllm.described_caches import BlockShape, LayerRun, described_caches

LAYERS, BLOCKS, HEADS, ROWS, BYTES = 3, 5, 2, 4, 16
ORDERS = [order for order in permutations(range(5)) if order[4] == 4 and set(order[:3]) & {0} and set(order[:3]) & {1}]


def _strides(order: tuple[int, ...]) -> list[int]:
    """Byte strides of the five axes, dense in this order."""
    extents, strides, step = (LAYERS, BLOCKS, HEADS, ROWS, BYTES), [0] * 5, 1
    for axis in reversed(order):
        strides[axis], step = step, step * extents[axis]
    return strides


@pytest.mark.parametrize("order", ORDERS, ids=["".join("LBHNC"[axis] for axis in order) for order in ORDERS])
def test_a_layers_cache_is_the_view_that_the_order_gives(order: tuple[int, ...]) -> None:
    memory = torch.arange(LAYERS * BLOCKS * HEADS * ROWS * BYTES).to(torch.uint8)
    strides = _strides(order)
    views = memory.as_strided((LAYERS, BLOCKS, HEADS, ROWS, BYTES), strides).view(torch.bfloat16)
    run = LayerRun(("a", "b", "c"), memory.data_ptr(), strides[0], strides[1], order)
    found = run.caches(BLOCKS, BlockShape(HEADS, ROWS, BYTES, "bfloat16"))
    for view, (layer, cache) in zip(views, found.items(), strict=True):
        wanted = LayerCache(layer, view.data_ptr(), tuple(view.shape), tuple(view.stride()), "bfloat16")  # type: ignore[arg-type]
        assert cache == wanted


def _config(block_stride: int, block_tokens: int = ROWS) -> SimpleNamespace:
    spec = SimpleNamespace(
        num_heads=HEADS,
        block_size=block_tokens,
        state_content_size_bytes=BYTES,
        dtype=torch.float16,
        get_num_kernel_states=lambda tokens: tokens,
    )
    run = SimpleNamespace(layers=["x", "y"], offset=512, layer_stride=block_stride * BLOCKS, block_stride=block_stride)
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_tensors=[run],
        kv_cache_groups=[SimpleNamespace(layer_names=["x", "y"], kv_cache_spec=spec)],
    )


def _registered(pages: int, rows: int) -> list[LayerCache]:
    """Two layers of dense LBNHC pages from address 4,096 on."""
    row, page = HEADS * BYTES // 2, HEADS * BYTES // 2 * rows
    return [
        LayerCache(name, 4096 + at * page * pages * 2, (pages, HEADS, rows, 8), (page, 8, row, 1), "float16")
        for at, name in enumerate("xy")
    ]


@pytest.mark.parametrize(("ratio", "rows"), [(1, 4), (2, 2)])
def test_blocks_that_kernels_split_are_described_as_they_are_registered(ratio: int, rows: int) -> None:
    registered = _registered(BLOCKS * ratio, rows)
    described = described_caches(_config(HEADS * BYTES * ROWS), (0, 1, 3, 2, 4), registered)
    assert described == {cache.layer: cache for cache in registered}


def test_padded_blocks_and_other_orders_are_other_places() -> None:
    registered = _registered(BLOCKS, ROWS)
    dense = HEADS * BYTES * ROWS
    padded = described_caches(_config(dense + 64), (0, 1, 3, 2, 4), registered)
    heads_first = described_caches(_config(dense), (0, 1, 2, 3, 4), registered)
    assert padded["x"].stride[0] * 2 == dense + 64
    assert padded["y"].address - padded["x"].address == (dense + 64) * BLOCKS
    assert heads_first["x"].stride == (dense // 2, ROWS * 8, 8, 1) != registered[0].stride
