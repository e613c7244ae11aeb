"""SGLang's device pools are described as values: their buffers' contents, and the layers that a model layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvmover.engines.common import BounceBuffer, EngineUnsupported, PackedBackend, ParallelRank
from kvmover.engines.sglang.page_parts import MAIN, PoolRows, TpPlacement, part_of_rows
from kvmover.engines.sglang.sglang_contract import SGLANG
from kvmover.engines.sglang.sglang_options import ModelFacts
from kvmover.engines.sglang.store_adapter import StoreAdapter
from kvmover.layout import PACKED_AXES, Component, Layout, Pool, PoolSpec, Span
from kvmover.regions import Move
from kvmover.store import PagePart

if TYPE_CHECKING:
    import torch

#: Pools whose rows mean the same to ranks of every shape: a row per token, K and V in separate buffers.
_ATTENTION = "MHATokenToKVPool"

#: Pools that list K of all layers, then V, or latents, as their transfers move them.
_TOLD = (_ATTENTION, "MLATokenToKVPool")

#: Class-name prefixes of pools that are the same on every tensor-parallel rank.
_SHARED = ("MLA", "DSA", "DeepSeekV4")


@dataclass(frozen=True, slots=True)
class Strand:
    """The buffers of equal rows, one per layer and K/V, that form one component of a page.

    `buffers`: numbers of the entry's buffers, layer by layer, K before V. `layers`: per layer of the model, the
    strand's own layers that it reads. `page_tokens`: rows per page. `index_tokens`: token indices per page in the
    engine's tables.
    """

    rows: PoolRows
    buffers: tuple[int, ...]
    layers: dict[int, tuple[int, ...]]
    pages: int
    page_tokens: int
    index_tokens: int

    def spec(self, component: Component) -> PoolSpec:
        """Returns the pool of `component`: a tensor per layer and K/V, rows dense, `page token head dim` in each."""
        row = self.rows.heads * self.rows.dim
        extents = (self.pages, self.rows.heads, self.rows.layers, self.rows.kv, self.page_tokens, self.rows.dim)
        strides = (self.page_tokens * row, self.rows.dim, 0, 0, row, 1)
        return PoolSpec(component, Layout(PACKED_AXES, extents, strides), ("layer", "kv"))

    def own(self, layers: range) -> list[range]:
        """Returns the strand's own layers that the model's `layers` need, as runs."""
        wanted = sorted({own for layer in layers for own in self.layers.get(layer, ())})
        runs = groupby(enumerate(wanted), lambda pair: pair[1] - pair[0])
        return [range(run[0][1], run[-1][1] + 1) for run in (list(of) for _, of in runs)]


def part_of_strand(
    name: str, strand: Strand, place: ParallelRank, model: ModelFacts, layers: int, page_tokens: int
) -> PagePart:
    """Returns the part of a page of pool `name` that the rank at `place` holds.

    `layers`: the rank's layers of all kinds. `model.kv_heads` applies to the main attention cache only, and
    `model.layers` only if all layers have such a cache.
    """
    if name != MAIN:
        model = replace(model, kv_heads=None, layers=None)
    elif strand.rows.layers != layers:
        model = replace(model, layers=None)
    return part_of_rows(strand.rows, place, model, page_tokens)


def placement_of(pool: Any) -> TpPlacement:
    """Returns REPLICATED for classes of pools that are the same on every tensor-parallel rank, else SHARDED."""
    is_same = any(base.__name__.startswith(_SHARED) for base in type(pool).__mro__)
    return TpPlacement.REPLICATED if is_same else TpPlacement.SHARDED


def strands_of(entry: Any, first_layer: int, placement: TpPlacement) -> list[Strand]:
    """Returns the strands of an SGLang `DevicePoolEntry`.

    Raises EngineUnsupported for buffers that are not dense, and for layers of different shapes.
    """
    flat = [buffer for group in entry.components for buffer in group]
    for buffer in flat:
        if not buffer.is_contiguous():
            raise EngineUnsupported(f"device pool {entry.name} has rows that do not follow each other")
    if type(entry.device_pool).__name__ == _ATTENTION and len(entry.components) == 1:
        return [_attention(entry, flat, first_layer)]
    made: list[Strand] = []
    first = 0
    for number, group in enumerate(entry.components):
        name = str(entry.name) if len(entry.components) == 1 else f"{entry.name}.{number}"
        made.append(_alone(entry, name, range(first, first + len(group)), group, first_layer, placement))
        first += len(group)
    return made


def checked_strands(plugin: str, entry: Any, first_layer: int, placement: TpPlacement) -> list[Strand]:
    """Returns the strands of an SGLang `DevicePoolEntry`, each compared as `check_addresses` does.

    Raises EngineUnsupported as `strands_of` and `check_addresses`.
    """
    strands = strands_of(entry, first_layer, placement)
    for strand in strands:
        check_addresses(plugin, entry, strand)
    return strands


def check_addresses(plugin: str, entry: Any, strand: Strand) -> None:
    """Raise EngineUnsupported, with both, unless page 1 of each layer's K and V lies where SGLang's transfers find it.

    Compared are address, bytes and dtype of a page, for the pools of which `plugin` knows what SGLang tells: plain
    attention and latents. Others are taken as SGLang's linker assembles them.
    """
    pool = entry.device_pool
    if type(pool).__name__ not in _TOLD or len(entry.components) != 1:
        return
    rows, flat = strand.rows, entry.components[0]
    addresses, _, sizes = pool.get_contiguous_buf_infos()
    ours: dict[str, object] = {}
    described: dict[str, object] = {}
    for place, number in enumerate(strand.buffers):
        layer, kv = divmod(place, rows.kv)
        told = kv * rows.layers + layer
        page_bytes = strand.page_tokens * rows.heads * rows.dim * flat[number].element_size()
        told_bytes = strand.page_tokens * sizes[told] // pool.page_size
        name = f"{entry.name}, layer {layer}, {'KV'[kv] if rows.kv == 2 else 'latent'}"
        ours[name] = flat[number].data_ptr() + page_bytes, page_bytes, rows.dtype
        described[name] = addresses[told] + told_bytes, told_bytes, str(pool.store_dtype).removeprefix("torch.")
    SGLANG.compare(plugin, ours, described)


def _attention(entry: Any, flat: Sequence[torch.Tensor], first_layer: int) -> Strand:
    """Returns the strand of an entry with K of every layer, then V: [token, head, dim] each."""
    layers, (slots, heads, dim) = len(flat) // 2, flat[0].shape
    if any(buffer.shape != flat[0].shape for buffer in flat):
        raise EngineUnsupported(f"device pool {entry.name} has keys and values of different shapes")
    rows = PoolRows(str(entry.name), layers, 2, heads, dim, _dtype(flat[0]), first_layer)
    order = tuple(kv * layers + layer for layer in range(layers) for kv in range(2))
    mapping = {layer: tuple(sorted({number % layers for number in of})) for layer, of in _mapping(entry).items()}
    return Strand(rows, order, mapping, slots // entry.page_size, entry.page_size, entry.page_size)


def _alone(
    entry: Any,
    name: str,
    numbers: range,
    group: Sequence[torch.Tensor],
    first_layer: int,
    placement: TpPlacement,
) -> Strand:
    """Returns a strand whose row is a whole: the latent of a token, or the index keys or the state of a page."""
    if any(buffer.shape[1:] != group[0].shape[1:] or buffer.dtype != group[0].dtype for buffer in group):
        raise EngineUnsupported(f"device pool {name} has layers of different shapes")
    # A row of a one-token page is both a page and a token; in the main pool it counts as a token.
    by_page = entry._row_span == 1 and not (entry.page_size == 1 and name == MAIN)
    latent = not by_page
    dim = group[0][0].numel() if latent else group[0][0].numel() * group[0].element_size()
    dtype = _dtype(group[0]) if latent else "uint8"
    rows = PoolRows(name, len(group), 1, 1, dim, dtype, first_layer, states=int(by_page), placement=placement)
    tokens = 1 if by_page else entry.page_size
    pages = min(buffer.shape[0] for buffer in group) // tokens
    return Strand(rows, tuple(numbers), _mapping(entry), pages, tokens, entry.page_size)


def _mapping(entry: Any) -> dict[int, tuple[int, ...]]:
    return {layer: (of,) if isinstance(of, int) else tuple(of) for layer, of in entry.layer_mapping.items()}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class DevicePoolPages:
    """The pages of a strand, with the memory and the store to move them.

    `part`: the rank's part of a page. `memory`: a flat tensor per layer and K/V, owned by the engine. An object lies
    `head layer kv token dim`: a run of layers is one read for a latent, one per head for attention.
    """

    strand: Strand
    part: PagePart
    memory: tuple[torch.Tensor, ...]
    adapter: StoreAdapter
    bounce: BounceBuffer
    move: Move

    def whole(self) -> PackedBackend:
        """Returns the backend of pages with all layers of the strand."""
        return self.layers(range(self.strand.rows.layers))

    def layers(self, run: range) -> PackedBackend:
        """Returns the backend of the pages' layers `run`, in the strand's numbering, as if the pool had only these."""
        box, kv = self.part.box, self.strand.rows.kv
        part = PagePart(self.part.component, replace(box, layers=Span(box.layers.start + run.start, len(run))))
        writes, memory = self.adapter.election(part.component), self.memory[run.start * kv : run.stop * kv]
        return PackedBackend(
            pool=Pool(_of_layers(self.strand.spec(part.component), len(run)), memory),
            view=self.adapter.view(part, writes),
            page_tokens=self.strand.index_tokens,
            out=self.bounce,
            into=self.bounce,
            move=self.move,
            writes=writes,
        )


def _of_layers(spec: PoolSpec, layers: int) -> PoolSpec:
    axes, shape, stride = spec.layout.axes, spec.layout.shape, spec.layout.stride
    extents = tuple(layers if axis == "layer" else extent for axis, extent in zip(axes, shape, strict=True))
    return PoolSpec(spec.component, Layout(axes, extents, stride), spec.separate)
