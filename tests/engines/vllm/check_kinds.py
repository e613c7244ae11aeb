"""Caches of every kind between engines of unlike TP and block size: what vLLM's own code writes is what arrives.

A prefill's ranks are written by vLLM: its allocation, its views of layers, its kernels where they run without a GPU. So
is what a decode's ranks must hold then; all of their memory is compared, with poison wherever nothing was asked for.
"""

from __future__ import annotations

import ast
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import KV_HEADS, POISON, Factory, Role, Shape, allocate, caching, config_of, configs

from kvmover.engines.common import CardServer, Remote
from kvmover.engines.vllm.connector_metadata import KvmoverConnectorMetadata, ReceiveSpec, SendSpec
from kvmover.errors import KvmoverError
from tests.safetensors_files import tiny, write_checkpoint

triton: Any = import_module("triton")
units: Any = import_module("vllm.triton_utils")
units.triton, units.tl = triton, import_module("triton.language")
latents: Any = import_module("vllm.models.deepseek_v4.common.ops.cache_utils")
index_keys: Any = import_module("vllm.v1.attention.ops.rocm_aiter_mla_sparse")
nvfp4: Any = import_module("vllm.utils.torch_utils")
mamba_utils: Any = import_module("vllm.model_executor.layers.mamba.mamba_utils")
splits: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils")
MambaBase: Any = import_module("vllm.model_executor.layers.mamba.abstract").MambaBase
Kinds: Any = import_module("vllm.v1.attention.backends.registry").MambaAttentionBackendEnum

BLOCKS, TOKENS = 31, 200

#: Writes what `tokens` of a request keep in the caches of a rank, by their block tables, as vLLM does.
Writer = Callable[["Rank", range], None]


@dataclass(frozen=True)
class Family:
    """`groups`: vLLM's specs by layer, a mapping a group, for a TP and block size. `write`: see Writer."""

    groups: Callable[[int, int], list[dict[str, Any]]]
    write: Writer
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """How one side is run."""

    tp: int = 1
    block_tokens: int = 64
    layout: str = "LBHNC"
    dcp: int = 1
    interleave: int = 1
    pp: int = 1


@dataclass
class Rank:
    """A worker with its caches, tensor-parallel rank `rank` of a stage. `tables`: of the one request, one a group."""

    grid: Grid
    rank: int
    stage: int
    specs: dict[str, Any]
    groups: dict[str, int]
    caches: dict[str, torch.Tensor]
    tables: list[list[int]]
    connector: Any = None

    @property
    def memory(self) -> torch.Tensor:
        storage = next(iter(self.caches.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def heads(self, total: int) -> range:
        """Those that vLLM gives this rank."""
        held = max(1, total // self.grid.tp)
        first = self.rank * total // self.grid.tp
        return range(first, first + held)

    def place(self, layer: str, token: int) -> tuple[int, int]:
        """Page and row of a token in the cache of a layer, by vLLM's rule for slots."""
        table, rows = self.tables[self.groups[layer]], self.caches[layer].shape[2]
        ratio = int(getattr(self.specs[layer], "tokens_per_state", 1))
        of_block = self.specs[layer].block_size // ratio
        row = token // ratio
        return table[row // of_block] * (of_block // rows) + row % of_block // rows, row % rows


def content(*what: int, nbytes: int) -> torch.Tensor:
    """Bytes that depend on all of `what`: in 1..126, which are finite and positive as fp8 too."""
    made = torch.Generator().manual_seed(sum(number * 7919**place for place, number in enumerate(what, 1)) % (1 << 60))
    return torch.randint(1, 127, (nbytes,), generator=made, dtype=torch.uint8)


def number(layer: str) -> int:
    return int(layer.split(".")[2])


# Writers


def rows(rank: Rank, tokens: range, layers: Sequence[str] | None = None, heads: int = KV_HEADS) -> None:
    """All content of a token and head, into vLLM's views [block, head, token, content]."""
    for layer in layers or rank.caches:
        spec, cache = rank.specs[layer], rank.caches[layer].view(torch.uint8)
        window, ratio = getattr(spec, "sliding_window", None), int(spec.tokens_per_state)
        held = (
            range(1) if isinstance(spec, caching.MLAAttentionSpec | caching.SlidingWindowMLASpec) else rank.heads(heads)
        )
        for token in tokens[-max(1, window - 1) :] if window else tokens:
            if (token + 1) % ratio or not shared(rank.grid, rank.rank, token):
                continue
            page, row = rank.place(layer, local(rank.grid, token))
            for slot, head in enumerate(held):
                cache[page, slot, row] = content(number(layer), token, head, nbytes=cache.shape[3])


def shared(grid: Grid, rank: int, token: int) -> bool:
    """Whether a rank holds a token: vLLM deals runs of tokens to neighbours."""
    return token // grid.interleave % grid.dcp == rank % grid.dcp


def local(grid: Grid, token: int) -> int:
    """Where a token stands among those of its rank."""
    run, within = divmod(token, grid.interleave)
    return run // grid.dcp * grid.interleave + within


def states(rank: Rank, tokens: range) -> None:
    """Channels of the whole model, of which vLLM's own split says which a rank has, into vLLM's own views."""
    for layer, cache in rank.caches.items():
        spec = rank.specs[layer]
        if not isinstance(spec, caching.MambaSpec):
            continue
        bound = _Recurrent(spec)
        bound.bind_kv_cache(cache)
        block = rank.tables[rank.groups[layer]][-1 - spec.num_speculative_blocks]
        for n, tensor in enumerate(bound.kv_cache):
            tensor[block] = state_of(rank, spec, n, number(layer)).view(spec.dtypes[n])


def state_of(rank: Rank, spec: Any, n: int, layer: int) -> torch.Tensor:
    """The bytes of state `n` of a layer on a rank."""
    shape, size = list(spec.shapes[n]), spec.dtypes[n].itemsize
    tp, name = rank.grid.tp, spec.mamba_type.name
    if spec.tp_replicated or (n == 0 and name != "LINEAR"):
        steps_first = not mamba_utils.is_conv_state_dim_first()
        steps, channels = shape if steps_first else shape[::-1]
        parts = [channels]
        if name in ("MAMBA1", "MAMBA2", "GDN_ATTN"):
            with pytest.MonkeyPatch.context() as patch:  # it asks for one of the layouts, and needs none
                patch.setattr(splits, "is_conv_state_dim_first", lambda: True)
                turned = replace(spec, shapes=((channels, steps), *spec.shapes[1:]))
                parts = list(splits.derive_mamba_conv_split(turned, tp).local_proj_dims)
        made: list[torch.Tensor] = []
        for part, held in enumerate(parts):
            copies = spec.tp_replicated or (name == "MAMBA2" and part and ONE_GROUP)
            whole = content(layer, n, part, nbytes=held * steps * size * (1 if copies else tp))
            whole = whole.reshape(-1, steps, size)
            made.append(whole if copies else whole[rank.rank * held : (rank.rank + 1) * held])
        found = torch.cat(made)
        return (found.transpose(0, 1) if steps_first else found).reshape(*shape[:-1], -1).contiguous()
    held = shape[0]
    whole = content(layer, n, nbytes=held * tp * shape[1] * (shape[2] if len(shape) > 2 else 1) * size)
    return whole.reshape(held * tp, *shape[1:-1], -1)[rank.rank * held : (rank.rank + 1) * held].contiguous()


def index_pages(rank: Rank, tokens: range) -> None:
    """Keys and scales of every page, where vLLM's own code for `[block, all keys, all scales]` has them."""
    for layer, cache in rank.caches.items():
        spec = rank.specs[layer]
        if spec.state_content_size_bytes != 132:
            continue
        ratio, size = int(spec.tokens_per_state), cache.shape[2]
        pages = cache.squeeze(1)
        keys, scales = pages.as_strided((len(pages), size * 132), (pages.stride(0), 1)).split((size * 128, size * 4), 1)
        for token in tokens:
            if (token + 1) % ratio:
                continue
            page, row = rank.place(layer, token)
            keys[page, row * 128 : (row + 1) * 128] = content(number(layer), token, 1, nbytes=128)
            scales[page, row * 4 : (row + 1) * 4] = content(number(layer), token, 2, nbytes=4)


def latent_pages(rank: Rank, tokens: range) -> None:
    """DeepSeek V4's latents, by vLLM's own kernel, in Triton's interpreter."""
    for layer, cache in rank.caches.items():
        spec = rank.specs[layer]
        if spec.state_content_size_bytes != 584:
            continue
        window, ratio = getattr(spec, "sliding_window", None), int(spec.tokens_per_state)
        kept = [n for n in (tokens[-(window - 1) :] if window else tokens) if (n + 1) % ratio == 0]
        values = [content(number(layer), n, nbytes=512).to(torch.bfloat16) / 8 for n in kept]
        slots = [page * cache.shape[2] + row for page, row in (rank.place(layer, n) for n in kept)]
        pages = cache.squeeze(1)
        flat = pages.as_strided((len(pages), pages.stride(0)), (pages.stride(0), 1))
        latents.quantize_and_insert_k_cache(torch.stack(values), flat, torch.tensor(slots), cache.shape[2])


def nvfp4_pages(rank: Rank, tokens: range) -> None:
    """Values and scales of K and V, in the views that vLLM's FlashInfer backend makes of a cache."""
    for layer, cache in rank.caches.items():
        held = rank.heads(KV_HEADS)
        *parts, order = flashinfers("_nvfp4_kv_views")(cache, len(held))
        for token in tokens:
            page, row = rank.place(layer, token)
            for n, head in enumerate(held):
                at = (page, n, row) if order == "HND" else (page, row, n)
                for part, sides in enumerate(parts):
                    for side, view in enumerate(sides):
                        said = content(number(layer), token, head, side, part, nbytes=view.shape[3])
                        view.view(torch.uint8)[at] = said


def flashinfers(name: str) -> Any:
    """A function of vLLM's FlashInfer backend, whose module asks for FlashInfer itself."""
    path = Path(nvfp4.__file__).parent.parent / "v1/attention/backends/flashinfer.py"
    found = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == name]
    scope = {"torch": torch, "_KVPair": Any, "nvfp4_split_data_scale": nvfp4.nvfp4_split_data_scale}
    exec(compile(ast.Module(found, []), str(path), "exec"), scope)
    return scope[name]


#: Whether B and C of the toy Mamba-2 have one group, of which each rank has a copy.
ONE_GROUP = True


class _Recurrent(MambaBase):
    """A layer of vLLM's as far as it unpacks its cache."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def get_state_shape(self) -> Any:
        return self.spec.shapes

    def get_state_dtype(self) -> Any:
        return self.spec.dtypes

    @property
    def mamba_type(self) -> Any:
        return self.spec.mamba_type


def both(*writers: Writer) -> Writer:
    """One after the other."""

    def write(rank: Rank, tokens: range) -> None:
        for writer in writers:
            writer(rank, tokens)

    return write


def of_layers(start: int, stop: int, heads: int = KV_HEADS) -> Writer:
    """Rows of these layers."""

    def write(rank: Rank, tokens: range) -> None:
        rows(rank, tokens, [layer for layer in rank.caches if start <= number(layer) < stop], heads)

    return write


# The fixture


@dataclass
class Bench:
    """Engines' ranks, made and closed."""

    folder: Path
    model: Any = None
    made: list[Any] = field(default_factory=list)

    def side(self, name: str, family: Family, grid: Grid, tokens: int) -> list[Rank]:
        """The ranks of an engine, whose memory is poison."""
        config = config_of(Shape(), self.folder)
        config.model_config = self.model or config.model_config
        config.kv_transfer_config.engine_id = name
        modules = config.compilation_config.static_forward_context
        if family.drafts:
            config.speculative_config = _Speculation()
            config.speculative_config.model = config.model_config.model  # as of heads that predict more tokens
            modules.update({layer: _Draft() for layer in family.drafts})
        ranks: list[Rank] = []
        for number in range(grid.tp * grid.pp):
            own = copy.copy(config)
            own.parallel_config = copy.copy(config.parallel_config)
            own.parallel_config.tensor_parallel_size, own.parallel_config.rank = grid.tp, number
            own.parallel_config.pipeline_parallel_size = grid.pp
            own.parallel_config.decode_context_parallel_size = grid.dcp
            own.parallel_config.cp_kv_cache_interleave_size = grid.interleave
            rank = blank(family, grid, number, tokens)
            rank.connector = Factory.create_connector(own, Role.WORKER, cache_config(family, grid, rank.stage))
            self.made.append(rank.connector)
            rank.connector.register_kv_caches(rank.caches)
            ranks.append(rank)
        return ranks

    def hand_over(self, family: Family, src: Grid, dst: Grid, tokens: range = range(TOKENS)) -> None:
        """A request from one engine's ranks to the other's, whose memory is compared then."""
        for rank in self.moved(family, family, src, dst, tokens):
            wanted = blank(family, dst, rank.stage * dst.tp + rank.rank, tokens.stop)
            family.write(wanted, tokens)
            assert torch.equal(rank.memory, wanted.memory), odd(rank, wanted)
            assert (wanted.memory != POISON).any()

    def moved(
        self, of_src: Family, of_dst: Family, src: Grid, dst: Grid, tokens: range, failing: bool = False
    ) -> list[Rank]:
        """The ranks that a request came to, or to each of which it did not."""
        a, b = self.side("prefill", of_src, src, tokens.stop), self.side("decode", of_dst, dst, tokens.stop)
        server = CardServer("127.0.0.1", 0)
        server.lay_out("prefill", [rank.connector.get_handshake_metadata().card for rank in a])
        remote = Remote("prefill", "p", "127.0.0.1", server.port)
        for rank in a:
            of_src.write(rank, range(tokens.stop))
            tables = tuple(rank.tables)
            step(rank, KvmoverConnectorMetadata(sends=[SendSpec("p", "p", tables, None)]))
        for rank in b:
            spec = ReceiveSpec("d", remote, tokens.start, tokens.stop, tuple(rank.tables))
            step(rank, KvmoverConnectorMetadata(receives=[spec]))
        waiting, deadline = list(b), time.monotonic() + 60
        while waiting:
            for rank in list(waiting):
                results = rank.connector.get_transfer_results(set())
                lost = results.failed_recving or rank.connector.get_block_ids_with_load_errors()
                assert bool(lost) == (failing and bool(results.finished_recving))
                if results.finished_recving:
                    waiting.remove(rank)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        server.close()
        return b


class _Draft:
    is_draft_layer = True


class _Speculation:
    """The part of vLLM's that is asked: of a draft with 2 heads."""

    num_kv_heads = 2
    model = ""

    @property
    def draft_model_config(self) -> Any:
        return self

    def get_total_num_kv_heads(self) -> int:
        return self.num_kv_heads

    @staticmethod
    def use_eagle() -> bool:
        return False


def step(rank: Rank, metadata: KvmoverConnectorMetadata) -> None:
    """What a model runner does in a step without a forward pass."""
    rank.connector.handle_preemptions(metadata)
    rank.connector.bind_connector_metadata(metadata)


def odd(rank: Rank, wanted: Rank) -> str:
    at = torch.nonzero(rank.memory != wanted.memory).flatten()
    return f"rank {rank.rank}: {len(at)} bytes of {rank.memory.numel()} differ, from {at[:8].tolist()} on"


def of_stage(family: Family, grid: Grid, stage: int) -> list[dict[str, Any]]:
    """The groups of a family with the layers that vLLM gives a stage."""
    groups = family.groups(grid.tp, grid.block_tokens)
    last = 1 + max(number(layer) for specs in groups for layer in specs)
    own = range(stage * last // grid.pp, (stage + 1) * last // grid.pp)
    return [{layer: spec for layer, spec in specs.items() if number(layer) in own} for specs in groups]


def cache_config(family: Family, grid: Grid, stage: int) -> Any:
    """One allocation, in which every kind of layer has a part."""
    groups: list[Any] = []
    parts: list[tuple[list[str], Any]] = []
    for specs in of_stage(family, grid, stage):
        found = list(specs.values())
        alike = all(spec == found[0] for spec in found)
        whole = found[0] if alike else caching.UniformTypeKVCacheSpecs(found[0].block_size, kv_cache_specs=specs)
        groups.append(caching.KVCacheGroupSpec(list(specs), whole))
        for spec in dict.fromkeys(found):
            parts.append(([layer for layer, its in specs.items() if its == spec], spec))
    tensors: list[Any] = []
    layout, offset = caching.KVCacheLayout[grid.layout], 0
    for layers, spec in parts:
        strides = caching.compute_layout_strides(spec, BLOCKS, len(layers), layout)
        tensors.append(caching.KVCacheTensor(0, layers, strides[0], strides[1], offset))
        offset += -(-spec.page_size_bytes * BLOCKS * len(layers) // 512) * 512
    for tensor in tensors:
        tensor.size = offset
    return caching.KVCacheConfig(BLOCKS, tensors, groups, kv_cache_layout=grid.layout)


def blank(family: Family, grid: Grid, rank: int, tokens: int) -> Rank:
    """A rank whose memory is poison, with a request whose blocks stand in no order."""
    stage, column = divmod(rank, grid.tp)
    config = cache_config(family, grid, stage)
    specs = {name: spec for each in of_stage(family, grid, stage) for name, spec in each.items()}
    groups = {name: n for n, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    caches = allocate(config, torch.device("cpu"), caching.KVCacheLayout[grid.layout])
    tables: list[list[int]] = []
    for n, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        scratch = getattr(spec, "num_speculative_blocks", None)
        need = -(-tokens // (spec.block_size * grid.dcp)) if scratch is None else 1 + scratch
        need = 1 if isinstance(spec, caching.CircularBufferSpec) else need
        free = sorted(range(1, BLOCKS), key=lambda block, n=n: (block * 11 + n) % 31)
        tables.append(table_of(free, need, getattr(spec, "sliding_window", None), spec.block_size))
    made = Rank(grid, column, stage, specs, groups, caches, tables)
    made.memory.fill_(POISON)
    return made


def table_of(free: list[int], need: int, window: int | None, block_tokens: int) -> list[int]:
    """A table of `need` blocks: the null block where a window has given them back."""
    held = need if window is None else min(need, -(-(window - 1) // block_tokens) + 1)
    assert held <= len(free), (held, free)
    return [0] * (need - held) + free[:held]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Make ranks, and close them."""
    made = Bench(tmp_path / "model")
    yield made
    for connector in made.made:
        connector.shutdown()


# Kinds


def full(tp: int, block_tokens: int, heads: int = KV_HEADS, **more: Any) -> Any:
    given = {"num_kv_heads": max(1, heads // tp), "head_size": 8, "dtype": torch.float32, **more}
    return caching.FullAttentionSpec(block_size=block_tokens, **given)


def sliding(tp: int, block_tokens: int) -> Any:
    heads = max(1, KV_HEADS // tp)
    return caching.SlidingWindowSpec(
        block_size=block_tokens, num_kv_heads=heads, head_size=8, dtype=torch.float32, sliding_window=33
    )


def named(start: int, stop: int, spec: Any) -> dict[str, Any]:
    return {f"model.layers.{n}.mixer": spec for n in range(start, stop)}


def windowed(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    """A window whose blocks are half as large as those of full attention."""
    return [named(0, 2, full(tp, block_tokens)), named(2, 4, sliding(tp, block_tokens // 2))]


@pytest.mark.parametrize(
    ("src", "dst"),
    [(Grid(2), Grid(1, 32)), (Grid(1, 32), Grid(4, 128, "LBNHC")), (Grid(8, 128), Grid(2, 64))],
    ids=["tp2-to-1", "tp1-to-4", "copies"],
)
def test_groups_have_blocks_of_their_own_size(bench: Bench, src: Grid, dst: Grid) -> None:
    bench.hand_over(Family(windowed, rows), src, dst)


def recurrent(kind: str, **how: Any) -> Callable[[int, int], list[dict[str, Any]]]:
    """A hybrid: attention, and two groups of a recurrent kind in shapes that vLLM calculates."""
    sizes = mamba_utils.MambaStateShapeCalculator
    conv, own = torch.bfloat16, torch.float32
    shapes: dict[str, Callable[[int], tuple[Any, Any]]] = {
        "GDN": lambda tp: (sizes.gated_delta_net_state_shape(tp, 4, 8, 6, 5, 4), (conv, own)),
        "KDA": lambda tp: (sizes.kda_state_shape(tp, 4, 6), (conv, own)),
        "MAMBA1": lambda tp: (sizes.mamba1_state_shape(tp, 24, 5, 4), (conv, conv)),
        "MAMBA2": lambda tp: (sizes.mamba2_state_shape(tp, 64, 1, 8, 8, 16, 4), (conv, own)),
        "SHORT_CONV": lambda tp: (sizes.short_conv_state_shape(tp, 24, 4), (conv,)),
        "LINEAR": lambda tp: (sizes.linear_attention_state_shape(4, tp, 6), (own,)),
        "REPLICATED": lambda tp: (sizes.short_conv_state_shape(1, 24, 4), (conv,)),
    }
    vllms = {"GDN": "GDN_ATTN", "KDA": "GDN_ATTN", "REPLICATED": "SHORT_CONV"}.get(kind, kind)

    def groups(tp: int, block_tokens: int) -> list[dict[str, Any]]:
        found, dtypes = shapes[kind](tp)
        spec = caching.MambaSpec(
            block_size=block_tokens,
            shapes=found,
            dtypes=dtypes,
            mamba_type=Kinds[vllms],
            tp_replicated=kind == "REPLICATED",
            **how,
        )
        return [named(0, 2, full(tp, block_tokens)), named(2, 4, spec), named(4, 5, spec)]

    return groups


@pytest.mark.parametrize(("src", "dst"), [(Grid(2), Grid(1, 32)), (Grid(1, 32), Grid(4))], ids=["tp2-to-1", "tp1-to-4"])
@pytest.mark.parametrize("order", ["SD", "DS"])
@pytest.mark.parametrize("kind", ["GDN", "KDA", "MAMBA1", "SHORT_CONV", "LINEAR", "REPLICATED"])
def test_states_of_recurrent_layers_are_cut_where_vllm_splits_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str, order: str, src: Grid, dst: Grid
) -> None:
    mamba_utils.get_conv_state_layout.cache_clear()
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: order)
    bench.hand_over(Family(recurrent(kind), both(of_layers(0, 2), states)), src, dst)


def staged(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    """Attention, states and windows by turns, so that each of two stages has a layer of each."""
    ((_, spec),) = [*recurrent("GDN")(tp, block_tokens)[2].items()]
    made = [full(tp, block_tokens), spec, sliding(tp, block_tokens // 2)]
    return [{f"model.layers.{n}.mixer": of for n in (kind, kind + 3)} for kind, of in enumerate(made)]


def by_turns(rank: Rank, tokens: range) -> None:
    """As they are in `staged`."""
    rows(rank, tokens, [layer for layer in rank.caches if number(layer) % 3 != 1])
    states(rank, tokens)


@pytest.mark.parametrize(
    ("src", "dst"),
    [(Grid(2, pp=2), Grid(1, 32)), (Grid(1, 32), Grid(2, pp=2)), (Grid(1, pp=2), Grid(4))],
    ids=["pp2-to-1", "1-to-pp2", "pp2-to-tp4"],
)
def test_stages_of_a_hybrid_hold_a_share_of_every_kind(bench: Bench, src: Grid, dst: Grid) -> None:
    bench.hand_over(Family(staged, by_turns), src, dst)


def mamba2_of(folder: Path, groups: int) -> Any:
    """A configuration of Mamba-2, of which vLLM's model says how its groups are shared."""
    config = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "expand": 2,
        "n_groups": groups,
        "state_size": 16,
        "conv_kernel": 4,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
        "torch_dtype": "float32",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_checkpoint(folder, tiny())  # tensors that nobody computes with
    model = configs.ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0)
    model.get_total_num_kv_heads = lambda: KV_HEADS  # it has none of its own
    return model


@pytest.mark.parametrize("groups", [1, 4])
def test_groups_of_mamba2_are_shared_or_copied_as_vllm_has_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: int
) -> None:
    monkeypatch.setattr(f"{__name__}.ONE_GROUP", groups == 1)
    bench.model = mamba2_of(tmp_path / "mamba2", groups)
    sizes = mamba_utils.MambaStateShapeCalculator

    def made(tp: int, block_tokens: int) -> list[dict[str, Any]]:
        shapes = sizes.mamba2_state_shape(tp, 64, groups, 8, 8, 16, 4)
        spec = caching.MambaSpec(block_size=block_tokens, shapes=shapes, dtypes=(torch.bfloat16, torch.float32))
        return [named(0, 2, full(tp, block_tokens)), named(2, 4, spec)]

    family = Family(made, both(of_layers(0, 2), states))
    bench.hand_over(family, Grid(2), Grid(1, 32))
    bench.hand_over(family, Grid(1), Grid(4, 32))


def test_a_state_is_where_the_last_token_left_it_and_scratch_blocks_stay(bench: Bench) -> None:
    """Blocks at the end of a table are for steps of speculation, and hold nothing of the request."""
    family = Family(recurrent("GDN", num_speculative_blocks=2), both(of_layers(0, 2), states))
    bench.hand_over(family, Grid(2), Grid(1))


def latent(block_tokens: int, **more: Any) -> Any:
    return caching.MLAAttentionSpec(block_size=block_tokens, num_kv_heads=1, max_tp_shards=1, **more)


def sparse(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    """DeepSeek V3.2: a latent of 656 B a token, and index keys beside it."""
    fp8 = {"head_size": 576, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
    indexer = {"head_size": 132, "dtype": torch.uint8, "cache_role": caching.SparseCacheRole.INDEXER}
    return [named(0, 2, latent(block_tokens, **fp8)) | named(2, 4, latent(block_tokens, **indexer))]


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("tokens", [range(200), range(70, 131)], ids=["all", "part"])
def test_index_keys_move_with_their_scales(bench: Bench, layout: str, tokens: range) -> None:
    """Replicas share the work. vLLM's kernels for index keys know blocks of 64 tokens only."""
    family = Family(sparse, both(of_layers(0, 2), index_pages))
    bench.hand_over(family, Grid(4), Grid(2, 64, layout), tokens)
    logits(bench, family)


def logits(bench: Bench, family: Family) -> None:
    """vLLM's own reader of index keys, in plain torch, sees at the other end what was written at this one."""
    rank = blank(family, Grid(1), 0, 200)
    family.write(rank, range(200))
    cache = rank.caches["model.layers.2.mixer"].squeeze(1).unsqueeze(2)
    table = torch.tensor([rank.tables[0]] * 128)
    ask, ones = torch.eye(128).reshape(128, 1, 1, 128), torch.ones(128, 1)
    seen = index_keys.fp8_paged_mqa_logits_torch(ask, cache, ones, torch.full((128,), 200), table, 256)
    for token in (0, 63, 64, 199):
        key = content(2, token, 1, nbytes=128).view(torch.float8_e4m3fn).float()
        assert torch.equal(seen[:, token], key * content(2, token, 2, nbytes=4).view(torch.float32))


def deepseek_v4(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    """Two compressions, their index keys, a window and what compressors keep: pools of six geometries."""
    fp8 = {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4", "alignment": 576}
    fp8 |= {"head_size": 512, "state_content_bytes": 584}
    keys = {"head_size": 132, "dtype": torch.uint8, "alignment": 576}
    window = {"num_kv_heads": 1, "max_tp_shards": 1}
    return [
        named(0, 2, latent(block_tokens, tokens_per_state=4, **fp8))
        | named(2, 3, latent(block_tokens, tokens_per_state=128, **fp8))
        | named(3, 4, latent(block_tokens, tokens_per_state=4, **keys)),
        named(4, 6, caching.SlidingWindowMLASpec(block_size=32 * (1 + tp), sliding_window=128, **window, **fp8)),
        named(6, 7, compressor(4, 1024, 8)),
        named(7, 8, compressor(8, 512, 128)),
    ]


def compressor(block_tokens: int, size: int, window: int) -> Any:
    return caching.SlidingWindowMLASpec(
        block_size=block_tokens,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=size,
        dtype=torch.float32,
        sliding_window=window,
        alignment=576,
    )


def test_the_pools_of_deepseek_v4_move_each_in_its_own_geometry(bench: Bench) -> None:
    family = Family(deepseek_v4, both(latent_pages, index_pages, of_layers(6, 8)))
    bench.hand_over(family, Grid(1, 256), Grid(2, 256), range(300))


def ringed(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    """Latents; rings of 8 tokens as DeepSeek V4.1's, and of 16 with keys and scores as two heads: GLM-5-Next's."""
    pairs = caching.CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=24, head_size_v=0, dtype=torch.float32)
    tail = caching.CircularBufferSpec(block_size=16, num_kv_heads=2, head_size=16, head_size_v=0, dtype=torch.bfloat16)
    return [named(0, 2, latent(block_tokens, head_size=24, dtype=torch.float32)), named(2, 4, pairs), named(4, 5, tail)]


def rings(rank: Rank, tokens: range) -> None:
    """The last tokens, as vLLM's kernels have them: in the request's one block, at `position % rows`."""
    for layer, cache in rank.caches.items():
        spec = rank.specs[layer]
        if isinstance(spec, caching.CircularBufferSpec):
            (block,) = rank.tables[rank.groups[layer]]
            for token in range(tokens.stop)[-spec.block_size :]:
                for slot in range(cache.shape[1]):
                    row = cache[block, slot, token % spec.block_size]
                    row.view(torch.uint8)[:] = content(number(layer), token, slot, nbytes=row.nbytes)


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_rings_of_tokens_that_wait_to_be_compressed_move_whole(bench: Bench, layout: str) -> None:
    family = Family(ringed, both(of_layers(0, 2), rings))
    bench.hand_over(family, Grid(2), Grid(1, 32, layout))
    bench.hand_over(family, Grid(1, 32, layout), Grid(4), range(70, 131))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_nvfp4_moves_with_its_scales(bench: Bench, layout: str) -> None:
    def groups(tp: int, block_tokens: int) -> list[dict[str, Any]]:
        heads = KV_HEADS // tp
        packed = {"kv_quant_mode": caching.KVQuantMode.NVFP4, "num_head_slots": 2 * heads}
        size = {"head_size": 64, "state_content_bytes": nvfp4.nvfp4_kv_cache_full_dim(64)}
        return [named(0, 2, full(tp, block_tokens, dtype=torch.uint8, **packed, **size))]

    family = Family(groups, nvfp4_pages)
    bench.hand_over(family, Grid(2), Grid(1, 32))
    bench.hand_over(family, Grid(1, 32), Grid(4))


DRAFT = ("model.layers.2.mixer",)


def drafted(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    """A draft of one layer with half as many heads, which vLLM keeps in a group of its own."""
    return [named(0, 2, full(tp, block_tokens)), named(2, 3, full(tp, block_tokens, 2))]


def test_a_draft_with_other_heads_moves_with_its_model(bench: Bench) -> None:
    family = Family(drafted, both(of_layers(0, 2), of_layers(2, 3, 2)), DRAFT)
    bench.hand_over(family, Grid(4), Grid(1, 32))
    bench.hand_over(family, Grid(1), Grid(4, 32))


def latents_only(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    return [named(0, 3, latent(block_tokens, head_size=24, dtype=torch.float32))]


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Grid(4, 32, dcp=4), Grid(1)),
        (Grid(2), Grid(4, 32, dcp=2)),
        (Grid(4, 16, dcp=2, interleave=16), Grid(4, 32, dcp=4)),
    ],
    ids=["dcp4-to-1", "1-to-dcp2", "runs"],
)
def test_tokens_that_ranks_share_are_dealt_anew(bench: Bench, src: Grid, dst: Grid) -> None:
    bench.hand_over(Family(latents_only, rows), src, dst)


def undrafted(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    return drafted(tp, block_tokens)[:1]


def halved(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    return [named(0, 2, full(tp, block_tokens, dtype=torch.bfloat16))]


def three(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    return [named(0, 3, full(tp, block_tokens))]


PLAIN = Family(undrafted, rows)


@pytest.mark.parametrize(
    ("src", "said"),
    [
        (Family(drafted, rows, DRAFT), "full_attention 1, 16 float32, draft 1x1x2x16 float32"),
        (Family(halved, rows), "full_attention 0, 16 bfloat16 2x1x4x16 bfloat16"),
        (Family(three, rows), "full_attention 0, 16 float32 3x1x4x16 float32"),
        (Family(recurrent("GDN"), rows), "mamba 2, 6 bfloat16, q 1x3x4x6 bfloat16 1 states"),
    ],
    ids=["draft", "dtype", "layers", "states"],
)
def test_engines_whose_caches_differ_are_refused_with_both_lists(
    bench: Bench, caplog: pytest.LogCaptureFixture, src: Family, said: str
) -> None:
    """Before a byte is sent: the decode engine keeps its poison, and computes."""
    (rank,) = bench.moved(
        replace(src, write=lambda rank, tokens: None), PLAIN, Grid(2), Grid(1, 32), range(TOKENS), True
    )
    (line,) = [record.getMessage() for record in caplog.records if "was not received" in record.getMessage()]
    assert said in line
    assert "full_attention 0, 16 float32 2x1x4x16 float32" in line
    assert (rank.memory == POISON).all()


def narrow(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    indexer = {"head_size": 68, "dtype": torch.uint8, "cache_role": caching.SparseCacheRole.INDEXER}
    return [named(0, 2, latent(block_tokens, **indexer))]


def stateful(tp: int, block_tokens: int) -> list[dict[str, Any]]:
    spec = caching.MambaSpec(block_size=block_tokens, shapes=((4, 8),), dtypes=(torch.float32,))
    return [named(0, 2, spec)]


@pytest.mark.parametrize(
    ("groups", "grid", "said"),
    [
        (ringed, Grid(2, dcp=2), "CircularBufferSpec with decode context parallelism of 2"),
        (narrow, Grid(), "MLAAttentionSpec with 68 B a row, indexer role"),
        (stateful, Grid(), r"kind MAMBA2 with 1 states \(\(4, 8\),\); not 2"),
        (sparse, Grid(1, 128), "128 rows, a row every 132 B; those of index keys, index scales have 1 x 64"),
        (recurrent("GDN"), Grid(2, dcp=2), "MambaSpec with decode context parallelism of 2"),
        (latents_only, Grid(4, 32, dcp=2, interleave=16), r"runs of 16 tokens on each of 2 ranks, in pages of \[32\]"),
    ],
    ids=["dcp-ring", "fp4-keys", "states", "blocks", "dcp-states", "runs"],
)
def test_what_cannot_be_cut_is_refused_with_its_values(
    bench: Bench, groups: Callable[[int, int], list[dict[str, Any]]], grid: Grid, said: str
) -> None:
    with pytest.raises(KvmoverError, match=said):
        bench.side("prefill", Family(groups, rows), grid, TOKENS)


def test_nvfp4_of_blackwells_own_kernels_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """How they order the scales of values is not described by anything that vLLM says."""
    platform = import_module("vllm.platforms").current_platform
    monkeypatch.setattr(
        type(platform), "is_device_capability_family", classmethod(lambda cls, family, *_: family == 100)
    )

    def groups(tp: int, block_tokens: int) -> list[dict[str, Any]]:
        packed = {"kv_quant_mode": caching.KVQuantMode.NVFP4, "num_head_slots": 8, "state_content_bytes": 36}
        return [named(0, 2, full(tp, block_tokens, dtype=torch.uint8, **packed, head_size=64))]

    with pytest.raises(KvmoverError, match="quantised as NVFP4, with 8 slots for 4 heads on sm_100"):
        bench.side("prefill", Family(groups, rows), Grid(), TOKENS)
