"""docs/object-format.md: the decoder that was written from it reads what PageStore wrote, byte for byte."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
import torch

from kvmover import Component, Fleet
from kvmover.store import Namespace, PagePart, PageStore, Policy
from kvmover.store.record import BLOCK_BYTES, FIXED_BYTES, PREAMBLE_BYTES
from kvmover.transport import memory_of
from tests.docs import decode_by_the_page as by_the_page

PAGE = (Path(__file__).parent.parent.parent / "docs" / "object-format.md").read_text()
PROSE = " ".join(PAGE.split())
KV = Component.attention(layers=3, kv_heads=4, head_dim=8, dtype="float16")
TEMPORAL = Component.state("temporal", layers=2, heads=4, dim=6, dtype="float32")
SPACE = Namespace("org/model", "révision 7", page_tokens=16, salt="of a tenant")
NAMES = [hashlib.sha256(bytes([n])).digest() for n in range(3)]


def _write(
    root: Path, component: Component, fleet: Fleet, rank: int, pages: list[bytes]
) -> tuple[PagePart, torch.Tensor]:
    """Pages of one rank of a fleet, put and flushed; the rank's part and its bytes [page, byte]."""
    part = PagePart.of(component, fleet.shard(component, rank, 16), 16)
    assert part is not None
    memory = torch.randint(256, (len(pages), part.nbytes), dtype=torch.uint8)
    with PageStore.open(root, SPACE, Policy(segment_bytes=1 << 20)) as store:
        store.register(memory_of(memory.view(-1)))
        put = store.view(SPACE, part).put(pages, [memory[n].data_ptr() for n in range(len(pages))])
        assert all(result.ok for result in put)
        store.flush()
    return part, memory


def _segments(root: Path) -> list[Path]:
    return sorted((root / SPACE.folder).glob("*.head"))


def _read(root: Path) -> list[tuple[dict, dict]]:
    """(record, cells) of every live object."""
    found = []
    for head in _segments(root):
        data = head.with_suffix(".data").read_bytes()
        live = [r for r in by_the_page.records(head.read_bytes()) if r["kind"] == "object" and r["live"]]
        found += [(record, by_the_page.cells(data, record)) for record in live]
    return found


FLEETS = [Fleet(tp=2, page_tokens=16), Fleet(tp=2, pp=3, page_tokens=16), Fleet(tp=3, cp=2, page_tokens=8)]


@pytest.mark.parametrize("fleet", FLEETS, ids=["tp2", "tp2-pp3", "tp3-cp2"])
def test_objects_of_every_rank_are_read_by_the_page(tmp_path: Path, fleet: Fleet) -> None:
    for rank in range(fleet.size):
        root = tmp_path / str(rank)
        root.mkdir()
        part, memory = _write(root, KV, fleet, rank, NAMES)
        box, found = part.box, _read(root)
        assert [record["page"] for record, _ in found] == NAMES
        for (record, cells), written in zip(found, memory, strict=True):
            assert (list(record["heads"]), list(record["layers"])) == (list(box.heads), list(box.layers))
            assert record["tokens"] == list(box.tokens)
            rows = written.numpy().reshape(box.heads.count, box.layers.count, -1)  # packed: head layer kv token dim
            for (head, layer), cell in cells.items():
                here = rows[box.heads.index(head), box.layers.index(layer)]
                assert np.array_equal(np.frombuffer(cell, np.uint8), here)


def test_names_are_derived_as_the_page_says(tmp_path: Path) -> None:
    of_space = by_the_page.name("org/model", "révision 7", 16, "of a tenant")
    assert (tmp_path / of_space[:16].hex()).name == SPACE.folder
    for component in (KV, TEMPORAL, replace(KV, row_tokens=4)):
        _write(tmp_path, component, Fleet(page_tokens=16), 0, NAMES[:1])
        keys = ("name", "layers", "kv", "heads", "dim", "dtype", "states", "row_tokens")
        fields = {key: getattr(component, key) for key in keys}
        names = [record["component"] for record, _ in _read(tmp_path)]
        assert by_the_page.name("org/model", "révision 7", 16, "of a tenant", **fields) in names
    boot = UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    assert [by_the_page.preamble(head.read_bytes()) for head in _segments(tmp_path)] == [(of_space, boot)] * 3
    manifest = json.loads((tmp_path / SPACE.folder / "namespace.json").read_text())
    (fields,) = re.findall(r"`namespace.json` \| for people and tools: (.*?)\. No read", PAGE)
    assert list(manifest) == re.findall(r"`(\w+)`(?! *\))", fields.replace("`kvmover.store/1`", ""))
    assert (manifest["digest"], manifest["salted"]) == (of_space.hex(), True)
    assert "of a tenant" not in json.dumps(manifest)


def test_marks_follow_the_objects_and_payloads_begin_at_blocks(tmp_path: Path) -> None:
    _write(tmp_path, KV, Fleet(page_tokens=16), 0, NAMES)
    (head,) = _segments(tmp_path)
    records = by_the_page.records(head.read_bytes())
    kinds = [record["kind"] for record in records]
    assert kinds[:3] == ["object"] * 3
    assert kinds[3:] == ["synced", "sealed"]
    assert [record["offset"] % 4096 for record in records[:3]] == [0] * 3
    assert records[3]["offset"] >= records[2]["offset"] + records[2]["bytes"]
    assert not records[4]["digests"]


def test_a_deleted_page_is_dead_in_its_head_and_in_the_news(tmp_path: Path) -> None:
    _write(tmp_path, KV, Fleet(page_tokens=16), 0, NAMES)
    (head,) = _segments(tmp_path)
    before = head.read_bytes()
    with PageStore.open(tmp_path, SPACE) as store:
        assert store.evict(1) > 0
    states = [record["live"] for record in by_the_page.records(head.read_bytes())[:3]]
    assert states.count(False) == 1
    first = 80 + states.index(False) * (144 + 8 * 12)
    assert by_the_page.deleted((head.parent / "deleted.news").read_bytes()) == [(head.stem, first)]
    changed = [at for at, (a, b) in enumerate(zip(before, head.read_bytes(), strict=True)) if a != b]
    assert changed == [first + 8 + i for i in range(4)]


def test_a_record_out_of_its_place_is_none(tmp_path: Path) -> None:
    _write(tmp_path, KV, Fleet(page_tokens=16), 0, NAMES[:1])
    (head,) = _segments(tmp_path)
    text = head.read_bytes()
    assert len(by_the_page.records(text)) == 3
    assert by_the_page.records(text[:80] + b"\0" * 8 + text[80:]) == []
    assert by_the_page.records(text[:-1]) == by_the_page.records(text)[:2]


def test_the_sizes_are_the_codes() -> None:
    assert f" {PREAMBLE_BYTES}-byte preamble" in PROSE
    assert f"each {FIXED_BYTES} bytes plus 8" in PROSE
    assert f"multiple of {BLOCK_BYTES:,}" in PROSE
