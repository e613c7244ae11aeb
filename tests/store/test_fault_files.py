"""Every call of the system, every errno, once, now and then and always: what it costs others, and what comes out."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from fault_files import CODES, PLACES, FaultyCall, Often, trial

from tests.proofs import family
from tests.test_imports import PACKAGE

CASES = [(name, code, often) for name in PLACES for code in CODES for often in Often]
#: Each call, errno and measure at least once.
FEW = [(name, CODES[n % len(CODES)], list(Often)[n % 3]) for n, name in enumerate(PLACES)]

#: Calls that fail in no way that matters here, or that only other engines and backends make.
HARMLESS = {"access", "fspath", "urandom", "strerror", "getpid", "geteuid"}
FILES_ENGINE = [path for path in (PACKAGE / "store").glob("*.py") if path.name not in ("nixl_files.py",)]


@pytest.mark.parametrize(("name", "code", "often"), family(CASES, FEW))
def test_one_process_in_trouble_costs_nobody_a_page(tmp_path: Path, name: str, code: int, often: Often) -> None:
    fault = FaultyCall(name, code, often, random.Random(f"{name} {code} {often.value}"))
    trial(tmp_path, fault)


def test_every_call_of_the_system_can_fail() -> None:
    called = set[str]()
    for path in FILES_ENGINE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                called.add(node.attr)
    assert {name for name in called if name.islower() and name != "path"} - HARMLESS <= PLACES.keys()
