"""What the pages show runs: Python blocks, page by page, and console blocks of our commands; links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.M | re.S)


#: What a page's reader has already, by page: names that its blocks use and do not make.
Given = Callable[[], contextlib.AbstractContextManager[dict[str, Any]]]


@contextlib.contextmanager
def _a_mover_and_a_ledger() -> Iterator[dict[str, Any]]:
    """For the page of metrics, whose server is not to take its port on this machine, nor the process's registry."""
    import prometheus_client

    from kvmover.cache.ledger import Ledger
    from perf.metrics_page import Nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
        patch.setattr(prometheus_client, "start_http_server", lambda *_, **__: None)
        yield {"__name__": "docs", "mover": Nothing(), "ledger": Ledger()}


@contextlib.contextmanager
def _nothing() -> Iterator[dict[str, Any]]:
    yield {"__name__": "docs"}


GIVEN: dict[str, Given] = {"metrics.md": _a_mover_and_a_ledger}

WITH_PYTHON = [page for page in PAGES if _blocks(page, "python")]
WITH_CONSOLE = [page for page in PAGES if _blocks(page, "console")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=[page.name for page in WITH_PYTHON])
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with GIVEN.get(page.name, _nothing)() as names, contextlib.redirect_stdout(io.StringIO()):
        for number, block in enumerate(_blocks(page, "python")):  # as one program, in the order of the page
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", WITH_CONSOLE, ids=[page.name for page in WITH_CONSOLE])
def test_the_console_of_a_page_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    for block in _blocks(page, "console"):
        for line, shown in _commands(block):
            if ours := _ours(line):
                ended = subprocess.run(
                    ["/bin/sh", "-c", ours],
                    capture_output=True,
                    text=True,
                    cwd=tmp_path,
                    timeout=100,
                    env=_environment(),
                )
                assert ended.returncode == 0, f"{line}\n{ended.stderr}"
                _agree(shown, ended.stdout, line)


def _commands(block: str) -> list[tuple[str, str]]:
    """(command, what the page shows of its output)."""
    parts = re.split(r"^\$ ", block, flags=re.M)[1:]
    return [(command, shown) for command, _, shown in (part.replace("\\\n", " ").partition("\n") for part in parts)]


def _ours(line: str) -> str | None:
    """The command with this Python's kvmover in it, or None for one of another program."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"\w+=", word)]
    if not words or words[0] != "kvmover":
        return None
    here = f'{shlex.quote(sys.executable)} -c "from kvmover.cli import main; main()"'
    return re.sub(r"(?<![\w./-])kvmover (?=[a-z])", here.replace("\\", r"\\") + " ", line, count=1)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVMOVER_")}
    return kept | {"COLUMNS": "160"}


def _agree(shown: str, printed: str, line: str) -> None:
    """Every line of the page is a line of the output, in order; `...` stands for any others."""
    rest = iter(text.rstrip() for text in printed.splitlines())
    for text in shown.splitlines():
        if text.strip() not in ("", "..."):
            assert any(text.rstrip() == other for other in rest), f"{line} does not print {text!r}:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if heading:
            assert heading in _anchors(target), f"{page.name} links to {link}; there are {_anchors(target)}"


def _anchors(page: Path) -> list[str]:
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    missing = [page.name for page in PAGES if page.name != "README.md" and f"]({page.name})" not in index]
    assert not missing
