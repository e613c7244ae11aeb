"""Two machines over a real network file system: GlusterFS, two mounts of one volume, each a client of its own.

KVMOVER_TWO_MOUNTS=DIR:DIR names two mounts of one file system of any kind; else a volume is made here, as root, where
Debian's glusterfs-server and glusterfs-client are installed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_peer import PAGES
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.store import HostBoot, PagePart, PageStore

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]

TOP = Path(__file__).parent.parent.parent
SECONDS = float(os.environ.get("KVMOVER_NETWORK_S", "20"))
WHOLE = PagePart.whole(GQA, PAGE)


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    given = os.environ.get("KVMOVER_TWO_MOUNTS")
    if given:
        one, two = map(Path, given.split(":"))
        yield one, two
        return
    missing = [name for name in ("glusterd", "gluster", "glusterfs") if not shutil.which(name)]
    if missing or os.geteuid():
        pytest.skip(f"no network file system: {'not root' if os.geteuid() else ', '.join(missing) + ' not installed'}")
    yield from _volume(tmp_path_factory.mktemp("gluster"))


def _volume(place: Path) -> Iterator[tuple[Path, Path]]:
    """A volume of one brick, served and mounted twice on this machine."""
    name = f"kvmover{os.getpid()}"
    address = subprocess.check_output(["hostname", "-I"], text=True).split()[0]  # no loopback, says gluster
    one, two, brick = (place / each for each in ("one", "two", "brick"))
    for folder in (one, two, brick):
        folder.mkdir()
    daemon = subprocess.Popen(["glusterd", "--no-daemon", "--log-level=ERROR"])
    gluster = ["gluster", "--mode=script", "volume"]
    try:
        for _ in range(50):
            if not subprocess.run([*gluster, "list"], capture_output=True).returncode:
                break
            time.sleep(0.2)
        subprocess.run([*gluster, "create", name, f"{address}:{brick}", "force"], check=True, capture_output=True)
        subprocess.run([*gluster, "start", name], check=True, capture_output=True)
        for mount in (one, two):
            subprocess.run(["glusterfs", f"--volfile-server={address}", f"--volfile-id={name}", mount], check=True)
        yield one, two
    finally:
        for mount in (one, two):
            subprocess.run(["umount", "-l", mount])
        subprocess.run([*gluster, "stop", name, "force"], capture_output=True)
        subprocess.run([*gluster, "delete", name], capture_output=True)
        daemon.terminate()
        daemon.wait()


@pytest.fixture
def shared(mounts: tuple[Path, Path]) -> tuple[Path, Path]:
    """A new folder, as both machines see it."""
    name = uuid.uuid4().hex
    (mounts[0] / name).mkdir()
    deadline = time.monotonic() + 10
    while not (mounts[1] / name).is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    return mounts[0] / name, mounts[1] / name


def machine(host: int) -> HostBoot:
    return HostBoot(bytes([host]) * 16)


def test_what_one_machine_flushed_another_reads_and_what_it_evicts_is_no_poison(shared: tuple[Path, Path]) -> None:
    pages = pages_of(12)
    with (
        PageStore.open(shared[0], SPACE, machine=machine(1)) as here,
        PageStore.open(shared[1], SPACE, machine=machine(2)) as there,
    ):
        writer, reader = Rank(here, WHOLE), Rank(there, WHOLE)
        assert all(answer.ok for answer in writer.put(pages))
        here.flush()
        deadline = time.monotonic() + 30  # what the client keeps of directories and sizes
        while not all(reader.exists(pages)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert all(answer.ok for answer in reader.get(pages))
        here.evict(6 * WHOLE.nbytes)
        reader.get(pages)
        assert not there.counters.poisoned
        assert sum(answer.ok for answer in writer.get(pages)) == 6


def test_machines_that_evict_beside_each_other_and_are_killed_raise_nothing(shared: tuple[Path, Path]) -> None:
    chance = random.Random(int(os.environ.get("KVMOVER_SEED", "1")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP), str(Path(__file__).parent)])}
    script = str(Path(__file__).with_name("network_peer.py"))
    said: list[str] = []

    def peer(number: int) -> subprocess.Popen[str]:
        host = number % 2
        command = [sys.executable, script, str(shared[host]), str(host + 1), str(chance.randrange(1 << 30))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    peers = [peer(number) for number in range(3)]
    stop = time.monotonic() + SECONDS
    while time.monotonic() < stop:
        time.sleep(chance.uniform(2, 4))
        gone = peers.pop(0)
        gone.send_signal(signal.SIGKILL)
        said += gone.communicate()[0].splitlines()
        peers.append(peer(chance.randrange(4)))
    for gone in peers:
        gone.kill()
        said += gone.communicate()[0].splitlines()
    assert not said
    for host in range(2):
        with PageStore.open(shared[host], SPACE, machine=machine(host + 7)) as store:
            rank = Rank(store, WHOLE, PAGES)
            rank.get(pages_of(PAGES))  # looks at every byte
            store.collect()
