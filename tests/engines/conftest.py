"""Engines live in environments of their own (`make engines`): their tests run there, or are skipped for that reason."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def in_engine() -> Callable[[str, Path], None]:
    """Run a file of tests with pytest inside the environment of an engine, and fail with its output.

    $KVMOVER_RELEASE: the folder of another release, whose Python lies over the environment's.
    """

    def run(engine: str, tests: Path) -> None:
        python = ROOT / ".engines" / engine / "bin" / "python"
        if not python.exists():
            pytest.skip(f"{engine} is not installed: `make engines` builds .engines/{engine}")
        release = os.environ.get("KVMOVER_RELEASE")
        path = os.pathsep.join([*filter(None, [release]), str(ROOT)])
        # A cache of its own: what the engine compiles at its first call is kept with it.
        home = Path(release) if release else python.parent.parent
        kept = {"TORCH_EXTENSIONS_DIR": str(home / "extensions"), "PYTHONPATH": path}
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "tests/engines/inside.ini", tests],
            cwd=ROOT,
            env={**os.environ, **kept},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]

    return run
