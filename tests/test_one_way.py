"""Imports point one way: no module imports, by whatever way round, one that imports it; not for its types either."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvmover"


def modules() -> dict[str, Path]:
    """Every module of kvmover by its name, but for the faces of packages, which only hand on."""
    paths = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")}
    return {name_of(path): path for path in paths if path.name != "__init__.py"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of ours that a module imports at its top, those for its types alone included."""
    package = list(path.relative_to(ROOT).parts[:-1])
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {id(inner) for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef) for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in late:
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return found & known.keys()


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    known = modules()
    graph = {name: imported(path, known) for name, path in known.items()}
    assert len(graph["kvmover.store.page_store"]) > 3
    assert not circle(graph)


@pytest.mark.parametrize("graph", [{"a": {"b"}, "b": {"c"}, "c": {"a"}}, {"a": {"a"}}], ids=["of three", "of one"])
def test_a_circle_is_found(graph: dict[str, set[str]]) -> None:
    assert set(circle(graph)) == set(graph)
