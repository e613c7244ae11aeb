"""The oldest NIXL that kvmover takes meets the newest: strided runs land exactly, whichever side posts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")

from nixl_peer import POISON, PeerProcess

from kvmover.transport import OLDEST_NIXL, Completed, Descriptors, MemoryKind
from kvmover.transport.nixl_agent import descriptor_rows

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOUND = sorted((ROOT / ".nixl").glob("*/.ready"))
NBYTES = 1 << 20

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def old_wheel() -> str:
    if not FOUND:
        pytest.skip("no older NIXL is installed beside the newest; `make setup` does that")
    return str(FOUND[0].parent)


@pytest.fixture
def pair(old_wheel: str) -> Iterator[dict[str, PeerProcess]]:
    """A process with the oldest NIXL and one with the newest, connected."""
    processes = {"oldest": PeerProcess("oldest", NBYTES, (old_wheel,)), "newest": PeerProcess("newest", NBYTES)}
    old, new = processes.values()
    assert old.ask("release") == OLDEST_NIXL
    assert new.ask("release") > old.ask("release")
    old.ask("connect", new.metadata)
    new.ask("connect", old.metadata)
    yield processes
    assert [process.leave() for process in processes.values()] == [0, 0]


@pytest.mark.parametrize("source", ["oldest", "newest"])
def test_strided_runs_land_exactly_between_the_releases(pair: dict[str, PeerProcess], source: str) -> None:
    here = pair[source]
    there = pair["newest" if source == "oldest" else "oldest"]
    here.ask("fill", 9)
    there.ask("fill", POISON)
    runs = here.runs(64, 48, 128, 500), there.runs(32, 48, 1024, 500)
    (event,) = here.ask("write", there.name, *runs)
    assert isinstance(event, Completed)
    expected = np.full(NBYTES, POISON, np.uint8)
    expected[32 : 32 + 500 * 1024].reshape(500, 1024)[:, :48] = 9
    np.testing.assert_array_equal(there.ask("content", NBYTES), expected)


def test_a_release_without_strided_lists_is_given_each_run_as_a_row() -> None:
    table = np.array([[1000, 8, 2, 32, 3], [5000, 4, 2, 4, 1]], np.int64)
    rows = descriptor_rows(Descriptors(MemoryKind.DEVICE, table), (1, 4, 1))
    assert rows.tolist() == [[1000, 8, 2], [1032, 8, 2], [1064, 8, 2], [5000, 4, 2]]
    strided = descriptor_rows(Descriptors(MemoryKind.DEVICE, table), (1, 5, 0))
    assert strided.tolist() == table.tolist()


def test_a_store_takes_plain_files_where_nixl_calls_a_short_write_done(old_wheel: str, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvmover.store import NixlFiles, files_for\n"
        "from kvmover.errors import TransportUnavailable\n"
        "print(type(files_for(Path(sys.argv[1]))).__name__)\n"
        "try: NixlFiles()\n"
        "except TransportUnavailable as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((old_wheel, str(ROOT)))}
    done = subprocess.run([sys.executable, "-c", script, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "PlainFiles",
        "NIXL 1.4.1 reports a short transfer of a file as done: a page store takes 1.5 or newer",
    ]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_all_tests_of_the_transport_and_all_faults_hold_in_the_oldest_release(old_wheel: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((old_wheel, str(ROOT)))}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not proof"]
    command += [f"--ignore={__file__}", HERE, ROOT / "tests/transfer/test_faults.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
