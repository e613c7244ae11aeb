"""docs/protocol.md: notes of real movers are as it says, and its tables are the code's."""

from __future__ import annotations

import hmac
import itertools
import json
import math
import os
import re
import struct
from pathlib import Path

import msgpack
import msgspec
import pytest
import torch

from kvmover import (
    Component,
    Fleet,
    Model,
    Mover,
    MoverConfig,
    Place,
    Pool,
    PoolSpec,
)
from kvmover.errors import PeerRefused
from kvmover.layout import CpOrder
from kvmover.plan import Plan, Replicas, Route
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import Key, Keys
from kvmover.transfer.protocol.handshake import read_card
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import Descriptors
from kvmover.transport.loopback import LoopbackNetwork, LoopbackTransport
from tests.docs import legs_by_the_page as by_the_page

PAGE = (Path(__file__).parent.parent.parent / "docs" / "protocol.md").read_text()
KV = Component.attention(layers=2, kv_heads=4, head_dim=8, dtype="bfloat16")
MODEL, TOKENS = Model("tiny", (KV,)), 40
WIDE, NARROW = Fleet(tp=2, page_tokens=16), Fleet(tp=1, page_tokens=64)


def messages(note: bytes) -> list[dict]:
    """The maps of a note that is not sealed. Fields that were left out are left out."""
    assert note[:4] == b"kvm\x01"
    value = msgpack.unpackb(note[4:])
    return value if isinstance(value, list) else [value]


class Overheard(LoopbackTransport):
    """A transport that keeps every note that was sent, and the bytes of every write."""

    def __init__(self, network: LoopbackNetwork, name: str, said: list[bytes]) -> None:
        super().__init__(network, name)
        self.said, self.written, self.to = said, list[bytes](), list[tuple[str, bytes]]()

    def notify(self, peer: str, note: bytes) -> None:
        self.said.append(note)
        self.to.append((peer, note))
        super().notify(peer, note)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        note: bytes,
        deadline_s: float,
        until: float = math.inf,
    ) -> int:
        if note:  # a probe has none
            self.said.append(note)
            self.to.append((peer, note))
            self.written.append(b"".join(_bytes_at(*row[:2]) for row in local.table.tolist()))
        return super().write(peer, local, remote, note, deadline_s, until)

    def read(self, peer: str, local: Descriptors, remote: Descriptors, note: bytes, deadline_s: float) -> int:
        self.said.append(note)
        self.to.append((peer, note))
        return super().read(peer, local, remote, note, deadline_s)


def _bytes_at(address: int, nbytes: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, nbytes)


def _moved(config: MoverConfig) -> tuple[list[bytes], list[Overheard], list[Pool]]:
    """A request from TP2 to TP1, everything that was said, and the pools: two sources', the destination's."""
    network, said = LoopbackNetwork(), list[bytes]()
    movers, pools, transports = list[Mover](), list[Pool](), list[Overheard]()
    for engine, fleet, rank in (("prefill", WIDE, 0), ("prefill", WIDE, 1), ("decode", NARROW, 0)):
        spec = PoolSpec.dense(KV, fleet.shard(KV, rank, 1), 4, fleet.page_tokens, "NHD")
        pools.append(Pool.shared(spec) if config.route is Route.MAPPED else Pool.zeros(spec))
        pools[-1].tensors[0].random_(0, 256)
        transports.append(Overheard(network, f"{engine}-{rank}", said))
        movers.append(Mover(transports[-1], MODEL, Place(engine, fleet, rank), pools[-1:], config))
    *sources, destination = movers
    for source in sources:
        destination.connect(source.card)
    for _ in range(3):  # the first stamps come with Pong
        for mover in movers:
            mover.poll()
    transfers = [destination.receive("r", "prefill", range(TOKENS), [[1]], aux_from=[0])]
    transfers += [source.send("r", [[2, 0, 3]], aux=b"beside" if source is sources[0] else None) for source in sources]
    while not all(transfer.ended for transfer in transfers):
        for mover in movers:
            mover.poll()
    for transfer in transfers:
        transfer.landed()
    for mover in movers:
        mover.close()
    return said, transports, pools


CASES = [(route, verb) for route in Route for verb in Verb]


@pytest.mark.parametrize(("route", "verb"), CASES, ids=[f"{route}-{verb}" for route, verb in CASES])
def test_every_note_of_a_request_is_read_by_the_page(route: Route, verb: Verb) -> None:
    said, _, _ = _moved(MoverConfig(route=route, verb=verb, arena_bytes=1 << 20, resend_s=20, chunk_layers=1))
    heard = [message for note in said for message in messages(note)]
    assert any(len(messages(note)) > 1 for note in said), "several messages travel in one note"
    spoken = [message["type"] for message in heard]
    rows = {name: (needed, optional) for name, (_, needed, optional) in _messages().items()}
    for each in heard:
        needed, optional = rows[each.pop("type")]
        assert needed <= each.keys() <= needed | optional, each
    assert [kind for kind in dict.fromkeys(spoken) if kind not in ("Ping", "Pong", "Aux")] == _steps(route, verb)


def _steps(route: Route, verb: Verb) -> list[str]:
    """In the order in which each is first said, by the page's table of a request."""
    packed = ["Offered", "Granted"] if route is Route.PACKED else []
    moved = ["Chunk", "Done"] if verb is Verb.PUSH else ["Staged", "Taken", "Done", "Kept"]
    return ["Hello", "Want", *packed, *moved]


@pytest.mark.parametrize("verb", Verb)
def test_one_packed_chunk_is_granted_with_its_want(verb: Verb) -> None:
    said, transports, _ = _moved(MoverConfig(route=Route.PACKED, verb=verb, arena_bytes=1 << 20, resend_s=20))
    heard = [message for note in said for message in messages(note)]
    grants = [message["grant"] for message in heard if message["type"] == "Want"]
    assert len(grants) == 2
    assert len({offset for _, offset, _ in grants}) == 2
    assert [chunk for chunk, offset, round_ in grants if (offset % 256, round_) == (0, 0)] == [0, 0]
    assert not {"Offered", "Granted"} & {message["type"] for message in heard}
    assert [len(transport.written) for transport in transports] == ([1, 1, 0] if verb is Verb.PUSH else [0, 0, 0])


def test_a_lease_echoes_a_stamp_that_its_source_has_said() -> None:
    said, _, _ = _moved(MoverConfig(route=Route.PACKED, chunk_layers=1))
    notes = [message for note in said for message in messages(note)]
    stamps = {note["stamp_us"] for note in notes if note["type"] in ("Hello", "Pong", "Offered")}
    leases = [note["lease"] for note in notes if note["type"] == "Granted"]
    assert leases
    for term, echo_us, span_us in leases:
        assert term >= 1
        assert echo_us in stamps
        assert span_us == MoverConfig().lease_s * 1e6


def test_page_tables_and_grants_are_what_the_page_says() -> None:
    said, _, _ = _moved(MoverConfig(route=Route.DIRECT, arena_bytes=1 << 20, resend_s=20))
    wants = [message for note in said for message in messages(note) if message["type"] == "Want"]
    assert [want["pages"] for want in wants] == [[struct.pack("<i", 1)]] * 2
    said, _, _ = _moved(MoverConfig(route=Route.PACKED, arena_bytes=1 << 20, resend_s=20, chunk_layers=1))
    for message in (message for note in said for message in messages(note)):
        if message["type"] == "Granted":
            assert [chunk for chunk, offset, round_ in message["grants"] if (offset % 256, round_) == (0, 0)]


def test_a_packed_chunk_holds_what_the_page_derives() -> None:
    _, transports, pools = _moved(MoverConfig(route=Route.PACKED, arena_bytes=1 << 20, resend_s=20))
    for transport, pool in zip(transports[:2], pools[:2], strict=True):
        # Pages of 16 and of 64 tokens: pieces of 16 and a tail of 8; the tail's group comes second, unpadded.
        planes = [pool.plane(layer, kv).view(torch.int16) for layer in range(2) for kv in range(2)]
        rows = torch.stack(planes)[:, [2, 0, 3]]  # layer-kv, page, token, head, dim
        pieces = [rows[:, :2], rows[:, 2:, :8]]
        due = b"".join(piece.permute(1, 3, 0, 2, 4).contiguous().numpy().tobytes() for piece in pieces)
        assert b"".join(transport.written) == due


SHAPES = [
    Fleet(tp, pp, cp, page_tokens=page, cp_order=CpOrder(order))
    for tp, pp, cp, page, order in [
        (1, 1, 1, 4, "page"),
        (2, 1, 1, 4, "page"),
        (3, 2, 1, 6, "page"),
        (4, 1, 1, 4, "page"),
        (6, 1, 2, 4, "page"),
        (2, 1, 3, 2, "token"),
        (4, 2, 2, 4, "block"),
        (8, 1, 1, 8, "page"),
    ]
]
CACHES = [
    Component.attention(layers=3, kv_heads=2, head_dim=4, dtype="float16"),
    Component.mla(layers=2, latent_dim=4, dtype="float16"),
    Component.state("state", layers=2, heads=4, dim=4, dtype="float32"),
]


@pytest.mark.parametrize("replicas", list(Replicas), ids=str)
@pytest.mark.parametrize("component", CACHES, ids=[component.name for component in CACHES])
def test_legs_between_fleets_are_what_the_page_derives(component: Component, replicas: Replicas) -> None:
    for fleets in itertools.product(SHAPES, SHAPES):
        for wanted in (range(21), range(3, 17), range(8, 9)):
            own = component.wanted(wanted)
            plan = Plan(component, *fleets, own.start, own.stop, replicas)
            for ranks in itertools.product(range(fleets[0].size), range(fleets[1].size)):
                leg = plan.leg(*ranks)
                tokens = [i for stripe in leg.positions for i in stripe if i < own.stop] if leg else []
                derived = by_the_page.sent(ranks, fleets, component, own, replicas.value)
                assert derived == sorted(tokens), (fleets, ranks)


def test_a_card_is_read_by_the_page() -> None:
    spec = PoolSpec.dense(KV, WIDE.shard(KV, 1, 1), 4, 16, "NHD")
    place = Place("prefill", WIDE, 1)
    mover = Mover(LoopbackTransport(LoopbackNetwork(), "p"), MODEL, place, [Pool.zeros(spec)])
    card = msgpack.unpackb(mover.card)
    own = {f"{KV.name}.{key}": str(getattr(KV, key)) for key in ("layers", "kv", "heads", "dim", "dtype")}
    assert card["fields"] == {"name": "tiny", "components": KV.name, **own}
    assert card["speaks"] == list(wire.CURRENT.speaks)
    body = msgpack.unpackb(card["body"])
    assert (body["place"]["engine"], body["place"]["rank"], body["place"]["fleet"]["tp"]) == ("prefill", 1, 2)
    assert body["pools"][0]["layout"]["axes"] == ["layer", "kv", "page", "token", "head", "dim"]
    assert body.keys() == {
        "place",
        "pools",
        "allocations",
        "arena",
        "staging",
        "transport",
        "host",
        "sandbox",
        "shares",
        "machine",
        "registration",
        "process",
        "listeners",
        "exports",
    }
    assert body["process"]["pid"] == os.getpid()
    start = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]  # field 22; the name is the second
    assert body["process"]["started"] == int(start)
    mover.close()


def test_the_shortest_body_of_the_page_is_accepted() -> None:
    (example,) = re.findall(r"^```json\n(.*?)^```", PAGE, flags=re.M | re.S)
    body = json.loads(example) | {"transport": b"of no network"}
    model = Model("toy", (Component.attention(layers=3, kv_heads=4, head_dim=32, dtype="bfloat16"),))
    card = {"speaks": [1, 1], "fields": model.fields(), "model": "toy", "body": msgpack.packb(body)}
    rank = read_card(model, msgpack.packb(card))
    assert rank.place == Place("decode", Fleet(page_tokens=24), 0, body["place"]["generation"])
    assert rank.pools[0].component == model.components[0]
    assert rank.allocations[0][0].nbytes == 2 * math.prod(rank.pools[0].layout.shape)
    for left_out in ({"arena"}, {"staging"}, {"pools"}, {"allocations"}, {"place"}, {"transport"}):
        less = {key: body[key] for key in body.keys() - left_out}
        with pytest.raises(PeerRefused, match=f"missing required field `{min(left_out)}`"):
            read_card(model, msgpack.packb(card | {"body": msgpack.packb(less)}))


def test_sealed_notes_are_opened_by_the_page() -> None:
    secret = bytes(range(32))
    said, transports, _ = _moved(MoverConfig(arena_bytes=1 << 20, resend_s=20, chunk_layers=1, keys=Keys(Key(secret))))
    kinds = set[str]()
    for transport in transports:
        numbers: dict[str, list[int]] = {}
        for peer, note in transport.to:
            head, number, tag, text = note[:4], note[4:12], note[12:44], note[44:]
            parts = (b"kvmover message", transport.name.encode(), peer.encode(), number, text)
            whole = b"".join(struct.pack(">Q", len(part)) + part for part in parts)
            assert (head, tag) == (b"kvs\x01", hmac.digest(secret, whole, "sha256"))
            numbers.setdefault(peer, []).append(int.from_bytes(number, "big"))
            kinds |= {message["type"] for message in messages(text)}
        assert all(seen == list(range(len(seen))) for seen in numbers.values())
    assert len(said) == sum(len(transport.to) for transport in transports)
    assert {"Hello", "Want", "Offered", "Granted", "Chunk", "Done"} <= kinds


def test_a_sealed_card_is_opened_by_the_page() -> None:
    secret = bytes(range(32))
    spec = PoolSpec.dense(KV, NARROW.shard(KV, 0, 1), 4, 64, "NHD")
    config = MoverConfig(arena_bytes=1 << 20, resend_s=20, keys=Keys(Key(secret)))
    transport, place = LoopbackTransport(LoopbackNetwork(), "p"), Place("decode", NARROW, 0)
    mover = Mover(transport, MODEL, place, [Pool.zeros(spec)], config)
    sealed, mover_card = mover.card, mover.card[44:]
    whole = b"".join(struct.pack(">Q", len(part)) + part for part in (b"kvmover card", mover_card))
    assert sealed[:44] == b"kvs\x01" + bytes(8) + hmac.digest(secret, whole, "sha256")
    assert msgpack.unpackb(mover_card).keys() == {"speaks", "fields", "model", "body"}
    mover.close()


def _messages() -> dict[str, tuple[str, set[str], set[str]]]:
    """(direction, fields, fields with a default) of each message in the page's table."""
    (table,) = re.findall(r"^\| Message \| From, to \|.*?\n\|[-|]+\n(.*?)\n\n", PAGE, flags=re.M | re.S)
    found: dict[str, tuple[str, set[str], set[str]]] = {}
    for row in table.splitlines():
        name, direction, fields = (cell.strip() for cell in row.strip("|").split("|"))
        about = {"request", "generation"} if " to " in direction or direction == "either way" else set()
        named = re.findall(r"`([a-z_]+)`( \([^)]+\))?", fields)
        optional = {field for field, default in named if default}
        found[name.strip("`")] = direction, about | {field for field, _ in named} - optional, optional
    return found


def test_the_table_of_messages_is_the_codes() -> None:
    kinds = {kind.__name__: kind for kind in _kinds(wire.Message) if kind is not wire.About}
    said = _messages()
    assert said.keys() == kinds.keys()
    for name, kind in kinds.items():
        fields = {field.name: field.required for field in msgspec.structs.fields(kind)}
        direction, needed, optional = said[name]
        assert needed == {field for field, required in fields.items() if required}, name
        assert optional == {field for field, required in fields.items() if not required}, name
        in_code = (kind in wire.ToSource.__args__, kind in wire.ToDestination.__args__)
        assert (direction == "destination to source", direction == "source to destination") == in_code, name


def _kinds(base: type) -> list[type]:
    return [kind for below in base.__subclasses__() for kind in (below, *_kinds(below))]


def test_the_numbers_are_the_codes() -> None:
    config = MoverConfig()
    for name in ("deadline_s", "drain_s", "resend_s", "ping_s", "silence_s", "lease_s", "linger_s"):
        assert f"| `{name}` | {getattr(config, name):g} |" in PAGE
    prose = " ".join(PAGE.split())
    assert f"longer than {wire.MAX_MESSAGE_BYTES:,} bytes" in prose
    assert f"at most {wire.MAX_AUX_BYTES:,}" in prose
    assert PAGE.splitlines()[2].startswith(f"Version {wire.CURRENT.speaks[1]}.")
