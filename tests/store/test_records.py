"""Headers: what is written is read, and nothing else is ever taken for one."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvmover.layout import Span, Stripe
from kvmover.store.head import next_record
from kvmover.store.part import PageBox, part_key
from kvmover.store.record import (
    BLOCK_BYTES,
    FIXED_BYTES,
    LIVE,
    PREAMBLE_BYTES,
    STAMP_AT,
    STATE_AT,
    Kind,
    Preamble,
    Record,
    decode,
    decode_all,
    decode_part,
    encode_mark,
    encode_object,
    encode_part,
    holds,
    table,
)

numbers, blocks = st.integers(0, 2**31), st.integers(0, 2**30)
spans = st.builds(Span, numbers, st.integers(1, 5))
stripes = st.builds(Stripe, numbers, st.integers(1, 9), st.integers(8, 20), st.integers(1, 8))
boxes = st.builds(PageBox, spans, spans, stripes)
hashes = st.binary(min_size=32, max_size=32)


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """A head file without its preamble, and where its records are."""
    at, blob, places = PREAMBLE_BYTES, b"", []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            box = draw(boxes)
            payload = box.cells * draw(st.integers(1, 100))
            digests = draw(st.binary(min_size=8 * box.cells, max_size=8 * box.cells))
            key = part_key(draw(hashes), box)
            place = BLOCK_BYTES * draw(blocks), payload
            one = encode_object(at, draw(numbers), place, draw(hashes), key, digests)
        else:
            one = encode_mark(at, draw(st.sampled_from((Kind.SYNCED, Kind.SEALED))), draw(numbers))
        places.append(at)
        blob, at = blob + one, at + len(one)
    return blob, places


def following(blob: bytes, at: int) -> int | None:
    """Where the next whole record after byte `at` begins of a head file, whose bytes behind its preamble are `blob`."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(PREAMBLE_BYTES) + blob)
        file.flush()
        return next_record(file.fileno(), at, PREAMBLE_BYTES + len(blob))


@given(
    at=st.integers(0, 2**40),
    stamp=numbers,
    offset=st.integers(0, 2**60),
    page=hashes,
    owner=hashes,
    box=boxes,
    data=st.data(),
)
def test_a_header_comes_back_as_it_was_written(at, stamp, offset, page, owner, box, data) -> None:
    digests = data.draw(st.binary(min_size=8 * box.cells, max_size=8 * box.cells))
    key = part_key(owner, box)
    blob = encode_object(at, stamp, (offset, box.cells * 7), page, key, digests)
    record = decode(blob, at, at)
    assert isinstance(record, Record)
    assert (record.kind, record.at, record.stamp, record.offset) == (Kind.OBJECT, at, stamp, offset)
    assert (record.nbytes, record.page, record.digests) == (box.cells * 7, page, digests)
    assert record.part is key, "equal parts are one object"
    assert record.record_bytes == len(blob) == FIXED_BYTES + 8 * box.cells


@given(file=files())
def test_a_head_file_is_read_record_by_record(file: tuple[bytes, list[int]]) -> None:
    blob, places = file
    assert [record.at for record in decode_all(blob, PREAMBLE_BYTES)] == places


@given(file=files(), data=st.data())
def test_a_cut_head_file_ends_with_its_last_whole_record(file: tuple[bytes, list[int]], data: st.DataObject) -> None:
    blob, places = file
    cut = data.draw(st.integers(0, len(blob)))
    ends = [*places[1:], PREAMBLE_BYTES + len(blob)]
    whole = [at for at, end in zip(places, ends, strict=True) if end <= PREAMBLE_BYTES + cut]
    assert [record.at for record in decode_all(blob[:cut], PREAMBLE_BYTES)] == whole


@given(file=files(), data=st.data())
def test_a_flipped_bit_spoils_its_record_and_no_other(file: tuple[bytes, list[int]], data: st.DataObject) -> None:
    blob, places = file
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    hit = max(at for at in places if at - PREAMBLE_BYTES <= bit // 8)
    within = bit // 8 + PREAMBLE_BYTES - hit
    bad = bytearray(blob)
    bad[bit // 8] ^= 1 << bit % 8
    found, at = [], PREAMBLE_BYTES
    while True:
        found += list(decode_all(bytes(bad)[at - PREAMBLE_BYTES :], at))
        ahead = following(bytes(bad), found[-1].at + found[-1].record_bytes - 1 if found else at)
        if ahead is None or ahead in {record.at for record in found}:
            break
        at = ahead
    mutable = range(STATE_AT, STAMP_AT + 4)
    assert {record.at for record in found} == set(places) - (set() if within in mutable else {hit})


@given(junk=st.binary(max_size=2000))
def test_junk_is_no_record(junk: bytes) -> None:
    assert not list(decode_all(junk, PREAMBLE_BYTES))
    assert following(b"KVRC" + junk, PREAMBLE_BYTES - 1) is None
    assert Preamble.decode(junk) is None


@given(file=files(), shift=st.integers(1, 4096))
def test_a_record_at_another_place_is_none(file: tuple[bytes, list[int]], shift: int) -> None:
    blob, _ = file
    assert decode(blob, PREAMBLE_BYTES + shift, PREAMBLE_BYTES + shift) is None


@given(namespace=hashes, boot=st.binary(min_size=16, max_size=16), flip=st.integers(0, 8 * PREAMBLE_BYTES - 1))
def test_a_preamble_is_whole_or_none(namespace: bytes, boot: bytes, flip: int) -> None:
    preamble = Preamble(namespace, boot)
    raw = bytearray(preamble.encode())
    assert Preamble.decode(bytes(raw)) == preamble
    raw[flip // 8] ^= 1 << flip % 8
    assert Preamble.decode(bytes(raw)) is None


#: Six cells of 10 bytes: the box of GOOD, a header for byte 80 of a head file.
KEY = part_key(bytes(32), PageBox(Span(0, 2), Span(0, 3), Stripe(0, 1, 16, 16)))
GOOD = encode_object(80, 1, (0, 60), bytes(32), KEY, bytes(48))
#: Byte offsets of a record's length, kind and count of heads.
LENGTH_AT, KIND_AT, HEADS_AT = 4, 24, 116


def sealed(raw: bytes, *numbers: tuple[int, int]) -> bytes:
    """A record for byte 80 with other numbers at some byte offsets, and the length and the check of what it is now."""
    bad = bytearray(raw)
    for at, number in ((LENGTH_AT, len(raw)), *numbers):
        bad[at : at + 4] = number.to_bytes(4, "little")
    bad[16:24] = xxh3_64_intdigest(bytes(bad[24:]), 80).to_bytes(8, "little")
    return bytes(bad)


MARK = encode_mark(80, Kind.SYNCED, 4096)


def test_a_header_that_names_an_impossible_box_is_none() -> None:
    assert decode(GOOD, 80, 80)
    for bad in (
        encode_object(80, 1, (0, 61), bytes(32), KEY, bytes(48)),  # cells of unequal size
        encode_object(80, 1, (0, 0), bytes(32), KEY, bytes(48)),
        encode_object(80, 1, (0, 60), bytes(32), KEY, bytes(40)),  # a digest too few
    ):
        assert decode(bad, 80, 80) is None


@pytest.mark.parametrize(
    "bad",
    [
        sealed(GOOD, (0, 0)),  # another magic
        sealed(GOOD, (LENGTH_AT, len(GOOD) + 8)),  # longer than the file
        sealed(GOOD[: FIXED_BYTES - 8]) + bytes(8),
        sealed(GOOD[:-8]),  # a digest too few for its cells
        sealed(GOOD, (HEADS_AT, 0)),
        sealed(GOOD, (HEADS_AT, 3)),
        sealed(GOOD, (KIND_AT, 9)),
        sealed(MARK, (KIND_AT, 0)),
        sealed(MARK + bytes(8)),
    ],
)
def test_a_header_whose_check_is_right_and_whose_numbers_are_not_is_none(bad: bytes) -> None:
    assert sealed(GOOD) == GOOD
    assert sealed(MARK) == MARK
    assert decode(bad, 80, 80) is None


def test_a_mark_has_no_page_no_part_and_no_bytes() -> None:
    assert decode(MARK, 80, 80) == Record(Kind.SYNCED, 80, LIVE, 0, 4096, 0, b"", None, b"")


def test_a_record_before_the_bytes_at_hand_is_none() -> None:
    """A negative place would be counted from their end."""
    assert decode(GOOD + bytes(8), 80, 80 + len(GOOD) + 8) is None


def test_an_object_of_more_cells_than_a_million_is_none() -> None:
    most = 1 << 20
    for cells in (most, most + 1):
        key = part_key(bytes(32), PageBox(Span(0, 1), Span(0, cells), Stripe(0, 1, 16, 16)))
        blob = encode_object(80, 1, (0, cells), bytes(32), key, bytes(8 * cells))
        assert (decode(blob, 80, 80) is not None) == (cells == most)


def test_the_parts_that_are_remembered_are_bounded_and_all_are_read() -> None:
    boxes = [PageBox(Span(0, 1), Span(0, 1 + number), Stripe(0, 1, 16, 16)) for number in range(9000)]
    keys = [part_key(bytes(32), box) for box in boxes]
    assert [decode_part(encode_part(key)) for key in keys] == keys
    assert decode_part.cache_info().currsize == decode_part.cache_info().maxsize


@pytest.mark.parametrize("cells", [1, 3, 8])
def test_a_digest_is_of_its_cell(cells: int) -> None:
    payload = bytearray(range(240)) * 2
    digests = table(memoryview(payload), cells)
    size = len(payload) // cells
    for cell in range(cells):
        piece = memoryview(payload)[cell * size : (cell + 1) * size]
        assert holds(piece, 1, digests, cell)
        assert cells == 1 or not holds(piece, 1, digests, (cell + 1) % cells)
        piece[-1] ^= 1
        assert not holds(piece, 1, digests, cell)
        piece[-1] ^= 1
