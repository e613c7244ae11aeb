"""The C core does what the Python that defines it does: state for state, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from engine import Engine, said

from kvmover.cache.prefix import (
    FULL,
    HAZARD,
    LFU,
    EvictionGranularity,
    KeyUnits,
    KVEvent,
    PrefixError,
    PrefixTree,
    SlidingWindow,
    State,
    Tier,
    WriteBack,
    WriteThrough,
    forest,
    hashes,
    keys,
)
from kvmover.cache.prefix.eviction_policy import Order, Recency
from kvmover.cache.prefix.node import Node
from tests.proofs import tries
from tests.sanitised import told

#: `KVMOVER_HISTORIES=50` runs fifty times as many.
MORE = int(os.environ.get("KVMOVER_HISTORIES", "1"))
PAGES = 48
SHAPES: dict[str, dict] = {
    "plain": {},
    "write through": {"tiers": WriteThrough(2)},
    "write back": {"tiers": WriteBack()},
    "hazard": {"policy": HAZARD},
    "hazard, write back": {"policy": HAZARD, "tiers": WriteBack()},
    "hazard, window and state": {"policy": HAZARD, "components": (SlidingWindow(4), State()), "tiers": WriteThrough()},
    "ranked": {"policy": LFU, "tiers": WriteThrough()},
    "whole nodes": {"grain": EvictionGranularity.NODE, "tiers": WriteThrough()},
    "bigrams": {"units": KeyUnits.BIGRAM, "tiers": WriteThrough()},
    "window": {"components": (SlidingWindow(3),)},
    "window and state": {"components": (SlidingWindow(4), State()), "tiers": WriteThrough()},
    "state and two windows": {"components": (State(), SlidingWindow(3, "short"), SlidingWindow(7, "long", rank=2))},
    "hazard, window": {"policy": HAZARD, "components": (SlidingWindow(4),)},
}
#: The same, and what a sink hears of it.
HEARD = ("plain", "write through", "write back", "window")
SHAPES |= {f"{name}, heard": {**SHAPES[name], "sink": None} for name in HEARD}
built = pytest.mark.skipif(forest.C_CORE is None, reason="the C core was not built")


@pytest.fixture(scope="module", autouse=True)
def used_core() -> None:
    """Here both are used, each where a test says so."""


def engine(of: forest.TreeCore | None, shape: dict) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "C_CORE", None if of is forest.PYTHON_CORE else of)
        events: list[KVEvent] = []
        mine = Engine(PrefixTree(2, **({**shape, "sink": events.append} if "sink" in shape else shape)), PAGES)
        mine.__dict__["heard"] = events
        return mine


def heard(mine: Engine) -> list[KVEvent]:
    """What its sink was told."""
    return mine.__dict__["heard"]


Turn = Callable[[Engine], object]


def turn(rng: random.Random) -> Turn:
    """One call, drawn before it is made of either tree."""
    text = rng.choice([[0] * 14, [0] * 6 + [1] * 8, [1] * 14])
    tokens = text[: rng.randrange(1, 15)] + [rng.randrange(3) for _ in range(rng.choice([0, 0, 3]))]
    count, which, done = rng.randrange(6), rng.randrange(99), rng.choice([None, None, 0, 1, 3])
    turns: list[tuple[int, Turn]] = [
        (6, lambda mine: insert(mine, tokens, count, which % 2)),
        (4, lambda mine: serve(mine, tokens, count, which % 2)),
        (3, lambda mine: mine.tree.match(tokens, limit_tokens=which if which < 14 else None)),
        (1, lambda mine: mine.tree.look(tokens)),
        (2, lambda mine: keep(mine, tokens)),
        (2, lambda mine: let_go(mine, which)),
        (3, lambda mine: give_up(mine, count, which)),
        (1, lambda mine: give_up_all(mine, count, which % 5)),
        (2, lambda mine: copy(mine, tokens, Tier.HOST)),
        (2, lambda mine: copy(mine, tokens, Tier.DEVICE)),
        (2, lambda mine: fetch(mine, tokens)),
        (3, lambda mine: end(mine, which, done)),
        (1, lambda mine: mine.tree.page_hashes(mine.tree.match(tokens).device_node)),
    ]
    return rng.choices([each for _, each in turns], [weight for weight, _ in turns])[0]


def short(mine: Engine, count: int, name: str, tier: Tier) -> bool:
    """Whether a pool has too few pages even after an eviction."""
    missing = count - len(mine.free[name, tier])
    if missing > 0:
        (mine.evict if tier is Tier.DEVICE else mine.evict_host)(missing, name)
    return count > len(mine.free[name, tier])


def insert(mine: Engine, tokens: list[int], window: int, state: int) -> object:
    units = len(tokens) - (int(mine.tree.config.units) - 1)
    pages, held = units // 2, {}
    for component in mine.tree.config.components:
        held[component.name] = min(window if component.per_page else state, pages)
    if any(short(mine, count, name, Tier.DEVICE) for name, count in [(FULL, pages), *held.items()]):
        return None
    return mine.insert(tokens, held)


def serve(mine: Engine, tokens: list[int], window: int, state: int) -> object:
    """A request: it computes what it does not find, and brings windows and a state for the end of that."""
    tree = mine.tree
    match = tree.match(tokens)
    handle = tree.lock(match.device_node)
    units = len(tokens) - (int(tree.config.units) - 1)
    first, pages = match.tokens // 2, units // 2
    held = {each.name: min(window if each.per_page else state, pages - first) for each in tree.config.components}
    told = None
    if not any(short(mine, count, name, Tier.DEVICE) for name, count in [(FULL, pages - first), *held.items()]):
        told = mine.insert(tokens, held, first_page=first)
    tree.unlock(handle)
    return match, told


def keep(mine: Engine, tokens: list[int]) -> object:
    handles = mine.__dict__.setdefault("handles", [])
    if len(handles) < 4:
        handles.append(mine.tree.lock(mine.tree.match(tokens).best_node))
        return handles[-1].node
    return None


def let_go(mine: Engine, which: int) -> None:
    if handles := mine.__dict__.get("handles"):
        mine.tree.unlock(handles.pop(which % len(handles)))


def give_up(mine: Engine, pages: int, which: int) -> object:
    names = [FULL, *(component.name for component in mine.tree.config.components)]
    name, tiers = names[which % len(names)], mine.tree.config.tiers
    if which % 5 == 0 and mine.tree._forest.hosted:
        return mine.evict_host(pages, name)
    room = mine.free[FULL, Tier.HOST][: which % 4] if isinstance(tiers, WriteBack) else []
    return mine.apply(mine.tree.evict(pages, name, room=room))


def give_up_all(mine: Engine, pages: int, others: int) -> object:
    """Of every component, in steps."""
    wanted = {FULL: pages, **{each.name: others for each in mine.tree.config.components}}
    return [mine.apply(each) for each in mine.tree.evict_in_steps(wanted)]


def copy(mine: Engine, tokens: list[int], dst: Tier) -> object:
    match, tree = mine.tree.match(tokens), mine.tree
    if not tree._forest.hosted or match.waits or (dst is Tier.HOST and isinstance(tree.config.tiers, WriteBack)):
        return None
    handle = tree.lock(match.best_node)
    ask = tree.backup_needs if dst is Tier.HOST else tree.load_needs
    for name, count in ask(match.best_node).items():
        if short(mine, count, name, dst):
            break
    needs = ask(match.best_node)
    told = None
    if needs and all(count <= len(mine.free[name, dst]) for name, count in needs.items()):
        told = (mine.backup if dst is Tier.HOST else mine.load)(match.best_node)
    tree.unlock(handle)
    return told


def fetch(mine: Engine, tokens: list[int]) -> object:
    if not mine.tree._forest.hosted or mine.tree.config.units is KeyUnits.BIGRAM:
        return None
    return None if short(mine, len(tokens) // 2, FULL, Tier.HOST) else mine.fetch(tokens, 0)


def end(mine: Engine, which: int, done: int | None) -> object:
    ops = sorted([*mine.transfers, *mine.fetches])
    return mine.end(ops[which % len(ops)], done) if ops else None


def state(tree: PrefixTree) -> list[object]:
    """Every column of every node, every sum and every order."""
    forest = tree._forest
    sets = [forest.device, forest.host, *forest.held_device, *forest.held_host]
    orders = [each.order for each in sets] + [forest.doubles]
    return [
        sorted((column(node) for node in forest), key=lambda each: each[0]),
        [(each.evictable, each.protected) for each in sets],
        [[node.id for node in listed(order)] for order in orders],
        (forest.columns.clock, forest.columns.next_id, len(forest.nodes), list(forest.roots)),
    ]


def listed(order: Order) -> list[Node]:
    """First what goes first; by other policies than LRU, that one alone."""
    if hasattr(order, "__iter__"):
        return list(cast("Recency", order))
    first = order.first()
    return [first] * len(order) if first is not None else []


def column(node: Node) -> tuple:
    names = [name for name in Node.__struct_fields__ if name not in ("parent", "children", "held")]
    return (
        *(getattr(node, name) for name in names),
        node.parent and node.parent.id,
        {page: child.id for page, child in node.children.items()},
        [(each.pages, each.host, each.locks, each.host_locks, each.busy) for each in node.held],
    )


@built
@pytest.mark.parametrize("shape", SHAPES)
def test_any_history_leaves_both_cores_in_the_same_state(shape: str) -> None:
    for seed in range(12 * MORE):
        rng = random.Random(f"{shape} {seed}")
        pair = [engine(each, SHAPES[shape]) for each in (forest.C_CORE, forest.PYTHON_CORE)]
        assert type(pair[0].tree._forest.columns) is not type(pair[1].tree._forest.columns)
        for _ in range(120):
            call, told = turn(rng), []
            for mine in pair:
                try:
                    told.append(said(call(mine)))
                except PrefixError as error:
                    told.append(type(error))
            assert repr(told[0]) == repr(told[1])
            assert counted(pair[0].tree) == counted(pair[1].tree)
            assert heard(pair[0]) == heard(pair[1])
        for mine in pair:
            mine.tree.check()


#: (core, shape) of trees that go the straight way.
STRAIGHT = [
    pytest.param(core, shape, id=f"{name}, {shape}", marks=built)
    for name, core in (("python", forest.PYTHON_CORE), ("c", forest.C_CORE))
    for shape, given in SHAPES.items()
    if given.get("policy") is not LFU and "grain" not in given
    if "components" not in given or (name == "c" and "tiers" not in given)
]


@pytest.mark.parametrize(("core", "shape"), STRAIGHT)
def test_any_history_goes_the_straight_way_as_the_general_one(core: forest.TreeCore, shape: str) -> None:
    """Both trees could go it, and the second has been told to go the general way."""
    for seed in range(12 * MORE):
        rng = random.Random(f"{shape} straight {seed}")
        pair = [engine(core, SHAPES[shape]) for _ in range(2)]
        assert pair[0].tree._straight is not None
        pair[1].tree._straight = None
        for _ in range(120):
            call, told = turn(rng), []
            for mine in pair:
                try:
                    told.append(said(call(mine)))
                except PrefixError as error:
                    told.append((type(error), str(error)))
            assert repr(told[0]) == repr(told[1])
            assert counted(pair[0].tree) == counted(pair[1].tree)
            assert heard(pair[0]) == heard(pair[1])
        for mine in pair:
            mine.tree.check()


def counted(tree: PrefixTree) -> list[object]:
    """The state of a tree, but for the hits of nodes where nothing asks for them."""
    nodes, *rest = state(tree)
    if not tree._forest.hosted and tree._forest.by_use:
        at = Node.__struct_fields__.index("hits") - 2  # without parent and children
        nodes = [(*node[:at], *node[at + 1 :]) for node in cast("list[tuple]", nodes)]
    return [nodes, *rest]


@built
def test_no_call_of_a_request_on_one_tier_is_left_to_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows and a state too, and where another request has brought the pages meanwhile."""
    tree = engine(forest.C_CORE, SHAPES["state and two windows"]).tree
    tree.insert(range(8), range(4), held={"state": [0], "short": range(2), "long": range(4)})
    straight = tree._straight
    assert straight is not None
    monkeypatch.setattr("kvmover.cache.prefix.tree.Insertion", None)
    monkeypatch.setattr("kvmover.cache.prefix.tree.Eviction", None)
    monkeypatch.setattr("kvmover.cache.prefix.tree.matched", None)
    match = tree.match(range(30))
    handle = tree.lock(match.device_node)
    tree.insert(range(30), range(4, 15), first_page=4, held={"state": [1], "short": range(2, 4), "long": range(4, 8)})
    tree.unlock(handle)
    twice = {FULL: [*range(20, 26), *range(27, 31)], "long": [20, 21, 22], "state": [7]}
    ids, window = [*twice[FULL][:6], 10, *twice[FULL][6:]], [20, 21, 6, 22]
    again = tree.insert(range(30), ids, first_page=4, held={"long": window, "state": [7]})
    assert {name: again.page_ids(name).tolist() for name in twice} == twice
    freed = tree.evict(1)
    assert [len(freed.page_ids(name)) for name in (FULL, "state", "short", "long")] == [2, 1, 2, 2]
    assert len(tree.evict(1, "long").page_ids("long")) == 2
    tree.check()


@built
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_that_is_gone_leaves_no_node_and_no_page(shape: str) -> None:
    """Nodes are not seen by Python's collector, so a reference too many would stay for ever."""
    nodes, whole = [], engine(forest.C_CORE, SHAPES[shape])
    rng = random.Random(5)
    for _ in range(300):
        call = turn(rng)
        try:
            call(whole)
        except PrefixError:
            continue
    kept = list(whole.tree._forest)
    nodes = [(node, node.tokens, node.pages) for node in kept]
    del kept, call
    columns = whole.tree._forest.columns
    del whole
    gc.collect()
    assert sys.getrefcount(columns) == 2
    del columns
    for node, _, _ in nodes:
        assert sys.getrefcount(node) == 3  # the tuple, the loop and the call
        assert node.parent is None
    assert nodes


@built
@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [0],
        [0, 1, 255, 256, 1 << 29, (1 << 30) - 1, 1 << 30, (1 << 32) - 1],
        [1, -1],
        [1, 1 << 32],
        [1, 1 << 64],
        [1, -(1 << 70)],
        [True, 2],
        [1.5],
        ["1"],
        [[1]],
        (3, 4),
        range(5),
        array("I", [1, 2]),
        array("q", [1, 2, 1 << 31]),
        array("q", [-1]),
        array("H", [7, 8]),
        np.array([1, 2], np.int64),
        np.array([1, -2], np.int64),
        np.array([1, 2, 3, 4], np.int64)[::2],
        np.array([1, 2, 3, 4], np.int32)[::-1],
        np.array([[1, 2]], np.int32),
        np.array([1, 2], ">i4"),
        np.array([1, 2], ">i8"),
        np.array([1.0], np.float32),
        np.array([1], np.uint8),
        np.array([], np.int64),
        b"ab",
    ],
    ids=repr,
)
def test_both_cores_take_and_refuse_the_same_tokens(tokens: object, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for native in (keys.NATIVE, None):
        monkeypatch.setattr(keys, "NATIVE", native)
        try:
            told.append(keys.words(tokens))
        except PrefixError as error:
            told.append(str(error))
    assert told[0] == told[1]


@built
def test_words_of_long_lists_and_rows_are_those_of_numpy() -> None:
    row = np.random.default_rng(3).integers(0, 1 << 32, 5_000, dtype=np.uint64)
    for tokens in (row, row.tolist(), row.astype(np.int64), row.astype(np.uint32), (row >> 3).tolist()):
        assert keys.words(tokens) == np.asarray(tokens).astype("<u4").tobytes()


@built
@pytest.mark.parametrize(
    "odd", [0, -1, 1 << 30, 1 << 32, True, 2.5, None, "7", 5e-324, object()], ids=lambda odd: type(odd).__name__
)
def test_one_odd_thing_in_a_list_is_seen_wherever_it_stands(odd: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in (0, 3, 7, 8, 70, 79, 149):
        tokens: list = list(range(1000, 1150))
        tokens[at] = odd
        test_both_cores_take_and_refuse_the_same_tokens(tokens, monkeypatch)


@pytest.mark.skipif(hashes.chain_bytes is hashes.chain_in_python, reason="no SHA instructions, or no C core")
@pytest.mark.parametrize("page_bytes", [4, 8, 56, 60, 64, 92, 96, 256, 1000])
def test_hashes_of_pages_are_hashlibs(page_bytes: int) -> None:
    data = random.Random(4).randbytes(20_003)
    for parent in (b"", bytes(range(32))):
        for length in (0, page_bytes - 1, page_bytes, 20_003):
            assert hashes.chain_bytes(parent, data[:length], page_bytes) == hashes.chain_in_python(
                parent, data[:length], page_bytes
            )
    whole = data * 8
    assert hashes.chain_bytes(b"", whole, page_bytes) == hashes.chain_in_python(b"", whole, page_bytes)


@built
def test_what_is_no_node_of_this_core_is_refused_with_its_type() -> None:
    assert forest.C_CORE is not None
    columns = forest.C_CORE.Columns()
    columns.device = columns.set_of(None, 0)
    stranger = Node(1, None, b"", 0, 0)
    for call in (columns.lock, columns.settle, columns.forget_root, lambda node: columns.touch([node])):
        with pytest.raises(TypeError, match="a node of this core is due"):
            call(stranger)
    leaf = columns.node(1, None, b"", 0, 1)
    leaf.children = {b"text": stranger}
    columns.page_bytes = 4
    for data in ("text", b"text"):
        with pytest.raises(TypeError, match="bytes|a node of this core is due"):
            columns.descend(leaf, data, 4)
    with pytest.raises(TypeError, match="bytes"):
        columns.trim(leaf, 1)
    leaf.pages = bytes(4)
    for pages in (-1, 2):
        with pytest.raises(ValueError, match=f"node 1 has no {pages} pages to trim"):
            columns.trim(leaf, pages)
    del leaf.tokens, leaf.pages
    with pytest.raises(TypeError, match="bytes"):
        columns.gather([leaf], 1)


@built
def test_arguments_that_no_part_of_kvmover_gives_end_no_process() -> None:
    core: Any = forest.C_CORE
    columns = core.Columns()
    columns.device = columns.set_of(None, 0)
    root = columns.node(0, None, b"", 0, 0)
    with pytest.raises(ValueError, match="does not fill"):
        columns.grow(root, b"abcd", 1, b"abcd")
    with pytest.raises(ValueError, match="a page of 0 bytes"):
        columns.descend(root, b"abcdefgh", 8)
    for loops in (((2**62, 0, 0), (2**62, 0, 0)), ((2**32, 0, 0), (2**32, 0, 0)), ((2**40, 0, 0), (2**40, 0, 0))):
        for call in (core.copy_rows, core.digest_rows):
            with pytest.raises(ValueError, match="more than memory has"):
                call(loops, 1, 1)
    with pytest.raises(ValueError, match="more than memory has"):
        core.copy_rows(((1, 0, 0),), 2**63 - 1, 1)
    with pytest.raises(TypeError):
        core.SimulatedStorage.__new__(core.SimulatedStorage)
    with pytest.raises(ValueError, match="storage of -1 pages"):
        core.SimulatedStorage(-1)
    for page_tokens, pages in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match=f"a table of {pages} pages of {page_tokens} tokens"):
            core.PageTable(page_tokens, pages)
    with pytest.raises(MemoryError):
        core.PageTable(1, 2**31)
    with pytest.raises(MemoryError):
        core.PageTable(2**62, 2).tokens(np.zeros(2, np.int32))
    with pytest.raises(TypeError, match="pages of attention KV and each component"):
        columns.evict_nodes((0, 1), 1)
    leaf = columns.node(1, root, b"abcd", 0, 1)
    for call in (lambda: columns.shift(leaf, 0, 0, 1, 1, 0), lambda: columns.first_held(leaf, 0)):
        with pytest.raises(IndexError):
            call()
    columns.per_page, columns.reach_pages = (True,), (1,)
    with pytest.raises(ValueError, match="a node below a root"):
        columns.first_held(root, 0)
    columns.roots["name"], columns.page_bytes = root, 4
    with pytest.raises(IndexError):
        columns.insert(root, b"abcd", bytes(4), 0, core.PagesInUse(), ((1, bytes(4), core.PagesInUse()),))
    with pytest.raises(TypeError, match="the pages in use"):
        columns.insert(root, b"abcd", bytes(4), 0, core.PagesInUse(), ((0, bytes(4), None),))
    table = core.PageTable(4, 2)
    assert [len(table.keep(np.arange(8), first, stop)) for first, stop in ((8, None), (2**62, 2**62), (0, -1))] == [
        0
    ] * 3
    with pytest.raises(ValueError, match="a first token"):
        table.keep(np.arange(8), -1, 8)
    with pytest.raises(ValueError, match="1 pages to forget, of 0 that are kept"):
        table.forget(np.zeros(1, np.int32))


@built
def test_two_orders_of_one_slot_share_nodes_and_end_no_process() -> None:
    core: Any = forest.C_CORE
    one, other, columns = core.Recency(0), core.Recency(0), core.Columns()
    columns.page_bytes = 4
    nodes = [columns.node(i, None, b"abcd", 0, 1) for i in range(5)]
    for node in nodes:
        one.add(node)
    for node in nodes[1:]:
        other.discard(node)
    other.add(nodes[1])
    one.touch([nodes[1]])
    assert [node.id for node in one] == [0, 1]
    assert list(other) == []
    assert len(other) == 0
    del one, other
    del node
    assert [sys.getrefcount(each) for each in nodes] == [3] * 5  # the list, the loop and the call


STORY = """
import random
import kvmover.cache.prefix as prefix
prefix.forest.C_CORE = prefix.keys.NATIVE = made
import test_cores
for shape in test_cores.SHAPES:
    rng, mine = random.Random(9), test_cores.engine(made, test_cores.SHAPES[shape])
    for _ in range(STEPS):
        call = test_cores.turn(rng)
        try:
            call(mine)
        except prefix.PrefixError:
            continue
    mine.tree.check()
from kvmover.tools.replay import ReplayConfig, ideal, replay, simulated_tiers
from tests.tools.replay.made import generated
ideal.NATIVE = simulated_tiers.NATIVE = made
requests = generated(5)
longest = max(request.input_length for request in requests)
replay(requests, ReplayConfig(48, longest + 64, 2 * longest, 4 * longest))
print(type(mine.tree._forest.columns).__module__, "done")
"""


@pytest.mark.searched
def test_a_sanitised_build_finds_no_fault(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of memory and of arithmetic, by every operation on every shape of tree."""
    story = STORY.replace("STEPS", str(tries(60, 400, 4000)))
    assert told(story, Path(__file__).parent, tmp_path_factory).endswith("_core done\n")
