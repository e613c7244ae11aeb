"""A server of an engine as a process: started, awaited, stopped, killed, paused, and what it says of itself."""

from __future__ import annotations

import atexit
import os
import random
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path

from tests.live.answers import connection_to
from tests.live.forkserver import Forkserver

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / ".engines"
LOGS = ENVIRONMENTS / "logs"

#: A server on two busy cores, of four processes that all import an engine.
_START_S = 400.0
_STOP_S = 30.0

#: Both engines on a machine without a GPU and without a network; threads would be more than there are cores.
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "DO_NOT_TRACK": "1",
}


class ServerDied(Exception):
    """A server that ended, or was not ready in time, with the end of its log."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What servers are forked from: a process of an engine's environment that has imported these modules.

    `environment` is there when they are imported.
    """

    engine: str
    modules: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory and the file descriptors of a server's processes, together."""

    rss_bytes: int
    descriptors: int

    def __str__(self) -> str:
        return f"{self.rss_bytes / 1e6:.0f} MB, {self.descriptors} descriptors"


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started. `name` is its log's; `bootstrap_port`: where SGLang's decode ranks find a prefill.

    `health`: the path that answers with 200 once it serves. `network`: the namespace it runs in, "" for this one.
    """

    name: str
    ground: Ground
    module: str
    arguments: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    bootstrap_port: int = 0
    health: str = "/health"
    network: str = ""


def taking_images(command: Command) -> Command:
    """Returns the same server with torchvision, which lies apart: all others run without."""
    ground = command.ground
    path = ground.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    environment = {**ground.environment, "PYTHONPATH": f"{ENVIRONMENTS / ground.engine / 'apart'}{os.pathsep}{path}"}
    return replace(command, ground=Ground(ground.engine, ("torchvision", *ground.modules), environment))


_forkservers: dict[str, Forkserver] = {}


def _forkserver(ground: Ground) -> Forkserver:
    """One a ground, which ends with this process."""
    key = " ".join([ground.engine, *ground.modules, ground.environment.get("PYTHONPATH", "")])
    if key not in _forkservers:
        home = ENVIRONMENTS / ground.engine
        LOGS.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **_QUIET, **ground.environment}
        environment["PATH"] = f"{home / 'bin'}{os.pathsep}{environment['PATH']}"
        environment.pop("KVMOVER_LIVE_KEEP", None)  # of the tests; kvmover refuses a setting that it does not know
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without byte code a start takes minutes
        log = LOGS / f"{ground.engine}-ground-{len(ground.modules)}.log"
        _forkservers[key] = Forkserver(home / "bin" / "python", ground.modules, environment, log)
        atexit.register(_forkservers[key].close)
    return _forkservers[key]


@dataclass(slots=True)
class Server:
    """One that runs. It has a process group of its own, so that its workers end with it."""

    command: Command
    pid: int
    _alive: int

    @classmethod
    def start(cls, command: Command) -> Server:
        """Returns at once; `ready` waits."""
        ground = _forkserver(command.ground)
        pid = ground.start(
            command.module, command.arguments, command.environment, cls._log_of(command), command.network
        )
        return cls(command, pid, os.pidfd_open(pid))

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether its first process is gone, waited for at most so long."""
        return bool(select.select([self._alive], [], [], within_s)[0])

    @staticmethod
    def _log_of(command: Command) -> Path:
        return LOGS / f"{command.name}.log"

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def engine(self) -> str:
        return self.command.ground.engine

    @property
    def port(self) -> int:
        return self.command.port

    @property
    def url(self) -> str:
        return f"http://{self.command.network or '127.0.0.1'}:{self.port}"

    def ready(self) -> Server:
        """Wait until it answers. Raises ServerDied."""
        stop = time.monotonic() + _START_S
        while time.monotonic() < stop:
            if self.ended():
                raise ServerDied(f"{self.name} ended:\n{self.log()[-6000:]}")
            try:
                if self.get(self.command.health)[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.2)
        raise ServerDied(f"{self.name} was not ready after {_START_S:.0f} s:\n{self.log()[-6000:]}")

    def footprint(self) -> Footprint:
        """Returns what its processes take."""
        processes = [each for each in Path("/proc").glob("[0-9]*") if _group_of(each) == self.pid]
        pages = sum(int((each / "statm").read_text().split()[1]) for each in processes)
        return Footprint(pages * os.sysconf("SC_PAGE_SIZE"), sum(len(os.listdir(each / "fd")) for each in processes))

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """From the server's own port or another of its. Raises OSError where nobody answers for a minute: servers of
        two files share two cores."""
        connection = connection_to(f"http://{self.command.network or '127.0.0.1'}:{port or self.port}", timeout_s=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def log(self) -> str:
        return self._log_of(self.command).read_text(errors="replace")

    def metrics(self, *names: str, port: int | None = None) -> dict[str, float]:
        """Prometheus samples whose names begin like this, summed over their labels. `port`: of kvmover."""
        sums: dict[str, float] = {}
        for line in self.get("/metrics", port)[1].splitlines():
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            if name.startswith(names) and not name.endswith("_created"):
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def cpu_s(self) -> float:
        """CPU seconds of the server and all processes that it started, so far."""
        ticks = os.sysconf("SC_CLK_TCK")
        return sum(int(fields[11]) + int(fields[12]) for fields in self._session().values()) / ticks

    def _session(self) -> dict[int, list[str]]:
        """Returns the processes of the server's session, by pid: the numbers of `/proc/PID/stat` behind the name."""
        found = dict[int, list[str]]()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has just ended
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid:
                    found[int(stat.parent.name)] = fields
        return found

    def ask_to_end(self) -> None:
        """Send it the signal by which an operator stops it."""
        if not self.ended():
            os.kill(self.pid, signal.SIGINT if self.engine == "vllm" else signal.SIGTERM)

    def stop(self) -> None:
        """As an operator stops it: a signal, and time to end."""
        self.ask_to_end()
        self.wait_for_end()

    def wait_for_end(self) -> None:
        """Give it time to end, and kill what is left of it."""
        self.ended(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """`kill -9` of all its processes, of whichever groups."""
        self._signal(signal.SIGKILL)
        for pid in self._session():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ended(_STOP_S)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def ports_of(worker: int, workers: int) -> Iterator[int]:
    """Yield a worker's ports in random order, each once, eight or more apart: TP ranks take those that follow.

    No connection is given one by itself: those begin at 32768.
    """
    ports = list(range(12000 + 8 * worker, 32000, 8 * workers))
    random.SystemRandom().shuffle(ports)
    yield from ports


_PORTS = ports_of(
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")),
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)


def _group_of(process: Path) -> int | None:
    """Returns the process group of a folder of /proc; None for one that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    return None


def free_port() -> int:
    """Return a port that was free a moment ago. No port is returned twice, since its server may bind it later."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("this worker has given out all of its ports")


def labelled(server: Server, name: str, label: str, port: int | None = None) -> float:
    """A metric's samples that have this value of some label, added up."""
    lines = server.get("/metrics", port)[1].splitlines()
    said = [line for line in lines if line.startswith(f"{name}{{") and f'="{label}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in said)
