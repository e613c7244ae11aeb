"""What is installed is what is promised: targets, versions, links and extras agree with each other."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import kvmover
from kvmover.tools.doctor.process_checks import NEWEST_TRITON, OLDEST_PYTHON, OLDEST_TORCH, OLDEST_TRITON
from kvmover.transport import OLDEST_NIXL

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = [
    "setup",
    "demo",
    "test",
    "prove",
    "proof",
    "mutants",
    "night",
    "mooncake",
    "simulate",
    "engines",
    "scan",
    "indexer",
    "live",
    "soak",
    "live-pair",
    "orchestrators",
    "lint",
    "types",
    "wheel",
    "perf",
    "wire",
    "gpu-check",
    "pictures",
    "site",
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


def test_each_vendored_file_comes_with_its_licence() -> None:
    licences = {f"core/vendored/{header.stem}.LICENSE" for header in (ROOT / "core" / "vendored").glob("*.h")}
    assert {"LICENSE", *licences} == set(PROJECT["license-files"])
    assert all((ROOT / licence).read_text() for licence in licences)


def test_a_build_without_triton_says_that_it_ships_no_machine_code(tmp_path: Path) -> None:
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
exec(compile(open("setup.py").read(), "setup.py", "exec"))
"""
    arguments = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    said = "no machine code is shipped, without triton: kernels are compiled where they run"
    assert said in done.stdout + done.stderr
    assert (tmp_path / "lib" / "kvmover" / "kernels" / "rows.py").exists()
    assert not (tmp_path / "lib" / "kvmover" / "kernels" / "shipped").exists()


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


def test_setup_installs_the_oldest_nixl_that_the_transport_takes() -> None:
    assert re.findall(r"^OLDEST_NIXL := (\S+)$", MAKEFILE, re.MULTILINE) == [dotted(OLDEST_NIXL)]


def with_python(folder: Path, version: str) -> Path:
    """This interpreter, but for what it says of its version."""
    fake = folder / "python"
    said = f"import sys; sys.version_info = ({', '.join(version.split('.'))}, 0); exec(sys.argv[2])"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{said}" "$@"\n')
    fake.chmod(0o755)
    return fake


@pytest.mark.parametrize("where", ["chosen", "in .venv"])
def test_a_python_that_is_too_old_is_refused_before_anything_is_installed(tmp_path: Path, where: str) -> None:
    make = shutil.which("make") or pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, tmp_path)
    folder = tmp_path / (".venv/bin" if where == "in .venv" else "elsewhere")
    folder.mkdir(parents=True)
    fake = with_python(folder, "3.10")
    chosen = sys.executable if where == "in .venv" else str(fake)
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run([make, "demo", f"PYTHON={chosen}"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "kvmover needs Python 3.11 or newer, and " in done.stderr
    assert (": remove .venv" in done.stderr) == (where == "in .venv")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_demo_needs_what_the_commands_need_and_not_what_the_tests_do() -> None:
    make = shutil.which("make") or pytest.skip("needs make")
    for target, is_wanted in (("demo", False), ("test", True)):
        done = subprocess.run([make, "-nB", target], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
        assert ("--target .triton/" in done.stdout) == is_wanted


def test_the_metadata_says_which_pythons_and_whose_it_is() -> None:
    assert PROJECT["authors"]
    oldest = f"Programming Language :: Python :: {dotted(OLDEST_PYTHON)}"
    assert next(line for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)) == oldest


def test_the_page_of_an_index_has_no_link_that_leads_nowhere_from_there() -> None:
    text = (ROOT / PROJECT["readme"]).read_text()
    assert text.startswith("# kvmover\n")
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", text)
    assert re.search(rf"kvmover-{re.escape(kvmover.__version__)}-cp311-abi3-linux_\w+\.whl", text)


def test_what_a_page_or_a_message_says_to_install_is_there_to_be_installed() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    sources = [*(ROOT / "kvmover").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    named: set[str] = set()
    for path in (*pages, *sources):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"""need\([^)]*"([a-z]+)"\)""", text))
        named |= set(re.findall(r"(?:kvmover|\.whl|install \"\.)\[([a-z0-9,]+)\]", text))
        assert not re.findall(r"pip install [^\s\"']*\[", text), f"{path}: unquoted brackets, which zsh reads"
    assert {"torch", "nixl", "plot", "metrics", "cuda13"} <= {name for each in named for name in each.split(",")}
    assert {name for each in named for name in each.split(",")} <= EXTRAS.keys()


def test_setup_pins_the_torch_of_machines_without_a_gpu() -> None:
    pins = [line for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins == ["torch==2.13.0"]


def test_continuous_integration_runs_every_check() -> None:
    steps = re.search(r"^for step in (.+); do$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps
    at_once = "mooncake environments lint types wheel"
    assert shlex.split(steps[1]) == ["setup", at_once, "test", "prove", "live-pair"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_changelog_says_in_sixty_lines_what_this_version_has() -> None:
    releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert releases[0].startswith(kvmover.__version__)
    assert all(release.count("\n") <= 60 for release in releases)


def test_public_names_are_found_where_the_package_says() -> None:
    for name in kvmover.__all__:
        assert getattr(kvmover, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvmover.nonsense


@pytest.mark.parametrize("package", ["store", "transfer", "transport", "migrate"])
def test_a_package_refuses_a_name_that_it_does_not_have(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'kvmover.{package}' has no attribute 'nonsense'"):
        _ = import_module(f"kvmover.{package}").nonsense
