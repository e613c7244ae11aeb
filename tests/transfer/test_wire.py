"""Control messages: what goes in comes out, and no bytes whatever do more than raise ProtocolError."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import msgspec.inspect as schemas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mover_cases import kinds_of_messages, messages

from kvmover.errors import ProtocolError
from kvmover.kernels.cuda_exports import Export
from kvmover.layout.fleet import Fleet
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.shared_memory import HostProcess
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Card, Place, Rank
from kvmover.transport import Memory

HEAD = b"kvm\x01"


@given(messages())
def test_what_was_encoded_is_decoded(message: wire.AnyMessage):
    assert wire.decode(wire.encode(message)) == message


def test_every_kind_of_message_is_tried_above():
    assert set(kinds_of_messages()) == set(wire.AnyMessage.__args__)


def test_a_field_that_a_newer_peer_added_is_ignored():
    newer = msgspec.msgpack.encode({"type": "Done", "request": "r", "generation": 3, "mood": {"good": [1, 2]}})
    assert wire.decode(HEAD + newer) == wire.Done("r", 3)


def test_a_field_with_a_default_may_be_missing():
    want = wire.Want("r", 1, 0, 8, Route.PACKED, Replicas.STRIPE, 4096)
    assert b"pages" not in wire.encode(want)
    assert wire.decode(wire.encode(want)) == want


@pytest.mark.parametrize("framing", [0, 2, 255])
def test_another_framing_is_refused_with_both_numbers(framing: int):
    with pytest.raises(ProtocolError, match=f"framing {framing:02x}, this side reads 01"):
        wire.decode(b"kvm" + bytes([framing]) + wire.encode(wire.Ping())[4:])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not a kvmover message"),
        (b"kv", "not a kvmover message"),
        (b"hello, world", "not a kvmover message: starts with b'hell'"),
        (b"kvm", "framing missing"),
        (HEAD, "malformed message of 4 bytes"),
        (HEAD + b"\xc1", "malformed"),
        (HEAD + msgspec.msgpack.encode({"type": "Dance"}), "Dance"),
        (HEAD + msgspec.msgpack.encode({"type": "Done", "request": "r"}), "generation"),
        (HEAD + msgspec.msgpack.encode({"type": "Done", "request": 7, "generation": 1}), "request"),
        (HEAD + msgspec.msgpack.encode({"type": "Done", "request": "r", "generation": 1.5}), "generation"),
        (wire.encode(wire.Ping()) + b"\x00", "malformed"),
        (HEAD + b"\x82\xa4type\xa5Hello\xa4card\xa2\xff\xfe", "malformed"),
    ],
)
def test_a_malformed_message_is_a_protocol_error_that_says_why(payload: bytes, reason: str):
    with pytest.raises(ProtocolError, match=reason):
        wire.decode(payload)


@pytest.mark.parametrize("kind", ["Abort", "NoSeat"])
def test_a_peer_s_reason_is_one_line_that_prints(kind: str):
    about = {"request": "r", "generation": 1} if kind == "Abort" else {}
    body = {"type": kind, **about, "reason": "\n2026-01-01 ERROR all is lost\x1b[2J" * 31}
    message = wire.decode(HEAD + msgspec.msgpack.encode(body))
    assert isinstance(message, wire.Abort | wire.NoSeat)
    assert message.reason.startswith(r"\n2026-01-01 ERROR all is lost\x1b[2J")
    assert message.reason.isprintable()
    assert len(message.reason) == wire.MAX_REASON_CHARACTERS


def test_a_message_over_the_limit_is_refused_unread():
    with pytest.raises(ProtocolError, match=f"over the limit of {wire.MAX_MESSAGE_BYTES}"):
        wire.decode(HEAD + bytes(wire.MAX_MESSAGE_BYTES))


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_errors_only(body: bytes):
    for payload in (body, HEAD + body):
        try:
            wire.decode(payload)
        except ProtocolError:
            continue


@pytest.mark.parametrize("shell", [b"\x91", b"\x81\xa1x"], ids=["arrays", "maps"])
def test_nesting_deeper_than_a_decoder_may_recurse_is_a_protocol_error(shell: bytes):
    with pytest.raises(ProtocolError, match="recursion"):
        wire.decode(HEAD + b"\x82\xa4type\xa4Ping\xa1x" + shell * 100_000)


@given(messages(), st.data())
def test_a_damaged_message_is_decoded_or_a_protocol_error(message: wire.AnyMessage, data: st.DataObject):
    payload = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut])):
        try:
            wire.decode(damaged)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion things
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff",  # text
        b"\x82\xa4type\xa7Granted\xa6grants\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa4Want\xa5pages\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa5Hello\xa4card\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa4Ping\xa1x\xdd\xff\xff\xff\xff",
    ],
)
def test_a_hostile_count_allocates_nothing(body: bytes):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode(HEAD + body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_page_table_that_no_message_holds_is_refused_by_the_side_that_has_it():
    tables = (bytes(wire.MAX_MESSAGE_BYTES),)
    with pytest.raises(ProtocolError, match=r"Want of \d+ bytes is over the limit"):
        wire.encode(wire.Want("r", 1, 0, 10, Route.DIRECT, Replicas.STRIPE, 4096, tables))


def test_messages_of_one_poll_travel_in_order_in_as_few_notes_as_hold_them():
    said = [wire.encode(wire.Done("r", number)) for number in range(2 * wire.MAX_BATCH + 1)]
    packed = list(wire.notes(said))
    assert [len(wire.split(note)) for note in packed] == [wire.MAX_BATCH, wire.MAX_BATCH, 1]
    assert [message for note in packed for message in wire.split(note)] == said
    assert list(wire.notes([])) == []
    assert list(wire.notes(said[:1])) == said[:1], "one message alone is as it is"


@given(sizes=st.lists(st.integers(0, wire.MAX_MESSAGE_BYTES - 100), min_size=1, max_size=12))
@settings(max_examples=30)
def test_no_note_is_longer_than_a_message_may_be(sizes: list[int]):
    said = [wire.encode(wire.Aux("r", 1, bytes(size))) for size in sizes]
    packed = list(wire.notes(said))
    assert all(len(note) <= wire.MAX_MESSAGE_BYTES for note in packed)
    assert [message for note in packed for message in wire.split(note)] == said


@given(damage=st.binary(max_size=20), at=st.integers(0, 60), cut=st.integers(0, 60))
def test_a_damaged_note_is_refused_or_its_messages_are_and_nothing_else_is_raised(damage: bytes, at: int, cut: int):
    (whole,) = wire.notes([wire.encode(wire.Done("r", number)) for number in range(3)])
    note = (whole[:at] + damage + whole[at + len(damage) :])[: len(whole) - cut]
    with contextlib.suppress(ProtocolError):
        for message in wire.split(note):
            with contextlib.suppress(ProtocolError):
                wire.decode(message)


@pytest.mark.parametrize("count", [wire.MAX_BATCH + 1, 0xFFFF])
def test_a_note_of_too_many_messages_is_refused_before_it_is_unpacked(count: int):
    body = wire.encode(wire.Ping())[4:]
    for head in (b"\xdc" + count.to_bytes(2), b"\xdd" + count.to_bytes(4)):
        with pytest.raises(ProtocolError, match=f"{count} messages is over the limit of {wire.MAX_BATCH}"):
            wire.split(HEAD + head + body * 3)


WANT = wire.Want("r", 1, 0, 8, Route.PACKED, Replicas.STRIPE, 4096)
BEYOND: list[wire.AnyMessage] = [
    wire.Done("r" * 257, 1),
    wire.Done("r", -1),
    wire.Done("r", 1 << 63),
    wire.Granted("r", 1, (wire.Grant(0, 0),) * (wire.MAX_GRANTS + 1)),
    wire.Granted("r", 1, (wire.Grant(-1, 0),)),
    wire.Granted("r", 1, (wire.Grant(0, -256),)),
    wire.Granted("r", 1, (wire.Grant(0, 1 << 63),)),
    wire.Granted("r", 1, (wire.Grant(0, 0, -1),)),
    wire.Offered("r", 1, ((-1, 2),)),
    wire.Offered("r", 1, ((0, 1),) * (wire.MAX_CHUNKS + 1)),
    wire.Staged("r", 1, 0, 0, 0, None, (b"",) * (wire.MAX_COMPONENTS + 1)),
    wire.Chunk("r", 1, -1),
    wire.Staged("r", 1, 0, -4096),
    wire.Taken("r", 1, 0, -1),
    wire.Aux("r", 1, bytes(wire.MAX_AUX_BYTES + 1)),
    *(
        msgspec.structs.replace(WANT, **change)
        for change in (
            {"start": -1},
            {"stop": 1 << 63},
            {"chunk_bytes": 0},
            {"chunk_layers": -1},
            {"pages": (b"",) * (wire.MAX_COMPONENTS + 1)},
            {"aux": (wire.MAX_RANKS,)},
            {"aux": (0,) * (wire.MAX_RANKS + 1)},
        )
    ),
]


@pytest.mark.parametrize("message", BEYOND, ids=lambda message: str(message)[:60])
def test_a_number_or_a_length_beyond_its_bound_is_malformed(message: wire.AnyMessage):
    with pytest.raises(ProtocolError, match="malformed"):
        wire.decode(wire.encode(message))


def test_a_long_reason_is_cut_where_it_is_said_and_refused_where_it_was_not():
    said = wire.Abort("r", 1, "x" * 5000)
    assert wire.decode(wire.encode(said)) == said
    assert said.reason == "x" * 1021 + "..."
    longer = msgspec.msgpack.encode({"type": "Abort", "request": "r", "generation": 1, "reason": "x" * 1025})
    with pytest.raises(ProtocolError, match="1024"):
        wire.decode(HEAD + longer)


#: What the length of the whole note or card bounds, or 64 bits of a number that is compared with another and no more.
WHOLE = {
    "Hello.card",
    "Registered.transport",
    "Want.pages[]",
    "Staged.pages[]",
    "Chunk.digest",
    "Staged.digest",
    "Card.body",
    "Rank.transport",
}

#: Values that check themselves, or that a card is checked for, and the tests that show it.
CHECKED = {"Place", "PoolSpec", "Memory", "HostProcess", "Export"}


def unbounded(kind: Any, where: str) -> Iterator[str]:
    """Fields whose schema lets them be of any size."""
    match kind:
        case schemas.IntType(ge=ge, gt=gt, le=le, lt=lt):
            if (ge is None and gt is None) or (le is None and lt is None):
                yield where
        case schemas.StrType(max_length=None) | schemas.BytesType(max_length=None):
            yield where
        case schemas.VarTupleType(item_type=item, max_length=most):
            if most is None:
                yield where
            yield from unbounded(item, f"{where}[]")
        case schemas.TupleType(item_types=items):
            for number, item in enumerate(items):
                yield from unbounded(item, f"{where}[{number}]")
        case schemas.UnionType(types=types):
            for each in types:
                yield from unbounded(each, where)
        case schemas.StructType(cls=cls) | schemas.DataclassType(cls=cls):
            if cls.__name__ not in CHECKED:
                for field in kind.fields:
                    yield from unbounded(field.type, f"{cls.__name__}.{field.name}")
        case schemas.StrType() | schemas.BytesType() | schemas.BoolType() | schemas.EnumType() | schemas.NoneType():
            pass
        case schemas.DictType(key_type=schemas.StrType(max_length=int()), value_type=value, max_length=int()):
            yield from unbounded(value, where)
        case _:
            raise AssertionError(f"{where} is {kind}, which this test does not know")


def test_each_field_of_each_message_and_card_has_a_bound_of_its_own():
    kinds = [*wire.AnyMessage.__args__, Card, Rank]
    found = [where for kind in kinds for where in unbounded(schemas.type_info(kind), kind.__name__)]
    assert len(kinds) == 21
    assert set(found) == WHOLE


def test_values_that_check_themselves_have_the_fields_that_are_checked():
    """Each is tried beyond its bounds in test_handshake.py and test_hostile_peers.py."""
    assert {field.name for field in fields(Memory)} == {"kind", "address", "nbytes", "device"}
    assert {field.name for field in fields(Fleet)} == {"tp", "pp", "cp", "page_tokens", "cp_order", "pages"}
    assert Place.__struct_fields__ == ("engine", "fleet", "rank", "generation")
    assert {field.name for field in fields(Export)} == {"kind", "handle", "nbytes", "offset"}  # test_mapped_gpus.py
    assert {field.name for field in fields(HostProcess)} == {"pid", "started"}  # which is compared, and no more
    assert is_dataclass(Memory)
