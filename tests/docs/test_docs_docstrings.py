"""What a reader of the code asks first, `help(name)`, is answered: every public name says what its types cannot."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "kvmover"

#: Every package of kvmover: nothing public is without a docstring.
DONE = tuple(sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(body: list[ast.stmt], within: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Definition]]:
    """Classes, functions, methods and properties that no underscore keeps from the world, by their full name."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield (*within, node.name), node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, (*within, node.name))


def modules(room: str) -> list[Path]:
    folder = ROOT / room
    return sorted([*folder.glob("*.py"), *folder.glob("[!_]*/**/*.py")])


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class of all packages: a name stands for one."""
    trees = [tree(path) for room in DONE for path in modules(room)]
    return {node.name: node for each in trees for node in ast.walk(each) if isinstance(node, ast.ClassDef)}


def inherited(owner: str, name: str, known: dict[str, ast.ClassDef]) -> str | None:
    """What a base class says of a method, as `inspect.getdoc` finds it."""
    for base in known[owner].bases:
        above = known.get(ast.unparse(base).split("[")[0].split(".")[-1])
        if above is None:
            continue
        own = [node for node in above.body if isinstance(node, Definition) and node.name == name]
        said = (ast.get_docstring(own[0]) if own else None) or inherited(above.name, name, known)
        if said:
            return said
    return None


def silent(module: ast.Module, known: dict[str, ast.ClassDef]) -> list[str]:
    """Public names without a docstring of their own or of a base class. A test's name is a sentence already."""
    return [
        ".".join(name)
        for name, node in public(module.body)
        if not ast.get_docstring(node)
        and not name[-1].startswith("test_")
        and not (len(name) > 1 and inherited(name[-2], name[-1], known))
    ]


@pytest.mark.parametrize("room", DONE)
def test_every_public_name_of_a_room_says_what_it_is(room: str) -> None:
    known, paths = classes(), modules(room)
    assert paths
    found = {str(path.relative_to(ROOT)): silent(tree(path), known) for path in paths}
    assert not {path: names for path, names in found.items() if names}


def test_a_name_without_a_word_is_found_unless_its_base_speaks() -> None:
    module = ast.parse(
        'class Base:\n    """Said."""\n    def told(self):\n        """Said."""\n    def silent(self): ...\n'
        'class Made(Base):\n    """Said."""\n    def told(self): ...\n    def silent(self): ...\n'
        "    def _own(self): ...\ndef alone(): ...\n"
    )
    known = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    assert silent(module, known) == ["Base.silent", "Made.silent", "alone"]
