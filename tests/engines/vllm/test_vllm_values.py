"""What of the vLLM connector needs no vLLM: its tensors as values, parameters, options, versions, and cards."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from kvmover.config import ConfigError
from kvmover.engines.common import (
    Cards,
    CardServer,
    EngineUnsupported,
    LastTurn,
    ParallelRank,
    Remote,
    RequestAsk,
    Running,
    Serve,
    answer,
    answer_of_turn,
    asked,
    fetch_cards,
)
from kvmover.engines.vllm.block_store import page_of
from kvmover.engines.vllm.caches import (
    CacheGroup,
    ComponentCache,
    LayerCache,
    ModelTotals,
    StoredRows,
    component_caches,
    lies_in,
    number_of,
    of_all_stages,
    pools_of,
)
from kvmover.engines.vllm.vllm_options import ConnectorOptions, parse
from kvmover.errors import TransportError
from kvmover.layout import Codec, Span
from kvmover.store import PagePart
from kvmover.transfer import Content
from kvmover.transport import Memory, MemoryKind

LAYERS, BLOCKS, TOKENS, CONTENT = 4, 6, 8, 10
NAMES = tuple(f"model.layers.{n}.self_attn.attn" for n in range(LAYERS))
FULL = CacheGroup(NAMES, "full_attention", TOKENS)

#: vLLM's layouts, as axes of [layer, block, head, token, content] from the outermost on.
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def caches(
    layout: str, heads: int, layers: int = LAYERS, kernel: int = TOKENS
) -> tuple[torch.Tensor, list[LayerCache]]:
    """The allocation, flat, and the caches of its layers; blocks are split for the kernel."""
    extents = {"L": layers, "B": BLOCKS * (TOKENS // kernel), "H": heads, "N": kernel, "C": CONTENT}
    whole = torch.zeros([extents[axis] for axis in layout], dtype=torch.int16)
    view = whole.permute([layout.index(axis) for axis in "LBHNC"])
    layer_caches = [
        LayerCache(NAMES[n], view[n].data_ptr(), tuple(view[n].shape), tuple(view[n].stride()), "int16")
        for n in range(layers)
    ]
    return whole.flatten(), layer_caches


def one(layer_caches: list[LayerCache], heads: int, place: ParallelRank, layers: int = LAYERS) -> ComponentCache:
    (component_cache,) = component_caches([FULL], layer_caches, BLOCKS, ModelTotals(heads), place)
    return component_cache


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_puts_a_row_where_vllm_has_it(layout: str) -> None:
    whole, layer_caches = caches(layout, heads=2)
    for number, value in enumerate(whole):
        value.fill_(number)
    component_cache = one(layer_caches, 2, ParallelRank(0, 1))
    (pool,) = pools_of([component_cache], whole.view(torch.uint8))
    for layer, layer_cache in enumerate(layer_caches):
        theirs = whole.as_strided(layer_cache.shape, layer_cache.stride, (layer_cache.address - whole.data_ptr()) // 2)
        assert torch.equal(pool.plane(layer, 0), theirs.transpose(1, 2))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_blocks_that_a_kernel_splits_are_pages_of_its_own(layout: str) -> None:
    _, layer_caches = caches(layout, heads=2, kernel=4)
    component_cache = one(layer_caches, 2, ParallelRank(0, 1))
    assert (component_cache.ratio, component_cache.spec.pages, component_cache.spec.page_tokens) == (2, 2 * BLOCKS, 4)


def test_split_blocks_are_whole_again_for_the_store_where_their_tokens_lie_evenly() -> None:
    whole, layer_caches = caches("LBNHC", heads=2, kernel=4)
    component_cache = one(layer_caches, 2, ParallelRank(0, 1))
    spec = component_cache.blocks(BLOCKS)
    assert (spec.pages, spec.page_tokens, spec.layout.elements) == (BLOCKS, TOKENS, whole.numel())
    with pytest.raises(EngineUnsupported, match="heads outermost.*--block-size 4"):
        one(caches("LBHNC", heads=2, kernel=4)[1], 2, ParallelRank(0, 1)).blocks(BLOCKS)


@pytest.mark.parametrize(("heads", "tp"), [(8, 1), (8, 2), (8, 8), (2, 4), (1, 8)])
def test_ranks_hold_the_heads_that_vllm_gives_them(heads: int, tp: int) -> None:
    """vLLM: `max(1, heads // tp)` on each rank, a head on neighbours where there are more ranks."""
    for rank in range(tp):
        held = max(1, heads // tp)
        component_cache = one(caches("LBNHC", held)[1], heads, ParallelRank.from_rank(rank, tp, 1))
        assert component_cache.spec.layout.extent_of("head") == held
        part = PagePart.held(component_cache.component, ParallelRank.from_rank(rank, tp, 1).fleet(TOKENS), rank, TOKENS)
        assert part.box.heads == Span(rank * heads // tp, held)


def test_a_latent_is_a_head_that_all_ranks_hold() -> None:
    group = CacheGroup(NAMES, "mla_attention", TOKENS)
    for rank in range(4):
        (component_cache,) = component_caches(
            [group], caches("LBNHC", 1)[1], BLOCKS, ModelTotals(8), ParallelRank.from_rank(rank, 4, 1)
        )
        assert (component_cache.component.heads, component_cache.component.dim) == (1, CONTENT)


def test_stages_hold_layers_of_the_whole_model() -> None:
    layer_caches = caches("LBNHC", 2)[1]
    group = CacheGroup(NAMES[2:], "full_attention", TOKENS)
    held = component_caches([group], layer_caches[2:], BLOCKS, ModelTotals(2), ParallelRank.from_rank(1, 1, 2))
    (component_cache,) = of_all_stages(held, {held[0].component.name: 4})
    assert component_cache.spec.component == component_cache.component
    assert (
        component_cache.component.layers,
        component_cache.spec.layout.extent_of("layer"),
        component_cache.layers,
    ) == (4, 2, NAMES[2:])


def test_quantised_caches_of_different_kinds_are_different_components() -> None:
    layer_caches = [LayerCache(s.layer, s.address, s.shape, s.stride, "uint8") for s in caches("LBNHC", 2)[1]]
    names = {
        component_caches([FULL], layer_caches, BLOCKS, ModelTotals(2, kv_dtype), ParallelRank(0, 1))[0].component.name
        for kv_dtype in ("fp8_e4m3", "fp8_e5m2")
    }
    assert len(names) == 2
    wide = {one(caches("LBNHC", 2)[1], 2, ParallelRank(0, 1)).component.name}
    assert not names & wide


def test_an_fp8_cache_is_the_same_component_as_a_wide_one_stored_in_another_form() -> None:
    codec = Codec.fp8("bfloat16", CONTENT // 2, CONTENT // 2)
    stored = {name: StoredRows(codec, (n + 1.0, n + 1.5)) for n, name in enumerate(NAMES)}
    narrow = [LayerCache(s.layer, s.address, s.shape, s.stride, "float8_e4m3fn") for s in caches("LBNHC", 2)[1]]
    wide = [LayerCache(s.layer, s.address, s.shape, s.stride, "bfloat16") for s in caches("LBNHC", 2)[1]]
    place, whole = ParallelRank(0, 1), ModelTotals(2, "fp8_e4m3")
    (fp8,) = component_caches([replace(FULL, stored=stored)], narrow, BLOCKS, whole, place)
    (bf16,) = component_caches([FULL], wide, BLOCKS, ModelTotals(2), place)
    assert fp8.component.meant == bf16.component
    assert fp8.component.codec == codec
    assert fp8.spec.scales == (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)
    (opaque,) = component_caches([FULL], narrow, BLOCKS, whole, place)
    assert opaque.component.meant != bf16.component


def test_groups_are_components_and_a_window_keeps_what_the_next_token_sees() -> None:
    layer_caches = caches("LBNHC", 2)[1]
    groups = [
        CacheGroup(NAMES[::2], "full_attention", TOKENS),
        CacheGroup(NAMES[1::2], "sliding_window", TOKENS, window=17),
    ]
    full, sliding = component_caches(groups, layer_caches, BLOCKS, ModelTotals(2), ParallelRank(0, 1))
    assert (full.group, full.component.window, full.component.layers) == (0, None, 2)
    assert (sliding.group, sliding.component.window, sliding.layers) == (1, 16, NAMES[1::2])


def test_layers_of_other_shapes_in_a_group_are_components_of_their_own() -> None:
    """As the index keys of sparse attention beside its latents."""
    wide, narrow = caches("LBNHC", 1)[1], caches("LBHNC", 1)[1]
    short = [LayerCache(s.layer + ".k", s.address, (*s.shape[:3], 4), s.stride, s.dtype) for s in narrow]
    group = CacheGroup((*NAMES, *(s.layer for s in short)), "mla_attention", TOKENS)
    made = component_caches([group], [*wide, *short], BLOCKS, ModelTotals(8), ParallelRank.from_rank(1, 2, 1))
    assert [(component_cache.group, component_cache.component.dim) for component_cache in made] == [
        (0, CONTENT),
        (0, 4),
    ]


def test_layers_that_lie_unevenly_have_an_allocation_each() -> None:
    layer_caches = caches("LBNHC", 2)[1]
    uneven = [layer_caches[0], layer_caches[1], layer_caches[3]]
    group = CacheGroup(tuple(layer_cache.layer for layer_cache in uneven), "full_attention", TOKENS)
    (component_cache,) = component_caches([group], uneven, BLOCKS, ModelTotals(2), ParallelRank(0, 1))
    assert component_cache.spec.separate == ("layer",)
    assert component_cache.starts == tuple(layer_cache.address for layer_cache in uneven)


@pytest.mark.parametrize(
    ("group", "layer_caches", "heads", "said"),
    [
        (CacheGroup(NAMES, "cross_attention", TOKENS), caches("LBNHC", 2)[1], 2, "of kind cross_attention"),
        (
            CacheGroup((*NAMES, "model.layers.4"), "full_attention", TOKENS),
            caches("LBNHC", 2)[1],
            2,
            "for model.layers.4",
        ),
        (CacheGroup(NAMES, "full_attention", 4 * TOKENS), caches("LBNHC", 2)[1], 2, "a row must be a token"),
        (FULL, caches("LBNHC", 2)[1], 4, "has 2 heads; of 4 this rank holds"),
        (FULL, caches("LBNHC", 2)[1][:2] + caches("LBHNC", 2)[1][2:], 2, "do not lie alike"),
    ],
    ids=["kind", "missing", "compressed", "heads", "strides"],
)
def test_caches_that_are_not_rows_of_tokens_are_refused(
    group: CacheGroup, layer_caches: list[LayerCache], heads: int, said: str
) -> None:
    with pytest.raises(EngineUnsupported, match=said):
        component_caches([group], layer_caches, BLOCKS, ModelTotals(heads), ParallelRank(0, 1))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("model.layers.12.self_attn.attn", (12,)), ("draft.3.layers.0", (3, 0)), ("layer12", ()), ("v2.layers.7", (7,))],
)
def test_layers_are_ordered_by_the_numbers_in_their_names(name: str, numbers: tuple[int, ...]) -> None:
    assert number_of(name) == numbers


REMOTE = Remote("engine", "p-1", "10.0.0.1", 5600)
PROMPT = Content(3, bytes(range(16)))


def test_the_answer_of_a_prefill_is_what_the_decode_engine_asks_by() -> None:
    assert asked(answer(REMOTE, PROMPT), "d-1").whole == REMOTE


def test_a_prefill_is_known_by_its_own_id_or_by_that_of_the_proxy() -> None:
    assert asked({"do_remote_decode": True}, "p-1").whole == Serve("p-1")
    assert asked({"do_remote_decode": True, "transfer_id": "both"}, "p-1").whole == Serve("both")
    both = answer(REMOTE, PROMPT) | {"remote_request_id": None, "transfer_id": "both"}
    assert asked(both, "d-1").whole == Remote("engine", "both", "10.0.0.1", 5600)


ROOM = {"bootstrap_host": "10.0.0.2", "bootstrap_port": 8998, "bootstrap_room": 7001}


def test_between_engines_of_unlike_make_a_room_is_the_requests_name() -> None:
    """Whoever answers at the address has it: a room does not name its engine."""
    assert asked({"do_remote_decode": True, **ROOM}, "p-1").whole == Serve("7001")
    assert asked({"do_remote_prefill": True, **ROOM}, "d-1").whole == Remote("", "7001", "10.0.0.2", 8998)
    assert asked({"do_remote_prefill": True, **ROOM, "bootstrap_room": "0"}, "d-1").whole == Remote(
        "", "0", "10.0.0.2", 8998
    )
    assert asked(answer(REMOTE, PROMPT) | {"bootstrap_room": 7001}, "d-1").whole == REMOTE
    for key, bad in (
        ("bootstrap_room", -1),
        ("bootstrap_room", 1 << 63),
        ("bootstrap_port", 0),
        ("bootstrap_host", ""),
    ):
        with pytest.raises(ValueError, match=f"kv_transfer_params of d-1: .*{key}"):
            asked({"do_remote_prefill": True, **ROOM, key: bad}, "d-1")


def test_what_a_decode_has_kept_is_told_with_its_content() -> None:
    last = LastTurn(REMOTE, PROMPT)
    assert asked(answer_of_turn(last), "p-2").whole == Serve("p-2", last)
    for key in ("remote_request_id", "remote_num_tokens", "kvmover_content"):
        assert asked(answer_of_turn(last) | {key: None}, "p-2").whole == Serve("p-2")
    assert asked(answer_of_turn(last) | {"remote_num_tokens": 4}, "p-2").whole == Serve("p-2")


def test_a_prefill_names_its_prompt_and_for_how_many_it_is() -> None:
    assert asked(answer(REMOTE, PROMPT), "d-1") == RequestAsk(REMOTE, None, PROMPT)
    assert asked(answer(REMOTE, PROMPT, 4), "d-1") == RequestAsk(REMOTE, None, PROMPT, 4)
    unknown = asked(answer(REMOTE, Content(3, unknown="an image")), "d-1").content
    assert unknown == Content(3, unknown="as its prefill says")
    without = {key: value for key, value in answer(REMOTE, PROMPT).items() if not key.startswith("kvmover")}
    assert asked(without, "d-1") == RequestAsk(REMOTE)


@pytest.mark.parametrize("said", ["", "3", ":", "3:ab", "-3:" + "00" * 16, "3:" + "AB" * 16, "3:" + "00" * 17, 7])
def test_a_content_that_makes_no_sense_is_refused_by_name(said: object) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params of d-1: .*kvmover_content"):
        asked({**answer(REMOTE, PROMPT), "kvmover_content": said}, "d-1")


@pytest.mark.parametrize("port", [5600, "5600", 5600.0])
def test_a_port_is_a_port_in_whatever_spelling_a_router_hands_it_on(port: object) -> None:
    assert asked({**answer(REMOTE, PROMPT), "remote_port": port}, "d-1").whole == replace(REMOTE, port=5600)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("remote_port", port) for port in ("z", -1, 0, 1 << 16, 1e9, 1.5, True, [9], {}, float("inf"), float("nan"))),
        *(("remote_engine_id", name) for name in (7, [], {"a": 1}, "", "x" * 513)),
        *(("remote_request_id", name) for name in (7, ["a"], "", "x" * 513)),
        *(("remote_host", host) for host in (7, {}, "", "a" * 70_000)),
        ("do_remote_decode", 7),
        ("do_remote_prefill", "perhaps"),
        ("transfer_id", [None]),
    ],
)
def test_parameters_that_make_no_sense_are_refused_by_name(key: str, value: object) -> None:
    """A client writes them, and the scheduler that reads them serves everybody."""
    with pytest.raises(ValueError, match=f"kv_transfer_params of d-1: .*{key}"):
        asked({**answer(REMOTE, PROMPT), key: value}, "d-1")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False, "remote_host": "x"}])
def test_other_requests_concern_nobody_else(params: dict[str, object] | None) -> None:
    assert asked(params, "r") == RequestAsk()


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_host", "remote_port", "remote_request_id"])
def test_parameters_that_lack_something_say_what(key: str) -> None:
    with pytest.raises(ValueError, match=f"kv_transfer_params of d-1 have no {key}"):
        asked({name: value for name, value in answer(REMOTE, PROMPT).items() if name != key}, "d-1")


def test_a_request_that_moves_says_what_is_there_and_may_move_on() -> None:
    where = {**answer(REMOTE, PROMPT), "remote_num_tokens": 140}
    assert asked(where, "d-1") == RequestAsk(Running(REMOTE, 140))
    assert asked({**where, "kvmover_copy": True}, "d-1") == RequestAsk(Running(REMOTE, 140, goes_on=True))
    assert asked({**where, "kvmover_movable": "r-2"}, "d-1") == RequestAsk(Running(REMOTE, 140), "r-2")
    assert asked({"kvmover_movable": "r-1"}, "d-1") == RequestAsk(None, "r-1")
    assert asked({**answer(REMOTE, PROMPT), "kvmover_movable": "r-1"}, "d-1") == RequestAsk(REMOTE, "r-1", PROMPT)
    assert asked({"do_remote_decode": True, "kvmover_movable": "r-1"}, "p-1") == RequestAsk(Serve("p-1"))
    for key, bad in (("kvmover_movable", ""), ("kvmover_movable", [7]), ("kvmover_copy", "perhaps")):
        with pytest.raises(ValueError, match=f"kv_transfer_params of d-1: .*{key}"):
            asked({**where, key: bad}, "d-1")


def test_options_are_checked_by_name_and_range() -> None:
    assert parse({"tenant": "t", "port": 0})[0] == ConnectorOptions(tenant="t")
    for key, value in (("rooot", "/tmp"), ("port", -1), ("arena_bytes", 0), ("route", "scenic")):
        with pytest.raises(ConfigError, match=rf"vLLM connector: .*{key}|vLLM connector: .*{value}"):
            parse({key: value})


def test_without_vllm_the_connector_says_so_and_imports_nothing_of_it() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, kvmover.engines.vllm as v\n"
            "try: v.KvmoverConnector\nexcept Exception as error: print(error)\n"
            "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch', 'nixl')])",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["vllm is not installed; kvmover.engines.vllm is loaded by vLLM", "[]"]


def test_hashes_of_any_length_name_pages() -> None:
    whole = bytes(range(32))
    assert page_of(whole) == whole
    assert len(page_of(whole[:16])) == 32
    assert page_of(whole[:16]) != page_of(whole[:15])


def test_cards_are_served_until_the_server_closes() -> None:
    desk = CardServer("127.0.0.1", 0)
    try:
        with pytest.raises(TransportError, match="HTTP 503"):
            fetch_cards("127.0.0.1", desk.port)
        desk.lay_out("engine", [b"one", b"two"])
        assert fetch_cards("127.0.0.1", desk.port) == Cards("engine", (b"one", b"two"))
        desk.lay_out("engine", [b"three"])
        assert fetch_cards("127.0.0.1", desk.port).cards == (b"three",)
    finally:
        desk.close()
    with pytest.raises(TransportError, match=f"no cards from 127.0.0.1:{desk.port}"):
        fetch_cards("127.0.0.1", desk.port)


def test_a_stranger_at_the_port_is_no_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        from threading import Thread

        def talk() -> None:
            caller = stranger.accept()[0]
            with caller:
                caller.recv(1000)
                caller.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nnope")

        thread = Thread(target=talk)
        thread.start()
        with pytest.raises(TransportError, match=f"no cards from 127.0.0.1:{port}"):
            fetch_cards("127.0.0.1", port)
        thread.join()


def test_what_lies_in_the_backing_needs_no_registration_of_its_own() -> None:
    whole = Memory(MemoryKind.HOST, 1 << 20, 4096, 0)
    for start, nbytes in product((-1, 0, 1, 4000), (96, 4096)):
        inner = Memory(MemoryKind.HOST, (1 << 20) + start, nbytes, 0)
        assert lies_in(inner, whole) == (start >= 0 and start + nbytes <= 4096)
    assert not lies_in(Memory(MemoryKind.HOST, 1 << 20, 1, 1), whole)
