"""The table of docs/live.md of compiled operators that the fixtures of live servers replace, read from the fixtures."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FIXTURES = Path(__file__).parent.parent / "tests" / "live" / "fixtures"

#: Constant of a fixture that names what it replaces otherwise than by an operator's implementation.
_CONSTANT = "REPLACED"

_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def replaced_operators() -> list[str]:
    """Returns the lines of the table: an engine's operators, by the file that has them in torch."""
    lines = [
        "**Compiled operators that the fixtures replace**, in `tests/live/fixtures`:",
        "",
        "| engine | compiled operator or kernel | in torch |",
        "|---|---|---|",
    ]
    for folder, engine in _ENGINES.items():
        for path in sorted((FIXTURES / folder).rglob("*.py")):
            names = ", ".join(f"`{name}`" for name in replaced_in(path))
            if names:
                lines.append(f"| {engine} | {names} | `{path.relative_to(FIXTURES)}` |")
    return lines


def replaced_in(path: Path) -> list[str]:
    """Returns the operators that a file implements or names in `REPLACED`, in order of their names."""
    return sorted(set(_implemented(tree := ast.parse(path.read_text()))) | set(_named(tree)))


def _implemented(tree: ast.Module) -> Iterator[str]:
    """Yield the operators of calls `library.impl(NAME, ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "impl":
            yield ast.literal_eval(node.args[0])


def _named(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(each, "id", "") for each in node.targets] == [_CONSTANT]:
            yield from ast.literal_eval(node.value)
