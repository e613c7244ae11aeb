"""`kvmover store` and the engines' one option, where the location is a bucket on a real server."""

from __future__ import annotations

import json
import time

import obstore
import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of
from test_upkeep import OTHER, Command, command

from kvmover.config import load
from kvmover.engines.common.store import open_store
from kvmover.engines.vllm.block_store import StoreLookup
from kvmover.errors import StoreError
from kvmover.store import PagePart, PageStore, PlainFiles
from kvmover.store.bucket.service import ObjectBucket

WHOLE = PagePart.whole(GQA, PAGE)
__all__ = ["command"]


@pytest.fixture
def filled(bucket: str) -> str:
    for space, count in ((SPACE, 5), (OTHER, 3)):
        with PageStore.open(bucket, space) as store:
            Rank(store, WHOLE, namespace=space).put(pages_of(count))
    return bucket


def test_the_commands_of_a_directory_work_on_a_bucket(command: Command, filled: str) -> None:
    _, out, _ = command("stat", filled, "--json")
    rows = {row["model"]: row for row in json.loads(out)}
    assert {model: (row["pages"], row["payload_bytes"], row["salted"]) for model, row in rows.items()} == {
        "llama": (5, 5 * WHOLE.nbytes, False),
        "mistral": (3, 3 * WHOLE.nbytes, True),
    }
    status, out, _ = command("verify", filled)
    assert (status, "all 5 objects are whole" in out) == (0, True)
    folder = SPACE.folder
    service = ObjectBucket.open(filled)._store
    (data,) = [
        each["path"] for page in obstore.list(service, folder) for each in page if each["path"].endswith(".data")
    ]
    raw = bytearray(obstore.get(service, data).bytes())
    raw[7] ^= 1
    obstore.put(service, data, bytes(raw))
    status, out, _ = command("verify", filled)
    assert (status, "deleted 1 bad (digest)" in " ".join(out.split())) == (1, True)
    assert command("gc", filled, "--quota", "1")[0] == 0
    assert command("clear", filled, "--namespace", OTHER.folder[:6], "--yes")[0] == 0
    _, out, _ = command("stat", filled, "--json")
    assert {row["model"]: row["pages"] for row in json.loads(out)} == {"llama": 0, "mistral": 0}


def test_a_namespace_without_its_manifest_is_found_by_its_heads(command: Command, filled: str) -> None:
    obstore.put(ObjectBucket.open(filled)._store, f"{SPACE.folder}/namespace.json", b"{")
    _, out, _ = command("stat", filled, "--json")
    assert {row["model"]: row["pages"] for row in json.loads(out)} == {"(unknown)": 5, "mistral": 3}


def test_a_manifest_of_a_later_format_stays(filled: str) -> None:
    path, later = f"{SPACE.folder}/namespace.json", b'{"format":"kvmover.store/2","codec":"new"}'
    obstore.put(ObjectBucket.open(filled)._store, path, later)
    with PageStore.open(filled, SPACE) as store:
        assert store.stat().pages == 5
    assert obstore.get(ObjectBucket.open(filled)._store, path).bytes() == later


def test_engines_reach_a_bucket_by_the_option_that_names_a_directory(bucket: str) -> None:
    settings = load(environ={"KVMOVER_STORE_ROOT": bucket}).settings.store
    assert settings.root == bucket
    with open_store(settings, SPACE) as store:
        rank = Rank(store, WHOLE)
        assert all(answer.ok for answer in rank.put(pages_of(4)))
    with open_store(settings, SPACE) as store:
        assert all(answer.ok for answer in Rank(store, WHOLE).get(pages_of(4)))


def test_a_scheduler_that_only_asks_learns_of_pages(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question looks at memory, and lets a thread look at the bucket where nobody has of late."""
    monkeypatch.setattr("kvmover.store.bucket.bucket_catalog._LOOK_S", 0.02)
    lookup = StoreLookup.open(bucket, SPACE, [WHOLE, WHOLE])
    pages = pages_of(4)
    assert lookup.leading(pages) == 0
    with PageStore.open(bucket, SPACE) as store:
        Rank(store, WHOLE).put(pages)
    while lookup.leading(pages) < 4:
        time.sleep(0.01)
    lookup.close()


def test_a_bucket_takes_no_files() -> None:
    with pytest.raises(StoreError, match="s3://bucket/prefix is no directory, and takes neither files"):
        PageStore.open("s3://bucket/prefix", SPACE, files=PlainFiles())


def test_a_command_says_that_a_bucket_is_not_there(command: Command, bucket: str) -> None:
    status, _, said = command("stat", "s3://nobody-made-this/prefix")
    assert status == 2
    assert "cannot read s3://nobody-made-this/prefix" in said
    assert "Traceback" not in said
