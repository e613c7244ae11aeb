"""The page store with a keeper in this process: room, eviction under readers, its journal, its commands, and liars."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from keepers import location
from store_rank import GQA, MLA, PAGE, SPACE, Rank, pages_of
from typer.testing import CliRunner

from kvmover.cli import app
from kvmover.errors import StoreError
from kvmover.layout import Fleet
from kvmover.store import Found, Got, Namespace, PageStore, Policy, Put, clear_stores, stat_stores, verify_stores
from kvmover.store.deletion import DeletionOrder
from kvmover.store.keeper import keeper_machine, keeper_objects, link, memory
from kvmover.store.keeper.keeper_objects import KeeperLocation, keeper_namespaces
from kvmover.store.keeper.link import StoreFenced
from kvmover.store.keeper.messages import PACKET_BYTES, ListNamespaces, decode_answer, encode
from kvmover.store.keeper.server import KeeperServer
from kvmover.store.objects import Verdict

ALONE, TP2 = Fleet(page_tokens=PAGE), Fleet(tp=2, page_tokens=PAGE)
PAGE_BYTES = 32 << 10
SLAB_BYTES = 4 * PAGE_BYTES


class Served:
    """A keeper in a thread, of slabs of four pages: four, or so many."""

    def __init__(self, folder: Path, slabs: int = 4) -> None:
        self.folder = folder
        self.server = KeeperServer(folder / "keeper.sock", slabs * SLAB_BYTES, SLAB_BYTES)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.server.serve, args=(self.over.is_set, 0.01))
        self.thread.start()

    def open(self, fleet: str = "", generation: int = 0, policy: Policy | None = None) -> PageStore:
        return PageStore.open(location(self.folder, fleet, generation), SPACE, policy)

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self.server.state.check()
        self.server.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Generator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def whole(store: PageStore, slots: int = 16) -> Rank:
    return Rank.of(store, GQA, ALONE, 0, slots)


def oks(answers) -> list[bool]:
    return [answer.ok for answer in answers]


def test_a_keeper_holds_no_more_than_it_has_and_evicts_what_is_least_used(keeper: Served) -> None:
    with keeper.open() as store:
        rank = whole(store)
        for batch in range(8):
            assert all(oks(rank.put(pages_of(4, str(batch)))))
            assert all(oks(rank.get(pages_of(4, "0")))), "what is read all the time stays"
            store.collect()
        assert not any(rank.exists(pages_of(4, "1")))
        assert all(rank.exists(pages_of(4, "7")))
        assert keeper.server.state.held_bytes <= 4 * SLAB_BYTES
        assert sum(os.fstat(fd).st_blocks * 512 for fd in keeper.server._slabs.values()) <= 4 * SLAB_BYTES


def test_a_page_longer_than_a_slab_has_one_of_its_own_and_one_longer_than_all_is_refused(keeper: Served) -> None:
    space = Namespace("long", "1", 4 * PAGE)
    fleet = Fleet(page_tokens=4 * PAGE)
    with PageStore.open(location(keeper.folder), space, Policy(segment_bytes=4096)) as store:
        assert all(oks(Rank(store, part_of(fleet), 2, space).put(pages_of(2))))
    space, fleet = Namespace("too long", "1", 32 * PAGE), Fleet(page_tokens=32 * PAGE)
    with PageStore.open(location(keeper.folder), space) as store:
        answer = Rank(store, part_of(fleet), 1, space).put(pages_of(1))[0]
        assert answer.outcome is Put.FAILED
        assert answer.reason.startswith("no room for 1048576 bytes: the keeper has 524288")


def part_of(fleet: Fleet):
    from kvmover.store import PagePart

    return PagePart.held(GQA, fleet, 0, fleet.page_tokens)


def test_a_reader_of_what_is_evicted_reads_no_other_bytes(keeper: Served) -> None:
    """It has the slab open, and looks its pages up before they go."""
    with keeper.open() as store, keeper.open() as other:
        rank = whole(store)
        pages = pages_of(4)
        rank.put(pages)
        assert all(oks(rank.get(pages)))
        found = store.objects.find(pages, rank.view._key)
        store.objects.catalog.refresh = lambda: None  # it has not heard of it yet
        assert other.clear() == 4
        store.objects.find = lambda asked, wanted: [found[pages.index(page)] for page in asked]
        failures = store.objects.read(
            part_of(ALONE), rank.view._reads(store.objects, range(4), pages, rank.addresses(4))
        )
        assert [failure.reason[:10] for failure in failures] == ["ends after"] * 4
        del store.objects.find, store.objects.catalog.refresh
        assert {answer.outcome for answer in rank.get(pages)} == {Got.ABSENT}


def test_memory_that_somebody_has_mapped_to_write_is_given_up(keeper: Served) -> None:
    with keeper.open() as store, keeper.open("engine", 1) as bad:
        rank = whole(bad)
        assert all(oks(rank.put(pages_of(2))))
        slab = bad.objects._writer._slab
        with mmap.mmap(slab.file.fd, slab.nbytes):
            with keeper.open("engine", 2):
                assert not any(whole(store).exists(pages_of(2))), "nobody knows what it will hold"
            assert not keeper.server.state.slabs


def test_a_slab_that_was_cut_by_who_fills_it_is_given_up(keeper: Served) -> None:
    with keeper.open("engine", 1) as bad:
        assert all(oks(whole(bad).put(pages_of(2))))
        os.ftruncate(bad.objects._writer._slab.file.fd, 100)
        with keeper.open() as store:
            assert not any(whole(store).exists(pages_of(2)))


def test_who_follows_a_journal_that_is_written_anew_loses_nothing(keeper: Served, monkeypatch) -> None:
    with keeper.open() as store, keeper.open() as other, keeper.open() as idle:
        monkeypatch.setattr("kvmover.store.keeper.keeper_machine._LEAST_BYTES", 1024)
        lost: list[bytes] = []

        class Watcher:
            def lost(self, page: bytes) -> None:
                lost.append(page)

        watcher = Watcher()
        mine, theirs = whole(store), whole(other)
        assert all(oks(mine.put(pages_of(4, "kept"))))
        assert all(theirs.exists(pages_of(4, "kept")))
        other.watch(watcher)
        bases = set[int]()
        for batch in range(12):
            assert all(oks(mine.put(pages_of(2, str(batch)))))
            assert all(oks(mine.get(pages_of(4, "kept"))))
            store.objects.catalog.sync()
            for each in [
                each
                for page in store.objects.find(pages_of(2, str(batch)), mine.view._key)
                if page
                for each in page.objects
            ]:
                store.objects.condemn(each, store.objects._door.order(DeletionOrder.CLEARED))
            other.flush()
            assert all(oks(theirs.get(pages_of(4, "kept"))))
            bases.add(keeper.server.state.namespaces[SPACE.digest].base)
        assert len(bases) > 2, "it was written anew, more than once"
        assert not set(lost) & set(pages_of(4, "kept"))
        assert whole(idle).exists(pages_of(4, "kept")) == [True] * 4, "who asks nobody has what he had"
        idle.flush()
        assert all(oks(whole(idle).get(pages_of(4, "kept"))))


def test_pages_that_nobody_used_for_the_ttl_are_absent_and_then_gone(keeper: Served, monkeypatch) -> None:
    with keeper.open(policy=Policy(ttl_s=100)) as store:
        rank = whole(store)
        rank.put(pages_of(3))
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 60)
        assert all(oks(rank.get(pages_of(1))))
        monkeypatch.setattr(time, "time", lambda: now + 120)
        assert rank.exists(pages_of(3)) == [True, False, False]
        assert store.collect().expired_pages == 2
        assert store.stat().pages == 1


def test_one_who_reads_keeps_a_page_from_the_ttl_of_another(keeper: Served, monkeypatch) -> None:
    with keeper.open(policy=Policy(ttl_s=100)) as store, keeper.open(policy=Policy(ttl_s=100)) as other:
        whole(store).put(pages_of(1))
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 90)
        assert all(oks(whole(store).get(pages_of(1))))
        store.flush()
        monkeypatch.setattr(time, "time", lambda: now + 150)
        assert whole(other).exists(pages_of(1)) == [True]


def test_a_quota_is_of_one_namespace(keeper: Served) -> None:
    space = Namespace("other", "1", PAGE)
    with keeper.open(policy=Policy(quota_bytes=SLAB_BYTES)) as store:
        with PageStore.open(location(keeper.folder), space) as other:
            assert all(oks(Rank(other, part_of(ALONE), 16, space).put(pages_of(4))))
            for batch in range(6):
                assert all(oks(whole(store).put(pages_of(1, str(batch)))))
            assert store.stat().held_bytes <= SLAB_BYTES
            assert other.stat().pages == 4
        assert store.clear() == store.objects.recovered.objects + store.objects.counters.puts[Put.WRITTEN] - 2


def test_several_components_share_a_namespace_and_other_shapes_read_them(keeper: Served) -> None:
    pages = pages_of(4)
    for rank in range(2):
        with keeper.open() as store:
            for component in (GQA, MLA):
                assert all(oks(Rank.of(store, component, TP2, rank).put(pages)))
    with keeper.open() as store:
        for component in (GQA, MLA):
            reader = Rank.of(store, component, ALONE, 0)
            assert all(reader.exists(pages))
            assert all(oks(reader.get(pages)))


def test_a_liar_and_one_who_does_not_listen_are_refused_and_others_served(keeper: Served) -> None:
    path = str(keeper.folder / "keeper.sock")
    with keeper.open() as store, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as liar:
        liar.settimeout(5)
        liar.connect(path)
        for packet in (b"\x00", b"\xff" * 100, bytes(PACKET_BYTES), encode(ListNamespaces(1 << 40))):
            liar.send(packet)
            assert decode_answer(liar.recv(PACKET_BYTES)) is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
            deaf.settimeout(5)
            deaf.connect(path)

            def talk() -> None:
                while True:
                    deaf.send(encode(ListNamespaces(0)))

            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                talk()
        assert all(oks(whole(store).put(pages_of(2))))


def test_an_engine_of_a_later_release_keeps_the_pages_of_a_keeper_that_runs(
    keeper: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = pages_of(3)
    with keeper.open("engine", 1) as store:
        assert all(answer.ok for answer in whole(store).put(pages))
    monkeypatch.setattr(keeper_objects, "SPEAKS", (1, 2))
    monkeypatch.setattr(
        link, "encode", lambda said: msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(said)), "new"])
    )
    with keeper.open("engine", 2) as store:
        assert all(answer.ok for answer in whole(store).get(pages))
        assert all(answer.ok for answer in whole(store).put(pages_of(2, "later")))
    monkeypatch.setattr(keeper_objects, "SPEAKS", (2, 3))
    with pytest.raises(StoreError, match="the client speaks versions 2 to 3, this keeper versions 1 to 1"):
        keeper.open("engine", 3)


def test_a_journal_of_a_later_version_is_refused_in_words(keeper: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_machine, "JOURNAL", 2)
    with pytest.raises(StoreError, match="the keeper's journal is of version 2; this side reads 1"):
        keeper.open()


def test_two_keepers_never_serve_one_socket_and_one_that_died_leaves_it(keeper: Served) -> None:
    with pytest.raises(StoreError, match="another keeper serves it"):
        KeeperServer(keeper.folder / "keeper.sock", 1 << 20)
    with keeper.open() as store:
        assert all(oks(whole(store).put(pages_of(1))))


@pytest.mark.parametrize("kind", ["file", "folder", "link to a file"])
def test_what_is_no_socket_is_no_place_for_a_keeper_and_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    path, weights = tmp_path / "model.safetensors", tmp_path / "weights"
    weights.write_text("70 GB of weights")
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("70 GB of weights")
    else:
        path.symlink_to(weights)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreError, match=r"model.safetensors: it is there, and is no socket"):
        KeeperServer(path, 1 << 20)
    assert sorted(tmp_path.iterdir()) == before
    assert weights.read_text() == "70 GB of weights"
    assert kind == "folder" or path.read_text() == "70 GB of weights"


def test_a_keeper_that_ends_leaves_what_others_put_where_its_socket_was(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    server = KeeperServer(path, 1 << 20)
    path.unlink()
    path.write_text("somebody's")
    server.close()
    assert path.read_text() == "somebody's"
    path.unlink()
    KeeperServer(path, 1 << 20).close()
    assert not path.exists()


def test_more_memory_than_the_host_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a keeper of 1125899906842624 bytes on a host that has \d+"):
        KeeperServer(tmp_path / "keeper.sock", 1 << 50)
    assert not list(tmp_path.iterdir())


def test_a_host_without_memory_refuses_a_slab_in_words(keeper: Served, monkeypatch) -> None:
    def nothing(_name: str, _nbytes: int) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with keeper.open() as store:
        monkeypatch.setattr(memory, "make", nothing)
        answers = whole(store).put(pages_of(2))
        assert {answer.reason for answer in answers} == {"the host has no 131072 bytes: Cannot allocate memory"}
        monkeypatch.undo()
        assert all(oks(whole(store).put(pages_of(2))))


def test_sealed_memory_can_be_copied_to_huge_pages_where_the_kernel_has_them(tmp_path: Path) -> None:
    fd = memory.make("test", 4 << 20)
    os.pwrite(fd, b"\x5a" * (4 << 20), 0)
    assert memory.seal(fd, 4 << 20)
    memory.collapse(fd, 4 << 20)
    assert os.pread(fd, 4 << 20, 0) == b"\x5a" * (4 << 20)
    memory.give_back(fd)
    assert memory.collapse(-1, 4 << 20) is False


def test_verify_of_a_client_with_bad_memory_keeps_to_the_budget(tmp_path: Path, monkeypatch) -> None:
    """Everything seems bad to such a process, which is told so; most is left to the others."""
    pages = pages_of(80)
    served = Served(tmp_path, 24)
    try:
        with served.open() as store:
            assert oks(whole(store, 80).put(pages)) == [True] * 80
            store.flush()
            real = os.preadv

            def flipped(fd, views, offset):
                moved = real(fd, views, offset)
                for at in range(0, len(views[0]), PAGE_BYTES // 4):
                    views[0][at] ^= 1
                return moved

            with served.open("broken") as broken:
                with monkeypatch.context() as patched:
                    patched.setattr(os, "preadv", flipped)
                    verified = broken.verify()
                assert (sum(verified.bad.values()), sum(verified.spared.values())) == (32, 48)
                assert sum(broken.counters.deleted.values()) == 32
            assert sum(oks(whole(store, 80).get(pages))) == 48
    finally:
        served.close()


def test_tools_find_the_namespaces_of_a_keeper(keeper: Served) -> None:
    where = location(keeper.folder)
    with keeper.open("engine", 1) as store:
        assert all(oks(whole(store).put(pages_of(3))))
        store.flush()
        (row,) = stat_stores(where, None)
        assert (row.found.manifest.model, row.stat.pages, row.stat.segments) == ("llama", 3, 1)
        (row,) = verify_stores(where, row.found.name)
        assert row.verified
        assert (row.verified.objects, row.verified.bad) == (3, {})
        (row,) = clear_stores(where, "")
        assert row.deleted_pages == 3
        assert not any(whole(store).exists(pages_of(3)))
        for number in range(20):
            PageStore.open(where, Namespace(f"model {number:02}", "1", PAGE)).close()
        found: list[Found] = keeper_namespaces(where)
        assert len(found) == 21, "more than one answer names"
    shown = CliRunner().invoke(app, ["store", "stat", f"keeper://{keeper.folder}/keeper.sock", "--json"])
    assert shown.exit_code == 0
    assert len(json.loads(shown.output)) == 21


@pytest.mark.parametrize(
    "text",
    [
        "keeper://host/run/kv.sock",
        "keeper:run/kv.sock",
        "keeper:///run/kv.sock?fleet=a&generation=x",
        "keeper:///run/kv.sock?generation=1",
        "keeper:///run/kv.sock?flet=a",
        "keeper:///run/kv.sock?fleet=a&generation=-1",
    ],
)
def test_a_location_that_names_no_keeper_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match="is no keeper; one is keeper:///PATH.sock"):
        KeeperLocation.parse(text)


def test_a_keeper_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot open the page store in keeper:.*: the keeper does not answer"):
        PageStore.open(location(tmp_path), SPACE)


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    command = [sys.executable, "-m", "kvmover", "keeper", "--socket", str(path), "--bytes", "8MiB"]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert keeper.stdout
    assert keeper.stdout.readline() == f"serving 8 MiB at {path}, Ctrl-C ends it\n"
    keeper.stdout.close()
    with PageStore.open(f"keeper://{path}", SPACE) as store:
        assert all(oks(whole(store).put(pages_of(2))))
    keeper.terminate()
    assert keeper.wait(20) == 0
    assert keeper.stderr
    assert keeper.stderr.read() == ""
    keeper.stderr.close()
    assert not path.exists()


def test_the_command_says_what_it_serves_and_a_keeper_without_pages_is_told_from_none(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    command = (sys.executable, "-m", "kvmover")
    served = subprocess.Popen(
        [*command, "keeper", "--socket", str(path), "--bytes", "64MiB"], stdout=subprocess.PIPE, text=True
    )
    assert served.stdout is not None
    with served:
        assert served.stdout.readline() == f"serving 64 MiB at {path}, Ctrl-C ends it\n"
        asked = [*command, "store", "stat", f"keeper://{path}"]
        assert subprocess.check_output(asked, text=True) == "the keeper answers, and keeps no page yet\n"
        served.send_signal(signal.SIGINT)
    assert served.returncode == 0
    assert not path.exists()


def test_a_client_that_finds_itself_fenced_judges_no_object(keeper: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with keeper.open("engine", 1) as store:
        objects = store.objects

        def fenced(_: object) -> object:
            raise StoreFenced("generation 1 is fenced by generation 2")

        monkeypatch.setattr(objects.catalog, "look_again", fenced)
        failure = SimpleNamespace(read=SimpleNamespace(each=None), reason="digest")
        assert objects.judge(failure) == (Verdict.UNKNOWN, "generation 1 is fenced by generation 2")


def test_verify_without_a_keeper_is_an_error_of_the_store(tmp_path: Path) -> None:
    served = Served(tmp_path)
    with served.open() as store:
        assert all(oks(whole(store).put(pages_of(2))))
        served.close()
        with pytest.raises(StoreError, match="cannot verify"):
            store.verify()


@pytest.mark.parametrize(("number", "writes"), [(errno.ENOSPC, 1), (errno.EPERM, 2)])
def test_only_a_write_to_a_sealed_slab_is_tried_in_another(
    keeper: Served, monkeypatch: pytest.MonkeyPatch, number: int, writes: int
) -> None:
    with keeper.open() as store:
        rank, tried = whole(store), list[int]()

        def refused(runs: list[object]) -> list[str]:
            tried.append(len(runs))
            return [os.strerror(number)] * len(runs)

        monkeypatch.setattr(store.objects.catalog.files, "write", refused)
        assert {answer.reason for answer in rank.put(pages_of(1))} == {os.strerror(number)}
        assert len(tried) == writes
        monkeypatch.undo()
        assert all(oks(rank.put(pages_of(1))))
