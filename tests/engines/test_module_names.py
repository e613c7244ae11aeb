"""Modules that adapters import by a name in a string are there: an engine may serve on without a plug-in that fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvmover

ADAPTERS = Path(kvmover.__file__).parent / "engines"


def named(path: Path) -> Iterator[str]:
    """Names in calls of `_module`, in `_CLASSES` and in `_HOMES` or `_HOME` of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_module":
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            (target,) = node.targets
            known = ast.unparse(target)
            if known == "_CLASSES":
                yield from (module for module, _ in ast.literal_eval(node.value).values())
            if known in ("_HOME", "_HOMES"):
                homes = ast.literal_eval(node.value)
                yield from (homes if isinstance(next(iter(homes.values())), tuple) else homes.values())


@pytest.mark.parametrize("engine", ["common", "sglang", "vllm"])
def test_every_module_that_an_adapter_names_in_a_string_is_there(engine: str) -> None:
    found = {name for path in (ADAPTERS / engine).glob("*.py") for name in named(path)}
    assert len(found) >= 3
    missing = {name for name in found if not (ADAPTERS / engine / f"{name}.py").exists()}
    assert not missing
