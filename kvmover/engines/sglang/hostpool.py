"""SGLang's host pools are described as values: the axes of their buffers by class and layout, and each page's place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmover.engines.common import EngineUnsupported
from kvmover.engines.sglang.page_parts import PoolRows, TpPlacement
from kvmover.engines.sglang.sglang_contract import SGLANG, STORE
from kvmover.layout import PACKED_AXES, Component, Layout, PoolSpec

if TYPE_CHECKING:
    import torch

#: The buffer of each class with known rows, and its axes outermost first; `slot` is page and token in one. Pools of
#: other classes are stored as they lie.
_BUFFERS = {
    "MHATokenToKVPoolHost": "kv_buffer",
    "MLATokenToKVPoolHost": "kv_buffer",
    "DSAIndexerPoolHost": "index_k_with_scale_buffer",
}
_AXES = {
    ("MHATokenToKVPoolHost", "layer_first"): "kv layer slot head dim",
    ("MHATokenToKVPoolHost", "page_first"): "kv slot layer head dim",
    ("MHATokenToKVPoolHost", "page_first_direct"): "kv page layer token head dim",
    ("MHATokenToKVPoolHost", "page_head"): "kv page head token layer dim",
    ("MLATokenToKVPoolHost", "layer_first"): "layer slot head dim",
    ("MLATokenToKVPoolHost", "page_first"): "slot layer head dim",
    ("MLATokenToKVPoolHost", "page_first_direct"): "page layer token head dim",
    ("DSAIndexerPoolHost", "layer_first"): "layer page dim",
    ("DSAIndexerPoolHost", "page_first"): "page layer head dim",
    ("DSAIndexerPoolHost", "page_first_direct"): "page layer head dim",
}

#: Pools that are cut over context-parallel ranks, by positions or layers that rank numbers do not tell.
_CUT = "PageInterleaveHostPool"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A host buffer with known axes: strides in elements, `page_tokens` rows per page."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    page_tokens: int

    def extent(self, axis: str) -> int:
        """Returns the length of an axis; 1 for an axis that the buffer lacks."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    def layout(self) -> Layout:
        """Returns the six axes of a pool: slots split in page and token, lacking axes of extent 1."""
        extents = {axis: self.extent(axis) for axis in PACKED_AXES}
        strides = {axis: self.stride[self.axes.index(axis)] if axis in self.axes else 0 for axis in PACKED_AXES}
        if "slot" in self.axes:
            slot = self.stride[self.axes.index("slot")]
            extents |= {"page": self.extent("slot") // self.page_tokens, "token": self.page_tokens}
            strides |= {"page": slot * self.page_tokens, "token": slot}
        return Layout(PACKED_AXES, tuple(extents.values()), tuple(strides.values()))

    def spec(self, component: Component) -> PoolSpec:
        """Returns the buffer as a pool of `component`: one allocation, strides in elements."""
        return PoolSpec(component, self.layout())


def is_split(pool: Any) -> bool:
    """Returns True if ranks hold parts of the pool (heads, states) even where the main pool is replicated."""
    return type(pool).__name__.startswith(("MHA", "Mamba"))


def refuse(pool: Any, name: str) -> None:
    """Raise EngineUnsupported for a host pool that is cut over context-parallel ranks, or empty on this rank."""
    if type(pool).__name__ == _CUT or getattr(pool, "_layer_shard_enabled", False):
        raise EngineUnsupported(f"host pool {name} is cut over context-parallel ranks; kvmover stores whole pages only")
    if getattr(pool, "_is_dummy", False):
        raise EngineUnsupported(f"host pool {name} holds nothing on this rank; kvmover stores what each rank holds")


def tensor_of(pool: Any) -> torch.Tensor | None:
    """Returns the buffer of a pool whose rows other pools can read; None for a pool that is stored as it lies."""
    kind, head_dim = type(pool).__name__, getattr(pool, "head_dim", 0)
    if (kind, pool.layout) not in _AXES or getattr(pool, "v_head_dim", head_dim) != head_dim:
        return None
    return getattr(pool, _BUFFERS[kind])


def buffer_of(pool: Any, tensor: torch.Tensor) -> Buffer:
    """Returns the axes of the buffer that `tensor_of` found, by the pool's class and layout."""
    axes = tuple(_AXES[type(pool).__name__, pool.layout].split())
    tokens = 1 if "token" not in axes and "slot" not in axes else pool.page_size
    return Buffer(axes, tuple(tensor.shape), tuple(tensor.stride()), tokens)


def page_runs(layout: Layout, element_bytes: int, page: int) -> list[tuple[int, int]]:
    """Returns the runs of bytes of a page in a buffer [first byte, bytes], in order; adjacent rows are one run.

    >>> page_runs(Layout(PACKED_AXES, (9, 2, 1, 1, 4, 8), (64, 32, 0, 0, 8, 1)), 2, 1)
    [(128, 128)]
    """
    extents = dict(zip(layout.axes, layout.shape, strict=True))
    strides = dict(zip(layout.axes, layout.stride, strict=True))
    starts = np.array([strides["page"] * page], np.int64)
    for axis in ("layer", "kv", "head", "token"):
        starts = np.add.outer(starts, np.arange(extents[axis]) * strides[axis]).ravel()
    return _joined((start * element_bytes, extents["dim"] * element_bytes) for start in starts.tolist())


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns runs [first byte, bytes] in order, with adjacent ones as one."""
    made: list[tuple[int, int]] = []
    for first, nbytes in sorted(runs):
        before, held = made[-1] if made else (0, -1)
        if first == before + held:
            made[-1] = before, held + nbytes
        else:
            made.append((first, nbytes))
    return made


def check_places(pool: Any, name: str, tensor: torch.Tensor, spec: PoolSpec) -> None:
    """Raise EngineUnsupported unless a page of a pool lies in `tensor` where SGLang's zero-copy backends find it.

    A layout without such a description, as layers of index keys one by one, is taken by its axes alone.
    """
    import torch

    page = min(1, spec.layout.shape[spec.layout.axes.index("page")] - 1)
    try:
        told = pool.get_page_buffer_meta(torch.arange(page * pool.page_size, (page + 1) * pool.page_size))
    except (NotImplementedError, ValueError):
        return
    ours = [
        (tensor.data_ptr() + first, nbytes) for first, nbytes in page_runs(spec.layout, tensor.element_size(), page)
    ]
    SGLANG.compare(STORE, {name: ours}, {name: _joined(zip(*told, strict=True))})


def rows_of(pool: Any, name: str, buffer: Buffer, dtype: str, placement: TpPlacement) -> PoolRows:
    """Returns the rows of a buffer. An index page is one row per layer: its keys, then their scales."""
    layers = buffer.extent("layer")
    return PoolRows(
        name=name,
        layers=layers,
        kv=buffer.extent("kv"),
        heads=buffer.extent("head"),
        dim=buffer.extent("dim"),
        dtype=dtype,
        first_layer=pool.start_layer,
        drafts=layers - getattr(pool, "target_layer_num", layers),
        states=int(buffer.page_tokens == 1 < pool.page_size),
        placement=placement,
    )


def whole_layers(pool: Any) -> bool:
    """Returns True if the pool holds every layer of its pipeline stage, unlike the attention pool of a hybrid model."""
    return pool.end_layer - pool.start_layer == getattr(pool, "target_layer_num", pool.layer_num)


def native_runs(pool: Any, name: str) -> list[int]:
    """Returns the bytes of each run of a page stored as it lies.

    Raises EngineUnsupported for pools without such runs, or with a run per layer (`layer_first`).
    """
    import torch

    try:
        sizes = list(pool.get_page_buffer_meta(torch.arange(pool.page_size))[1])
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise EngineUnsupported(f"host pool {name} of {type(pool).__name__} cannot be stored: {error}") from error
    if pool.layout == "layer_first":
        raise EngineUnsupported(
            f"host pool {name} of {type(pool).__name__} in layer_first has {len(sizes)} runs a page;"
            " start SGLang with --hicache-mem-layout page_first or page_first_direct"
        )
    return sizes


def own_name(pool: Any, name: str, sizes: Sequence[int]) -> str:
    """Returns a name with all that the bytes of a page, stored as it lies, depend on."""
    parts = [f"{name}, native {type(pool).__name__} {pool.layout}", f"{pool.page_size} tokens", f"{list(sizes)} bytes"]
    parts += [str(value) for value in (getattr(pool, key, None) for key in ("dtype", "storage_format_tag")) if value]
    layers = [getattr(pool, key, 0) for key in ("start_layer", "end_layer", "layer_num")]
    return ", ".join([*parts, f"layers {layers}"])


def memory_of_pool(pool: Any) -> list[torch.Tensor]:
    """Returns every tensor that holds pages of the pool."""
    import torch

    held = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else pool.kv_buffer
    tensors = [held] if isinstance(held, torch.Tensor) else list(held)
    return [tensor for tensor in tensors if tensor is not None and tensor.numel()]
