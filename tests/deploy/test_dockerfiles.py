"""The Dockerfile of each engine begins from the release that live servers run, and its RUN lines install kvmover."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from kvmover import __version__

ROOT = Path(__file__).parents[2]
IMAGES = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}
#: As an engine's image has it: of a build that no index has, and found by what looks for its name.
TORCH = "2.13.0+of.the.image"


def lines(engine: str, word: str) -> list[str]:
    return re.findall(rf"^{word} (.*)$", (ROOT / "deploy" / engine / "Dockerfile").read_text(), re.M)


@pytest.mark.parametrize("engine", IMAGES)
def test_the_image_is_the_release_and_has_the_router_that_live_servers_are_run_with(engine: str) -> None:
    installed = (ROOT / "tests" / "engines" / engine / "alone.txt").read_text().split()
    assert lines(engine, "FROM") == [f"{IMAGES[engine]}:${{RELEASE}}"]
    (release,) = lines(engine, "ARG")
    assert release.replace("RELEASE=v", f"{engine}==") in installed
    (router,) = re.findall(r"\S+-router==\S+", "\n".join(lines(engine, "RUN")))
    assert router in installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    made = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    without_kernels = {**os.environ, "KVMOVER_ARCHITECTURES": ""}
    with (ROOT / "setup.py").open() as lock:  # two workers would build in one folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(made, check=True, capture_output=True, timeout=300, env=without_kernels)
    (found,) = folder.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(found).namelist() if "kernels/shipped/" in name]
    return found


def made_torch(folder: Path) -> Path:
    """An empty distribution by that name, so that nobody downloads gigabytes."""
    path, info = folder / f"torch-{TORCH}-py3-none-any.whl", f"torch-{TORCH}.dist-info"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", IMAGES)
def test_its_run_lines_install_kvmover_beside_an_engine_and_leave_that_as_it_is(
    engine: str, wheel: Path, tmp_path: Path
) -> None:
    """In a bare environment whose only part of an engine is torch, by name."""
    home, work = tmp_path / "environment", tmp_path / "work"
    venv.create(home, with_pip=True)
    work.mkdir()
    (work / wheel.name).write_bytes(wheel.read_bytes())  # COPY dist/*.whl ./
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ["PATH"] = f"{home / 'bin'}{os.pathsep}{environ['PATH']}"

    def run(command: str) -> str:
        ran = subprocess.run(["sh", "-c", command], cwd=work, env=environ, capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    run(f"python3 -m pip install -q {made_torch(tmp_path)}")
    said = [run(line) for line in lines(engine, "RUN")]
    assert "kvmover over NIXL 1." in "".join(said)
    has = run("python3 -m pip list --format=freeze").splitlines()
    assert f"torch=={TORCH}" in has
    assert f"kvmover=={__version__}" in has
    assert list(work.iterdir()) == []
    run("kvmover plan --kv-heads 8 --head-dim 128 --layers 4 --tokens 100 --src tp=4 --dst tp=2")
    assert run("python3 -c 'import prometheus_client, zmq'") == ""
