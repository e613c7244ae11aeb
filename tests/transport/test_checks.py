"""What never reaches a wire: bad ranges, bad pairs, bad metadata. No backend is needed here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.c_core import NATIVE
from kvmover.errors import DescriptorError, LeaseOver, PeerRefused, ProtocolError
from kvmover.transport import MAX_NOTE_BYTES, Descriptors, Memory, MemoryKind, checks, memory_of, whole
from kvmover.transport.base import run_count_in_python, short_strides_in_python, union
from kvmover.transport.checks import Operation, Ranges, check_note, check_runs, touches
from kvmover.transport.envelope import TransportCard, seal, unseal
from tests.proofs import searched

HOST, DEVICE = MemoryKind.HOST, MemoryKind.DEVICE
BASE = 1 << 20


def rows(*table: tuple[int, int, int, int, int], kind: MemoryKind = HOST) -> Descriptors:
    return Descriptors(kind, np.array(table, np.int64))


def two_ranges() -> Ranges:
    ranges = Ranges()
    ranges.add(Memory(HOST, BASE, 4096))
    ranges.add(Memory(HOST, BASE + 4096, 4096))
    ranges.add(Memory(DEVICE, BASE, 4096, device=1))
    return ranges


@pytest.mark.parametrize(
    "bad",
    [
        rows((BASE - 1, 1, 0, 1, 1)),
        rows((BASE + 8192, 1, 0, 1, 1)),
        rows((BASE, 16, 0, 16, 1), (BASE + 4090, 16, 0, 16, 1)),
        rows((BASE, 16, 0, 1024, 5)),
        rows((BASE, 16, 1, 16, 1)),
        rows((BASE, 16, 0, 16, 1), kind=DEVICE),
        rows((BASE + 4096, 256, 0, -512, 4)),
        rows((BASE, 256, 0, 128, 2)),
        rows((BASE, 256, 0, 0, 2)),
        rows((BASE, (1 << 63) - 1, 0, 1, 1)),
        rows((BASE, 8, 0, (1 << 62), 5)),
        rows((BASE, 8, 0, 8, (1 << 63) - 1)),
        rows((-(1 << 63), 8, 0, 8, 1)),
        rows(((1 << 63) - 1, 8, 0, 8, 1)),
    ],
    ids=[
        "before", "behind", "across-two-ranges", "last-run-outside", "other-device", "other-kind", "backwards",
        "overlapping", "stride-0", "length-2^63", "stride-wraps", "count-2^63", "address-lowest", "address-highest",
    ],
)  # fmt: skip
def test_runs_outside_registered_memory_are_refused(bad: Descriptors) -> None:
    with pytest.raises(DescriptorError, match="local: "):
        two_ranges().check(bad, "local")


def test_runs_to_the_last_byte_pass() -> None:
    ranges = two_ranges()
    ranges.check(rows((BASE, 16, 0, 1020, 5), (BASE + 4096, 4096, 0, 0, 1)), "local")
    ranges.check(rows((BASE, 4096, 1, 4096, 1), kind=DEVICE), "local")
    ranges.remove(Memory(HOST, BASE, 4096))
    with pytest.raises(DescriptorError):
        ranges.check(rows((BASE, 16, 0, 16, 1)), "local")


def test_runs_on_several_devices_are_each_looked_for_on_their_own() -> None:
    ranges = Ranges()
    for device in (0, 1):
        ranges.add(Memory(DEVICE, BASE + 8192 * device, 4096, device))
    good = [(BASE, 16, 0, 16, 1), (BASE + 8192, 16, 1, 16, 1)]
    ranges.check(rows(*good, kind=DEVICE), "local")
    for bad in ((BASE, 16, 1, 16, 1), (BASE + 8192, 16, 0, 16, 1)):
        with pytest.raises(DescriptorError, match=f"outside the registered .* memory of device {bad[2]}"):
            ranges.check(rows(*good, bad, kind=DEVICE), "local")


def test_bytes_side_by_side_are_runs_too_and_memory_that_came_later_counts() -> None:
    ranges = two_ranges()
    ranges.check(rows((BASE, 1, 0, 1, 4096), (BASE + 4096, 1, 0, 1, 4096)), "local")
    later = rows((BASE + 8192, 16, 0, 16, 1))
    with pytest.raises(DescriptorError, match="outside"):
        ranges.check(later, "local")
    ranges.add(Memory(HOST, BASE + 8192, 16))
    ranges.check(later, "local")


@given(
    st.lists(
        st.tuples(
            st.integers(BASE - 40, BASE + 200), st.integers(1, 90), st.integers(0, 1), st.integers(-20, 60),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=4,
    )
)  # fmt: skip
def test_the_check_agrees_with_looking_at_every_byte(table: list[tuple[int, int, int, int, int]]) -> None:
    ranges = Ranges()
    memory = [Memory(HOST, BASE, 64), Memory(HOST, BASE + 64, 40), Memory(HOST, BASE, 150, device=1)]
    for part in memory:
        ranges.add(part)

    def legal(address: int, nbytes: int, device: int, stride: int, count: int) -> bool:
        if count > 1 and stride < nbytes:
            return False
        starts = [address + i * stride for i in range(count)]
        homes = [
            m for m in memory if m.device == device and all(
                m.address <= start and start + nbytes <= m.address + m.nbytes for start in starts)
        ]  # fmt: skip
        return bool(homes)

    if all(legal(*row) for row in table):
        ranges.check(rows(*table), "local")
    else:
        with pytest.raises(DescriptorError):
            ranges.check(rows(*table), "local")


def outcome(operation: Operation, ours: Ranges, theirs: Ranges, core: object) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "NATIVE", core)
        try:
            operation.check(ours, theirs)
        except DescriptorError as error:
            return str(error)
    return "passes"


needs_c = pytest.mark.skipif(NATIVE is None, reason="the C core was not built")
ends = st.sampled_from([0, 1, BASE - 1, BASE, BASE + 4090, BASE + 8191, BASE + 8192, -(1 << 63), (1 << 63) - 1])
odd_rows = st.tuples(
    ends | st.integers(BASE, BASE + 8192),
    st.integers(1, 64) | st.sampled_from([4096, 8192, (1 << 63) - 1]),
    st.sampled_from([0, 0, 0, 1, 2]),
    st.integers(-64, 128) | st.sampled_from([1 << 62, -(1 << 63)]),
    st.integers(1, 4) | st.sampled_from([(1 << 63) - 1]),
)


@needs_c
@searched(few=100, many=5000)
@given(st.data(), st.lists(odd_rows, min_size=1, max_size=4), st.sampled_from([HOST, DEVICE]))
def test_c_lets_operations_pass_that_python_lets_pass(
    data: st.DataObject, local: list[tuple[int, int, int, int, int]], kind: MemoryKind
) -> None:
    moved = [(BASE, nbytes, 0, stride, runs) for _, nbytes, _, stride, runs in local]
    remote = data.draw(st.sampled_from([local, moved, local[:1]]) | st.lists(odd_rows, min_size=1, max_size=4))
    operation = Operation("WRITE", "peer", rows(*local, kind=kind), rows(*remote), b"", 1.0)
    ours, theirs = two_ranges(), two_ranges()
    assert outcome(operation, ours, theirs, NATIVE) == outcome(operation, ours, theirs, None)


@needs_c
def test_an_address_and_a_length_that_wrap_round_lie_in_no_range() -> None:
    most = (1 << 63) - 1
    for local in ([(most, most, 0, 0, 1)], [(BASE, most, 0, most, 2)], [(most, 1, 0, most, most)]):
        operation = Operation("WRITE", "peer", rows(*local, kind=HOST), rows(*local), b"", 1.0)
        assert "outside the registered" in outcome(operation, two_ranges(), two_ranges(), NATIVE), local


@needs_c
@given(st.lists(st.tuples(*[st.integers(-1, 3) | st.just((1 << 63) - 1)] * 5), min_size=1, max_size=5))
def test_c_counts_runs_and_finds_short_strides_as_python_does(table: list[tuple[int, ...]]) -> None:
    assert NATIVE is not None
    counted = np.array(table, np.int64)
    assert NATIVE.run_count(counted) == run_count_in_python(counted)
    assert NATIVE.short_strides(counted) == short_strides_in_python(counted)


@needs_c
def test_c_refuses_tables_that_do_not_fit() -> None:
    assert NATIVE is not None
    row, one = np.zeros((1, 5), np.int64), np.zeros(1, np.int64)
    for odd in ((np.zeros(4, np.int64), one, one), (row, one, np.zeros(2, np.int64)), (row, one[:0], one[:0])):
        for sides in ((*odd, row, one, one), (row, one, one, *odd)):
            with pytest.raises(ValueError, match="do not fit"):
                NATIVE.runs_fit(*sides)
    with pytest.raises(TypeError, match="takes 6 tables, got 1"):
        NATIVE.runs_fit(row)
    for counted in (NATIVE.run_count, NATIVE.short_strides):
        with pytest.raises(ValueError, match="3 bytes are no numbers"):
            counted(np.zeros(3, np.int8))


@pytest.mark.parametrize(
    "bad",
    [Memory(HOST, BASE, 0), Memory(HOST, 0x10, 64), Memory(HOST, BASE, 1 << 63), Memory(DEVICE, BASE, 64, device=-1)],
)
def test_memory_that_cannot_be_is_not_registered(bad: Memory) -> None:
    with pytest.raises(DescriptorError):
        Ranges().add(bad)


def test_the_lowest_and_the_highest_byte_that_there_can_be_are_registered() -> None:
    ranges, top = Ranges(), 1 << 63
    with pytest.raises(DescriptorError, match="not memory that can be registered"):
        ranges.add(Memory(HOST, top - 64, 64))
    for memory in (Memory(HOST, 1 << 16, 1), Memory(HOST, top - 65, 64)):
        ranges.add(memory)
        assert memory in ranges


def test_views_are_registered_as_what_they_are_views_of_and_neighbours_apart() -> None:
    ranges = [(0, 8), (4, 12), (5, 6), (12, 16), (0, 8), (20, 24)]
    views = [Memory(HOST, BASE + start, stop - start) for start, stop in ranges]
    elsewhere = [Memory(DEVICE, BASE + 2, 8, 0), Memory(DEVICE, BASE + 2, 8, 1)]
    registered = union([*views, *elsewhere])
    assert [(m.address - BASE, m.nbytes) for m in registered if m.kind is HOST] == [(0, 12), (12, 4), (20, 4)]
    assert [m for m in registered if m.kind is DEVICE] == elsewhere
    Ranges((memory, 1) for memory in registered)


def test_overlapping_registration_is_refused_and_names_the_other() -> None:
    ranges = two_ranges()
    for address, nbytes in ((BASE, 4096), (BASE + 10, 10), (BASE - 10, 11), (BASE + 4000, 200)):
        with pytest.raises(DescriptorError, match="overlaps"):
            ranges.add(Memory(HOST, address, nbytes))
    ranges.add(Memory(DEVICE, BASE, 4096, device=0))


@pytest.mark.parametrize(
    ("local", "remote", "legal"),
    [
        (rows((0, 8, 0, 16, 4)), rows((0, 8, 0, 8, 4)), True),
        (rows((0, 8, 0, 16, 4)), Descriptors.runs(HOST, [0, 99, 50, 7], 8), True),
        (rows((0, 8, 0, 16, 2), (0, 4, 0, 4, 2)), rows((0, 8, 0, 8, 1), (0, 8, 0, 8, 1), (0, 4, 0, 4, 2)), True),
        (rows((0, 8, 0, 16, 4)), rows((0, 8, 0, 8, 3)), False),
        (rows((0, 8, 0, 16, 2)), rows((0, 16, 0, 16, 1)), False),
        (rows((0, 8, 0, 16, 2)), rows((0, 12, 0, 8, 1), (0, 4, 0, 4, 1)), False),
    ],
)
def test_sides_pair_when_they_expand_to_equal_runs(local: Descriptors, remote: Descriptors, legal: bool) -> None:
    if legal:
        check_runs(local, remote)
    else:
        with pytest.raises(DescriptorError):
            check_runs(local, remote)


def test_sides_that_differ_after_an_equal_first_row_are_refused_by_the_number_of_the_run() -> None:
    local = rows((0, 8, 0, 8, 1), (0, 8, 0, 8, 1))
    with pytest.raises(DescriptorError, match="run 1 is 8 bytes here and 4 bytes at the peer"):
        check_runs(local, rows((0, 8, 0, 8, 1), (0, 4, 0, 4, 1)))


def test_rows_touch_only_the_memory_they_lie_in() -> None:
    descriptors = rows((BASE, 16, 0, 16, 2), (BASE + 9000, 16, 2, 16, 2))
    assert touches(descriptors, Memory(HOST, BASE, 64))
    assert not touches(descriptors, Memory(HOST, BASE + 64, 64))
    assert not touches(descriptors, Memory(HOST, BASE - 64, 64)), "which ends where they begin"
    assert not touches(descriptors, Memory(DEVICE, BASE, 64))
    assert not touches(descriptors, Memory(HOST, BASE + 9000, 64, device=0))


def test_serials_are_of_the_ranges_that_runs_lie_in() -> None:
    ranges = two_ranges()
    both = rows((BASE, 16, 0, 16, 2), (BASE + 4096, 16, 0, 16, 1), (BASE + 9, 1, 0, 1, 1))
    assert ranges.serials(rows((BASE + 4096, 16, 0, 16, 2))) == {2}
    assert ranges.serials(both) == {1, 2}
    on_two_devices = Ranges()
    for device in (0, 1):
        on_two_devices.add(Memory(DEVICE, BASE, 4096, device))
    table = np.array([[BASE, 16, device, 16, 1] for device in (1, 0)], np.int64)
    assert on_two_devices.serials(Descriptors(DEVICE, table)) == {1, 2}
    assert on_two_devices.serials(Descriptors(DEVICE, table[:1])) == {2}
    ranges.remove(Memory(HOST, BASE, 4096))
    ranges.add(Memory(HOST, BASE, 4096))
    assert ranges.serials(both) == {2, 5}, "registered anew"


@pytest.mark.parametrize("deadline_s", [0, -1, float("inf"), float("nan")])
def test_an_operation_needs_a_finite_deadline(deadline_s: float) -> None:
    post = Operation("READ", "peer", rows((BASE, 16, 0, 16, 1)), rows((BASE, 16, 0, 16, 1)), b"", deadline_s)
    with pytest.raises(DescriptorError, match="deadline"):
        post.check(two_ranges(), two_ranges())
    msgspec.structs.replace(post, deadline_s=1.0).check(two_ranges(), two_ranges())


def test_no_operation_is_posted_from_the_end_of_its_permission_on() -> None:
    post = Operation("WRITE", "peer", rows((BASE, 16, 0, 16, 1)), rows((BASE, 16, 0, 16, 1)), b"", 1.0, until=5.0)
    post.check_until(4.999)
    with pytest.raises(LeaseOver, match="the permission to write to peer is over"):
        post.check_until(5.0)


def test_a_note_longer_than_the_limit_is_refused() -> None:
    check_note(bytes(MAX_NOTE_BYTES))
    with pytest.raises(ProtocolError, match=str(MAX_NOTE_BYTES)):
        check_note(bytes(MAX_NOTE_BYTES + 1))


def card() -> TransportCard:
    return TransportCard.of("loopback", "decode.1f", two_ranges(), b"agent bytes")


def test_metadata_survives_the_trip() -> None:
    assert unseal(seal(card()), "loopback") == card()
    assert unseal(seal(card()), "loopback").ranges().items() == two_ranges().items()


@given(st.data())
def test_metadata_with_any_byte_changed_or_missing_is_refused(data: st.DataObject) -> None:
    whole_metadata = seal(card())
    at = data.draw(st.integers(0, len(whole_metadata) - 1))
    flip = data.draw(st.integers(1, 255))
    changed = bytearray(whole_metadata)
    changed[at] ^= flip
    for bad in (bytes(changed), whole_metadata[:at], whole_metadata + bytes([flip])):
        with pytest.raises(PeerRefused):
            unseal(bad, "loopback")


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "decode.2f"},
        {"backend": "nixl"},
        {"registrations": [["DRAM", 16, 64, 0, 1]]},
        {"registrations": [["DRAM", BASE, 64, 0, 1], ["DRAM", BASE, 64, 0, 2]]},
        {"registrations": [["DRAM", -BASE, 64, 0, 1]]},
        {"registrations": [["FILE", BASE, 64, 0, 1]]},
        {"revision": -1},
        {"surprise": 1},
    ],
)
def test_a_card_that_lies_about_itself_is_refused_even_well_sealed(bad: dict[str, object]) -> None:
    fields = msgspec.to_builtins(card(), builtin_types=(bytes,)) | bad
    with pytest.raises(PeerRefused):
        unseal(seal(fields), "loopback")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["decode\n2026-01-01 ERROR all is lost.1f", "\x1b[2J" * 500 + ".1f"])
def test_a_name_that_does_not_print_is_refused_on_one_line_that_does(name: str) -> None:
    bad = msgspec.structs.replace(card(), name=name, generation="1f")
    with pytest.raises(PeerRefused) as refused:
        unseal(seal(bad), "loopback")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


@dataclass(frozen=True)
class Device:
    type: str
    index: int | None = None


@dataclass(frozen=True)
class Tensor:
    device: Device
    nbytes: int
    contiguous: bool = True

    def data_ptr(self) -> int:
        return BASE

    def numel(self) -> int:
        return self.nbytes // 2

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self.contiguous


def test_memory_of_a_tensor_is_its_bytes() -> None:
    assert memory_of(Tensor(Device("cpu"), 64)) == Memory(HOST, BASE, 64)
    assert memory_of(Tensor(Device("cuda", 3), 64)) == Memory(DEVICE, BASE, 64, 3)
    assert whole(Memory(DEVICE, BASE, 64, 3)).table.tolist() == [[BASE, 64, 3, 64, 1]]


@pytest.mark.parametrize(
    "bad", [Tensor(Device("meta"), 64), Tensor(Device("cpu"), 64, contiguous=False), Tensor(Device("cpu"), 0)]
)
def test_a_tensor_without_one_range_of_memory_is_refused(bad: Tensor) -> None:
    with pytest.raises(DescriptorError):
        memory_of(bad)


def test_importing_the_transport_loads_neither_nixl_nor_torch() -> None:
    probe = "import sys, kvmover.transport as t; t.memory_of, t.LoopbackNetwork, t.NixlTransport; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.partition(".")[0] for name in loaded} & {"nixl", "nixl_cu13", "nixl_cu12", "torch"}
