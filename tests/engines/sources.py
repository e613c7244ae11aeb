"""The names of an unpacked release, found by reading its Python: nothing of the engine is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmover.engines.common import Contract

#: What a name stands for; None for what only a running engine knows, like a value that a call makes.
Found = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None


class Absent(Exception):
    """The error for a name that a release does not have."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The Python of a release below `root`, of the package `package`."""

    root: Path
    package: str
    _modules: dict[str, ast.Module | None] = field(default_factory=dict[str, "ast.Module | None"])

    def lacking(self, contract: Contract, plugin: str) -> list[str]:
        """Returns the names without a stand-in that a plug-in needs or hooks, and that this release lacks."""
        found: list[str] = []
        for need in (*contract.needs, *contract.hooks):
            if plugin not in need.plugins or not need.name.startswith(f"{self.package}."):
                continue
            dot = "." if ":" in need.name else ":"
            if not self.has(need.name):
                found += [] if need.stand_in else [need.name]
            else:
                found += [name for has in need.has if not self.has(name := f"{need.name}{dot}{has}")]
        return found

    def has(self, name: str) -> bool:
        """Returns True if the release has a name, `module:path`, as far as its text says."""
        module, _, path = name.partition(":")
        try:
            self._follow(module, path.split(".") if path else [])
        except Absent:
            return False
        return True

    def _follow(self, module: str, path: Sequence[str]) -> None:
        found: Found = self._module(module)
        for name in path:
            match found:
                case None:
                    return
                case ast.Module():
                    found, module = self._top(module, name, set())
                case ast.ClassDef():
                    found, module = self._member(found, module, name)
                case _:
                    if not _uses(found, name):
                        raise Absent(f"{module}:{found.name}.{name}")
                    found = None

    def _module(self, name: str) -> ast.Module:
        if name not in self._modules:
            at = self.root.joinpath(*name.split("."))
            path = next((each for each in (at.with_suffix(".py"), at / "__init__.py") if each.exists()), None)
            self._modules[name] = ast.parse(path.read_text()) if path else None
        if (module := self._modules[name]) is None:
            raise Absent(name)
        return module

    def _top(self, module: str, name: str, seen: set[str]) -> tuple[Found, str]:
        """Returns what a module's name stands for and its module. Raises Absent."""
        if module in seen:
            raise Absent(f"{module}:{name}")
        seen.add(module)
        everything: list[str] = []
        for node in _statements(self._module(module).body):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                    return node, module
                case ast.Assign() | ast.AnnAssign() if name in _assigned(node):
                    return None, module
                case ast.Import() if any((each.asname or each.name.split(".")[0]) == name for each in node.names):
                    return None, module
                case ast.ImportFrom():
                    source = self._source(module, node)
                    for each in node.names:
                        if (each.asname or each.name) == name:
                            return self._imported(source, each.name)
                        everything += [source] if each.name == "*" else []
                case _:
                    pass
        for source in everything:
            try:
                return self._top(source, name, seen)
            except Absent:
                continue
        below = f"{module}.{name}"
        return self._module(below), below

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        """Returns the full name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        if not self.root.joinpath(*parts, "__init__.py").exists():
            parts.pop()
        return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])

    def _imported(self, source: str, name: str) -> tuple[Found, str]:
        if source.partition(".")[0] != self.package:
            return None, source
        return self._top(source, name, set())

    def _member(self, owner: ast.ClassDef, module: str, name: str) -> tuple[Found, str]:
        """Returns what a name of a class or its bases stands for, those that constructors set too. Raises Absent."""
        for node in owner.body:
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                    return node, module
                case ast.Assign() | ast.AnnAssign() if name in _assigned(node):
                    return None, module
                case _:
                    pass
        made = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if hasattr(object, name) or any(_uses(node, name) for node in made):
            return None, module
        for base in owner.bases:
            if isinstance(base, ast.Name):
                found, of = self._top(module, base.id, set())
                if isinstance(found, ast.ClassDef):
                    try:
                        return self._member(found, of, name)
                    except Absent:
                        continue
        raise Absent(f"{module}:{owner.name}.{name}")


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those in branches and attempts too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _uses(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Returns True if a function takes a parameter, or names a variable or an attribute, of that name."""
    return any(
        name in (getattr(node, "arg", None), getattr(node, "id", None), getattr(node, "attr", None))
        for node in ast.walk(function)
    )
