"""What the prefill/decode backend and the linker read of SGLang's pools, without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvmover.engines.sglang import pd_wire
from kvmover.engines.sglang.devicepool import is_shared, strands_of
from kvmover.engines.sglang.haul import Haul, Wanted
from kvmover.engines.sglang.model import Model
from kvmover.engines.sglang.pd_pool import Rows, component_of, pool_of, refuse, tensor_at
from kvmover.engines.sglang.seat import Seat, part_of
from kvmover.engines.sglang.version import EngineUnsupported
from kvmover.errors import PeerUnknown, PlanError
from kvmover.layout import Fleet

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8


def pointers(buffers: list[torch.Tensor], **more: Any) -> Any:
    return SimpleNamespace(
        kv_data_ptrs=[buffer.data_ptr() for buffer in buffers],
        kv_data_lens=[buffer.nbytes for buffer in buffers],
        kv_item_lens=[buffer[0].nbytes * PAGE for buffer in buffers],
        page_size=PAGE,
        kv_cache_dtype_str="bfloat16",
        state_types=[],
        num_draft_entries=0,
        **more,
    )


def test_the_planes_of_a_pool_are_the_engines_buffers() -> None:
    """K of every layer, then V, as SGLang lists them; a plane a layer and K/V, as kvmover asks for them."""
    buffers = [torch.randint(-99, 99, (5 * PAGE, HEADS, DIM)).to(torch.bfloat16) for _ in range(2 * LAYERS)]
    args, fleet = pointers(buffers), Fleet(tp=2, page_tokens=PAGE)
    component = component_of(args, 2, 2 * HEADS, fleet, 1)
    assert (component.layers, component.heads, component.dim) == (LAYERS, 2 * HEADS, 2 * DIM)
    pool = pool_of(args, component, fleet, 1, torch.device("cpu"))
    for layer in range(LAYERS):
        for kv in range(2):
            plane = pool.plane(layer, kv).reshape(5 * PAGE, HEADS, 2 * DIM)
            assert torch.equal(plane, buffers[kv * LAYERS + layer].view(torch.uint8))


def test_a_borrowed_tensor_is_the_engines_memory_itself() -> None:
    whole = torch.zeros(64, dtype=torch.uint8)
    tensor_at(whole.data_ptr() + 16, 8, torch.device("cpu")).fill_(7)
    assert whole.tolist() == [0] * 16 + [7] * 8 + [0] * 40


def test_pages_that_are_no_whole_rows_are_refused() -> None:
    args = pointers([torch.zeros(8, 3, 5, dtype=torch.uint8)] * 2)
    with pytest.raises(EngineUnsupported, match="60 bytes are not 4 tokens x 2 heads"):
        component_of(args, 2, 2, Fleet(), 0)


@pytest.mark.parametrize(
    ("changed", "cp", "pp", "word"),
    [
        ({"state_types": ["swa", "mamba"]}, 1, 1, "swa, mamba"),
        ({"num_draft_entries": 1}, 1, 1, "draft"),
        ({}, 2, 1, "context parallelism of 2"),
        ({}, 1, 4, "4 pipeline stages"),
        ({"kv_item_lens": [8, 16]}, 1, 1, r"\[8, 16\] bytes"),
    ],
    ids=str,
)
def test_what_is_not_transferred_is_named(changed: dict[str, Any], cp: int, pp: int, word: str) -> None:
    args = pointers([torch.zeros(8, 1, 8)])
    refuse(args, 1, 1)
    vars(args).update(changed)
    with pytest.raises(EngineUnsupported, match=word):
        refuse(args, cp, pp)


def test_rows_beside_the_cache_travel_as_one_payload() -> None:
    buffers = [torch.arange(40, dtype=torch.uint8).reshape(5, 8), torch.arange(10.0).reshape(5, 2)]
    others = [torch.zeros_like(buffer) for buffer in buffers]
    ours, theirs = (
        Rows(SimpleNamespace(aux_data_ptrs=[b.data_ptr() for b in of], aux_item_lens=[b[0].nbytes for b in of]))
        for of in (buffers, others)
    )
    theirs.put(1, ours.take(3))
    for buffer, other in zip(buffers, others, strict=True):
        assert torch.equal(other[1], buffer[3])
        assert not other[[0, 2, 3, 4]].any()
    with pytest.raises(ValueError, match="3 bytes beside the cache; this side's buffers take 16"):
        theirs.put(0, b"abc")


@pytest.mark.parametrize("message", [pd_wire.Call(b"c", ("h", 1), "k"), pd_wire.Asked(1 << 62, "r", 2, 64)], ids=repr)
def test_messages_come_back_as_they_were(message: pd_wire.Message) -> None:
    assert pd_wire.read(pd_wire.frames(message)) == message


@pytest.mark.parametrize(
    "received",
    [[], [b"KVMOVER"], [b"KVMOVER", b"\xc1"], [b"ABORT", b"7"], [b"KVMOVER", msgspec.msgpack.encode({"type": "Call"})]],
    ids=str,
)
def test_frames_that_are_not_ours_are_left_to_others(received: list[bytes]) -> None:
    assert pd_wire.read(received) is None


class Stub:
    """A mover that does as it is told: `error` is what `receive` raises."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.said: list[str] = []
        self.transfer = SimpleNamespace(ended=False, held=False, result=None)

    def poll(self) -> bool:
        return False

    def receive(self, *given: Any) -> Any:
        if self.error:
            raise self.error
        self.said.append(f"receive {given[0]} of {given[1]}")
        return self.transfer

    def abort(self, transfer: Any, reason: str) -> None:
        self.said.append(f"abort: {reason}")

    def refuse(self, request: str, reason: str) -> None:
        self.said.append(f"refuse {request}: {reason}")


def hauled(stub: Any, now: list[float]) -> tuple[Haul, list[tuple[int, str | None]]]:
    over: list[tuple[int, str | None]] = []
    return Haul(stub, lambda room, reason, _: over.append((room, reason)), lambda: now[0]), over


def test_a_request_is_asked_for_once_its_engine_is_known_and_connected() -> None:
    stub, now, engine = Stub(), [0.0], [None, "p", "p"]
    haul, over = hauled(stub, now)
    haul.receive(7, Wanted(lambda: engine.pop(0), range(8), torch.arange(2).numpy(), 0, 10.0))
    haul.turn()
    stub.error = PeerUnknown("rank 1 of p is not connected")
    haul.turn()
    stub.error = None
    haul.turn()
    assert (stub.said, over, haul.busy) == (["receive 7 of p"], [], True)


@pytest.mark.parametrize(
    ("engine", "error", "reason"),
    [
        (None, None, "the prefill engine has not answered"),
        ("p", PeerUnknown("rank 1 is not connected"), "rank 1 is not connected"),
        ("p", PlanError("no plan"), "no plan"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_asked_for_ends_with_the_reason(
    engine: str | None, error: Exception | None, reason: str
) -> None:
    stub, now = Stub(), [0.0]
    haul, over = hauled(stub, now)
    stub.error = error
    haul.receive(7, Wanted(lambda: engine, range(8), torch.arange(2).numpy(), 0, 10.0))
    haul.turn()
    now[0] = 11.0
    haul.turn()
    assert over == [(7, reason)]
    assert not haul.has(7)


def test_pages_are_not_given_back_while_they_may_still_be_written() -> None:
    stub, now = Stub(), [0.0]
    haul, over = hauled(stub, now)
    haul.receive(7, Wanted(lambda: "p", range(8), torch.arange(2).numpy(), 0, 10.0))
    haul.turn()
    haul.abort(7, "enough")
    stub.transfer.ended = stub.transfer.held = True
    stub.transfer.result = SimpleNamespace(reason="enough", aux={})
    haul.turn()
    assert (over, haul.has(7)) == ([], True)
    stub.transfer.held = False
    haul.turn()
    assert (over, haul.has(7)) == ([(7, "enough")], False)


def test_a_request_that_was_not_begun_is_refused_to_whoever_asks() -> None:
    stub = Stub()
    haul, over = hauled(stub, [0.0])
    haul.abort(9, "no")
    assert (stub.said, over) == (["refuse 9: no"], [])


def entry(kind: str, components: list[list[torch.Tensor]], mapping: dict[int, Any], by_page: bool) -> Any:
    pool = type(kind, (), {})()
    span = 1 if by_page else PAGE
    return SimpleNamespace(
        name="kv", device_pool=pool, components=components, layer_mapping=mapping, page_size=PAGE, _row_span=span
    )


def test_keys_and_values_are_two_planes_of_a_layer() -> None:
    buffers = [torch.zeros(5 * PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    of = entry("MHATokenToKVPool", [buffers], {layer: (layer, LAYERS + layer) for layer in range(LAYERS)}, False)
    (strand,) = strands_of(of, 0, False)
    assert strand.buffers == (0, 3, 1, 4, 2, 5)
    assert [strand.own(range(1, 3)), strand.own(range(3))] == [[range(1, 3)], [range(3)]]
    part = part_of(strand.rows, Seat(0, 1), Model(), PAGE)
    assert strand.spec(part.component).allocation_bytes == buffers[0].nbytes
    assert part.nbytes == sum(buffer[:PAGE].nbytes for buffer in buffers)


def test_a_layer_of_the_model_may_wait_for_several_of_a_pools_own() -> None:
    """A draft layer rides with the first layer of the model: two runs."""
    buffers = [torch.zeros(8, 16, dtype=torch.uint8) for _ in range(4)]
    (strand,) = strands_of(entry("X", [buffers], {0: (0, 3), 1: 1, 2: 2}, True), 0, False)
    assert strand.own(range(1)) == [range(1), range(3, 4)]
    assert strand.own(range(1, 3)) == [range(1, 3)]
    assert strand.own(range(3, 9)) == []


def test_buffers_of_one_shape_are_one_strand_each() -> None:
    temporal = [torch.zeros(9, 4, 4) for _ in range(2)]
    conv = [torch.zeros(9, 6, 3, dtype=torch.bfloat16) for _ in range(2)]
    a, b = strands_of(entry("MambaPool", [temporal, conv], {0: 0, 1: 1}, True), 0, False)
    assert [(s.rows.name, s.rows.dim, s.rows.states, s.buffers) for s in (a, b)] == [
        ("kv.0", 64, 1, (0, 1)),
        ("kv.1", 36, 1, (2, 3)),
    ]


def test_buffers_that_cannot_be_described_are_refused() -> None:
    strided = torch.zeros(8, 4, 16, dtype=torch.uint8)[:, 0]
    with pytest.raises(EngineUnsupported, match="do not follow each other"):
        strands_of(entry("X", [[strided]], {0: 0}, True), 0, False)
    with pytest.raises(EngineUnsupported, match="layers of different shapes"):
        strands_of(entry("X", [[torch.zeros(8, 4), torch.zeros(8, 5)]], {0: 0}, True), 0, False)


def test_latent_pools_are_the_same_on_every_rank_and_others_are_not() -> None:
    latent = type("MLATokenToKVPool", (), {})
    sparse = type("DSATokenToKVPool", (latent,), {})
    named_otherwise = type("Mine", (sparse,), {})
    assert all(is_shared(kind()) for kind in (latent, sparse, named_otherwise))
    assert not is_shared(type("MambaPool", (), {})())
