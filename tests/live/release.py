"""Python that is laid over an engine's environment for a server: another release of the engine, an orchestrator."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace

from tests.live.server import ROOT, Command


def laid(script: str, *words: str) -> str:
    """Runs a script of tests/engines, and returns the folder for PYTHONPATH that it prints."""
    command = [str(ROOT / "tests" / "engines" / script), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def over(command: Command, *folders: str) -> Command:
    """Returns the same server with these folders before all others that its process and its ground import from."""
    ground = command.ground
    path = [*folders, ground.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH") or str(ROOT)]
    return replace(
        command, ground=replace(ground, environment={**ground.environment, "PYTHONPATH": os.pathsep.join(path)})
    )


@dataclass(frozen=True, slots=True)
class Release:
    """A release of an engine, as pip names it; without a version that of the environment."""

    engine: str
    version: str = ""

    @classmethod
    def named(cls, variable: str) -> Release:
        """Returns the release that an environment variable names; vLLM's of the environment if it is not set."""
        engine, _, version = (os.environ.get(variable) or "vllm").partition("==")
        assert engine in ("vllm", "sglang"), f"{variable} is {engine!r}: it may be vllm==0.31.0 or sglang==0.5.22"
        return cls(engine, version)

    def __str__(self) -> str:
        return f"{self.engine} {self.version or 'as installed'}"

    def of(self, command: Command) -> Command:
        """Returns the same server of this release, whose Python lies over the environment's."""
        if not self.version:
            return command
        return over(command, laid("release.sh", self.engine, self.version))
