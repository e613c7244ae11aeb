"""The guide for an engine of one's own: its examples run, and every public name is in docs/api.md, where it is from."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import kvmover
from tests.docs.api_page import CHOSEN, PACKAGES, PAGE, WHOLE, names, page

DOCS = PAGE.parent
ROW_MOVER = DOCS / "examples" / "row_mover.py"
EXAMPLES = sorted({*DOCS.glob("examples/*.py")} - {ROW_MOVER})


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_an_example_runs_and_finds_every_byte_right(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")  # its own assertions are the test
    assert capfd.readouterr() == ("", "")


def test_the_row_mover_of_the_page_has_forty_lines_and_moves_every_byte_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = ROW_MOVER.read_text()
    assert f"```py\n{text}```" in (DOCS / "kernels.md").read_text(), "docs/kernels.md shows another row mover"
    assert len(text.splitlines()) <= 40
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    runpy.run_path(str(ROW_MOVER), run_name="__main__")


def test_the_example_of_a_memory_manager_stays_short_and_does_it_all() -> None:
    text = (DOCS / "examples" / "memory_manager.py").read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 60
    for call in ("Pool.zeros(", ".connect(", ".send(", ".receive(", ".abort(", ".put(", ".get(", ".quarantined"):
        assert call in text, call


def _sections() -> dict[str, set[str]]:
    """Names by package, as the page has them; methods are not names."""
    parts = re.split(r"^## `([\w.]+)`$", PAGE.read_text(), flags=re.M)[1:]
    rows = [set(re.findall(r"^\| `(\w+)(?:\([^`]*)?` \| \S", text, flags=re.M)) for text in parts[1::2]]
    return dict(zip(parts[::2], rows, strict=True))


@pytest.mark.parametrize("package", [*PACKAGES, *WHOLE, *CHOSEN])
def test_every_public_name_has_a_line(package: str) -> None:
    assert _sections()[package] == set(names(package)), "run: python -m tests.docs.api_page"


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.docs.api_page"


def test_a_row_has_types_defaults_and_what_is_raised() -> None:
    text = PAGE.read_text()
    assert "`Mover.connect(card: bytes) -> str`" in text
    assert "`Result.quarantined: bool = False` | a one-sided operation may still touch the pages" in text
    assert re.search(
        r"`Mover\.receive\(request: str, .*\) -> Transfer` \| .*Raises PlanError, LayoutError or PeerUnknown", text
    )


def test_no_package_with_public_names_is_left_out() -> None:
    root = Path(kvmover.__file__).parent
    promised = {
        ".".join((root.name, *path.parent.relative_to(root).parts))
        for path in root.rglob("__init__.py")
        if re.search(r"^__all__ = \[", path.read_text(), flags=re.M)
    }
    adapters = {package for package in promised if package.startswith("kvmover.engines.")}  # pages of their own
    assert promised - adapters == set(PACKAGES)
