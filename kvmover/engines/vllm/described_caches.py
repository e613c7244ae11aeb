"""Described caches are the places that vLLM's own configuration gives its caches, to compare with registered ones.

Names that stand prove nothing about a release: its block size, strides or dtype may mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmover.engines.vllm.caches import LayerCache
from kvmover.layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of a layer by its spec: `heads` x `rows` cells of `content_bytes`, in `dtype`."""

    heads: int
    rows: int
    content_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers that vLLM places `layer_stride` bytes apart, their blocks `block_stride` bytes apart, from `address` on.

    `order` has vLLM's numbers of the axes layer, block, head, token and content, from the outermost inwards:
    (0, 1, 3, 2, 4) is LBNHC, tokens before heads.
    """

    layers: tuple[str, ...]
    address: int
    layer_stride: int
    block_stride: int
    order: tuple[int, ...]

    def caches(self, blocks: int, shape: BlockShape) -> dict[str, LayerCache]:
        """Returns the cache of each layer, with `blocks` of this shape, in elements of its dtype.

        Two layers of 10 blocks with 2 heads x 16 rows x 128 B as LBNHC: rows are 256 B apart, heads 128 B.
        """
        extents = (len(self.layers), blocks, shape.heads, shape.rows, shape.content_bytes)
        strides, step = [self.layer_stride, self.block_stride, 0, 0, 0], 1
        for axis in reversed(self.order):
            strides[axis] = strides[axis] or step
            step = strides[axis] * extents[axis]
        size = DTYPE_BYTES[shape.dtype]
        _, heads, rows, content = extents[1:]
        _, block, head, row, _ = (stride // size for stride in strides)
        return {
            layer: LayerCache(
                layer,
                self.address + number * self.layer_stride,
                (blocks, heads, rows, content // size),
                (block, head, row, 1),
                shape.dtype,
            )
            for number, layer in enumerate(self.layers)
        }


def described_caches(config: Any, order: Sequence[int], registered: Sequence[LayerCache]) -> dict[str, LayerCache]:
    """Returns the caches that a `KVCacheConfig` describes, by layer. `order` is that of its layout.

    The allocation's address is that of the registered cache with the lowest offset, and the number of kernel blocks in
    a block is that of each registered cache: vLLM's description has neither.
    """
    specs, known = _specs(config), {cache.layer: cache for cache in registered}
    runs = [run for run in config.kv_cache_tensors if run.layers and run.layers[0] in known]
    first = min(runs, key=lambda run: run.offset)
    base = known[first.layers[0]].address - first.offset
    found: dict[str, LayerCache] = {}
    for run in runs:
        cache, spec = known[run.layers[0]], specs[run.layers[0]]
        ratio = max(1, cache.shape[0] // config.num_blocks)
        shape = BlockShape(
            spec.num_heads,
            int(spec.get_num_kernel_states(spec.block_size // ratio)),
            spec.state_content_size_bytes,
            _dtype(spec),
        )
        strides = run.layer_stride, run.block_stride // ratio
        layers = LayerRun(tuple(run.layers), base + run.offset, *strides, tuple(order))
        found |= layers.caches(config.num_blocks * ratio, shape)
    return found


def _specs(config: Any) -> Mapping[str, Any]:
    """Returns the spec of each layer: of its group, or its own in a group of unlike ones."""
    specs: dict[str, Any] = {}
    for group in config.kv_cache_groups:
        alike = dict.fromkeys(group.layer_names, group.kv_cache_spec)
        specs |= getattr(group.kv_cache_spec, "kv_cache_specs", alike)
    return specs


def _dtype(spec: Any) -> str:
    """Returns the dtype of a layer's view; states of several dtypes, and dtypes unknown to kvmover, are bytes."""
    name = str(getattr(spec, "dtype", "torch.int8")).removeprefix("torch.")
    return name if name in DTYPE_BYTES else "uint8"
