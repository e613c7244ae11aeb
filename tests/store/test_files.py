"""Backends: what moves, what does not and why, run by run; the same answers from system calls and from NIXL."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmover.errors import DescriptorError, TransportUnavailable
from kvmover.store.files import Access, FileRun, Files, PlainFiles, memory_of_buffer
from kvmover.store.nixl_files import NixlFiles, StoragePlugin, files_for
from kvmover.transport import Memory, MemoryKind
from tests.store.one_call_files import OneCallFiles

BLOCK = 4096
BACKENDS = {
    "plain": PlainFiles,
    "plain direct": lambda: PlainFiles(Access.DIRECT),
    "nixl": NixlFiles,
    "a call a run": OneCallFiles,
}


class Bench:
    """A backend, registered memory, and a file."""

    def __init__(self, files: Files, folder: Path, nbytes: int = 1 << 20) -> None:
        self.files = files
        self.buffer = mmap.mmap(-1, nbytes)
        self.memory = memory_of_buffer(self.buffer)
        files.register(self.memory)
        self.path = folder / "file"
        self.path.touch()
        self.file = files.open(self.path)

    def run(self, offset: int, at: int, nbytes: int) -> FileRun:
        return FileRun(self.file, offset, self.memory.address + at, nbytes)


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")
    files = BACKENDS[request.param]()
    made = Bench(files, tmp_path)
    yield made
    files.close_file(made.file)
    files.close()


@pytest.mark.parametrize("unit", [BLOCK, 1000])
def test_runs_in_any_order_go_to_their_places_and_come_back(bench: Bench, unit: int) -> None:
    content = os.urandom(40 * unit)
    bench.buffer[: len(content)] = content
    order = list(range(40))
    random.Random(unit).shuffle(order)
    assert bench.files.write([bench.run((39 - n) * unit, n * unit, unit) for n in order]) == [""] * 40
    assert bench.path.read_bytes() == b"".join(content[n * unit : (n + 1) * unit] for n in reversed(range(40)))
    bench.buffer[:] = b"\xa5" * len(bench.buffer)
    assert bench.files.read([bench.run((39 - n) * unit, n * unit, unit) for n in order]) == [""] * 40
    assert bench.buffer[: len(content)] == content
    assert bench.buffer[len(content) :] == b"\xa5" * (len(bench.buffer) - len(content))


def test_each_group_is_looked_at_once_when_it_has_come(bench: Bench) -> None:
    bench.path.write_bytes(os.urandom(8 * BLOCK))
    content, seen = bench.path.read_bytes(), list[int]()

    def look(n: int, reasons: list[str]) -> None:
        assert reasons == [""]
        assert bench.buffer[n * BLOCK : (n + 1) * BLOCK] == content[n * BLOCK : (n + 1) * BLOCK]
        seen.append(n)

    bench.files.read_each([[bench.run(n * BLOCK, n * BLOCK, BLOCK)] for n in range(8)], look)
    assert sorted(seen) == list(range(8))


def test_each_group_is_written_as_it_was_made_and_looked_at_once(bench: Bench) -> None:
    bench.path.write_bytes(b"")
    bench.buffer[: 8 * BLOCK] = os.urandom(8 * BLOCK)
    seen: list[int] = []

    def look(n: int, reasons: list[str]) -> None:
        assert reasons == [""]
        seen.append(n)

    bench.files.write_each([lambda n=n: [bench.run(n * BLOCK, n * BLOCK, BLOCK)] for n in range(8)], look)
    assert sorted(seen) == list(range(8))
    assert bench.path.read_bytes() == bench.buffer[: 8 * BLOCK]


def test_what_is_raised_of_one_group_is_raised_once_no_other_is_read_any_more(bench: Bench) -> None:
    bench.path.write_bytes(os.urandom(8 * BLOCK))
    under_way: list[int] = []

    def look(n: int, reasons: list[str]) -> None:
        under_way.append(n)
        time.sleep(0.01)
        under_way.remove(n)
        if n == 2:
            raise ValueError("group 2")

    with pytest.raises(ValueError, match="group 2"):
        bench.files.read_each([[bench.run(n * BLOCK, n * BLOCK, BLOCK)] for n in range(8)], look)
    assert not under_way


def test_a_run_past_the_end_fails_alone(bench: Bench) -> None:
    bench.path.write_bytes(b"x" * (3 * BLOCK + 100))
    reasons = bench.files.read([bench.run(n * BLOCK, n * BLOCK, BLOCK) for n in (4, 3, 0, 2, 1)])
    assert reasons == ["ends after 0 of 4096 bytes", "ends after 100 of 4096 bytes", "", "", ""]
    assert bench.buffer[: 3 * BLOCK] == b"x" * (3 * BLOCK)


def test_small_gaps_are_filled_and_large_ones_are_left_alone(bench: Bench) -> None:
    bench.path.write_bytes(b"\xff" * (8 * BLOCK))
    bench.buffer[:BLOCK] = b"y" * BLOCK
    runs = [bench.run(0, 0, 100), bench.run(BLOCK, 0, 100), bench.run(3 * BLOCK, 0, 100)]
    assert bench.files.write(runs) == [""] * 3
    content = bench.path.read_bytes()
    for at in (0, BLOCK, 3 * BLOCK):
        assert content[at : at + 100] == b"y" * 100
    assert content[BLOCK + 100 : 3 * BLOCK] == b"\xff" * (2 * BLOCK - 100)


def test_a_file_size_limit_fails_what_lies_beyond(bench: Bench) -> None:
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK, before[1]))
    try:
        reasons = bench.files.write([bench.run(n * BLOCK, n * BLOCK, BLOCK) for n in range(6)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert reasons == [""] * 4 + ["File too large"] * 2


def test_memory_that_is_not_registered_is_refused(bench: Bench) -> None:
    with pytest.raises(DescriptorError, match="outside the registered"):
        bench.files.read([bench.run(0, len(bench.buffer) - 10, 11)])
    with pytest.raises(DescriptorError, match="not host memory"):
        bench.files.register(Memory(MemoryKind.DEVICE, 1 << 20, 4096))
    with pytest.raises(DescriptorError, match="registered already"):
        bench.files.register(Memory(MemoryKind.HOST, bench.memory.address + 8, 16))
    bench.files.deregister(bench.memory)
    with pytest.raises(DescriptorError, match="outside the registered"):
        bench.files.view(bench.memory.address, 1)
    with pytest.raises(DescriptorError, match="is not registered"):
        bench.files.deregister(bench.memory)


def test_a_link_is_not_opened(bench: Bench) -> None:
    link = bench.path.with_name("link")
    link.symlink_to(bench.path)
    with pytest.raises(OSError, match="symbolic"):
        bench.files.open(link)


def test_nixl_moves_what_is_aligned_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")
    files = NixlFiles()
    bench = Bench(files, tmp_path)
    if bench.file.direct < 0:
        pytest.skip("no O_DIRECT here")
    requests: list[int] = []
    real = files._post
    monkeypatch.setattr(files, "_post", lambda verb, runs: requests.append(len(runs)) or real(verb, runs))
    files.write([bench.run(0, 0, BLOCK), bench.run(2 * BLOCK, BLOCK + 8, BLOCK), bench.run(4 * BLOCK, 0, BLOCK)])
    assert requests == [2], "an unaligned run went to the plugin"
    files.read([bench.run(n * BLOCK, n * BLOCK, BLOCK) for n in (0, 1, 2, 4)])
    assert requests == [2, 2], "neighbours in file and memory went as requests of their own"
    files.read([bench.run(n * BLOCK, (7 - n) * BLOCK, BLOCK) for n in (0, 1, 2, 4)])
    assert requests == [2, 2, 1], "small neighbours whose memory is scattered did not go in one call"
    files.read([bench.run(n << 18, n << 18, 1 << 18) for n in (0, 1, 3)])
    assert requests == [2, 2, 1, 2], "large runs did not go to the plugin"
    files.close_file(bench.file)
    files.close()


def test_a_plugin_that_is_missing_is_named() -> None:
    with pytest.raises(TransportUnavailable, match="kvmover doctor"):
        NixlFiles(StoragePlugin.GDS)


@pytest.mark.parametrize("name", ["OBJ", "AZURE_BLOB", "posix"])
def test_a_plugin_that_cannot_append_is_refused_by_name(name: str) -> None:
    with pytest.raises(TransportUnavailable, match=f"{name}.*appends to files, which POSIX, GDS, GDS_MT do"):
        StoragePlugin(name)


def test_memory_file_systems_are_read_the_plain_way(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no shared memory")
    assert files_for(shared).name == "plain, buffered"
    chosen = files_for(tmp_path)
    assert chosen.name in ("NIXL POSIX", "plain, direct", "plain, buffered")
    assert not list(tmp_path.iterdir())
    chosen.close()
