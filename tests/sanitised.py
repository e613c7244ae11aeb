"""The C core built with sanitisers of memory and arithmetic, once a run, and stories told to it, each in a process."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Memory that is not to be had is an error of Python, as it is without sanitisers.
OPTIONS = "detect_leaks=0:allocator_may_return_null=1"
#: `made` is the module, for the story that follows.
LOADED = """
import sys
sys.path[:0] = [{folder!r}, {root!r}]
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("_core", {library!r}, loader=ExtensionFileLoader("_core", {library!r}))
made = module_from_spec(spec)
spec.loader.exec_module(made)
"""


def told(story: str, folder: Path, builds: pytest.TempPathFactory) -> str:
    """Returns the words that a story prints, which may import from `folder`. Fails where a sanitiser objects; skips
    without gcc's.
    """
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("needs gcc's address sanitizer")
    library = _built(compiler, builds)
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(folder=str(folder), root=str(ROOT), library=str(library)) + story],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": OPTIONS, "PYTHONMALLOC": "malloc"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _built(compiler: str, builds: pytest.TempPathFactory) -> Path:
    """Returns the module, which the first test of a run builds for all workers: that takes as long as a story."""
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        pytest.skip("needs Python's headers")
    base = builds.getbasetemp()
    work = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    library, unfinished = work / "_core.abi3.so", work / "_core.unfinished"
    options = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra"]
    options += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fPIC", "-shared", f"-I{include}"]
    sources = [str(each) for each in sorted((ROOT / "core").glob("*.c"))]
    with (work / "_core.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            command = [compiler, *options, *sources, "-o", str(unfinished)]
            built = subprocess.run(command, capture_output=True, text=True, timeout=100)
            assert built.returncode == 0, built.stderr
            unfinished.rename(library)
    return library
