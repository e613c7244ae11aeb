"""An operator's commands show the configuration, the metrics of running engines, the report of a run, and page stores.

Here is also what the options of all commands have in common.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmover.errors import StoreError

if TYPE_CHECKING:
    from kvmover.store import StoreRow

HELP = {"help_option_names": ["-h", "--help"]}

#: What a number on the command line may be: larger ones overflow on their way, and nothing has so many of anything.
_MOST = 1 << 53

app = typer.Typer()


def count(text: str) -> int:
    """A number of things that there must be: the message names the value, which typer's own does not."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"{text} is not a number of at least 1")
    if int(text) > _MOST:
        raise typer.BadParameter(f"{text} is more than {_MOST}, the most that there may be of anything")
    return int(text)


def size(text: str) -> int:
    """A number of bytes, with a unit or without."""
    from kvmover.config.load import bytes_in

    try:
        nbytes = bytes_in(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text}: {error}") from None
    return count(str(nbytes))


#: For every command that has both.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("config")
def show_config(
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; $KVMOVER_CONFIG if not given.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Print every setting as TOML: defaults as comments, and behind others where they were given."""
    from kvmover.config import load
    from kvmover.config.load import as_data, as_toml

    loaded = load(config)
    typer.echo(json.dumps(as_data(loaded)) if as_json else as_toml(loaded), nl=as_json)


@app.command("top")
def show_top(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            help="Where ranks serve their metrics: http://decode-0:9400/metrics, or decode-0:9400-9407 for eight ranks;"
            " http://127.0.0.1:9400/metrics if not given.",
            metavar="[URL]...",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two frames.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, of all since the start.")] = False,
) -> None:
    """Watch transfers, hits by tier, bandwidth, arenas and failures, from metrics endpoints. Ctrl-C ends it."""
    from kvmover.observe import top
    from kvmover.observe.scrape import endpoints
    from kvmover.observe.tables import console

    found = [each for text in addresses or ["http://127.0.0.1:9400/metrics"] for each in endpoints(text)]
    if once:
        top.show(found, console())
        return
    with contextlib.suppress(KeyboardInterrupt):
        top.watch(found, interval, console())


@app.command("report")
def write_report(
    logs: Annotated[list[Path], typer.Argument(help="Run logs, one a rank or several.", metavar="RUN.jsonl...")],
    html: Annotated[Path, typer.Option(help="The page to write.", metavar="FILE")],
) -> None:
    """Draw a run: hit rate by tier, where lost hits went, bandwidth, transfers and routes, on one page of HTML."""
    from kvmover.observe import report

    lines = report.write_report(logs, html)
    typer.echo(f"wrote {html}: {len(lines.transfers)} transfers and {len(lines.accounts)} requests")


store_app = typer.Typer(help="Look after page stores: directories of KV pages.", context_settings=HELP)


@store_app.callback(invoke_without_command=True)
def _store(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Root = Annotated[
    Path | None, typer.Argument(help="The directory that the stores are in; store.root if not given.", metavar="DIR")
]
OneNamespace = Annotated[
    str | None, typer.Option("--namespace", help="Only those whose name begins so.", metavar="PREFIX")
]


def _directory(given: Path | None) -> Path:
    from kvmover.config import load

    return given or load().settings.store.directory()


@store_app.command("stat")
def store_stat(root: Root = None, namespace: OneNamespace = None, as_json: Json = False) -> int:
    """Show what is stored, and what a crash cost."""
    from kvmover.store import stat_stores

    return _tell(stat_stores(_directory(root), namespace), as_json)


@store_app.command("verify")
def store_verify(root: Root = None, namespace: OneNamespace = None, as_json: Json = False) -> int:
    """Read every object and delete the bad ones. Exit status 1 if there were any."""
    from kvmover.store import chosen_stores, verify_stores

    where = _directory(root)
    if not chosen_stores(where, namespace):
        raise StoreError(f"no page store in {where}: nothing was verified")
    return _tell(verify_stores(where, namespace), as_json)


@store_app.command("gc")
def store_gc(
    root: Root = None,
    namespace: OneNamespace = None,
    quota: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="BYTES",
            help="Evict until each namespace holds no more, as 10GB or 64MiB; store.quota_bytes if not given.",
        ),
    ] = None,
    ttl: Annotated[
        int | None,
        typer.Option(
            parser=count, metavar="SECONDS", help="Delete pages unused for so long; store.ttl_s if not given."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Take over what dead writers left, and keep to a quota or an age."""
    from kvmover.config import load
    from kvmover.store import collect_stores

    configured = load().settings.store
    policy = replace(configured, quota_bytes=quota or configured.quota_bytes, ttl_s=ttl or configured.ttl_s)
    return _tell(collect_stores(root or configured.directory(), namespace, policy), as_json)


@store_app.command("clear")
def store_clear(
    namespace: Annotated[str, typer.Option(help="Those whose name begins so; '' is all.", metavar="PREFIX")],
    root: Root = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> int:
    """Delete all pages of a namespace, and nothing else. Asks before it does."""
    from kvmover.store import clear_stores

    where = _directory(root)
    if not yes:
        _ask_to_clear(where, namespace)
    return _tell(clear_stores(where, namespace), as_json)


def _ask_to_clear(root: Path, namespace: str) -> None:
    """Say what would be deleted, and go on only if a person agrees: pages are not had back."""
    from kvmover.store import stat_stores

    rows = stat_stores(root, namespace)
    names = ", ".join(f"{row.found.manifest.model} ({row.found.folder.name[:12]})" for row in rows)
    what = f"{sum(row.stat.pages for row in rows):,} pages of {len(rows)} namespaces in {root}: {names}"
    if not sys.stdin.isatty():
        raise StoreError(f"would delete {what}; say --yes to do it")
    typer.confirm(f"Delete {what}?", abort=True, err=True)


def _tell(rows: Sequence[StoreRow], as_json: bool) -> int:
    """Print them, as a table and a sentence where there is something to say; 1 if a bad object was found."""
    if as_json:
        typer.echo(json.dumps([row.as_data() for row in rows]))
    else:
        _print_stores(rows)
    return int(any(sum(row.verified.bad.values()) for row in rows if row.verified))


def _print_stores(rows: Sequence[StoreRow]) -> None:
    from kvmover.observe.tables import Column, Sheet, console

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


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _note(row: StoreRow) -> str:
    """What was found or done, in words; nothing where there is nothing to say."""
    notes = [f"dropped {number:,} ({reason})" for reason, number in row.recovered.dropped.items()]
    if row.deleted_pages:
        notes.append(f"deleted {row.deleted_pages:,} pages")
    if row.verified:
        bad = [f"deleted {number:,} bad ({reason})" for reason, number in row.verified.bad.items()]
        objects = f"all {row.verified.objects:,} objects are" if row.verified.objects != 1 else "its one object is"
        notes += bad or [f"{objects} whole"]
    return ", ".join(notes)
