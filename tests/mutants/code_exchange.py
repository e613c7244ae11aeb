"""A mutant is a module's source with one fragment of a function replaced; its code takes the function's place.

The function object stays, so every module that imported it, every class and every decorator around it runs the mutant.
Nothing is written into the tree.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

#: A piece of a function's syntax that has a place in its source.
Fragment = ast.stmt | ast.expr | ast.keyword


@dataclass(frozen=True)
class Source:
    """The text of a module, in bytes as positions of its syntax tree count, and the functions in it by name."""

    module: str
    path: str
    text: bytes

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """Returns the functions and methods, by names as `Class.method`."""
        found = dict[str, ast.FunctionDef]()
        for node in ast.parse(self.text).body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            found |= {prefix + each.name: each for each in inner if isinstance(each, ast.FunctionDef)}
        return found

    @cached_property
    def _starts(self) -> list[int]:
        """Returns the place of each line's first byte."""
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def span(self, node: Fragment) -> slice:
        """Returns the bytes of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return slice(
            self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset
        )

    def line_of(self, at: int) -> int:
        """Returns the number of the line with this byte."""
        return self.text.count(b"\n", 0, at) + 1


@cache
def source_of(module: str) -> Source:
    """Returns the source of a module of the project."""
    path = str(import_module(module).__file__)
    return Source(module, path, Path(path).read_bytes())


def function_at(module: str, name: str) -> FunctionType:
    """Returns the function of a module or class under a name such as `Class.method`, without what decorates it."""
    found: Any = import_module(module)
    for part in name.split("."):
        found = vars(found)[part]
    for inside in ("fget", "__func__", "func", "__wrapped__"):
        found = getattr(found, inside, None) or found
    assert isinstance(found, FunctionType), f"{name} of {module} is {found}"
    return found


def code_at(compiled: CodeType, name: str) -> CodeType:
    """Returns the code of the function with this name from the code of its module."""
    for part in name.split("."):
        compiled = next(each for each in compiled.co_consts if isinstance(each, CodeType) and each.co_name == part)
    return compiled


@dataclass(frozen=True)
class Mutant:
    """A function of a module in which `new` stands in the place of the bytes from `start` to `stop`."""

    module: str
    function: str
    start: int
    stop: int
    new: str

    @property
    def source(self) -> Source:
        """Returns the honest source."""
        return source_of(self.module)

    @property
    def line(self) -> int:
        """Returns the line on which the replaced fragment begins."""
        return self.source.line_of(self.start)

    @property
    def lines(self) -> range:
        """Returns the lines of the statement around the fragment; of one with a body, those before the body."""
        statements = [each for each in ast.walk(self.source.functions[self.function]) if isinstance(each, ast.stmt)]
        around = [each for each in statements if self.source.span(each).start <= self.start]
        around = [each for each in around if self.source.span(each).stop >= self.stop]
        least = min(around, key=lambda each: self.source.span(each).stop - self.source.span(each).start)
        body = getattr(least, "body", None)
        assert least.end_lineno is not None
        return range(least.lineno, max(body[0].lineno, least.lineno + 1) if body else least.end_lineno + 1)

    def code(self) -> CodeType:
        """Returns the code of the mutant. Raises SyntaxError where the fragment may not stand."""
        text = self.source.text
        mutated = text[: self.start] + self.new.encode() + text[self.stop :]
        return code_at(compile(mutated, self.source.path, "exec"), self.function)

    def apply(self) -> Callable[[], None]:
        """Put the mutant in the function's place. Returns a call that undoes it."""
        function = function_at(self.module, self.function)
        honest, function.__code__ = function.__code__, self.code()
        return partial(setattr, function, "__code__", honest)

    @property
    def change(self) -> str:
        """Returns the function and the change, without the place of either."""
        old, new = (" ".join(text.split()) for text in (self.source.text[self.start : self.stop].decode(), self.new))
        return f"{self.function}: {old} -> {new}"

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.change}"


def mutant(module: str, function: str, old: str, new: str) -> Mutant:
    """Returns the function with `new` in the place of `old`, which stands in it once."""
    source = source_of(module)
    whole = source.span(source.functions[function])
    text = source.text[whole]
    assert text.count(old.encode()) == 1, f"{old!r} stands {text.count(old.encode())} times in {function}"
    start = whole.start + text.index(old.encode())
    return Mutant(module, function, start, start + len(old.encode()), new)


@contextmanager
def exchanged(each: Mutant) -> Iterator[None]:
    """Run a block with a mutant in its function's place."""
    undo = each.apply()
    try:
        yield
    finally:
        undo()


def codes_in(code: CodeType) -> set[CodeType]:
    """Returns a function's code and that of all functions inside it."""
    return {code}.union(*(codes_in(each) for each in code.co_consts if isinstance(each, CodeType)))
