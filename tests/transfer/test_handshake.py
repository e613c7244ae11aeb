"""The handshake: same model or refused, with both sides' values, before anything of a stranger is understood."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError, OtherWeights, PeerRefused, RefusedFor
from kvmover.layout import Component, CpOrder, Fleet, Layout, PoolSpec
from kvmover.transfer.protocol import handshake
from kvmover.transfer.protocol.handshake import Card, Model, Place, Rank, agreed_version, read_card, write_card
from kvmover.transfer.protocol.wire import Dialect
from kvmover.transport import Memory, MemoryKind

Versions = tuple[int, int]

ATTENTION = Component("attention", 4, 2, 8, 64, "bfloat16")
KEYS = Component("index", 4, 1, 1, 16, "uint8")
MODEL = Model("toy", (ATTENTION, KEYS))


def rank_of(model: Model = MODEL, fleet: Fleet | None = None, rank: int = 0, order: str = "NHD") -> Rank:
    fleet = fleet or Fleet(tp=2, pp=2, page_tokens=16)
    specs = tuple(
        PoolSpec.dense(c, fleet.shard(c, rank, 1), 8, fleet.page_tokens, order, ("layer",)) for c in model.components
    )
    memories = tuple(
        tuple(Memory(MemoryKind.HOST, (7 + 10 * n + i) << 24, s.allocation_bytes) for i in range(s.allocations))
        for n, s in enumerate(specs)
    )
    return Rank(Place("decode", fleet, rank), specs, memories, *[Memory(MemoryKind.HOST, 1 << 40, 4096)] * 2, b"wire")


RANK = rank_of()


def card_with(body: bytes) -> bytes:
    return msgspec.msgpack.encode(Card((1, 1), MODEL.fields(), MODEL.text(), body))


def test_a_fleet_with_pages_of_its_own_is_read_and_its_pools_must_have_them():
    fleet = Fleet(page_tokens=16, pages={"index": 4})
    pools = [
        PoolSpec.dense(c, fleet.shard(c, 0, 1), 8, fleet.page_rows(c), "NHD", ("layer",)) for c in MODEL.components
    ]
    own = msgspec.structs.replace(rank_of(fleet=fleet), pools=tuple(pools))
    assert read_card(MODEL, write_card(MODEL, own)) == own
    with pytest.raises(PeerRefused, match="pool of index, 16-token pages, does not fit its fleet"):
        read_card(MODEL, write_card(MODEL, rank_of(fleet=fleet)))


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([["keys", 4]], "the fleet names pages of keys, and the model's components are attention, index"),
        ([["index", 0]], "a page of index has rows = 0"),
        ([["index", 4], ["index", 4]], "a component is named twice"),
    ],
)
def test_pages_that_no_pool_has_are_refused_when_the_card_is_read(pages: list[list[object]], message: str):
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(RANK))
    body["place"]["fleet"]["pages"] = pages
    with pytest.raises(PeerRefused, match=message):
        read_card(MODEL, card_with(msgspec.msgpack.encode(body)))


@pytest.mark.parametrize("rank", [RANK, rank_of(fleet=Fleet(tp=3, cp=2, cp_order=CpOrder.TOKEN), rank=5, order="HND")])
def test_what_was_written_is_read(rank: Rank):
    assert read_card(MODEL, write_card(MODEL, rank)) == rank


@pytest.mark.parametrize(
    "other",
    [
        Model("toy-2", MODEL.components),
        Model("toy", (ATTENTION,)),
        Model("toy", (KEYS, ATTENTION)),
        *(
            Model("toy", (replace(ATTENTION, **change), KEYS))
            for change in (
                {"name": "mla"},
                {"layers": 5},
                {"kv": 1},
                {"heads": 4},
                {"dim": 128},
                {"dtype": "float16"},
                {"row_tokens": 4},
            )
        ),
        Model("toy", (ATTENTION, replace(KEYS, dim=17))),
    ],
    ids=lambda model: model.text(),
)
def test_another_model_is_refused_with_both_sides_values(other: Model):
    assert other.fields() != MODEL.fields()
    with pytest.raises(PeerRefused) as refused:
        read_card(MODEL, write_card(other, rank_of(other)))
    assert other.text() in str(refused.value)
    assert MODEL.text() in str(refused.value)


@pytest.mark.parametrize(
    ("own", "theirs", "version"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 1), 1), ((1, 1), (1, 9), 1), ((2, 5), (4, 9), 5), ((4, 9), (1, 4), 4)],
)
def test_two_sides_speak_the_highest_version_of_both(own: Versions, theirs: Versions, version: int):
    card = write_card(MODEL, RANK, Dialect(theirs))
    assert read_card(MODEL, card, Dialect(own)) == RANK
    assert agreed_version(card, Dialect(own)) == version


@pytest.mark.parametrize(("own", "theirs"), [((2, 2), (1, 1)), ((1, 3), (4, 5)), ((1, 1), (7, 2))])
def test_sides_without_a_common_version_refuse_each_other_with_both_ranges(own: Versions, theirs: Versions):
    words = f"peer speaks protocol versions {theirs[0]} to {theirs[1]}; this side speaks {own[0]} to {own[1]}"
    with pytest.raises(PeerRefused, match=words):
        read_card(MODEL, write_card(MODEL, RANK, Dialect(theirs)), Dialect(own))


def test_a_refusal_names_the_fields_that_differ():
    other = Model("toy", (replace(ATTENTION, heads=4, window=9), replace(KEYS, dim=17)))
    with pytest.raises(PeerRefused, match=r"they differ in attention\.heads, index\.dim, attention\.window$"):
        read_card(MODEL, write_card(other, rank_of(other)))


def test_a_field_that_a_later_release_adds_is_of_no_account_at_its_default_and_named_otherwise():
    card = msgspec.msgpack.decode(write_card(MODEL, RANK))
    assert not {"attention.window", "attention.states", "attention.row_tokens"} & card["fields"].keys()
    body = msgspec.msgpack.decode(card["body"])
    body["pools"][0]["component"]["of_a_later_release"] = 3
    assert read_card(MODEL, msgspec.msgpack.encode(card | {"body": msgspec.msgpack.encode(body), "more": 1})) == RANK
    card["fields"]["attention.sinks"] = "4"
    with pytest.raises(PeerRefused, match=r"they differ in attention\.sinks$"):
        read_card(MODEL, msgspec.msgpack.encode(card))


@pytest.mark.parametrize(
    ("fleet", "order"),
    [
        (Fleet(tp=8), "NHD"),
        (Fleet(pp=4), "NHD"),
        (Fleet(cp=3), "NHD"),
        (Fleet(page_tokens=1), "NHD"),
        (Fleet(), "HND"),
        (Fleet(tp=3, cp_order=CpOrder.BLOCK), "page token layer kv head dim"),
    ],
)
def test_another_shape_of_the_same_model_is_welcome(fleet: Fleet, order: str):
    rank = rank_of(fleet=fleet, order=order)
    assert read_card(MODEL, write_card(MODEL, rank)) == rank


@given(st.binary(max_size=100))
def test_the_body_of_a_stranger_is_not_read(body: bytes):
    stranger = Model("stranger", (Component.mla(1, 8, "uint8"),))
    card = msgspec.msgpack.encode(Card((1, 1), stranger.fields(), stranger.text(), body))
    with pytest.raises(PeerRefused, match=r"peer holds stranger \(mla 1x1x1x8 uint8\); this side holds toy"):
        read_card(MODEL, card)


@given(st.binary(max_size=300))
def test_a_body_of_random_bytes_is_refused(body: bytes):
    with pytest.raises(PeerRefused):
        read_card(MODEL, card_with(body))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(card: bytes):
    with pytest.raises(PeerRefused):
        read_card(MODEL, card)


@given(st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_damaged_card_is_read_or_refused(damage: list[tuple[int, int]]):
    card = bytearray(write_card(MODEL, RANK))
    for place, change in damage:
        card[place % len(card)] ^= change
    try:
        read_card(MODEL, bytes(card))
    except PeerRefused:
        return


@pytest.mark.parametrize("card", [b"", b"\x91" * 100_000, b"\x81\xa1x" + b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff"])
def test_a_card_made_to_hurt_is_refused(card: bytes):
    with pytest.raises(PeerRefused):
        read_card(MODEL, card)


def test_a_body_made_to_hurt_is_refused():
    for body in (b"\x81\xa1x" + b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(PeerRefused):
            read_card(MODEL, card_with(body))


def test_an_oversized_card_is_refused_unread():
    with pytest.raises(PeerRefused, match=f"over the limit of {handshake.MAX_CARD_BYTES}"):
        read_card(MODEL, bytes(handshake.MAX_CARD_BYTES + 1))


def _place(**changes: object) -> Callable[[Rank], Rank]:
    """As a peer writes it that checks nothing."""

    def change(rank: Rank) -> Rank:
        place = copy.copy(rank.place)
        for name, value in changes.items():
            msgspec.structs.force_setattr(place, name, value)
        return msgspec.structs.replace(rank, place=place)

    return change


def _first_pool(change: Callable[[PoolSpec], PoolSpec]) -> Callable[[Rank], Rank]:
    return lambda rank: msgspec.structs.replace(rank, pools=(change(rank.pools[0]), *rank.pools[1:]))


def _extent(axis: str, extent: int) -> Callable[[Rank], Rank]:
    def change(spec: PoolSpec) -> PoolSpec:
        at = spec.layout.axes.index(axis)
        shape = (*spec.layout.shape[:at], extent, *spec.layout.shape[at + 1 :])
        return replace(spec, layout=Layout(spec.layout.axes, shape, spec.layout.stride))

    return _first_pool(change)


def _first_memories(change: Callable[[tuple[Memory, ...]], tuple[Memory, ...]]) -> Callable[[Rank], Rank]:
    return lambda rank: msgspec.structs.replace(rank, allocations=(change(rank.allocations[0]), *rank.allocations[1:]))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_place(rank=4), "rank 4 of a fleet of 4 ranks"),
        (_place(rank=-1), "rank -1 of a fleet of 4"),
        (_place(fleet=Fleet(tp=2, pp=2, page_tokens=32)), "16-token pages"),
        (_place(fleet=Fleet(tp=4, page_tokens=16)), "has layer extent 2; its rank holds 4"),
        (_place(fleet=Fleet(pp=2, page_tokens=16)), "head extent 4; its rank holds 8"),
        (_place(fleet=Fleet(pp=5, page_tokens=16)), "5 pipeline stages for 4 layers"),
        (_first_pool(lambda spec: replace(spec, component=replace(spec.component, name="index"))), "pool of index"),
        (_extent("layer", 1), "has layer extent 1; its rank holds 2"),
        (_extent("head", 8), "has head extent 8; its rank holds"),
        (_extent("token", 15), "15-token pages"),
        (
            lambda rank: msgspec.structs.replace(rank, pools=rank.pools[:1]),
            "1 pools, 2 lists of allocations; the",
        ),
        (
            lambda rank: msgspec.structs.replace(rank, allocations=rank.allocations[:1]),
            "2 pools, 1 lists of allocations; the",
        ),
        (_first_memories(lambda memories: memories[:-1]), "fewer or smaller"),
        (_first_memories(lambda memories: (*memories, memories[0])), "fewer or smaller"),
        (_first_memories(lambda memories: (replace(memories[0], nbytes=64), *memories[1:])), "fewer or smaller"),
    ],
)
def test_a_card_that_contradicts_itself_is_refused(damage: Callable[[Rank], Rank], reason: str):
    with pytest.raises(PeerRefused, match=reason):
        read_card(MODEL, write_card(MODEL, damage(RANK)))


def _layout(**fields: object) -> dict[str, object]:
    return {**msgspec.to_builtins(RANK.pools[0].layout), **fields}


@pytest.mark.parametrize(
    "layout",
    [
        _layout(axes=("layer",), shape=(2,), stride=(1,)),
        _layout(axes=("layer",) * 6),
        _layout(axes=("page", "layer", "kv", "token", "head", "depth")),
        _layout(shape=tuple(3 for _ in RANK.pools[0].layout.shape)),
        _layout(stride=tuple(-1 for _ in RANK.pools[0].layout.shape)),
    ],
    ids=["one axis", "one axis six times", "an unknown axis", "kv and dim of no component", "negative strides"],
)
def test_a_pool_that_cannot_be_is_refused(layout: dict[str, object]):
    body = msgspec.to_builtins(RANK)
    body["pools"][0]["layout"] = layout
    with pytest.raises(PeerRefused):
        read_card(MODEL, card_with(msgspec.msgpack.encode(body)))


def test_equal_weights_meet_whatever_they_are_called() -> None:
    here, there = (Model(name, MODEL.components, weights="7" * 64) for name in ("/models/here", "/models/there"))
    assert here.fields() == there.fields()
    assert read_card(here, write_card(there, rank_of(there))).place == rank_of(there).place


@pytest.mark.parametrize("name", ["/models/here", "/models/there"])
def test_other_weights_are_refused_with_both_digests_whatever_they_are_called(name: str) -> None:
    here, there = Model("/models/here", MODEL.components, "7" * 64), Model(name, MODEL.components, "a" * 64)
    with pytest.raises(OtherWeights) as refused:
        read_card(here, write_card(there, rank_of(there)))
    assert refused.value.refused_for is RefusedFor.WEIGHTS
    assert f"peer holds weights {'a' * 12} of {name} (" in str(refused.value)
    assert f"this side holds weights {'7' * 12} of /models/here (" in str(refused.value)


def test_another_model_with_equal_weights_is_refused_for_the_model() -> None:
    weights = "7" * 64
    here, there = (Model("llama", components, weights) for components in (MODEL.components, MODEL.components[:1]))
    assert here.fields() != there.fields()
    with pytest.raises(PeerRefused) as refused:
        read_card(here, write_card(there, rank_of(there)))
    assert type(refused.value) is PeerRefused


def test_a_name_is_not_taken_for_weights() -> None:
    assert Model("llama", MODEL.components).fields() != Model("", MODEL.components, "llama").fields()
    with pytest.raises(LayoutError, match="a model is named by text, got 7"):
        Model("llama", MODEL.components, cast(Any, 7))
    with pytest.raises(LayoutError, match="weights of 1025 characters; at most 1024"):
        Model("llama", MODEL.components, "x" * 1025)
