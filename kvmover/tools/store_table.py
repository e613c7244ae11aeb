"""A table of page stores has a row for each namespace, and below it a note of repairs and deletions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvmover.store import StoreRow, is_keeper
from kvmover.tools.tables import Column, Sheet, console


def print_stores(rows: Sequence[StoreRow], where: Path | str) -> None:
    """Print the table on standard output, then each note on a line of its own.

    `where`: a keeper's address, or a directory, which may hold no store.
    """
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
            row.found.name[:12],
            manifest.model + (" (salted)" if manifest.salted else ""),
            manifest.weights,
            str(manifest.page_tokens),
            f"{found.pages:,}",
            f"{found.objects:,}",
            _mebibytes(found.payload_bytes),
            _mebibytes(found.held_bytes + found.head_bytes),
            f"{found.segments:,}",
        )
    alive = isinstance(where, str) and is_keeper(where)
    out.print(table if rows else "the keeper answers, and keeps no page yet" if alive else "no page store here")
    for row in rows:
        if note := _note(row):
            out.print(f"{row.found.name[:12]} {row.found.manifest.model}: {note}", soft_wrap=True)


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _note(row: StoreRow) -> str:
    """Returns the store's repairs and deletions in words, or an empty text."""
    notes = [f"dropped {number:,} ({reason})" for reason, number in row.recovered.dropped.items()]
    if row.deleted_pages:
        notes.append(f"deleted {row.deleted_pages:,} pages")
    if row.verified:
        bad = [f"deleted {number:,} bad ({reason})" for reason, number in row.verified.bad.items()]
        bad += [f"left {number:,} to other processes ({why})" for why, number in row.verified.spared.items()]
        objects = f"all {row.verified.objects:,} objects are" if row.verified.objects != 1 else "its one object is"
        notes += bad or [f"{objects} whole"]
    return ", ".join(notes)
