"""The digests of cells are XXH3 as the xxhash package has it, whichever of the two computes them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvmover.c_core import NATIVE
from kvmover.store import record

BYTES = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
CORES = [None, NATIVE] if NATIVE else [None]


@pytest.fixture(params=CORES, ids=lambda core: "c" if core else "python")
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "NATIVE", request.param)


def lengths() -> list[int]:
    return [*range(2200), *np.random.default_rng(1).integers(2200, 1 << 20, 40).tolist(), 1 << 20]


@pytest.mark.usefixtures("core")
def test_a_cell_of_any_length_has_its_digest() -> None:
    for length in lengths():
        cell = memoryview(BYTES)[len(BYTES) - length :]  # starts at any address
        assert record.table(cell, 1) == xxh3_64_intdigest(cell).to_bytes(8, "little"), length


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("cell_bytes", [1, 132, 240, 241, 1024, 32768])
def test_a_table_has_the_digest_of_each_cell(cell_bytes: int) -> None:
    payload = memoryview(BYTES)[7 : 7 + 9 * cell_bytes]
    numbers = [xxh3_64_intdigest(payload[at : at + cell_bytes]) for at in range(0, len(payload), cell_bytes)]
    table = struct.pack("<9Q", *numbers)
    assert record.table(payload, 9) == table
    assert record.holds(payload[2 * cell_bytes : 5 * cell_bytes], 3, table, 2)
    assert record.holds(payload[8 * cell_bytes :], 1, table, 8)
    assert not record.holds(payload[2 * cell_bytes : 5 * cell_bytes], 3, table, 3)


@pytest.mark.usefixtures("core")
def test_tables_of_many_payloads_are_those_of_each() -> None:
    payloads = [memoryview(BYTES)[start : start + 4096] for start in (0, 7, 4096, 99_999)]
    assert record.tables(payloads, 4) == [record.table(payload, 4) for payload in payloads]
    assert record.tables([], 4) == []


@pytest.mark.skipif(NATIVE is None, reason="the C core was not built")
def test_c_lets_go_of_every_payload_after_one_that_it_refuses() -> None:
    assert NATIVE is not None
    buffer = bytearray(64)
    for odd in (b"123", "text"):
        with pytest.raises((ValueError, TypeError)):
            NATIVE.cell_digests([buffer, odd], 2)
    buffer.clear()  # BufferError while a view of it is held


@pytest.mark.skipif(NATIVE is None, reason="the C core was not built")
def test_every_kind_of_vectors_has_the_digest() -> None:
    assert NATIVE is not None
    for length in lengths()[::7]:
        cell = memoryview(BYTES)[len(BYTES) - length :]
        found = {NATIVE.cell_digests([cell], 1, vectors) for vectors in NATIVE.vectors()}
        assert found == {xxh3_64_intdigest(cell).to_bytes(8, "little")}


@pytest.mark.skipif(NATIVE is None, reason="the C core was not built")
@pytest.mark.parametrize(("nbytes", "cells"), [(482, 2 * 2), (1000, 3), (1000, 0)])
def test_c_refuses_cells_that_are_none_or_unequal(nbytes: int, cells: int) -> None:
    assert NATIVE is not None
    with pytest.raises(ValueError, match="cells"):
        NATIVE.cell_digests([BYTES[:nbytes]], cells)
