"""`kvmover store` and the engines' one option, where the location is a pool of memory; and what a location may say."""

from __future__ import annotations

import json
import sys

import pytest
from pool_processes import PoolProcesses
from store_rank import GQA, PAGE, SPACE, Rank, pages_of
from test_upkeep import OTHER, Command, command

from kvmover.config import load
from kvmover.engines.common.store import open_store
from kvmover.engines.sglang import sglang_options as sglang
from kvmover.engines.vllm import vllm_options as vllm
from kvmover.engines.vllm.block_store import StoreLookup
from kvmover.errors import StoreError
from kvmover.layout import Fleet
from kvmover.store import PagePart, PageStore, PlainFiles
from kvmover.store.mooncake import client
from kvmover.store.mooncake.client import PoolClient
from kvmover.store.mooncake.format import PoolAddress

WHOLE = PagePart.whole(GQA, PAGE)
__all__ = ["command"]


@pytest.mark.proof
def test_the_commands_work_on_a_pool_as_far_as_it_can_tell(command: Command, pool: PoolProcesses) -> None:
    location = f"{pool.location}/commands"
    for space, count in ((SPACE, 5), (OTHER, 3)):
        with PageStore.open(location, space) as store:
            assert all(answer.ok for answer in Rank(store, WHOLE, namespace=space).put(pages_of(count)))
    _, out, _ = command("stat", location, "--json")
    rows = {row["model"]: (row["pages"], row["salted"]) for row in json.loads(out)}
    assert rows == {"llama": (0, False), "mistral": (0, True)}
    assert command("gc", location)[0] == 0
    for words in (("verify",), ("gc", "--quota", "1GB"), ("gc", "--ttl", "60")):
        status, _, said = command(words[0], location, *words[1:])
        assert (status, location in said, "Traceback" in said) == (2, True, False), words
    status, out, _ = command("clear", location, "--namespace", OTHER.folder[:6], "--yes", "--json")
    assert (status, [row["deleted_pages"] for row in json.loads(out)]) == (0, [3 + 1])
    for space, there in ((SPACE, True), (OTHER, False)):
        with PageStore.open(location, space) as store:
            assert Rank(store, WHOLE, namespace=space).exists(pages_of(3)) == [there] * 3


@pytest.mark.proof
def test_engines_reach_a_pool_by_the_option_that_names_a_directory(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = f"{pool.location}/engines?donate=16MiB"
    for parse in (sglang.parse, vllm.parse):
        settings = parse({"root": location})[1].store
        assert settings.location() == location
        with open_store(settings, SPACE) as store:
            for rank in range(2):
                assert all(
                    answer.ok for answer in Rank.of(store, GQA, Fleet(tp=2, page_tokens=PAGE), rank).put(pages_of(4))
                )
            lookup = StoreLookup.open(settings.location(), SPACE, [WHOLE])
            assert lookup.leading(pages_of(6)) == 4
            lookup.clear()
            assert lookup.leading(pages_of(6)) == 0
            lookup.close()
    assert load(environ={"KVMOVER_STORE_ROOT": location}).settings.store.root == location


def test_a_location_says_where_the_master_is_and_what_is_given() -> None:
    assert PoolAddress.parse("mooncake://[::1]:5/") == PoolAddress("::1", 5)
    assert PoolAddress("::1", 5).location == "mooncake://[::1]:5/kvmover"
    address = PoolAddress.parse("mooncake://host:50051/a/b?donate=3GiB&metadata=http://m:8080/metadata&protocol=rdma")
    assert address == PoolAddress("host", 50051, "a/b", 3 << 30, "http://m:8080/metadata", "rdma")
    assert address.location == "mooncake://host:50051/a/b?metadata=http://m:8080/metadata&protocol=rdma"
    assert PoolAddress.parse(address.location) == address.without_gift()


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("mooncake://host", "no host and port"),
        ("mooncake://:5", "no host and port"),
        ("mooncake://host:port", "Port could not be cast"),
        ("mooncake://host:5/a b", "a prefix is of"),
        ("mooncake://host:5/a#b", "a prefix is of"),
        ("mooncake://host:5?donate=8GB", "donate=8GB is no number of bytes"),
        ("mooncake://host:5?donate", "bad query field"),
        ("mooncake://host:5?gift=8GiB", "unknown option gift"),
        ("mooncake://host:5?protocol=udp", "protocol=udp is neither tcp nor rdma"),
    ],
)
def test_what_is_no_location_of_a_pool_is_refused_with_its_words(location: str, reason: str) -> None:
    with pytest.raises(StoreError, match=reason) as refused:
        PageStore.open(location, SPACE)
    assert location in str(refused.value)


def test_a_process_without_mooncake_hears_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_see_alive", lambda address: None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreError, match=r"host:5/kvmover needs Mooncake: pip install '\.\[mooncake\]'"):
        PoolClient.open(PoolAddress("host", 5))


def test_a_pool_takes_no_files() -> None:
    with pytest.raises(StoreError, match="mooncake://host:5 is no directory, and takes neither files nor a machine"):
        PageStore.open("mooncake://host:5", SPACE, files=PlainFiles())
