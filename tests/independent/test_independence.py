"""The client and the reader that prove the pages: as short as the pages say, and without a line of kvmover's."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
WRITTEN = {"protocol.md": ("decode_client.py", 200), "object-format.md": ("object_reader.py", 100)}


@pytest.mark.parametrize("page", WRITTEN)
def test_what_was_written_from_a_page_is_as_short_as_it_says(page: str) -> None:
    name, most = WRITTEN[page]
    lines = len((Path(__file__).parent / name).read_text().splitlines())
    said = re.findall(
        r"of (\d+) lines, \[tests/independent/(\w+\.py)\]", " ".join((ROOT / "docs" / page).read_text().split())
    )
    assert said == [(str(lines), name)]
    assert lines <= most


@pytest.mark.parametrize("name", [name for name, _ in WRITTEN.values()])
def test_it_imports_nothing_of_kvmover_or_of_other_tests(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / name).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {module.partition(".")[0] for module in imported} - sys.stdlib_module_names
    assert packages <= {"msgpack", "nixl", "xxhash"}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"__import__", "exec", "eval"}
    assert "importlib" not in imported
