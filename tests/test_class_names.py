"""A public class of kvmover has a name that stands once in the tree, and so has a file."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

from tests.test_imports import PACKAGE, modules


def test_every_public_class_has_a_name_that_stands_once() -> None:
    found = defaultdict[str, list[str]](list)
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert "PrefixTree" in found
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice, twice


def test_a_file_name_stands_once() -> None:
    found = Counter(path.name for path in modules() if path.name != "__init__.py")
    assert found["page_store.py"] == 1
    assert not {name for name, times in found.items() if times > 1}
