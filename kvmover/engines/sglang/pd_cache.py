"""SGLang describes a rank's caches to its transfer backends; here that becomes values, pools and payloads.

All but the last two functions and `AuxRows` compute with integers alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.errors import PlanError
from kvmover.layout import PACKED_AXES, Component, Layout, Pool, PoolSpec, Span

if TYPE_CHECKING:
    import torch

#: Kinds of `StateType` that are read here. SGLang hands over the others as well; nobody described their rows yet.
KNOWN = ("dsa", "swa", "mamba")

#: A state is cut into at most so many heads: every usual number of ranks divides it, and a row is many channels.
_MOST_HEADS = 192


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What the whole model has. `kv`: 2 for keys and values, 1 for a latent; `window` of `window_heads`, if any."""

    kv: int
    heads: int
    window_heads: int = 0
    window: int | None = None


def whole_of(config: Any, latent: Any) -> CacheTotals:
    """`config`: SGLang's `ModelConfig`. A model whose window it does not know may have a chunk instead (Llama 4)."""
    if latent:
        return CacheTotals(1, 1)
    window = config.sliding_window_size or config.attention_chunk_size
    return CacheTotals(2, config.get_total_num_kv_heads(), config.get_swa_num_kv_heads(1), window)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Allocations of the engine: address, bytes, and bytes of a page or state of each."""

    pointers: tuple[int, ...]
    nbytes: tuple[int, ...]
    items: tuple[int, ...]

    @classmethod
    def of(cls, pointers: Sequence[int], nbytes: Sequence[int], items: Sequence[int]) -> Buffers:
        """From lists of SGLang's, one entry an allocation."""
        return cls(tuple(pointers), tuple(nbytes), tuple(items))

    def part(self, start: int, stop: int) -> Buffers:
        """Allocations [start, stop)."""
        return Buffers(self.pointers[start:stop], self.nbytes[start:stop], self.items[start:stop])

    @property
    def item_bytes(self) -> int:
        """Raises EngineUnsupported where they differ."""
        if len(set(self.items)) > 1:
            raise EngineUnsupported(
                "kvmover's prefill/decode backend does not transfer"
                f" pages of different sizes, {sorted(set(self.items))} bytes"
            )
        return self.items[0]

    @property
    def pages(self) -> int:
        """Pages or states that every allocation has room for."""
        return min(self.nbytes) // self.item_bytes


@dataclass(frozen=True, slots=True)
class RankCache:
    """One component on one rank. Bytes are opaque: a row is `row_bytes` of them.

    `pointers`: one a layer and K/V, layer by layer, or one a layer whose K/V planes are `plane_bytes` apart. `heads` of
    the whole model, `own_heads` of this rank. `by`: which of SGLang's state indices it goes by; None: the KV pages.
    """

    name: str
    pointers: tuple[int, ...]
    pages: int
    item_bytes: int
    row_bytes: int
    kv: int = 1
    heads: int = 1
    own_heads: int = 1
    plane_bytes: int = 0
    window: int | None = None
    states: int = 0
    by: int | None = None

    @property
    def layers(self) -> int:
        """Layers on this rank."""
        return len(self.pointers) // (1 if self.plane_bytes else self.kv)

    def component(self, layers: int) -> Component:
        """As the whole model has it, of `layers` layers on all stages together."""
        return Component(self.name, layers, self.kv, self.heads, self.row_bytes, "uint8", self.window, self.states)


def caches_of(args: Any, whole: CacheTotals, place: ParallelRank) -> list[RankCache]:
    """All caches that `KVArgs` names, in its order. Raises EngineUnsupported for what cannot be described."""
    every = Buffers.of(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    drafts, tokens, dtype = args.num_draft_entries, args.page_size, args.kv_cache_dtype_str
    target, draft = every.part(0, len(every.items) - drafts), every.part(len(every.items) - drafts, len(every.items))
    found = list(_attention(f"kv {dtype}", target, whole.kv, whole.heads, place, tokens))
    if drafts:
        if set(draft.items) != set(target.items):
            raise EngineUnsupported(
                "kvmover's prefill/decode backend does not transfer the cache of a draft model whose layers are not"
                f" like the model's: pages of {sorted(set(draft.items))} and {sorted(set(target.items))} bytes"
            )
        found += _attention(f"draft {dtype}", draft, whole.kv, whole.heads, place, tokens)
    for number, kind in enumerate(kinds_of(args)):
        own = Buffers.of(args.state_data_ptrs[number], args.state_data_lens[number], args.state_item_lens[number])
        if kind == "mamba":
            held: Sequence[RankCache] = list(_states(args, number, own, place))
        elif kind == "swa":
            if whole.window is None:
                raise EngineUnsupported("the model's configuration does not tell the size of its sliding window")
            span, heads = (ceil(whole.window / tokens) + 1) * tokens, whole.window_heads
            held = [replace(c, window=span) for c in _attention(f"window {dtype}", own, 2, heads, place, tokens)]
        else:
            held = list(_attention("index keys", own, 1, 1, place, tokens))
        found += [replace(cache, by=number) for cache in held]
    return found


def kinds_of(args: Any) -> list[str]:
    """SGLang's words for the kinds of state caches, in its order."""
    return [str(getattr(kind, "value", kind)) for kind in args.state_types]


def refuse(args: Any, context: Any) -> None:
    """Raise EngineUnsupported for what SGLang hands to a backend and this one cannot take."""
    unknown = [kind for kind in kinds_of(args) if kind not in KNOWN]
    cp, layout = context.attn_cp_size, args.swa_kv_cache_layout
    for bad, what in (
        (unknown, f"caches of these kinds: {', '.join(unknown)}"),
        ("swa" in kinds_of(args) and layout != "nhd", f"sliding windows in the layout {layout}"),
        (context.enable_cp_tp_group_sharing, "states that are cut over context-parallel ranks"),
        (cp > 1 and args.is_hybrid_mla_backend, f"a hybrid of latents and states on {cp} context-parallel ranks"),
    ):
        if bad:
            raise EngineUnsupported(f"kvmover's prefill/decode backend does not transfer {what}")


def layers_of(stages: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Layers of the whole model by cache, from those that each pipeline stage holds.

    Raises EngineUnsupported where they do not hold them as `Fleet` divides layers: stage s of S from layer s L // S on.
    """
    total: dict[str, int] = {}
    for name in dict.fromkeys(name for stage in stages for name in stage):
        held = [stage.get(name, 0) for stage in stages]
        total[name] = sum(held)
        wanted = [Span.share(total[name], len(stages), number).count for number in range(len(stages))]
        if held != wanted or 0 in held:
            raise EngineUnsupported(
                f"pipeline stages that hold {held} layers of the cache {name!r} are not transferred, {wanted} would be"
                " (SGLANG_PP_LAYER_PARTITION decides)"
            )
    return total


def page_table(
    cache: RankCache, prefix_pages: int, pages: npt.NDArray[np.int64], states: Sequence[Any], page_tokens: int
) -> npt.NDArray[np.int64]:
    """The page table of a request from what SGLang tells of it: the pages after `prefix_pages`, and state indices.

    SGLang tells the pages of a window as the last of the request. How many they are depends on where in its last page
    the request ends, which decode is not told, and a component's window is fixed: it may reach one page further back
    than was told. The first page stands there too; on both sides, so the same bytes go to the same place twice.

    Raises PlanError for indices that cannot be of this request.
    """
    own = pages if cache.by is None else np.asarray(states[cache.by], np.int64).reshape(-1)
    length, most = prefix_pages + len(pages), None if cache.window is None else cache.window // page_tokens
    if cache.states:
        length = cache.states
    if len(own) > length or (cache.states and len(own) < length) or (most is not None and len(own) > most):
        room = "" if most is None else f", {most} of them in its window"
        raise PlanError(f"{len(own)} indices of {cache.name!r} for a request of {length} pages or states{room}")
    return np.concatenate([np.full(length - len(own), own[0] if len(own) else 0, np.int64), own])


def chunk_table(
    cache: RankCache,
    prefix_pages: int,
    before: int | None,
    pages: npt.NDArray[np.int64],
    states: Sequence[Any] | None,
    page_tokens: int,
) -> npt.NDArray[np.int64]:
    """What a chunk of a prefill adds to `page_table`, behind `before` pages of earlier chunks (None: it is the first).

    `states` None: other chunks follow. SGLang tells state indices with the last: what goes by them is named then.
    """
    if cache.by is None:
        return page_table(cache, prefix_pages if before is None else 0, pages, (), page_tokens)
    if states is None:
        return np.zeros(0, np.int64)
    return page_table(cache, prefix_pages + (before or 0), pages, states, page_tokens)


def _attention(name: str, own: Buffers, kv: int, heads: int, place: ParallelRank, tokens: int) -> Iterator[RankCache]:
    """Pages `token head dim`: K of every layer, then V. K and V of different dims are caches of their own."""
    layers = len(own.items) // kv
    halves = [own.part(n * layers, (n + 1) * layers) for n in range(kv)]
    if len({half.item_bytes for half in halves}) > 1:
        for half, word in zip(halves, ("k", "v"), strict=True):
            yield from _attention(f"{name} {word}", half, 1, heads, place, tokens)
        return
    held = place.heads(heads).count
    row, rest = divmod(own.item_bytes, tokens * held)
    if rest:
        raise EngineUnsupported(f"pages of {own.item_bytes} bytes are not {tokens} tokens x {held} heads")
    pointers = tuple(half.pointers[layer] for layer in range(layers) for half in halves)
    yield RankCache(name, pointers, own.pages, own.item_bytes, row, kv, heads, held)


def _states(args: Any, number: int, own: Buffers, place: ParallelRank) -> Iterator[RankCache]:
    """States of Mamba and its like: a run of buffers, one a layer, for each tensor of the state.

    The first is a convolution, whose channels are x, B and C or q, k and v side by side: it is cut over ranks in as
    many groups, which SGLang tells for some models. The others are cut along one axis.
    """
    ids, cuts = args.state_layer_ids[number], args.state_dim_per_tensor[number]
    groups, outers = args.state_conv_shard_groups[number], args.state_slice_outer_counts[number]
    heads = [n for n in range(len(own.items)) if n == 0 or ids[n] <= ids[n - 1]]
    for tensor, (start, stop) in enumerate(zip(heads, [*heads[1:], len(own.items)], strict=True)):
        runs = own.part(start, stop)
        whole = RankCache(f"state {tensor}", runs.pointers, runs.pages, runs.item_bytes, runs.item_bytes, states=1)
        known = groups[start] or [cuts[start] * place.tp_size] * (tensor > 0)
        yield from _cut(whole, cuts[start], outers[start], known, place)


def _cut(state: RankCache, dim: int, outer: int, groups: Sequence[int], place: ParallelRank) -> Iterator[RankCache]:
    """A state of `outer` planes of `dim` units; `groups`: units of the whole model, each group cut by itself.

    `dim` 0: every rank holds all of it. A state whose groups nobody tells, or of which ranks hold parts twice, is cut
    by rank: fleets of the same TP find each other, others do not.
    """
    if not dim:
        yield state
        return
    units = [group // place.tp_size for group in groups]
    if sum(units) != dim or any(group % place.tp_size for group in groups):
        yield replace(state, name=f"{state.name}, one of {place.tp_size} ranks", heads=place.tp_size)
        return
    unit_bytes, plane_bytes = state.item_bytes // (outer * dim), state.item_bytes // outer
    at = 0
    for part, held in enumerate(units):
        heads = gcd(held * place.tp_size, _MOST_HEADS)
        own = place.heads(heads).count
        if heads % place.tp_size:
            raise EngineUnsupported(f"{held * place.tp_size} rows of {state.name!r} on {place.tp_size} ranks")
        yield replace(
            state,
            name=f"{state.name}.{part}",
            pointers=tuple(pointer + at * unit_bytes for pointer in state.pointers),
            row_bytes=held // own * unit_bytes,
            kv=outer,
            heads=heads,
            own_heads=own,
            plane_bytes=plane_bytes,
        )
        at += held


def pool_of(cache: RankCache, component: Component, page_tokens: int, device: torch.device) -> Pool:
    """The engine's memory as it lies: pages of `token head dim`, states of `kv head dim`. It stays the engine's."""
    tokens, layers = 1 if component.states else page_tokens, cache.layers
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


class AuxRows:
    """The rows of the buffers that go beside the cache (first token, log probabilities), as one payload."""

    def __init__(self, args: Any) -> None:
        self._buffers = list(zip(args.aux_data_ptrs, args.aux_item_lens, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of one row of all buffers together."""
        return sum(nbytes for _, nbytes in self._buffers)

    def take(self, index: int) -> bytes:
        """Row `index` of each buffer, one behind the other: a copy."""
        return b"".join(ctypes.string_at(pointer + index * nbytes, nbytes) for pointer, nbytes in self._buffers)

    def put(self, index: int, payload: bytes) -> None:
        """Raises ValueError where the payload is of other buffers."""
        if len(payload) != self.nbytes:
            raise ValueError(f"{len(payload)} bytes beside the cache; this side's buffers take {self.nbytes}")
        at = 0
        for pointer, nbytes in self._buffers:
            ctypes.memmove(pointer + index * nbytes, payload[at : at + nbytes], nbytes)
            at += nbytes
