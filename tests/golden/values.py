"""The values of the golden files: each message, card, record and manifest, with its writer and its reader.

A value whose fields have defaults stands twice: `NAME` has another value in each, `NAME-least` has the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import msgspec
import numpy as np

from kvmover.cache.ledger.account import Account, AccountGroup, AttemptPhase, Loss
from kvmover.cache.prefix import kv_events
from kvmover.cache.prefix.packed_rows import packed
from kvmover.engines.common import transfer_params as vllm
from kvmover.engines.common.cards import Cards
from kvmover.engines.common.first_token import FirstToken
from kvmover.engines.sglang import pd_driver
from kvmover.engines.sglang.pd_exchange import RankCard
from kvmover.kernels.cuda_exports import Export, HandleKind
from kvmover.kernels.cuda_virtual import HANDLE_BYTES
from kvmover.layout import Codec, Component, CpOrder, Fleet, PoolSpec, Span, Stripe
from kvmover.migrate.migration import Announcement, Decision, Migration, Party, Round
from kvmover.observe import runlog
from kvmover.plan.calibration import Calibration, HostCopies, load, load_host_copies, save
from kvmover.plan.cost import Posting, Route
from kvmover.plan.legs import Replicas
from kvmover.shared_memory import HostProcess, SharedRange
from kvmover.store import Namespace
from kvmover.store.bucket.compaction import decode_catalog, encode_catalog
from kvmover.store.bucket.sealed import Dead, FillingSegment, decode_uses, encode_uses, read_head
from kvmover.store.keeper import journal, messages
from kvmover.store.manifest import decode_manifest, encode_manifest
from kvmover.store.mooncake import format as mooncake
from kvmover.store.part import PageBox, part_key
from kvmover.store.record import Kind, Preamble, Record, decode, encode_mark, encode_object
from kvmover.transfer.meter import Stage
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import Key, Keys, MessageAuth
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.handshake import Listener, Model, Place, Rank, read_card, write_card
from kvmover.transfer.result import Cause
from kvmover.transport.base import Memory, MemoryKind
from kvmover.transport.checks import Ranges
from kvmover.transport.envelope import TransportCard, seal, unseal


@dataclass(frozen=True, slots=True)
class Golden:
    """The bytes of a value, and the code that reads such bytes and writes what it has read."""

    written: bytes
    again: Callable[[bytes], bytes]


Goldens = dict[str, Golden]

_CONTENT = Content(300, bytes(range(16)))
_LEASE = wire.WriteLease(3, 1_000_000, 2_000_000)
_ABOUT = ("request-1", 2)
_PAGES = (np.arange(3, dtype="<i4").tobytes(), b"")

#: Of the messages between movers. A class stands here once for each of its shapes.
_MESSAGES: tuple[wire.AnyMessage, ...] = (
    wire.Hello(b"card"),
    wire.Hello(b"card", 7),
    wire.Ping(),
    wire.Ping(_LEASE),
    wire.Pong(),
    wire.Pong(7),
    wire.NoSeat("taken by generation 8"),
    wire.Registered(b"transport", 4),
    wire.Query("request-1", bytes(range(32))),
    wire.Query("request-1", bytes(range(64)), 5),
    wire.Holding("request-1", 2),
    wire.Want(*_ABOUT, 0, 300, Route.PACKED, Replicas.STRIPE, 1 << 20),
    wire.Want(
        *(*_ABOUT, 16, 300, Route.DIRECT, Replicas.ELECT, 1 << 20, _PAGES, 4, wire.Verb.PULL, True, (0, 3)),
        *(_LEASE, wire.Grant(0, 4096, 1), _CONTENT),
    ),
    wire.Noted(*_ABOUT, 5000),
    wire.Noted(*_ABOUT, 5000, (3, 0)),
    wire.Offered(*_ABOUT, ((0, 2), (5, 6))),
    wire.Offered(*_ABOUT, ((0, 2),), 7, 4),
    wire.Granted(*_ABOUT, (wire.Grant(0, 4096),)),
    wire.Granted(*_ABOUT, (wire.Grant(0, 4096), wire.Grant(1, 8192, 2)), _LEASE, 4),
    wire.Chunk(*_ABOUT, 1),
    wire.Chunk(*_ABOUT, 1, 2, (1 << 64) - 1),
    wire.Staged(*_ABOUT, 1, 4096),
    wire.Staged(*_ABOUT, 1, 4096, 2, (1 << 64) - 1),
    wire.Staged(*_ABOUT, 1, 0, 0, None, _PAGES, (2, 0)),
    wire.Taken(*_ABOUT, 1),
    wire.Taken(*_ABOUT, 1, 2),
    wire.Aux(*_ABOUT, b"first token"),
    wire.Done(*_ABOUT),
    wire.Kept(*_ABOUT),
    wire.Abort(*_ABOUT, "deadline"),
    wire.Drained(*_ABOUT),
)

_PACKETS: tuple[messages.Request | messages.Answer, ...] = (
    messages.Attach(messages.SPEAKS, bytes(32), b"manifest"),
    messages.Attach(messages.SPEAKS, bytes(32), b"manifest", "fleet", 3),
    messages.AllocateSlab(4096, 1 << 20, None, [1]),
    messages.CommitObjects(7, [messages.CommittedObject(4096, 64, bytes(32), bytes(64), bytes(8))]),
    messages.OpenSlabs([7, 8]),
    messages.FollowJournal(),
    messages.RemoveObjects(7, [40, 168]),
    messages.NoteUses([bytes(32)]),
    messages.TrimNamespace(None, 1 << 30, 1 << 20),
    messages.ClearNamespace(),
    messages.ListNamespaces(16),
    messages.Welcome(40, 1 << 20, 1, 1),
    messages.SlabToFill(7, 1 << 20),
    messages.SlabsToRead([7]),
    messages.JournalToFollow(80),
    messages.Agreed(),
    messages.Trimmed(1, 2, 4096),
    messages.Cleared(3),
    messages.Listed([b"manifest"]),
    messages.Refused(messages.KeeperRefusal.FULL, "no room"),
)

_EVENTS: tuple[kv_events.KVEvent, ...] = (
    kv_events.BlockStored(packed((1, -2)), None, packed((5, 6)), 1, None, kv_events.Medium.GPU, None),
    kv_events.BlockStored(
        packed((1,)),
        9,
        packed((5, 6)),
        2,
        4,
        kv_events.Medium.DISK,
        "adapter",
        "salt",
        "session",
        (("adapter", "image"),),
    ),
    kv_events.BlockRemoved(packed((1, -2)), kv_events.Medium.CPU_PINNED),
    kv_events.AllBlocksCleared(),
)

_BOX = PageBox(Span(2, 2), Span(0, 4), Stripe(0, 16, 16, 16))
_NAMESPACE = Namespace("toy", "revision", 16, salt="tenant")
_ATTENTION = Component("attention", 4, 2, 8, 64, "bfloat16")
_PART = part_key(_NAMESPACE.digest_for(_ATTENTION), _BOX)
_PAGE = bytes(range(32))
_DIGESTS = bytes(range(8 * _BOX.cells))


def goldens() -> dict[str, Goldens]:
    """Returns every format by its name, and in each the values by theirs."""
    return {
        "message": dict(
            _named(_MESSAGES, lambda each: Golden(wire.encode(each), lambda raw: wire.encode(wire.decode(raw))))
        ),
        "note": _notes(),
        "card": _cards(),
        "engine": _engine_messages(),
        "migration": _migrations(),
        "event": _event_batches(),
        "record": _records(),
        "segment": _segments(),
        "pool": _pool_objects(),
        "keeper": dict(_named(_PACKETS, lambda each: Golden(messages.encode(each), _keeper_again(each)))),
        "journal": _journal(),
        "file": _files(),
    }


def unnamed() -> set[str]:
    """Returns names of classes and kinds that travel or are stored and have no golden value."""
    classes = {*get_args(wire.AnyMessage), *get_args(messages.Request), *get_args(messages.Answer)}
    classes |= {*get_args(kv_events.KVEvent), *get_args(pd_driver.Message), *get_args(runlog.AnyLine)}
    names = {each.__name__ for each in classes} | {each.name for each in (*Kind, *journal.JournalChange)}
    return names - {name.partition("-")[0] for values in goldens().values() for name in values}


def _named(values: Iterable[Any], golden: Callable[[Any], Golden]) -> Iterator[tuple[str, Golden]]:
    """Name values by their classes: of two of one class, the first has the defaults."""
    classes = [type(each).__name__ for each in values]
    for at, (name, each) in enumerate(zip(classes, values, strict=True)):
        yield (f"{name}-least" if name in classes[at + 1 :] else name), golden(each)


def _packed(value: Any) -> Golden:
    """A value that its own class encodes and decodes."""
    return Golden(value.encode(), lambda raw: type(value).decode(raw).encode())


def _notes() -> Goldens:
    auth = MessageAuth(Keys(Key(bytes(range(16)))), "decode-0.1")
    (note,) = wire.notes([wire.encode(wire.Pong(7)), wire.encode(wire.Done(*_ABOUT))])

    def opened(raw: bytes) -> bytes:
        reader = MessageAuth(Keys(Key(bytes(range(16)))), "prefill-0.1")
        message = reader.verify("decode-0.1", raw)
        return MessageAuth(Keys(Key(bytes(range(16)))), "decode-0.1").sign("prefill-0.1", message)

    return {
        "several": Golden(note, lambda raw: next(wire.notes(list(wire.split(raw))))),
        "sealed": Golden(auth.sign("prefill-0.1", note), opened),
    }


def _rank(model: Model, fleet: Fleet, number: int) -> Rank:
    specs = tuple(
        PoolSpec.dense(each, fleet.shard(each, number, 1), 8, fleet.page_tokens, "NHD", ("layer",))
        for each in model.components
    )
    memories = tuple(
        tuple(Memory(MemoryKind.HOST, (7 + 10 * n + i) << 24, spec.allocation_bytes) for i in range(spec.allocations))
        for n, spec in enumerate(specs)
    )
    staging = Memory(MemoryKind.HOST, 1 << 40, 4096)
    return Rank(Place("decode", fleet, number), specs, memories, staging, staging, b"wire")


def _cards() -> Goldens:
    index = Component("index", 4, 1, 1, 16, "uint8")
    least, full = Model("toy", (_ATTENTION,)), Model("toy", (_ATTENTION, index), "sha256:" + "ab" * 32)
    rank = _rank(full, Fleet(tp=2, pp=2, cp=2, cp_order=CpOrder.TOKEN, page_tokens=16), 5)
    held = [len(each) for each in rank.allocations]
    rank = msgspec.structs.replace(
        rank,
        place=msgspec.structs.replace(rank.place, generation=9),
        host="host",
        sandbox=Memory(MemoryKind.HOST, 1 << 41, 4096),
        shares=tuple(tuple(SharedRange(77, 5, "token", 4096 * n) for n in range(count)) for count in held),
        machine="machine",
        registration=3,
        process=HostProcess(77, 12345),
        listeners=(Listener("10.0.0.7", 5600),),
        exports=tuple(
            tuple(Export(HandleKind.IPC, bytes(HANDLE_BYTES), 1 << 20, 256 * n) for n in range(count)) for count in held
        ),
    )
    transport = TransportCard.of("NIXL", "decode-0.12", Ranges([(Memory(MemoryKind.HOST, 1 << 24, 4096), 2)]), b"agent")
    signed = MessageAuth(Keys(Key(bytes(range(16)))), "decode-0.1")

    def of(model: Model, each: Rank) -> Golden:
        return Golden(write_card(model, each), lambda raw: write_card(model, read_card(model, raw)))

    return {
        "rank-least": of(least, _rank(least, Fleet(tp=2, page_tokens=16), 1)),
        "rank": of(full, rank),
        "rank-sealed": Golden(signed.sign_card(b"card"), lambda raw: signed.sign_card(signed.verify_card(raw))),
        "rank-of-a-codec": _card_of_a_codec(of),
        "transport": Golden(seal(transport), lambda raw: seal(unseal(raw, "NIXL"))),
    }


def _card_of_a_codec(of: Callable[[Model, Rank], Golden]) -> Golden:
    stored = replace(_ATTENTION, dtype="uint8", dim=72, codec=Codec.nvfp4("bfloat16", 128))
    model = Model("toy", (stored,))
    return of(model, _rank(model, Fleet(page_tokens=16), 0))


def _engine_messages() -> Goldens:
    cards = Cards("decode", (b"card 0", b"card 1"))
    rank_card = RankCard("prefill", 1, 2, b"card")
    sockets: tuple[Any, ...] = (
        pd_driver.Call(b"card", ("10.0.0.7", 5600), "prefill"),
        pd_driver.Answer("prefill", "engine"),
        pd_driver.Answer("prefill", "", "another model"),
        pd_driver.PagesReady(1 << 62, "decode-0", 2, 16),
        pd_driver.PagesReady(1 << 62, "decode-0", 2, 16, _CONTENT),
    )

    def on_a_socket(each: Any) -> Golden:
        return Golden(b"".join(pd_driver.frames(each)), _socket_again)

    remote = vllm.Remote("prefill", "request-1", "10.0.0.7", 5600)
    return {
        "Cards": Golden(cards.encode(), lambda raw: msgspec.msgpack.decode(raw, type=Cards).encode()),
        "RankCard": Golden(
            msgspec.msgpack.encode(rank_card),
            lambda raw: msgspec.msgpack.encode(msgspec.msgpack.decode(raw, type=RankCard)),
        ),
        "FirstToken-least": _packed(FirstToken(5)),
        "FirstToken": _packed(FirstToken(5, 16, -0.5, ((5, -0.5), (9, -1.25)))),
        "vllm_parameters-least": _parameters(vllm.answer(remote, _CONTENT)),
        "vllm_parameters": _parameters(vllm.answer(remote, _CONTENT, 4)),
        "vllm_parameters_of_a_turn": Golden(
            msgspec.json.encode(vllm.answer_of_turn(vllm.LastTurn(remote, _CONTENT))), _turn_again
        ),
        **dict(_named(sockets, on_a_socket)),
    }


def _socket_again(raw: bytes) -> bytes:
    said = pd_driver.read([raw[: len(pd_driver.TAG)], raw[len(pd_driver.TAG) :]])
    assert said is not None
    return b"".join(pd_driver.frames(said))


def _parameters(told: dict[str, Any]) -> Golden:
    def again(raw: bytes) -> bytes:
        ask = vllm.asked(msgspec.json.decode(raw), "request")
        assert isinstance(ask.whole, vllm.Remote)
        assert ask.content is not None
        return msgspec.json.encode(vllm.answer(ask.whole, ask.content, ask.readers))

    return Golden(msgspec.json.encode(told), again)


def _turn_again(raw: bytes) -> bytes:
    ask = vllm.asked(msgspec.json.decode(raw), "request")
    assert isinstance(ask.whole, vllm.Serve)
    assert ask.whole.last is not None
    return msgspec.json.encode(vllm.answer_of_turn(ask.whole.last))


def _migrations() -> Goldens:
    sides = Party("first", 2), Party("second", 1)
    return {
        "Migration-least": _packed(Migration("request-1", 1, *sides, 300)),
        "Migration": _packed(Migration("request-1", 1, *sides, 300, b"sampler", _CONTENT)),
        "Announcement": _packed(Announcement(Round(1, 300, 316), 316, b"sampler")),
        "Decision-least": _packed(Decision(True)),
        "Decision": _packed(Decision(False, "no room", _CONTENT)),
    }


def _event_batches() -> Goldens:
    def batch(*told: kv_events.KVEvent, rank: int | None = None) -> Golden:
        written = msgspec.msgpack.encode(kv_events.KVEventBatch(1.5, told, rank))
        return Golden(
            written, lambda raw: msgspec.msgpack.encode(msgspec.msgpack.decode(raw, type=kv_events.KVEventBatch))
        )

    def again(raw: bytes) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(raw))

    arrays = msgspec.msgpack.encode((1.5, kv_events.as_form(_EVENTS, kv_events.EventForm.ARRAYS), 1))
    return {**dict(_named(_EVENTS, batch)), "batch": batch(*_EVENTS, rank=1), "arrays": Golden(arrays, again)}


def _records() -> Goldens:
    def again(raw: bytes) -> bytes:
        record = decode(raw, 80, 80)
        assert record is not None
        return _written(record)

    def preamble(raw: bytes) -> bytes:
        found = Preamble.decode(raw)
        assert found is not None
        return found.encode()

    return {
        "preamble": Golden(Preamble(_NAMESPACE.digest, bytes(range(16))).encode(), preamble),
        "OBJECT": Golden(encode_object(80, 1_700_000_000, (4096, 2 << 13), _PAGE, _PART, _DIGESTS), again),
        "SYNCED": Golden(encode_mark(80, Kind.SYNCED, 8192), again),
        "SEALED": Golden(encode_mark(80, Kind.SEALED, 0), again),
    }


def _written(record: Record) -> bytes:
    if record.part is None:
        return encode_mark(record.at, record.kind, record.offset)
    place = record.offset, record.nbytes
    return encode_object(record.at, record.stamp, place, record.page, record.part, record.digests)


def _segment() -> FillingSegment:
    segment = FillingSegment("6553f10000000000-00000007", _NAMESPACE.digest, 1 << 16, 0.0)
    for number in range(2):
        payload = memoryview(bytes([number + 1]) * 64)
        segment.add(payload, bytes([number]) * 32, _PART, _DIGESTS, 1_700_000_000 + number)
    return segment


def _segments() -> Goldens:
    segment = _segment()
    name, namespace = segment.name, segment.namespace

    def head(raw: bytes) -> bytes:
        sealed = read_head(name, raw, namespace)
        assert not isinstance(sealed, str), sealed
        filled = FillingSegment(name, namespace, 1 << 16, 0.0)
        for row in range(len(sealed.table)):
            nbytes, part = int(sealed.table.nbytes[row]), sealed.table.parts[int(sealed.table.part[row])]
            record = decode(raw, int(sealed.table.at[row]))
            assert record is not None
            filled.add(memoryview(bytes(nbytes)), record.page, part, record.digests, record.stamp)
        return filled.head()

    def dead(raw: bytes) -> bytes:
        found = Dead.decode(raw)
        assert found is not None
        return found.encode()

    def catalog(raw: bytes) -> bytes:
        found = decode_catalog(raw, namespace)
        assert found is not None
        return encode_catalog(namespace, found)

    sealed = read_head(name, segment.head(), namespace)
    assert not isinstance(sealed, str), sealed
    deaths = Dead()
    deaths.kill([4096])
    return {
        "head": Golden(segment.head(), head),
        "dead": Golden(deaths.encode(), dead),
        "used": Golden(encode_uses({_PAGE: 1_700_000_000}), lambda raw: encode_uses(decode_uses(raw))),
        "catalog": Golden(encode_catalog(namespace, [sealed]), catalog),
    }


def _pool_objects() -> Goldens:
    def header(raw: bytes) -> bytes:
        record = mooncake.decode_header(raw, _PAGE, _PART)
        assert record is not None
        return mooncake.encode_header(_PAGE, _PART, record.nbytes, record.stamp, record.digests)

    def box(raw: bytes) -> bytes:
        part = mooncake.decode_box(raw)
        assert part is not None
        return mooncake.encode_box(part)

    key = mooncake.object_key(_NAMESPACE.folder, _PAGE, _PART).encode()
    return {
        "key": Golden(key, lambda _: mooncake.object_key(_NAMESPACE.folder, _PAGE, _PART).encode()),
        "header": Golden(mooncake.encode_header(_PAGE, _PART, 64, 1_700_000_000, _DIGESTS), header),
        "box": Golden(mooncake.encode_box(_PART), box),
    }


def _keeper_again(packet: messages.Request | messages.Answer) -> Callable[[bytes], bytes]:
    kind: Any = messages.Request if type(packet) in get_args(messages.Request) else messages.Answer
    return lambda raw: messages.encode(msgspec.msgpack.decode(raw, type=kind))


def _journal() -> Goldens:
    change, at, stamp = journal.JournalChange, 80, 1_700_000_000
    objects = [
        journal.AddedObject(0, 64, _PAGE, _PART, stamp, _DIGESTS),
        journal.AddedObject(4096, 64, _PAGE, _PART, stamp, 120),
    ]
    removed = np.array([120, 248], "<u8").tobytes()
    written = {
        change.ADDED: journal.encode_added(objects, at, stamp, 7),
        change.REMOVED: journal.encode_entry(change.REMOVED, at, stamp, 7, removed),
        change.DROPPED: journal.encode_entry(change.DROPPED, at, stamp, 7),
        change.USED: journal.encode_entry(change.USED, at, stamp, 0, _PAGE),
        change.ENDED: journal.encode_entry(change.ENDED, at, stamp),
        change.PROVED: journal.encode_entry(change.PROVED, at, stamp, 7),
    }

    def again(raw: bytes) -> bytes:
        (entry,) = journal.decode_entries(raw, at)
        begun = entry.at - journal.ENTRY_BYTES
        return journal.encode_entry(entry.change, begun, entry.stamp, entry.slab, bytes(entry.payload), entry.rows)

    return {each.name: Golden(raw, again) for each, raw in written.items()}


def _files() -> Goldens:
    def manifest(raw: bytes) -> bytes:
        found = decode_manifest(raw, _NAMESPACE.folder)
        assert found is not None
        return msgspec.json.encode(found)

    group = AccountGroup("tenant", "toy")
    account = Account(
        "request-1", group, 1, AttemptPhase.FINISHED, 1.0, 2.5, 300, 160, 96, 32, 0, 0, 172, 0, {Loss.CONCURRENT: 32}
    )
    lines: tuple[runlog.AnyLine, ...] = (
        runlog.Run(1.5, "decode", 1, "0.1.0"),
        runlog.Moved(2.5, 0.25, "decode", 1, "receive", "request-1"),
        runlog.Moved(
            *(2.5, 0.25, "decode", 1, "send", "request-2", Cause.DEADLINE, "deadline of 5 s", 4096, 3, 2),
            *((Route.PACKED,), 2, 1, True, {Stage.WIRE: 0.125}),
        ),
        runlog.Accounted(2.5, account),
    )

    def line(each: runlog.AnyLine) -> Golden:
        decoder = msgspec.json.Decoder(runlog.AnyLine)
        return Golden(msgspec.json.encode(each), lambda raw: msgspec.json.encode(decoder.decode(raw)))

    links = [
        Calibration("decode-3", "UCX", Posting.AHEAD, 412, 0),
        Calibration("decode-3", "UCX", Posting.INLINE, 412, 9, 0.1, 2.0, 0.5, 1e4, 1e5, 2e5, 20.0),
    ]
    gpus = [HostCopies("NVIDIA H200", ((16, 28672), (1024, 4096)), ())]
    return {
        "namespace.json": Golden(encode_manifest(_NAMESPACE), manifest),
        "calibration.json": Golden(_saved(links), lambda raw: _saved(*_loaded(raw))),
        "calibration-gpus.json": Golden(_saved(links, gpus), lambda raw: _saved(*_loaded(raw))),
        **dict(_named(lines, line)),
    }


def _saved(links: Iterable[Calibration], gpus: Iterable[HostCopies] = ()) -> bytes:
    with TemporaryDirectory() as folder:
        save(Path(folder, "links"), list(links), list(gpus))
        return Path(folder, "links").read_bytes()


def _loaded(raw: bytes) -> tuple[tuple[Calibration, ...], tuple[HostCopies, ...]]:
    with TemporaryDirectory() as folder:
        Path(folder, "links").write_bytes(raw)
        return load(Path(folder, "links")), load_host_copies(Path(folder, "links"))
