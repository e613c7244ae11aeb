"""A public class of kvmover has a name of its own: nothing else in the tree is called so."""

from __future__ import annotations

import ast
from collections import defaultdict

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
