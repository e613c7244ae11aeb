"""What is installed is what is promised: targets, versions, links and extras agree with each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import kvmover
from kvmover.observe.checks import NEWEST_TRITON, OLDEST_NIXL, OLDEST_PYTHON, OLDEST_TORCH, OLDEST_TRITON

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = [
    "setup",
    "demo",
    "test",
    "prove",
    "simulate",
    "engines",
    "live",
    "live-pair",
    "lint",
    "types",
    "wheel",
    "perf",
    "gpu-check",
    "pictures",
    "clean",
]


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)


def test_make_alone_prints_each_target_with_a_line_of_description() -> None:
    make = shutil.which("make") or pytest.skip("needs make")
    done = subprocess.run([make], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    described = dict(re.findall(r"^  make (\S+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert list(described) == ["help", *TARGETS]


def test_the_device_code_is_a_link_so_that_the_name_kernels_is_never_taken() -> None:
    assert os.readlink(ROOT / "kvmover" / "kernels") == "../kernels"


def test_base_dependencies_are_light() -> None:
    names = {re.split(r"[<>=\[ ]", line)[0] for line in PROJECT["dependencies"]}
    assert names == {"msgspec", "numpy", "rich", "typer", "xxhash"}


def test_extras_refer_to_extras_that_exist() -> None:
    for lines in EXTRAS.values():
        for inner in re.findall(r"kvmover\[([^\]]+)\]", " ".join(lines)):
            assert set(inner.split(",")) <= set(EXTRAS)


def test_the_doctor_asks_for_the_versions_that_the_extras_ask_for() -> None:
    assert PROJECT["requires-python"] == f">={dotted(OLDEST_PYTHON)}"
    assert f"torch>={dotted(OLDEST_TORCH)}" in EXTRAS["torch"]
    assert f"triton>={dotted(OLDEST_TRITON)}" in EXTRAS["torch"]
    assert f"nixl-cu13>={dotted(OLDEST_NIXL)}" in EXTRAS["nixl"]


def test_setup_installs_the_oldest_and_the_newest_triton_that_the_doctor_knows() -> None:
    versions = dict(re.findall(r"^(OLDEST|NEWEST)_TRITON := (\d+\.\d+)\.\d+$", MAKEFILE, re.MULTILINE))
    assert versions == {"OLDEST": dotted(OLDEST_TRITON), "NEWEST": dotted(NEWEST_TRITON)}


def test_setup_pins_the_torch_of_machines_without_a_gpu() -> None:
    pins = [line for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins == ["torch==2.13.0"]


def test_continuous_integration_runs_every_check() -> None:
    steps = re.search(r"^for target in (.+); do$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps
    assert steps[1].split() == ["setup", "lint", "types", "wheel", "test", "prove", "live-pair"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_changelog_knows_this_version() -> None:
    assert f"## {kvmover.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_public_names_are_found_where_the_package_says() -> None:
    for name in kvmover.__all__:
        assert getattr(kvmover, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvmover.nonsense
