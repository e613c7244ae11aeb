"""The functions of a CUDA file as generators of Python: each statement runs, and PTX is yielded to the caller.

It reads the part of C++ that the bulk kernel is written in, and refuses any other: nothing is skipped in silence. A
function is given the thread that calls it as its first argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TYPES = {"u32", "i64", "u64", "int", "unsigned", "char", "void"}
QUALIFIERS = {"const", "static", "inline", "extern", "__shared__", "__device__", "__global__", "__restrict__"}
#: Calls of the machine, which are yielded with their arguments, and the thread's own words.
MACHINE = {"__reduce_add_sync", "__syncwarp", "__syncthreads", "__cvta_generic_to_shared"}
OF_THREAD = {"threadIdx", "blockIdx", "blockDim", "gridDim"}

TOKEN = re.compile(
    r'\s+|//[^\n]*|#[^\n]*|(?P<token>"(?:\\.|[^"\\])*"|0x[0-9a-fA-F]+u?|\d+u?|[A-Za-z_]\w*'
    r"|<<=|>>=|<<|>>|\+\+|--|->|&&|\|\||[-+*/%&|^<>=!]=|[^\s\w])"
)
PRECEDENCE = {
    **dict.fromkeys(("*", "/", "%"), 10),
    **dict.fromkeys(("+", "-"), 9),
    **dict.fromkeys(("<<", ">>"), 8),
    **dict.fromkeys(("<", ">", "<=", ">="), 7),
    **dict.fromkeys(("==", "!="), 6),
    "&": 5,
    "^": 4,
    "|": 3,
    "&&": 2,
    "||": 1,
}
IN_PYTHON = {"/": "//", "&&": "and", "||": "or"}
ASSIGNS = {"=", "+=", "-=", "^=", "|=", "&="}


class UnknownText(Exception):
    """A statement that this reader does not know."""


def tokens_of(text: str) -> list[str]:
    """Returns the words of a CUDA text, without comments and lines of the preprocessor."""
    return [found["token"] for found in TOKEN.finditer(text) if found["token"]]


class _Reader:
    """The words of one function, read from the front and written as lines of Python."""

    def __init__(self, tokens: list[str], functions: frozenset[str], structs: frozenset[str]) -> None:
        self.tokens, self.at = tokens, 0
        self.functions, self.structs = functions, structs
        self.lines = list[str]()

    def peek(self, further: int = 0) -> str:
        return self.tokens[self.at + further] if self.at + further < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        found = self.peek()
        if not found or (wanted and found != wanted):
            raise UnknownText(f"{wanted or 'a word'} is due: {' '.join(self.tokens[self.at - 8 : self.at + 4])}")
        self.at += 1
        return found

    def took(self, word: str) -> bool:
        if self.peek() != word:
            return False
        self.at += 1
        return True

    def write(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    # Statements.

    def block(self, depth: int) -> None:
        """Reads one statement, or several in braces."""
        if self.took("{"):
            while not self.took("}"):
                self.statement(depth)
        else:
            self.statement(depth)
        self.write(depth, "pass")

    def statement(self, depth: int) -> None:
        word = self.peek()
        if word in ("if", "while"):
            self.take()
            self.take("(")
            self.write(depth, f"{word} {self.expression()}:")
            self.take(")")
            self.block(depth + 1)
            if word == "if" and self.took("else"):
                self.write(depth, "else:")
                self.block(depth + 1)
        elif word == "for":
            self._for(depth)
        elif word == "do":
            self.take()
            self.write(depth, "while True:")
            self.block(depth + 1)
            self.take("while")
            self.write(depth + 1, f"if not {self.expression()}: break")
            self.take(";")
        elif word == "return":
            self.take()
            self.write(depth, "return" if self.peek() == ";" else f"return {self.expression()}")
            self.take(";")
        elif word == "asm":
            self._asm(depth)
        elif word == "static_assert":
            self.take()
            self.take("(")
            self.write(depth, f"assert {self.expression()}, {self.take(',') and self.take()}")
            self.take(")")
            self.take(";")
        elif word == "{":
            self.block(depth)
        elif word == ";":
            self.take()
        elif word in TYPES | QUALIFIERS | self.structs:
            self._declaration(depth)
        else:
            self._assignments(depth)
            self.take(";")

    def _for(self, depth: int) -> None:
        self.take()
        self.take("(")
        if not self.took(";"):
            self._declaration(depth)
        self.write(depth, f"while {'True' if self.peek() == ';' else self.expression()}:")
        self.take(";")
        step = _Reader(self._group(), self.functions, self.structs)
        if step.tokens:
            step._assignments(depth + 1)
        self.block(depth + 1)
        self.lines += step.lines

    def _group(self) -> list[str]:
        """Takes the words up to the bracket that closes the present one, and that bracket."""
        depth, begin = 1, self.at
        while depth:
            depth += {"(": 1, ")": -1}.get(self.take(), 0)
        return self.tokens[begin : self.at - 1]

    def _declaration(self, depth: int) -> None:
        shared, kind = False, ""
        while (word := self.peek()) in TYPES | QUALIFIERS | self.structs | {"__align__", "*", "&"}:
            self.take()
            shared |= word == "__shared__"
            kind = word if word in self.structs else kind
            if word == "__align__":
                self.take("(")
                self._group()
        while True:
            name = self.take()
            if array := self.took("["):
                if self.peek() != "]":
                    self.expression()
                self.take("]")
            if self.took("="):
                if array:
                    self.take("{")
                    each = [self.expression()]
                    while self.took(","):
                        each.append(self.expression())
                    self.take("}")
                    self.write(depth, f"{name} = [{', '.join(each)}]")
                else:
                    self.write(depth, f"{name} = {self.expression()}")
            elif shared or array:
                if not shared:
                    raise UnknownText(f"an array in local memory: {name}")
                self.write(depth, f"{name} = {name!r}")
            elif kind:
                self.write(depth, f"{name} = {kind}()")
            if not self.took(","):
                break
        self.take(";")

    def _assignments(self, depth: int) -> None:
        """Reads assignments and calls, with commas between them."""
        while True:
            if self.peek() in ("++", "--"):
                sign = self.take()[0]
                self.write(depth, f"{self.expression()} {sign}= 1")
            else:
                target = self.expression()
                if self.peek() in ASSIGNS:
                    self.write(depth, f"{target} {self.take()} {self.expression()}")
                else:
                    self.write(depth, target)
            if not self.took(","):
                return

    def _asm(self, depth: int) -> None:
        """Reads `asm volatile("text" : results : operands : clobbers)`."""
        self.take()
        self.take("volatile")
        self.take("(")
        text = ""
        while self.peek().startswith('"'):
            text += self.take()[1:-1].replace("\\n\\t", " ")
        parts: list[list[str]] = []
        while self.took(":"):
            parts.append([])
            while self.peek().startswith('"'):
                self.take()
                if self.took("("):
                    parts[-1].append(self.expression())
                    self.take(")")
                self.took(",")
        self.take(")")
        self.take(";")
        results, operands = [*parts, [], []][:2]
        call = f"(yield ({text!r}, {''.join(each + ', ' for each in operands)}))"
        self.write(depth, " = ".join([*results, call]))

    # Expressions, in brackets wherever Python binds otherwise.

    def expression(self, least: int = 0) -> str:
        left = self._unary()
        while (operator := self.peek()) in PRECEDENCE and PRECEDENCE[operator] > least:
            self.take()
            right = self.expression(PRECEDENCE[operator])
            left = f"({left} {IN_PYTHON.get(operator, operator)} {right})"
        if not least and self.took("?"):
            yes = self.expression()
            self.take(":")
            left = f"({yes} if {left} else {self.expression()})"
        return left

    def _unary(self) -> str:
        word = self.take()
        if word == "!":
            return f"(not {self._unary()})"
        if word in ("~", "-"):
            return f"({word}{self._unary()})"
        if word == "++":
            name = self._unary()
            return f"({name} := {name} + 1)"
        if word == "(":
            if self.peek() in TYPES:
                kind = self.take()
                self.take(")")
                return f"_u32({self._unary()})" if kind == "u32" else self._unary()
            found = f"({self.expression()})"
            self.take(")")
            return self._further(found)
        if re.fullmatch(r"(0x[0-9a-fA-F]+|\d+)u?", word):
            return word.rstrip("u")
        if not re.fullmatch(r"[A-Za-z_]\w*", word):
            raise UnknownText(f"an expression is due: {' '.join(self.tokens[self.at - 6 : self.at + 3])}")
        return self._further(f"thread.{word}" if word in OF_THREAD else word)

    def _further(self, found: str) -> str:
        """Reads fields, places of arrays and calls behind a value."""
        while True:
            if self.took(".") or self.took("->"):
                found += f".{self.take()}"
            elif self.took("["):
                found += f"[{self.expression()}]"
                self.take("]")
            elif self.took("("):
                arguments = list[str]()
                while not self.took(")"):
                    arguments.append(self.expression())
                    self.took(",")
                found = self._call(found, arguments)
            elif self.took("++"):
                found = f"(({found} := {found} + 1) - 1)"
            else:
                return found

    def _call(self, name: str, arguments: list[str]) -> str:
        if name in self.functions:
            return f"(yield from {name}({', '.join(['thread', *arguments])}))"
        if name in MACHINE:
            return f"(yield ({name!r}, {''.join(each + ', ' for each in arguments)}))"
        if "." in name or name == "locate":
            return f"{name}({', '.join(arguments)})"
        raise UnknownText(f"a call of {name}")


def _struct(name: str, body: list[str], structs: frozenset[str]) -> str:
    """Returns a struct as a class: fields with values, and methods that change them."""
    lines, at = [f"class {name}:", "    pass"], 0
    fields = list[str]()
    while at < len(body):
        end = at
        while body[end] not in (";", "{"):
            end += 1
        if body[end] == ";":
            reader = _Reader(body[at : end + 1], frozenset(), structs)
            reader._declaration(1)
            lines += reader.lines
            fields += [line.split("=")[0].strip() for line in reader.lines]
            at = end + 1
        else:
            method, depth, at = body[body.index("(", at) - 1], 1, end + 1
            while depth:
                depth += {"{": 1, "}": -1}.get(body[at], 0)
                at += 1
            reader = _Reader(body[end:at], frozenset(), structs)
            reader.block(2)
            both = ", ".join(fields), ", ".join(f"self.{field}" for field in fields)
            lines += [f"    def {method}(self):", f"        {both[0]} = {both[1]}", *reader.lines]
            lines += [f"        {both[1]} = {both[0]}"]
    return "\n".join(lines)


def _parts(tokens: list[str]) -> list[tuple[list[str], list[str]]]:
    """Returns what stands before and inside each pair of braces outside of all others."""
    found, at = list[tuple[list[str], list[str]]](), 0
    while at < len(tokens):
        end = at
        while tokens[end] not in (";", "{"):
            end += 1
        head, body = tokens[at:end], list[str]()
        if head == ["extern", '"C"'] or tokens[end] == ";":
            at = end + 1
        else:
            depth, at = 1, end + 1
            while depth:
                depth += {"{": 1, "}": -1}.get(tokens[at], 0)
                at += 1
            body = tokens[end + 1 : at - 1]
            if at < len(tokens) and tokens[at] == ";":
                at += 1
        found.append((head, body))
    return found


def python_of(text: str, given: frozenset[str]) -> str:
    """Returns the functions and structs of a CUDA text as a module of Python, but for those whose names are `given`."""
    parts = [(head, body) for head, body in _parts(tokens_of(text)) if body]
    structs = frozenset(head[1] for head, _ in parts if head[0] == "struct")
    named = {_name(head): (head, body) for head, body in parts if head[0] != "struct"}
    functions = frozenset(named) - given
    lines = [_struct(head[1], body, structs) for head, body in parts if head[0] == "struct" and head[1] not in given]
    for name in named:
        if name in functions:
            head, body = named[name]
            reader = _Reader(["{", *body, "}"], functions, structs)
            reader.block(1)
            lines.append("\n".join([f"def {name}(thread, {_parameters(head)}):", *reader.lines, "    yield from ()"]))
    return "\n\n".join(lines) + "\n"


def _opens(head: list[str]) -> int:
    """Returns the place of the bracket before the parameters."""
    depth, at = 0, len(head) - 1
    while True:
        depth += {")": 1, "(": -1}.get(head[at], 0)
        if not depth:
            return at
        at -= 1


def _name(head: list[str]) -> str:
    return head[_opens(head) - 1]


def _parameters(head: list[str]) -> str:
    inside = head[_opens(head) + 1 : -1]
    return ", ".join(part.split()[-1] for part in " ".join(inside).split(" , ") if part)


def loaded(text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the names of a CUDA text, its functions as generators; `given` has the constants, and takes the place of
    functions.
    """
    names = {"_u32": lambda value: value & 0xFFFFFFFF if isinstance(value, int) else value, **given}
    exec(compile(python_of(text, frozenset(given)), "cuda", "exec"), names)
    return names
