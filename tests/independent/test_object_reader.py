"""The reader that was written from docs/object-format.md reads what PageStore wrote, byte for byte."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import product
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
import torch

from kvmover import Component, Fleet
from kvmover.store import Namespace, PagePart, PageStore, Policy
from kvmover.transport import memory_of
from tests.independent.object_reader import Reader, deleted, records

KV = Component.attention(layers=3, kv_heads=4, head_dim=8, dtype="float16")
TEMPORAL = Component.state("temporal", layers=2, heads=4, dim=6, dtype="float32")
SPARSE = replace(Component("sparse", 3, 1, 1, 12, "uint8"), row_tokens=4)
SPACE = Namespace("org/model", "révision 7", page_tokens=16, salt="of a tenant")
NAMES = [hashlib.sha256(bytes([n])).digest() for n in range(3)]
BOOT = UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
ALONE = Fleet(page_tokens=16)


def described(component: Component) -> dict:
    keys = ("name", "layers", "kv", "heads", "dim", "dtype", "states", "row_tokens")
    return {key: getattr(component, key) for key in keys}


def reader(root: Path, boot: UUID = BOOT) -> Reader:
    return Reader(root, "org/model", "révision 7", 16, "of a tenant", boot)


def written(root: Path, component: Component, fleet: Fleet, pages: list[bytes] = NAMES) -> np.ndarray:
    """Random pages [page, head, layer, kv, token, byte], of which each rank of a fleet put and flushed its part."""
    extents = (component.heads, component.layers, component.kv, component.extent(16), component.row_bytes)
    truth = np.random.default_rng(1).integers(0, 256, (len(pages), *extents), np.uint8)
    for rank in range(fleet.size):
        part = PagePart.of(component, fleet.shard(component, rank, 16), 16)
        assert part is not None
        box = part.box
        mine = truth[:, list(box.heads)][:, :, list(box.layers)][:, :, :, :, list(box.tokens)]
        memory = torch.from_numpy(np.ascontiguousarray(mine).reshape(len(pages), -1))
        with PageStore.open(root, SPACE, Policy(segment_bytes=1 << 20)) as store:
            store.register(memory_of(memory.view(-1)))
            put = store.view(SPACE, part).put(pages, [row.data_ptr() for row in memory])
            assert all(result.ok for result in put)
            store.flush()
    return truth


def expected(page: np.ndarray) -> dict[tuple[int, ...], bytes]:
    return {place: page[place].tobytes() for place in product(*map(range, page.shape[:-1]))}


def heads_in(root: Path) -> list[Path]:
    return sorted((root / SPACE.folder).glob("*.head"))


FLEETS = [
    (KV, ALONE),
    (KV, Fleet(tp=2, page_tokens=16)),
    (KV, Fleet(tp=2, pp=3, page_tokens=16)),
    (KV, Fleet(tp=3, cp=2, page_tokens=8)),
    (TEMPORAL, Fleet(tp=2, page_tokens=16)),
    (SPARSE, Fleet(tp=2, pp=2, page_tokens=16)),
]


@pytest.mark.parametrize(("component", "fleet"), FLEETS, ids=["one", "tp2", "tp2-pp3", "tp3-cp2", "states", "sparse"])
def test_pages_that_the_ranks_of_a_fleet_wrote_are_read_whole(
    tmp_path: Path, component: Component, fleet: Fleet
) -> None:
    truth, here = written(tmp_path, component, fleet), reader(tmp_path)
    for name, page in zip(NAMES, truth, strict=True):
        assert here.rows(described(component), name) == expected(page)
    assert here.rows(described(component), bytes(32)) == {}
    assert here.rows(described(component) | {"dim": component.dim + 1}, NAMES[0]) == {}


def test_the_names_of_namespaces_tell_them_apart(tmp_path: Path) -> None:
    written(tmp_path, KV, ALONE)
    assert reader(tmp_path).folder == tmp_path / SPACE.folder
    other = Reader(tmp_path, "org/model", "révision 7", 16, "of another", BOOT)
    assert other.folder.name != SPACE.folder
    other.folder = tmp_path / SPACE.folder
    assert other.rows(described(KV), NAMES[0]) == {}


def test_a_damaged_cell_is_missing_and_no_other_is(tmp_path: Path) -> None:
    (page,) = written(tmp_path, KV, ALONE, NAMES[:1])
    (head,) = heads_in(tmp_path)
    data, cell_bytes = head.with_suffix(".data"), page[0, 0].nbytes
    text = bytearray(data.read_bytes())
    text[4 * cell_bytes] ^= 1  # the cell of head 1 and layer 1
    data.write_bytes(text)
    left = {place: row for place, row in expected(page).items() if place[:2] != (1, 1)}
    assert reader(tmp_path).rows(described(KV), NAMES[0]) == left


def test_another_machine_believes_what_lies_below_the_last_synced_mark(tmp_path: Path) -> None:
    truth = written(tmp_path, KV, ALONE)
    (head,) = heads_in(tmp_path)
    whole = head.read_bytes()
    first, *_, synced, sealed = records(whole)
    assert [record.kind for record in records(whole)] == ["object"] * 3 + ["synced", "sealed"]
    assert (synced.digests, sealed.digests, first.offset % 4096) == ((), (), 0)
    elsewhere = reader(tmp_path, UUID(int=1))
    assert elsewhere.rows(described(KV), NAMES[0]) == expected(truth[0])
    head.write_bytes(whole[: synced.at])
    assert elsewhere.rows(described(KV), NAMES[0]) == {}
    assert reader(tmp_path).rows(described(KV), NAMES[0]) == expected(truth[0])


def test_a_payload_beyond_the_end_of_its_file_is_not_believed(tmp_path: Path) -> None:
    truth = written(tmp_path, KV, ALONE)
    (head,) = heads_in(tmp_path)
    *_, last, _, _ = records(head.read_bytes())
    with head.with_suffix(".data").open("r+b") as data:
        data.truncate(last.offset + last.nbytes - 1)
    found = [reader(tmp_path).rows(described(KV), name) for name in NAMES]
    assert found == [expected(truth[0]), expected(truth[1]), {}]


def test_a_deleted_page_is_dead_in_its_head_and_in_the_news(tmp_path: Path) -> None:
    written(tmp_path, KV, ALONE)
    (head,) = heads_in(tmp_path)
    before = head.read_bytes()
    with PageStore.open(tmp_path, SPACE) as store:
        assert store.evict(1) > 0
    (dead,) = (record for record in records(head.read_bytes()) if record.kind == "object" and not record.is_live)
    assert deleted((head.parent / "deleted.news").read_bytes()) == [(head.stem, dead.at)]
    changed = [at for at, (a, b) in enumerate(zip(before, head.read_bytes(), strict=True)) if a != b]
    assert changed == [dead.at + 8 + i for i in range(4)]
    assert reader(tmp_path).rows(described(KV), dead.page) == {}


def test_a_record_out_of_its_place_is_none_and_those_behind_it_are_found(tmp_path: Path) -> None:
    written(tmp_path, KV, ALONE)
    (head,) = heads_in(tmp_path)
    text = head.read_bytes()
    first, second, *rest = records(text)
    assert list(records(text[:80] + bytes(8) + text[80:])) == []
    assert list(records(text[:-1])) == [first, second, *rest[:-1]]
    torn = text[: first.at + 100] + bytes(8) + text[first.at + 108 :]
    assert list(records(torn)) == [second, *rest]
