"""docs/object-format.md: the names and sizes that it gives are the code's."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvmover.store import Namespace, PageStore
from kvmover.store.record import BLOCK_BYTES, FIXED_BYTES, PREAMBLE_BYTES

PAGE = (Path(__file__).parent.parent.parent / "docs" / "object-format.md").read_text()
PROSE = " ".join(PAGE.split())


def test_the_manifest_has_the_fields_that_the_page_names_and_never_the_salt(tmp_path: Path) -> None:
    space = Namespace("org/model", "révision 7", page_tokens=16, salt="of a tenant")
    PageStore.open(tmp_path, space).close()
    manifest = json.loads((tmp_path / space.folder / "namespace.json").read_text())
    (fields,) = re.findall(r"`namespace.json` \| for people and tools: (.*?)\. No read", PAGE)
    assert list(manifest) == re.findall(r"`(\w+)`(?! *\))", fields.replace("`kvmover.store/1`", ""))
    assert manifest["digest"].startswith(space.folder)
    assert manifest["salted"] is True
    assert "of a tenant" not in json.dumps(manifest)


def test_the_sizes_are_the_codes() -> None:
    assert f" {PREAMBLE_BYTES}-byte preamble" in PROSE
    assert f"each {FIXED_BYTES} bytes plus 8" in PROSE
    assert f"multiple of {BLOCK_BYTES:,}" in PROSE
