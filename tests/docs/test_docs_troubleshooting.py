"""docs/operations.md, Troubleshooting: every message that it explains is one that the code can say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text()

#: A string of fewer letters that are always the same says nothing: `{name}: {reason}` is every message.
LEAST_LITERAL = 8


def _messages() -> list[str]:
    """The code spans in the first cells of tables headed `Message`."""
    tables = re.findall(r"^\| Message \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, flags=re.M)
    cells = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
    return [message for cell in cells for message in re.findall(r"`([^`]{8,})`", cell)]


def _templates() -> Iterator[re.Pattern[str]]:
    """Every string in kvmover with what is filled in as a wildcard."""
    for path in (ROOT / "kvmover").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                parts = [part or None for part in re.split(r"%[-.\d]*[sdfr]", node.value)]
            else:
                continue
            literals = [str(part) for part in parts if part]
            if sum(sum(map(str.isalpha, literal)) for literal in literals) >= LEAST_LITERAL:
                yield re.compile(".+?".join(re.escape(literal) for literal in literals))


@pytest.fixture(scope="module")
def templates() -> list[re.Pattern[str]]:
    return list(_templates())


@pytest.mark.parametrize("message", _messages())
def test_a_message_of_the_page_is_one_that_the_code_says(message: str, templates: list[re.Pattern[str]]) -> None:
    shown = [piece.strip(" :;,") for piece in message.split("...")]
    longest = max(shown, key=len)
    literals = {part for template in templates for part in template.pattern.split(".+?")}
    assert any(re.escape(longest) in part for part in literals) or any(
        template.search(message.replace("...", "x")) for template in templates
    ), f"nothing in kvmover says {message!r}"


def test_the_page_explains_many() -> None:
    assert len(_messages()) > 40
