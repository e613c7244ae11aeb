"""CONTRIBUTING.md and DESIGN.md: the files that they send a reader to are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = ("CONTRIBUTING.md", "DESIGN.md", "README.md")


@pytest.mark.parametrize("name", PAGES)
def test_every_path_of_a_page_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    linked = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    named = re.findall(r"`((?:kvmover|kernels|tests|docs|perf|\.ci)/[\w./-]*\w/?)`", text)
    assert linked or named
    for path in {*linked, *named}:
        assert "ENGINE" in path or (ROOT / path).exists(), f"{name} names {path}"


def test_the_recipes_name_what_the_code_has() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name, path in (
        ("HYBRID", "tests/transfer/test_mover_models.py"),
        ("BACKENDS", "tests/store/test_files.py"),
        ("StoreConformance", "kvmover/tools/conformance.py"),
        ("Contract", "kvmover/engines/common/contract.py"),
        ("files_for", "kvmover/store/nixl_files.py"),
        ("ToDestination", "kvmover/transfer/protocol/wire.py"),
        ("kinds_of_messages", "tests/transfer/mover_cases.py"),
        ("_LAZY", "kvmover/transport/__init__.py"),
        ("kinds", "tests/transport/test_conformance.py"),
        ("IMPLEMENTS", "tests/docs/api_page.py"),
        ("COMPANIONS", "kvmover/vocabulary.py"),
        ("HostMemory", "kvmover/store/files.py"),
        ("SHORT", "kvmover/store/files.py"),
        ("ADAPTERS", "tests/docs/test_docs_engines.py"),
    ):
        assert f"`{name}`" in text
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), (name, path)
