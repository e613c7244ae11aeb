"""The commands of an operator: the configuration, the view of metrics and the report of a run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


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
