"""The site of `make site`: files beside docs/ have a place in it, lists are indented for its reader, and it builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf.site_pages import ROOT, for_python_markdown, place, sources, written


def test_pages_stand_where_they_are_and_other_files_below_source() -> None:
    assert place(ROOT / "docs" / "vllm.md") == "vllm.md"
    assert place(ROOT / "DESIGN.md") == "source/DESIGN.md"
    assert place(ROOT / "kvmover" / "vocabulary.py") == "source/kvmover/vocabulary.py.md"
    assert place(ROOT / "deploy") == "source/deploy/index.md"


def test_all_pages_and_what_they_lead_to_are_in_the_site() -> None:
    found = sources()
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {*found}
    assert {"source/README.md", "source/CONTRIBUTING.md", "source/deploy/kubernetes/index.md"} <= {*found}
    assert "source/kvmover/transfer/README.md" in found, "linked from DESIGN.md alone"
    assert "kustomization.yaml" in written(ROOT / "deploy" / "kubernetes")
    assert "````dockerfile\n# vLLM with kvmover" in written(ROOT / "deploy" / "vllm" / "Dockerfile")


@pytest.mark.parametrize(
    ("written_so", "read_so"),
    [
        ("Text\n- one\n- two\n  more\n", "Text\n\n- one\n- two\n    more\n"),
        ("1. a\n\n   ```sh\n   x\n   ```\n2. b\n", "1. a\n\n    ```sh\n    x\n    ```\n2. b\n"),
        ("- a\n\nText\n  indented\n", "- a\n\nText\n  indented\n"),
        ("- a\n  - b\n", "- a\n    - b\n"),
        ("```\nx\n- y\n```\n", "```\nx\n- y\n```\n"),
        ("| a |\n|---|\n", "| a |\n|---|\n"),
    ],
)
def test_lists_begin_after_a_blank_line_and_are_indented_by_four(written_so: str, read_so: str) -> None:
    assert for_python_markdown(written_so) == read_so


def test_the_site_builds_and_a_link_that_leads_nowhere_ends_it(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=100)
    page = (tmp_path / "multi-node.html").read_text()
    assert 'href="source/deploy/vllm/Dockerfile.html"' in page
    assert (tmp_path / "source" / "deploy" / "vllm" / "Dockerfile.html").exists()
