"""The KV cache of a rank as a component and a pool, from the pointers that SGLang gives its transfer backends."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvmover.engines.sglang.version import EngineUnsupported
from kvmover.layout import Component, Fleet, Layout, Pool, PoolSpec, Span

if TYPE_CHECKING:
    import torch

_PACKED = ("page", "head", "layer", "kv", "token", "dim")


def refuse(args: Any, prefill_cp: int, pp: int) -> None:
    """Raise EngineUnsupported for what SGLang hands to a backend and this one cannot take."""
    states = [str(getattr(state, "value", state)) for state in args.state_types]
    for bad, what in (
        (states, f"caches beside attention ({', '.join(states)})"),
        (args.num_draft_entries, "the cache of a draft model"),
        (prefill_cp > 1, f"attention context parallelism of {prefill_cp}"),
        (pp > 1, f"{pp} pipeline stages"),
        (len(set(args.kv_item_lens)) > 1, f"pages of different sizes, {sorted(set(args.kv_item_lens))} bytes"),
    ):
        if bad:
            raise EngineUnsupported(f"kvmover's prefill/decode backend does not transfer {what}")


def component_of(args: Any, kv: int, kv_heads: int, fleet: Fleet, rank: int) -> Component:
    """Bytes are opaque: a row is `dim` of them, and the engine's name of the dtype is part of the component's.

    `kv` 1 is a latent, one "head" on every rank; 2 is attention with `kv_heads` in the whole model.
    """
    heads = Span.share(kv_heads, fleet.tp, fleet.coordinate(rank).tp).count
    row, rest = divmod(args.kv_item_lens[0], args.page_size * heads)
    if rest:
        raise EngineUnsupported(
            f"pages of {args.kv_item_lens[0]} bytes are not {args.page_size} tokens x {heads} heads"
        )
    return Component(f"kv {args.kv_cache_dtype_str}", len(args.kv_data_ptrs) // kv, kv, kv_heads, row, "uint8")


def pool_of(args: Any, component: Component, fleet: Fleet, rank: int, device: torch.device) -> Pool:
    """SGLang's order: K of every layer, then V; each `page token head dim`. Memory stays the engine's."""
    layers, kv, tokens = component.layers, component.kv, args.page_size
    heads = Span.share(component.heads, fleet.tp, fleet.coordinate(rank).tp).count
    pages = min(args.kv_data_lens) // args.kv_item_lens[0]
    row = heads * component.dim
    shape = (pages, heads, layers, kv, tokens, component.dim)
    spec = PoolSpec(component, Layout(_PACKED, shape, (tokens * row, component.dim, 0, 0, row, 1)), ("layer", "kv"))
    order = [kind * layers + layer for layer in range(layers) for kind in range(kv)]
    pointers: Sequence[int] = args.kv_data_ptrs
    return Pool(spec, tuple(tensor_at(pointers[n], spec.allocation_bytes, device) for n in order))


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
