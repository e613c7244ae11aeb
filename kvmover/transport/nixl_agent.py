"""A NIXL agent is made here, with STRICT locking and a name of its own. Only this module loads nixl."""

from __future__ import annotations

import ctypes
import os
import re
import uuid
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from threading import Lock
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvmover.errors import TransportUnavailable
from kvmover.transport.base import COUNT, DEVICE, NBYTES, STRIDE, Descriptors, Timing, short_strides

#: The oldest release that the tests ran with. 1.4.0 crashes when a peer dies.
OLDEST_NIXL = (1, 4, 1)

#: The first release with strided [n, 5] lists. An older one is given each run as a row of its own.
_STRIDED_SINCE = (1, 5)

#: The first release whose progress thread is used. An older one takes down a dead peer's endpoint while `poll` posts to
#: it: in 4 of 12 runs that killed a peer the process ended with SIGSEGV. Without that thread `poll` makes the progress.
_PROGRESS_SINCE = (1, 5)

#: Longest sleep of an agent's progress thread.
PROGRESS_US = 100

_making = Lock()

_ENVIRONMENT = {
    # Without it a cut TCP link leaves a write in progress for as long as the kernel retries, some 15 minutes; UCX
    # keepalives do not act while data is unacknowledged. With 3s the error came 3.25 s after the cut.
    "UCX_TCP_USER_TIMEOUT": "5s",
    "NIXL_LOG_LEVEL": "WARN",
}


class Handle(Protocol):
    """A NIXL transfer. Releasing it does not stop it."""

    def release(self) -> None:
        """Release the state. Raises one of `NixlAgent.errors`."""
        ...


@dataclass(frozen=True, slots=True)
class NixlAgent:
    """An agent with the particulars of its wheel.

    `name`: unique for ever. `nixl`: NIXL's object. `errors`: all of NIXL's exceptions. `gone`: the one for a dead peer.
    `telemetry`: True if NIXL's timing is on. `release`: of the wheel.
    """

    name: str
    nixl: Any
    errors: tuple[type[Exception], ...]
    gone: type[Exception]
    telemetry: bool
    release: tuple[int, ...]

    def prepare(
        self, verb: Literal["WRITE", "READ"], local: Descriptors, peer: str, remote: Descriptors, note: bytes
    ) -> Handle:
        """Prepare an operation for `nixl.transfer` to post; `note` reaches `peer` after the bytes. Raises one of
        `errors`.

        16384 runs: 0.3-1.8 ms in 64 rows a side, 1.4 ms in 16384 rows; the post takes 60 ms. Indices count runs: with
        row numbers NIXL silently moves the first runs only.
        """
        runs = np.arange(local.count, dtype=np.int32)
        lists: list[Any] = []
        try:
            for owner, descriptors in (("", local), (peer, remote)):
                rows = descriptor_rows(descriptors, self.release)
                lists.append(self.nixl.prep_xfer_dlist(owner, rows, descriptors.kind))
            return self.nixl.make_prepped_xfer(verb, lists[0], runs, lists[1], runs, note)
        finally:
            for prepared in lists:
                prepared.release()

    def timing(self, handle: Handle) -> Timing:
        """Returns the telemetry of a finished operation. Raises one of `errors`."""
        found = self.nixl.get_xfer_telemetry(handle)
        return Timing(float(found.postDuration), float(found.xferDuration))


def start_agent(name_hint: str, backends: Sequence[str], num_threads: int) -> NixlAgent:
    """Start an agent and set unset environment variables of UCX and NIXL. Raises TransportUnavailable."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    api = _load()
    bindings: ModuleType = api.nixlBind
    errors = tuple(v for k, v in vars(bindings).items() if k.startswith("nixl") and k.endswith("Error"))
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = {"backends": list(backends), "sync_mode": sync, "num_threads": num_threads}
    config["enable_prog_thread"] = nixl_release() >= _PROGRESS_SINCE
    # A generation in the name: NIXL takes metadata of a restarted agent for its predecessor's if the names agree.
    name = f"{name_hint}.{uuid.uuid4().hex}"
    try:
        with _sleeping(bindings):
            nixl = api.nixl_agent(name, api.nixl_agent_config(**config))
    except errors as error:
        tls = os.environ.get("UCX_TLS")
        raise TransportUnavailable(f"NIXL cannot start {list(backends)} with UCX_TLS={tls}: {error}") from error
    if missing := [backend for backend in backends if backend not in nixl.backends]:
        raise TransportUnavailable(f"NIXL has no plugin {missing}, only {nixl.plugin_list}")
    return NixlAgent(name, nixl, errors, bindings.nixlRemoteDisconnectError, _telemetry(), nixl_release())


@contextmanager
def _sleeping(bindings: Any) -> Generator[None, None, None]:
    """Make agents in this context sleep up to PROGRESS_US between events.

    NIXL's own pause of 0 costs an idle agent a whole core; any pause 2 % of one.
    """
    config = bindings.nixlAgentConfig
    pause = config.pthrDelay

    class Sleeping(config):
        @property
        def pthrDelay(self) -> int:  # noqa: N802
            return pause.fget(self)

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:  # noqa: N802
            pause.fset(self, PROGRESS_US)

    with _making:
        bindings.nixlAgentConfig = Sleeping
        try:
            yield
        finally:
            bindings.nixlAgentConfig = config


def _telemetry() -> bool:
    return os.environ.get("NIXL_TELEMETRY_ENABLE", "n").lower() not in {"n", "no", "0", "false", "off", "disable"}


def descriptor_rows(descriptors: Descriptors, release: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """Returns `descriptors` as a NIXL of `release` reads them: [n, 5] strided rows, or [run, 3] of address, nbytes,
    device.
    """
    if release < _STRIDED_SINCE:
        return descriptors.dense().table[:, : DEVICE + 1].astype(np.uint64, order="C")
    table = np.ascontiguousarray(descriptors.table)
    if not short_strides(table):
        return table.view(np.uint64)
    table = table.astype(np.uint64, order="C")
    one = table[:, COUNT] == 1
    # NIXL refuses a stride below the length even of a single run.
    table[one, STRIDE] = table[one, NBYTES]
    return table


def _load() -> ModuleType:
    """Returns NIXL's API from its wheel: `import nixl` imports torch, 2.4 s instead of 0.3 s."""
    for major in (13, 12):
        try:
            api = import_module(f"nixl_cu{major}._api")
        except ModuleNotFoundError as error:
            if error.name != f"nixl_cu{major}":
                raise TransportUnavailable(f"nixl-cu{major} misses the module {error.name}") from error
            continue
        except ImportError as error:
            raise TransportUnavailable(f"nixl-cu{major} does not load: {error}") from error
        found = version(f"nixl-cu{major}")
        if _numbers(found) < OLDEST_NIXL:
            oldest = ".".join(map(str, OLDEST_NIXL))
            raise TransportUnavailable(f"nixl-cu{major} {found} is older than {oldest}, the oldest that kvmover takes")
        return api
    raise TransportUnavailable(
        "neither nixl-cu13 nor nixl-cu12 is installed: pip install nixl-cu13 (CUDA 12: nixl-cu12)"
    )


def nixl_version() -> str:
    """Returns the release of the installed wheel. Raises TransportUnavailable."""
    return version(_load().__name__.partition(".")[0].replace("_", "-"))


def nixl_release() -> tuple[int, ...]:
    """Returns `nixl_version` as numbers that compare: (1, 5, 1). Raises TransportUnavailable."""
    return _numbers(nixl_version())


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


#: The owners of agents in this process.
_living: weakref.WeakSet[Any] = weakref.WeakSet()


def spare_forks(owner: object) -> None:
    """Keep forked children from destroying the agent of `owner`, which would hang."""
    _living.add(owner)


def _keep_for_ever() -> None:
    for owner in _living:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


os.register_at_fork(after_in_child=_keep_for_ever)
