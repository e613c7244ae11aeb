"""A DemoKeeper is a scenario's keeper, in its own process: it outlives a killed fleet, and serves the next."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

from kvmover.store import serve_keeper
from kvmover.tools.demo.crew import END_S, CrewError

#: Time for the process to import and serve, s.
_BEGIN_S = 60.0


class DemoKeeper:
    """A keeper process at `folder / "keeper.sock"`, until closed."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        """Spawn the process and wait for its socket. Raises CrewError if it does not serve."""
        self._path = folder / "keeper.sock"
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve_keeper, args=(self._path, capacity_bytes), daemon=True)
        self._process.start()
        deadline = time.monotonic() + _BEGIN_S
        while not self._path.exists():
            if not self._process.is_alive() or time.monotonic() > deadline:
                raise CrewError(f"the keeper does not serve; its exit code is {self._process.exitcode}")
            time.sleep(0.01)

    def location(self, generation: int) -> str:
        """Returns the location of the pages for a generation of the demo's one fleet."""
        return f"keeper://{self._path}?fleet=demo&generation={generation}"

    def close(self) -> None:
        """End the process and drop its pages. Safe to call twice."""
        self._process.terminate()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()
