"""Memory of the engine as pools and payloads, from the pointers that SGLang gives its transfer backends."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kvmover.engines.sglang.pd_cache import Cache
from kvmover.layout import PACKED_AXES, Component, Layout, Pool, PoolSpec

if TYPE_CHECKING:
    import torch


def pool_of(cache: Cache, component: Component, page_tokens: int, device: torch.device) -> Pool:
    """The engine's memory as it lies: pages of `token head dim`, states of `kv head dim`. It stays the engine's."""
    tokens, layers = component.page_tokens(page_tokens), cache.layers
    token_bytes = cache.own_heads * cache.row_bytes
    shape = (cache.pages, cache.own_heads, layers, cache.kv, tokens, cache.row_bytes)
    stride = (cache.item_bytes, cache.row_bytes, 0, cache.plane_bytes, token_bytes, 1)
    spec = PoolSpec(component, Layout(PACKED_AXES, shape, stride), ("layer",) if cache.plane_bytes else ("layer", "kv"))
    return Pool(spec, tuple(tensor_at(pointer, spec.allocation_bytes, device) for pointer in cache.pointers))


def tensor_at(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The bytes at an address of the engine's memory, uint8 [nbytes]. Nothing keeps them alive."""
    import torch

    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    held: Any = type("Borrowed", (), {"__cuda_array_interface__": interface})()
    return torch.as_tensor(held, device=device)


class Rows:
    """The rows of the buffers that go beside the cache (first token, log probabilities), as one payload."""

    def __init__(self, args: Any) -> None:
        self._buffers = list(zip(args.aux_data_ptrs, args.aux_item_lens, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._buffers)

    def take(self, index: int) -> bytes:
        return b"".join(ctypes.string_at(pointer + index * nbytes, nbytes) for pointer, nbytes in self._buffers)

    def put(self, index: int, payload: bytes) -> None:
        """Raises ValueError where the payload is of other buffers."""
        if len(payload) != self.nbytes:
            raise ValueError(f"{len(payload)} bytes beside the cache; this side's buffers take {self.nbytes}")
        at = 0
        for pointer, nbytes in self._buffers:
            ctypes.memmove(pointer + index * nbytes, payload[at : at + nbytes], nbytes)
            at += nbytes
