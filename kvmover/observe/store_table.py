"""Page stores as people and scripts read them: a table and a sentence where there is something to say, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvmover.observe.console import console
from kvmover.observe.tables import Column, Sheet
from kvmover.store import StoreRow


def print_rows(rows: Sequence[StoreRow], as_json: bool) -> int:
    """Print them; 1 if a bad object was found."""
    bad = sum(sum(row.verified.bad.values()) for row in rows if row.verified)
    if as_json:
        print(json.dumps([row.as_data() for row in rows]))  # noqa: T201
        return 1 if bad else 0
    out = console()
    table = Sheet(
        [
            Column("namespace", "left"),
            *(Column(title, "left", folds_at=24) for title in ("model", "weights")),
            *(Column(title) for title in ("page", "pages", "objects", "payload", "on disk", "segments")),
        ]
    )
    for row in rows:
        manifest, found = row.found.manifest, row.stat
        table.add(
            row.found.folder.name[:12],
            manifest.model + (" (salted)" if manifest.salted else ""),
            manifest.weights,
            str(manifest.page_tokens),
            f"{found.pages:,}",
            f"{found.objects:,}",
            _mebibytes(found.payload_bytes),
            _mebibytes(found.held_bytes + found.head_bytes),
            f"{found.segments:,}",
        )
    out.print(table if rows else "no page store here")
    for row in rows:
        if note := _note(row):
            out.print(f"{row.found.folder.name[:12]} {row.found.manifest.model}: {note}", soft_wrap=True)
    return 1 if bad else 0


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _note(row: StoreRow) -> str:
    """What was found or done, in words; nothing where there is nothing to say."""
    notes = [f"dropped {number:,} ({reason})" for reason, number in row.recovered.dropped.items()]
    if row.deleted_pages:
        notes.append(f"deleted {row.deleted_pages:,} pages")
    if row.verified:
        bad = [f"deleted {number:,} bad ({reason})" for reason, number in row.verified.bad.items()]
        notes += bad or [f"all {row.verified.objects:,} objects are whole"]
    return ", ".join(notes)
