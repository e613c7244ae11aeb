"""Yields the mutants of a function: a statement dropped, a condition decided, a comparison or a number off by one.

Conditions that stay on (`assert`, `strict`), messages, logs and annotations are left as they are. Neither of two tools
does this: cosmic-ray and mutmut drop no statement and take no fragment that has a name; the first writes into the tree
and starts a process a mutant, the second leaves out methods that are decorated.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard

from tests.mutants.code_exchange import Fragment, Mutant, code_at, source_of

#: Each comparison and the one that differs from it least.
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",  # codespell:ignore
    ast.Is: "is not",
    ast.IsNot: "is",
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
NEGATED = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)  # codespell:ignore
SAYING = {"log", "warnings"}
#: Expressions that need no brackets, or may have none.
BARE = (ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.Subscript, ast.Slice)

#: A place in a function's source, by its node, and the text that takes it.
Edit = tuple[Fragment, str]


def mutants_of(module: str, function: str) -> list[Mutant]:
    """Returns the mutants of a function whose code differs from the honest one and from each other."""
    source = source_of(module)
    codes = {code_at(compile(source.text, source.path, "exec"), function)}
    found = list[Mutant]()
    for node, new in edits(source.functions[function]):
        span = source.span(node)
        each = Mutant(module, function, span.start, span.stop, new)
        code = each.code()
        if code not in codes:
            codes.add(code)
            found.append(each)
    return found


def edits(function: ast.FunctionDef) -> Iterator[Edit]:
    """Yields each edit of a function's body."""
    for statement in function.body:
        yield from _of_statement(statement)


def _of_statement(node: ast.stmt) -> Iterator[Edit]:
    if _asserts(node) or _says(node):
        return
    if _may_go(node):
        yield node, "pass"
    if isinstance(node, ast.If):
        yield node.test, "False"
        yield node.test, "True"
    elif isinstance(node, ast.While):
        yield node.test, "False"
    if isinstance(node, ast.Raise):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _of_statement(child)
        elif isinstance(child, ast.ExceptHandler):
            for inner in child.body:
                yield from _of_statement(inner)
        elif isinstance(child, ast.withitem):
            yield from _of_expression(child.context_expr, is_decided=False)
        elif _is_number(child) and isinstance(node, ast.Assign | ast.AugAssign | ast.Return):
            yield node, _with_another_number(node, child)
        elif isinstance(child, ast.expr) and child is not getattr(node, "annotation", None):
            yield from _of_expression(child, is_decided=child is getattr(node, "test", None))


def _asserts(node: ast.stmt) -> bool:
    """Returns True for a condition that stays on, or a loop over such."""
    return isinstance(node, ast.Assert) or (isinstance(node, ast.For) and all(map(_asserts, node.body)))


def _says(node: ast.stmt) -> bool:
    """Returns True for a docstring or a line of a log."""
    if not isinstance(node, ast.Expr):
        return False
    called = node.value.func if isinstance(node.value, ast.Call) else None
    owner = called.value if isinstance(called, ast.Attribute) else None
    return isinstance(node.value, ast.Constant) or (isinstance(owner, ast.Name) and owner.id in SAYING)


def _may_go(node: ast.stmt) -> bool:
    """Returns True for a statement whose names all exist without it."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)


def _of_expression(node: ast.expr, *, is_decided: bool) -> Iterator[Edit]:
    """Yields the edits of an expression. `is_decided`: it is a condition that is made true and false anyway."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        if not (is_decided and isinstance(node.ops[0], NEGATED)):
            new = COMPARISONS[type(node.ops[0])]
            yield node, f"({_text(node.left)} {new} {_text(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in range(len(node.values)):
            kept = [_text(each) for number, each in enumerate(node.values) if number != left_out]
            yield node, f"({word.join(kept)})" if len(kept) > 1 else kept[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and not is_decided:
        yield node, _text(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield node, f"({_text(node.left)} {ARITHMETIC[type(node.op)]} {_text(node.right)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, repr(_other(node.value))
    elif isinstance(node, ast.IfExp):
        yield node, _text(node.body)
        yield node, _text(node.orelse)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield node.func, CALLS[node.func.id]
    for child in ast.iter_child_nodes(node):
        if _is_number(child) and not isinstance(node, ast.Tuple):
            yield node, _with_another_number(node, child)
        elif isinstance(child, ast.expr):
            yield from _of_expression(child, is_decided=False)
        elif isinstance(child, ast.keyword) and _is_number(child.value) and child.arg != "strict":
            yield child, _with_another_number(child, child.value)
        elif isinstance(child, ast.keyword) and child.arg != "strict":
            yield from _of_expression(child.value, is_decided=False)
        elif isinstance(child, ast.comprehension):
            for condition in child.ifs:
                yield condition, "True"
            for each in (child.iter, *child.ifs):
                yield from _of_expression(each, is_decided=False)


def _other(number: int) -> int:
    return not number if isinstance(number, bool) else number + 1


def _is_number(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _with_another_number(node: Fragment, number: ast.Constant) -> str:
    """Returns the text of a fragment whose child is another number: a bare number would not name its place."""
    honest = number.value
    assert isinstance(honest, int)
    number.value = _other(honest)
    text = _text(node) if isinstance(node, ast.expr) else ast.unparse(node)
    number.value = honest
    return text


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, BARE) else f"({text})"
