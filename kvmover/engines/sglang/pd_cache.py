"""SGLang's description of a rank's caches becomes values, pools and payloads here.

All but the last two functions compute with integers alone.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.engines.sglang.sglang_contract import compresses_latents, shares_heads_over_context, window_layout
from kvmover.errors import PlanError
from kvmover.layout import DTYPE_BYTES, PACKED_AXES, Component, Layout, Pool, PoolSpec

if TYPE_CHECKING:
    import torch


class Division(Enum):
    """The division of a kind's pages among tensor-parallel ranks."""

    HEADS = "the model's KV heads, K and V in buffers of their own"
    WINDOW_HEADS = "the same of layers that attend to a window"
    PROJECTIONS = "each tensor of a state along an axis of its own"
    COPIES = "not at all: every rank holds all of them"


class Told(Enum):
    """The meaning of SGLang's indices of a kind."""

    PAGES = "pages of the request, or of what decode lacks of it"
    WINDOW = "the last pages of the request, as many as the window reaches into"
    ROW = "one row or state of the request, or none where nothing is pending"
    RING = "a row for each of the last positions that a window reaches"


@dataclass(frozen=True, slots=True)
class StateKind:
    """A `StateType` of SGLang's, and the name of its components here.

    `halves`: families of buffers behind one another, all layers each. `numbers`: numbers by which SGLang tells a row,
    the first its index. `interleaved`: pages of so many tokens lie head by head, and within a head in an order private
    to SGLang's kernels; 0: the pool's layout decides.
    """

    word: str
    told: Told
    division: Division
    halves: int = 1
    numbers: int = 1
    interleaved: int = 0


#: By SGLang's names; complete for `StateType` of 0.5.23.
KINDS = {
    "swa": StateKind("window", Told.WINDOW, Division.WINDOW_HEADS),
    "block_scale_swa": StateKind("window scales", Told.WINDOW, Division.WINDOW_HEADS, interleaved=128),
    "block_scale": StateKind("scales", Told.PAGES, Division.HEADS, interleaved=128),
    "minimax_dense_kv": StateKind("dense", Told.PAGES, Division.HEADS),
    "minimax_index_k": StateKind("index keys", Told.PAGES, Division.COPIES),
    "dsa": StateKind("index keys", Told.PAGES, Division.COPIES),
    # Keys, then their scores. Numbers: a row's index, start and length of two live parts of it, and its length.
    "dsa_tail": StateKind("index tail", Told.ROW, Division.COPIES, halves=2, numbers=6),
    "qsa_compressed": StateKind("compressed keys", Told.PAGES, Division.COPIES),
    "qsa_pending": StateKind("pending keys", Told.ROW, Division.COPIES),
    "swa_ring": StateKind("window ring", Told.RING, Division.COPIES),
    "c128_state": StateKind("pending compression", Told.ROW, Division.COPIES),
    "request_row": StateKind("request row", Told.ROW, Division.COPIES),
    "mamba": StateKind("state", Told.ROW, Division.PROJECTIONS),
}

#: Heads of a state at most: every usual number of ranks divides it, and a row is still many channels.
MOST_HEADS = 192

#: Layouts of pages in which the tokens of a head lie together.
_HEADS_OUTERMOST = ("hnd", "vectorized_5d")


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """The caches of the whole model.

    `kv`: 2 for keys and values, 1 for a latent. `window`: tokens, of `window_heads`, if any. `projections`: units and
    heads of the parts of a convolution (x, B, C of Mamba-2), which SGLang's pools do not tell. `draft`: the draft
    model's caches.
    """

    kv: int
    heads: int
    window_heads: int = 0
    window: int | None = None
    projections: tuple[tuple[int, int], ...] = ()
    draft: CacheTotals | None = None


def whole_of(config: Any, latent: Any) -> CacheTotals:
    """Returns the caches of SGLang's `ModelConfig`. Without a known window its chunk is used (Llama 4)."""
    window = config.sliding_window_size or config.attention_chunk_size
    if latent:
        return CacheTotals(1, 1, 1, window)
    return CacheTotals(2, config.get_total_num_kv_heads(), config.get_swa_num_kv_heads(1), window)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The engine's allocations: address, bytes, and bytes of a page or state of each."""

    pointers: tuple[int, ...]
    nbytes: tuple[int, ...]
    items: tuple[int, ...]

    @classmethod
    def of(cls, pointers: Sequence[int], nbytes: Sequence[int], items: Sequence[int]) -> Buffers:
        """Returns the allocations of SGLang's lists, one entry each."""
        return cls(tuple(pointers), tuple(nbytes), tuple(items))

    def only(self, numbers: Iterable[int]) -> Buffers:
        """Returns the allocations of these numbers."""
        chosen = list(numbers)
        return Buffers(*(tuple(of[n] for n in chosen) for of in (self.pointers, self.nbytes, self.items)))

    @property
    def item_bytes(self) -> int:
        """Bytes of a page or state, the same in all."""
        (item,) = set(self.items)
        return item

    @property
    def pages(self) -> int:
        """Pages or states for which every allocation has room."""
        return min(self.nbytes) // self.item_bytes


@dataclass(frozen=True, slots=True)
class RankCache:
    """A component on one rank. Bytes are opaque unless `dtype` names a known type; a row is `row_bytes`.

    `pointers`: one per layer and K/V, layer by layer, or one per layer with K/V planes `plane_bytes` apart. `heads` of
    the whole model, `own_heads` of this rank. `by`: number of SGLang's state indices for it; None: the KV pages.
    `row_tokens`: tokens per row, a whole page's if their order in it is private to SGLang. `spare`: row for a request
    without a pending state; `numbers`: see `StateKind`.
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
    row_tokens: int = 1
    by: int | None = None
    spare: int | None = None
    numbers: int = 1
    dtype: str = "uint8"

    @property
    def layers(self) -> int:
        """Layers on this rank."""
        return len(self.pointers) // (1 if self.plane_bytes else self.kv)

    def component(self, layers: int) -> Component:
        """Returns the component of the whole model, with `layers` layers on all stages together."""
        shape = (self.name, layers, self.kv, self.heads, self.row_bytes // DTYPE_BYTES[self.dtype])
        return Component(*shape, self.dtype, self.window, self.states, self.row_tokens)


def caches_of(args: Any, whole: CacheTotals, place: ParallelRank) -> list[RankCache]:
    """Returns all caches of `KVArgs`, in its order. Raises EngineUnsupported for caches that cannot be described."""
    every = Buffers.of(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    count, dtype, tokens = len(every.items) - args.num_draft_entries, args.kv_cache_dtype_str, args.page_size
    own, draft = every.only(range(count)), every.only(range(count, len(every.items)))
    if compresses_latents(args):
        found = list(_copies(f"kv {dtype}", own, 1, tokens, place))
    else:
        found = list(_pages(f"kv {dtype}", own, whole.kv, whole.heads, place, tokens, 1))
    if draft.items:
        if whole.draft is None and set(draft.items) != set(own.items):
            raise EngineUnsupported(
                "kvmover's prefill/decode backend does not transfer the cache of a draft model of which it knows no"
                f" configuration: pages of {sorted(set(draft.items))} and the model's of {sorted(set(own.items))} bytes"
            )
        like = whole.draft or whole
        found += _pages(f"draft {dtype}", draft, like.kv, like.heads, place, tokens, 1)
    for number, word in enumerate(kinds_of(args)):
        found += [replace(cache, by=number) for cache in _of_kind(args, number, KINDS[word], whole, place)]
    if not by_token(found):
        found = [replace(cache, window=cache.window and _whole_pages(cache.window, tokens)) for cache in found]
    return _told_apart(found)


def by_token(caches: Iterable[RankCache]) -> bool:
    """Returns True if decode asks for single tokens; else it asks for whole pages, whose order is private to SGLang."""
    return all(cache.row_tokens == 1 for cache in caches)


def _whole_pages(window: int, page_tokens: int) -> int:
    """Returns the tokens of a window's pages: one page more, since a request ends anywhere in its last page."""
    return (ceil(window / page_tokens) + 1) * page_tokens


def kinds_of(args: Any) -> list[str]:
    """Returns SGLang's words for the kinds of state caches, in its order."""
    return [str(getattr(kind, "value", kind)) for kind in args.state_types]


def refuse(args: Any, context: Any) -> None:
    """Raise EngineUnsupported for caches or parallel settings that this backend cannot transfer."""
    kinds, cp = kinds_of(args), context.attn_cp_size
    unknown = [kind for kind in kinds if kind not in KINDS]
    # MiniMax keeps its scales inside the pages.
    scaleless = "fp4" in args.kv_cache_dtype_str and not any(kind.startswith("minimax") for kind in kinds)
    for bad, what in (
        (unknown, f"caches of these kinds: {', '.join(unknown)}"),
        (scaleless, f"a cache in {args.kv_cache_dtype_str}, whose scales SGLang does not hand over"),
        (shares_heads_over_context(context), "states that are cut over context-parallel ranks"),
        (cp > 1 and args.is_hybrid_mla_backend, f"a hybrid of latents and states on {cp} context-parallel ranks"),
    ):
        if bad:
            raise EngineUnsupported(f"kvmover's prefill/decode backend does not transfer {what}")


def page_table(
    cache: RankCache, prefix_pages: int, pages: npt.NDArray[np.int64], states: Sequence[Any], page_tokens: int
) -> npt.NDArray[np.int64]:
    """Returns one cache's page table [page] of a request: `prefix_pages` and then `pages`, or `cache.states` entries of
    a cache of states. The ids are `pages`, or `states[cache.by]` where that is set.

    SGLang tells a window's pages as the last of the request; the entries before them repeat the first. Where decode
    asks for tokens, these repeats are not read. Where it asks for whole pages, a window reaches one page further back
    than told, on both sides, so the same bytes go to the same place twice; likewise the rows of a ring whose request is
    shorter than the window. Without a pending state both sides take the spare row, which belongs to no request.

    Raises PlanError for more ids than entries or than the window, and for no state.
    """
    own = pages if cache.by is None else np.asarray(states[cache.by], np.int64).reshape(-1)
    length, most = prefix_pages + len(pages), None
    if cache.window is not None:
        most = (cache.window + page_tokens - 2) // page_tokens + 1  # a window from the last token of its first page
    if cache.states:
        length = cache.states
        if cache.spare is not None and len(own) in (0, cache.numbers):
            own = np.append(own, cache.spare)[:1]
    if len(own) > length or (cache.states and not len(own)) or (most is not None and len(own) > most):
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
    """Returns the entries that a prefill chunk adds to `page_table`, behind `before` pages of earlier chunks.

    `before` None: it is the first chunk. `states` None: further chunks follow; state indices, and the caches that go by
    them, come with the last chunk. Pages that decode has are -1.
    """
    if cache.by is None:
        lacking = prefix_pages if before is None else 0
        return np.concatenate([np.full(lacking, -1), page_table(cache, 0, pages, (), page_tokens)])
    if states is None:
        return np.zeros(0, np.int64)
    table = page_table(cache, prefix_pages + (before or 0), pages, states, page_tokens)
    if cache.window is None and not cache.states:
        table[: len(table) - len(states[cache.by])] = -1
    return table


def _of_kind(args: Any, number: int, kind: StateKind, whole: CacheTotals, place: ParallelRank) -> Iterable[RankCache]:
    """Returns the components of SGLang's state caches number `number`."""
    listed = args.state_data_ptrs[number], args.state_data_lens[number], args.state_item_lens[number]
    own, tokens = Buffers.of(*listed), args.page_size
    if kind.division is Division.PROJECTIONS:
        return _states(args, number, own, whole, place)
    if kind.told in (Told.WINDOW, Told.RING) and whole.window is None:
        raise EngineUnsupported("the model's configuration does not tell the size of its sliding window")
    window = whole.window or 0
    if kind.told is Told.ROW:
        rows = _copies(kind.word, own, kind.halves, 1, place)
        return [replace(cache, states=1, spare=0, numbers=kind.numbers) for cache in rows]
    if kind.told is Told.RING:
        return [replace(cache, states=window) for cache in _copies(kind.word, own, kind.halves, 1, place)]
    if kind.division is Division.COPIES or whole.kv == 1:
        pages = _copies(kind.word, own, kind.halves, tokens, place)
    else:
        if kind.told is Told.WINDOW and window_layout(args) is None:
            raise EngineUnsupported(
                "kvmover's prefill/decode backend transfers windows of keys and values, not of others"
            )
        heads = whole.window_heads if kind.division is Division.WINDOW_HEADS else whole.heads
        outermost = window_layout(args) in _HEADS_OUTERMOST and kind.told is Told.WINDOW
        if kind.interleaved:
            outermost = tokens == kind.interleaved
        name = f"{kind.word} {args.kv_cache_dtype_str}"
        pages = _pages(name, own, 2, heads, place, tokens, tokens if outermost else 1)
    return pages if kind.told is Told.PAGES else [replace(cache, window=window) for cache in pages]


def _copies(name: str, own: Buffers, halves: int, row_tokens: int, place: ParallelRank) -> Iterator[RankCache]:
    """Yield the pages or rows that all ranks hold, in an order private to SGLang: a row each.

    Buffers of unlike item sizes become separate caches; buffers without items are of layers that use another layer's.
    Raises EngineUnsupported if, on pipeline stages, buffers of one size lie before and behind others.
    """
    held = [number for number, item in enumerate(own.items) if item]
    sizes = list(dict.fromkeys(own.items[number] for number in held))
    for item in sizes:
        same = [number for number in held if own.items[number] == item]
        between = [number for number in held if same[0] < number < same[-1] and number not in same]
        if between and place.pp_size > 1:
            raise EngineUnsupported(f"buffers of {item} bytes of {name!r} before and behind others, on pipeline stages")
        layers = len(same) // halves
        part = own.only(same[half * layers + layer] for layer in range(layers) for half in range(halves))
        word = name if len(sizes) == 1 else f"{name} of {item} B"
        yield RankCache(word, part.pointers, part.pages, item, item, halves, row_tokens=row_tokens)


def _pages(
    name: str, own: Buffers, kv: int, heads: int, place: ParallelRank, tokens: int, row_tokens: int
) -> Iterator[RankCache]:
    """Yield pages of the model's `heads`, all K before all V.

    With a row per token they lie `token head dim`, with a row per page `head ...`. Layers whose K or V pages differ in
    size become separate caches, and so do K and V of unlike sizes. Raises EngineUnsupported for buffers that do not
    divide into layers, tokens and heads.
    """
    if len(own.items) % kv:
        raise EngineUnsupported(f"{len(own.items)} buffers of {name!r} are not {kv} a layer")
    layers, held = len(own.items) // kv, place.heads(heads).count
    sizes = [tuple(own.items[half * layers + layer] for half in range(kv)) for layer in range(layers)]
    for items in dict.fromkeys(sizes):
        same = [layer for layer, other in enumerate(sizes) if other == items]
        planes = [("", range(kv))] if len(set(items)) == 1 else [(" k", range(1)), (" v", range(1, 2))]
        for word, halves in planes:
            part = own.only(half * layers + layer for layer in same for half in halves)
            row, rest = divmod(part.item_bytes, tokens // row_tokens * held)
            if rest:
                raise EngineUnsupported(f"pages of {part.item_bytes} bytes are not {tokens} tokens x {held} heads")
            full = name + word if len(set(sizes)) == 1 else f"{name}{word} of {row} B"
            shape = len(halves), heads, held
            yield RankCache(full, part.pointers, part.pages, part.item_bytes, row, *shape, row_tokens=row_tokens)


def _told_apart(caches: Sequence[RankCache]) -> list[RankCache]:
    """Returns the caches with unique names: duplicates are numbered in SGLang's order, which both sides share."""
    seen: Counter[str] = Counter()
    named: list[RankCache] = []
    for cache in caches:
        seen[cache.name] += 1
        number = seen[cache.name]
        named.append(cache if number == 1 else replace(cache, name=f"{cache.name}, {number}"))
    return named


def _states(args: Any, number: int, own: Buffers, whole: CacheTotals, place: ParallelRank) -> Iterator[RankCache]:
    """Yield states of Mamba and its like: for each tensor of the state a run of buffers, one per layer.

    The first tensor is a convolution with channels of x, B and C, or q, k and v, side by side: ranks cut each of these
    groups, which SGLang tells for some models. The other tensors are cut along one axis.
    """
    cuts, outers = args.state_dim_per_tensor[number], args.state_slice_outer_counts[number]
    groups, ids = args.state_conv_shard_groups[number], args.state_layer_ids[number]
    if ids:
        heads = [n for n in range(len(own.items)) if n == 0 or ids[n] <= ids[n - 1]]
    else:
        like = [(own.items[n], cuts[n], outers[n], groups[n]) for n in range(len(own.items))]
        heads = [n for n in range(len(own.items)) if n == 0 or like[n] != like[n - 1]]
    for tensor, (start, stop) in enumerate(zip(heads, [*heads[1:], len(own.items)], strict=True)):
        runs = own.only(range(start, stop))
        state = RankCache(f"state {tensor}", runs.pointers, runs.pages, runs.item_bytes, runs.item_bytes, states=1)
        told = groups[start] or [cuts[start] * place.tp_size] * (tensor > 0)
        known = [(group, gcd(group, MOST_HEADS)) for group in told] or whole.projections
        yield from _cut(state, cuts[start], outers[start], known, place)


def _cut(
    state: RankCache, dim: int, outer: int, groups: Sequence[tuple[int, int]], place: ParallelRank
) -> Iterator[RankCache]:
    """Yield the groups of a state of `outer` planes of `dim` units.

    `groups`: the model's units and heads, each cut by itself. `dim` 0: every rank holds all of it. A state with unknown
    groups, or with other parts on the ranks than the heads say, is cut by rank: only fleets of the same TP share it.
    """
    if not dim:
        yield state
        return
    held = [place.heads(heads).count * units // heads for units, heads in groups]
    if sum(held) != dim:
        yield replace(state, name=f"{state.name}, one of {place.tp_size} ranks", heads=place.tp_size)
        return
    unit_bytes, plane_bytes = state.item_bytes // (outer * dim), state.item_bytes // outer
    at = 0
    for part, ((units, heads), own) in enumerate(zip(groups, held, strict=True)):
        if heads > 1 and heads % place.tp_size:
            raise EngineUnsupported(f"{units} rows of {state.name!r} in {heads} heads on {place.tp_size} ranks")
        yield replace(
            state,
            name=f"{state.name}.{part}",
            pointers=tuple(pointer + at * unit_bytes for pointer in state.pointers),
            row_bytes=units // heads * unit_bytes,
            kv=outer,
            heads=heads,
            own_heads=place.heads(heads).count,
            plane_bytes=plane_bytes,
        )
        at += own


def pool_of(cache: RankCache, component: Component, page_tokens: int, device: torch.device) -> Pool:
    """Returns a pool over the engine's own memory: pages of `token head dim`, states of `kv head dim`."""
    tokens, layers = 1 if component.states else page_tokens // component.row_tokens, cache.layers
    token_bytes, size = cache.own_heads * cache.row_bytes, component.element_bytes
    shape = (cache.pages, cache.own_heads, layers, cache.kv, tokens, component.dim)
    strides = (cache.item_bytes, cache.row_bytes, 0, cache.plane_bytes, token_bytes)
    stride = (*(nbytes // size for nbytes in strides), 1)
    spec = PoolSpec(component, Layout(PACKED_AXES, shape, stride), ("layer",) if cache.plane_bytes else ("layer", "kv"))
    return Pool(spec, tuple(tensor_at(pointer, spec.allocation_bytes, device) for pointer in cache.pointers))


def tensor_at(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns the bytes at an address of the engine's memory, uint8 [nbytes], without keeping them alive."""
    import torch

    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    held: Any = type("Borrowed", (), {"__cuda_array_interface__": interface})()
    return torch.as_tensor(held, device=device)
