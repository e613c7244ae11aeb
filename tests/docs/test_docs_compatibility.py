"""docs/README.md names the versions that the package asks for, and those that the tests install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvmover.engines.common import Contract, is_of
from kvmover.engines.sglang.sglang_contract import SGLANG
from kvmover.engines.vllm.vllm_contract import VLLM

ROOT = Path(__file__).parents[2]
ROWS = dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", (ROOT / "docs" / "README.md").read_text(), flags=re.M))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def least(requirement: str) -> str:
    return requirement.split(">=")[1].split(",")[0]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ("Python", least(PROJECT["requires-python"])),
        ("torch", least(PROJECT["optional-dependencies"]["torch"][0])),
        ("Triton", least(PROJECT["optional-dependencies"]["torch"][1])),
        ("NIXL (`nixl-cu13`, `nixl-cu12`)", least(PROJECT["optional-dependencies"]["nixl"][0])),
        (
            "CuPy, for the experimental engines `ring` and `tensor_ring`",
            least(PROJECT["optional-dependencies"]["cuda13"][1]),
        ),
    ],
)
def test_a_library_is_taken_from_the_version_on_that_the_package_asks_for(row: str, asked: str) -> None:
    assert ROWS[row].startswith(f"{asked} and newer |")


@pytest.mark.parametrize(("row", "contract"), [("vLLM", VLLM), ("SGLang", SGLANG)])
def test_an_engine_is_taken_in_the_releases_that_its_contract_knows(row: str, contract: Contract) -> None:
    releases = sorted({release for tested in contract.tested.values() for release in tested})
    installed = (ROOT / "tests" / "engines" / contract.package / "alone.txt").read_text()
    (newest,) = re.findall(rf"^{contract.package}==(\S+)$", installed, flags=re.M)
    assert is_of(newest, (releases[-1],))
    taken = f"by plug-in, {releases[0]} to {releases[-1]} with their fixes: [releases](compatibility.md)"
    assert ROWS[row] == f"{taken} | {releases[0]} to {newest}"


@pytest.mark.parametrize(("row", "engine"), [("vLLM's router", "vllm"), ("SGLang's router", "sglang")])
def test_a_router_is_the_one_that_live_servers_are_run_with(row: str, engine: str) -> None:
    installed = (ROOT / "tests" / "engines" / engine / "alone.txt").read_text().split()
    assert ROWS[row].rpartition(" | ")[2].replace(" ", "==") in installed
