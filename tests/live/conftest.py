"""Live servers are for `make live`, which names the engines in KVMOVER_LIVE; without it these tests are skipped."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import pytest

from tests.live.answers import Answer
from tests.live.server import ENVIRONMENTS, Command, Server
from tests.live.table import Results, Row
from tests.mooncake_home import NEEDED
from tests.store.pool_processes import PoolProcesses

HERE = Path(__file__).parent

#: By the folder of a test: whose servers it starts.
_ENGINES = {
    **{name: {name} for name in ("sglang", "vllm", "pair", "orchestrators")},
    "cross": {"sglang", "vllm"},
    "dynamo": set[str](),
    "english": set[str](),  # each test says its own
}

#: Seconds that a soak takes at least: `make soak` sets half an hour.
SOAK_S = float(os.environ.get("SOAK_S", "0"))

_RESULTS = pytest.StashKey[Results]()
_LOCK = pytest.StashKey[IO[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = os.environ.get("KVMOVER_LIVE", "").split()
    for item in items:
        folder = item.path.parent.name
        if item.path.is_relative_to(HERE) and folder in _ENGINES:
            item.add_marker(pytest.mark.timeout(600 + 2 * SOAK_S))
            engines = " ".join(_ENGINES[folder])
            if not (wanted and _ENGINES[folder] <= set(wanted)):
                item.add_marker(pytest.mark.skip(reason=f'`make live ENGINE="{engines}"` runs servers of {engines}'))
            if folder == "english" and not os.environ.get("MODEL"):
                item.add_marker(pytest.mark.skip(reason="`make live MODEL=smollm2` serves a trained model"))


def pytest_configure(config: pytest.Config) -> None:
    """One live run at a time: two would make each other's servers too late."""
    config.addinivalue_line("markers", "alone: no other live test runs beside this one, for it times something")
    config.stash[_RESULTS] = Results()
    if os.environ.get("KVMOVER_LIVE") and not _is_worker(config):
        ENVIRONMENTS.mkdir(exist_ok=True)
        config.stash[_LOCK] = lock = (ENVIRONMENTS / "live.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _is_worker(config: pytest.Config) -> bool:
    """Of several processes that share the files of tests, one that runs some; the first collects what they found."""
    return hasattr(config, "workerinput")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _is_worker(session.config):
        output: Any = session.config
        output.workeroutput["live"] = [asdict(row) for row in session.config.stash[_RESULTS].rows]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    rows = getattr(node, "workeroutput", {}).get("live", ())
    node.config.stash[_RESULTS].rows += [Row(**row) for row in rows]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if _is_worker(config):
        return  # it knows its own tests alone, and nothing of what failed elsewhere
    results = config.stash[_RESULTS]
    results.rows.sort(key=lambda row: row.engine)
    if results.rows:
        results.print()
    # A run of a few scenarios, or one that was broken off, is no record of all.
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if results.rows and ended and not config.option.keyword and config.args == ["tests/live"]:
        results.keep(failed_tests(terminalreporter))
    elif results.rows and exitstatus == pytest.ExitCode.OK and os.environ.get("KEEP_ROWS"):
        results.keep_beside()


def failed_tests(reporter: pytest.TerminalReporter) -> list[str]:
    """Return the names of tests that failed, or whose servers did not start or end, each once."""
    reports = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
    return sorted({report.nodeid.rpartition("::")[2] for report in reports})


@pytest.fixture(autouse=True)
def _room(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two processes share the files of tests: one whose test is marked `alone` lets the other one wait between tests.

    Whoever asks for the room waits at the door, so that a test that is to be alone is not passed by.
    """
    if not os.environ.get("KVMOVER_LIVE"):
        yield
        return
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with (ENVIRONMENTS / "live.door").open("w") as door, (ENVIRONMENTS / "live.room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@dataclass(slots=True)
class Servers:
    """All servers that a file of tests started; they end with it."""

    running: list[Server] = field(default_factory=list[Server])

    def start(self, *commands: Command) -> list[Server]:
        """Start them side by side, and wait for all."""
        begun = [Server.start(command) for command in commands]
        self.running += begun
        for server in begun:
            server.ready()
        return begun

    def again(self, server: Server) -> Server:
        """Start a server that has ended anew, on its ports."""
        self.running.remove(server)
        (begun,) = self.start(server.command)
        return begun

    def stop(self, servers: Sequence[Server] | None = None) -> None:
        """End them side by side: each takes seconds to end."""
        ending = list(self.running if servers is None else servers)
        for server in ending:
            server.resume()
            server.ask_to_end()
        for server in ending:
            server.wait_for_end()
            self.running.remove(server)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    started = Servers()
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def pool() -> Iterator[PoolProcesses]:
    """A pool of memory of the test's own, over TCP, with two donors that hold all that its prompts take."""
    pytest.importorskip("mooncake.store", reason=NEEDED, exc_type=ImportError)
    processes = PoolProcesses(patience_s=30)
    try:
        for _ in range(2):
            processes.donate(256 << 20)
        yield processes
    finally:
        processes.close()


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Results:
    return pytestconfig.stash[_RESULTS]


@pytest.fixture(scope="session")
def model() -> ModelMaker:
    return ModelMaker()


@dataclass(slots=True)
class ModelMaker:
    """The folder of a model of `models.py`, made on first use and again when that file changes."""

    def __call__(self, name: str, engine: str) -> Path:
        maker = HERE / "models.py"
        folder = ENVIRONMENTS / "models" / name
        stamp, mark = folder / ".made", sha256(maker.read_bytes()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.exists() or stamp.read_text() != mark:
                python = ENVIRONMENTS / engine / "bin" / "python"
                environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
                subprocess.run([python, maker, name, folder], check=True, capture_output=True, env=environment)
                stamp.write_text(mark)
        return folder


def chats_by_openais_client(engine: str, url: str, count: int) -> list[Answer]:
    """Return the turns of each chat as an answer, whose tokens are their bytes: `openai_chats.py` asks."""
    python = ENVIRONMENTS / engine / "bin" / "python"
    command = [python, HERE / "openai_chats.py", url, str(count)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    seconds = time.monotonic() - began
    return [Answer(200, seconds, tuple(json.dumps(turns).encode())) for turns in json.loads(done.stdout)]
