"""The `kvmover store` command inspects, verifies, collects and clears the page stores below a root."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvmover.errors import StoreError
from kvmover.store.manifest import Found, namespaces
from kvmover.store.page_store import PageStore
from kvmover.store.services import service_namespaces
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Recovered, Stat, Verified

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True, slots=True)
class StoreRow:
    """A namespace with its statistics and the results of an operation on it."""

    found: Found
    stat: Stat
    recovered: Recovered
    verified: Verified | None = None
    deleted_pages: int = 0

    def as_data(self) -> dict[str, object]:
        """Returns the row as a flat JSON object: sizes in bytes, times in seconds since 1970."""
        manifest = self.found.manifest
        return {
            "namespace": self.found.name,
            "model": manifest.model,
            "weights": manifest.weights,
            "page_tokens": manifest.page_tokens,
            "salted": manifest.salted,
            **asdict(self.stat),
            "dropped": self.recovered.dropped,
            "deleted_pages": self.deleted_pages,
            **(
                {"bad": self.verified.bad, "spared": self.verified.spared, "read_bytes": self.verified.nbytes}
                if self.verified
                else {}
            ),
        }


def _namespaces(root: Path | str) -> list[Found]:
    return service_namespaces(root) if isinstance(root, str) else namespaces(root)


def chosen_stores(root: Path | str, name: str | None) -> list[Found]:
    """List the namespaces of `root` whose folder begins with `name`, or all. Raises StoreError if no folder does."""
    found = [each for each in _namespaces(root) if each.name.startswith(name or "")]
    if name is not None and not found:
        raise StoreError(f"no namespace in {root} begins with {name!r}")
    return found


def stat_stores(root: Path | str, name: str | None) -> list[StoreRow]:
    """Open and recover each namespace and return its statistics. Raises StoreError if one cannot be opened."""
    return [_row(each, store) for each, store in _opened(chosen_stores(root, name))]


def collect_stores(root: Path | str, name: str | None, policy: Policy) -> list[StoreRow]:
    """Apply a quota and a TTL, and take over segments of dead writers. Raises StoreError as `stat_stores`."""
    rows: list[StoreRow] = []
    for each, store in _opened(chosen_stores(root, name), policy):
        done = store.collect()
        rows.append(_row(each, store, deleted_pages=done.evicted_pages + done.expired_pages))
    return rows


def clear_stores(root: Path | str, name: str) -> list[StoreRow]:
    """Delete all pages of the namespaces that begin with `name`. Raises StoreError as `stat_stores`."""
    rows: list[StoreRow] = []
    for each, store in _opened(chosen_stores(root, name)):
        pages = store.clear()
        rows.append(_row(each, store, deleted_pages=pages))
    return rows


def verify_stores(root: Path | str, name: str | None) -> list[StoreRow]:
    """Read every object of the namespaces and delete bad objects; a progress bar goes to standard error."""
    rows: list[StoreRow] = []
    with _progress() as progress:
        for each, store in _opened(chosen_stores(root, name)):
            task = progress.add_task(each.name[:12], total=store.stat().payload_bytes)
            verified = store.verify(lambda nbytes, task=task: progress.advance(task, nbytes))
            rows.append(_row(each, store, verified=verified))
    return rows


def _opened(found: list[Found], policy: Policy | None = None) -> Iterator[tuple[Found, PageStore]]:
    for each in found:
        try:
            with PageStore.of_found(each, policy) as store:
                yield each, store
        except OSError as error:
            raise StoreError(f"{each.folder}: {error.strerror}") from error


def _row(found: Found, store: PageStore, verified: Verified | None = None, deleted_pages: int = 0) -> StoreRow:
    return StoreRow(found, store.stat(), store.recovered, verified, deleted_pages)


@contextmanager
def _progress() -> Generator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress
