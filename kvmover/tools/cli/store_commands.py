"""`kvmover store` looks after page stores, and `kvmover keeper` serves one from host memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmover.errors import StoreError
from kvmover.tools.cli.command_options import HELP, Json, OneNamespace, Root, count, size

if TYPE_CHECKING:
    from kvmover.store import KeeperServer, StoreRow

store_app = typer.Typer(help="Look after page stores: directories of KV pages.", context_settings=HELP)


@store_app.callback(invoke_without_command=True)
def _store(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _location(given: str | None) -> Path | str:
    from kvmover.config import load
    from kvmover.store import store_location

    return store_location(given) if given else load().settings.store.location()


@store_app.command("stat")
def store_stat(root: Root = None, namespace: OneNamespace = None, as_json: Json = False) -> int:
    """Show the stored pages, and the losses of a crash."""
    from kvmover.store import stat_stores

    where = _location(root)
    return _tell(stat_stores(where, namespace), as_json, where)


@store_app.command("verify")
def store_verify(root: Root = None, namespace: OneNamespace = None, as_json: Json = False) -> int:
    """Read every object and delete the bad ones. Exit status 1 if there were any."""
    from kvmover.store import chosen_stores, verify_stores

    where = _location(root)
    if not chosen_stores(where, namespace):
        raise StoreError(f"no page store in {where}: nothing was verified")
    return _tell(verify_stores(where, namespace), as_json, where)


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
    namespace_ttl: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="SECONDS",
            help="Empty namespaces unused for so long; store.namespace_ttl_s if not given.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Take over the remains of dead writers, and keep to a quota or an age."""
    from kvmover.config import load
    from kvmover.store import clear_unused, collect_stores

    configured = load().settings.store
    unused_s = namespace_ttl or configured.namespace_ttl_s
    if unused_s is not None:
        clear_unused(_location(root), unused_s)
    policy = replace(configured, quota_bytes=quota or configured.quota_bytes, ttl_s=ttl or configured.ttl_s)
    where = _location(root)
    return _tell(collect_stores(where, namespace, policy), as_json, where)


@store_app.command("clear")
def store_clear(
    namespace: Annotated[str, typer.Option(help="Those whose name begins so; '' is all.", metavar="PREFIX")],
    root: Root = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> int:
    """Delete all pages of a namespace, and only those. Asks first."""
    from kvmover.store import clear_stores

    where = _location(root)
    if not yes:
        _ask_to_clear(where, namespace)
    return _tell(clear_stores(where, namespace), as_json, where)


def _ask_to_clear(root: Path | str, namespace: str) -> None:
    """Show the pages to be deleted, and go on only if a person agrees: deletion is final.

    Raises StoreError if stdin is no terminal.
    """
    from kvmover.store import stat_stores

    rows = stat_stores(root, namespace)
    names = ", ".join(f"{row.found.manifest.model} ({row.found.name[:12]})" for row in rows)
    plural = "" if len(rows) == 1 else "s"
    what = f"{sum(row.stat.pages for row in rows):,} pages of {len(rows)} namespace{plural} in {root}: {names}"
    if not sys.stdin.isatty():
        raise StoreError(f"would delete {what}; say --yes to do it")
    typer.confirm(f"Delete {what}?", abort=True, err=True)


def _tell(rows: Sequence[StoreRow], as_json: bool, where: Path | str) -> int:
    """Print the rows, as a table with notes or as JSON. Returns 1 if an object is bad or was left unread."""
    if as_json:
        typer.echo(json.dumps([row.as_data() for row in rows]))
    else:
        from kvmover.tools.store_table import print_stores

        print_stores(rows, where)
    return int(any(row.verified.bad or row.verified.spared for row in rows if row.verified))


def keep(
    socket: Annotated[Path, typer.Option(help="Where engines reach it: a file that it makes.", metavar="PATH")],
    capacity: Annotated[
        int, typer.Option("--bytes", parser=size, metavar="BYTES", help="Memory that it owns, as 64GiB.")
    ],
    port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", help="Serve metrics, and /healthz, at this port.", metavar="PORT", min=0, max=65535
        ),
    ] = None,
    address: Annotated[
        str, typer.Option("--metrics-address", help="The address of that port.", metavar="ADDRESS")
    ] = "0.0.0.0",
) -> None:
    """Keep pages in host memory for engines that die, restart or change their shape. Ends with SIGTERM."""
    from kvmover.observe.formats import bytes_in_words
    from kvmover.store import serve_keeper

    with ExitStack() as ended:

        def begun(server: KeeperServer) -> None:
            """Serve metrics, and say so on one line."""
            served = "" if port is None else _keeper_metrics(server, address, port, ended)
            typer.echo(f"serving {bytes_in_words(capacity)} at {socket}{served}, Ctrl-C ends it")

        serve_keeper(socket, capacity, begun)


def _keeper_metrics(server: KeeperServer, address: str, port: int, ended: ExitStack) -> str:
    """Serve a keeper's metrics until `ended`. Returns the words that say where; a port that is taken is a warning."""
    from kvmover.observe.endpoint import MetricsEndpoint
    from kvmover.store import KeeperCollector

    try:
        endpoint = ended.enter_context(MetricsEndpoint(address, port, lambda: server.is_well))
    except OSError as error:
        typer.echo(f"no metrics are served at {address}:{port}: {error.strerror}; say another --metrics-port", err=True)
        return ""
    endpoint.add(KeeperCollector(lambda: server.snapshot))
    return f", metrics at {address}:{endpoint.port}"
