"""The command line has kvmover's commands and exit statuses. Heavy imports wait until a command runs."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from kvmover import __version__
from kvmover.errors import (
    KvmoverError,
    PeerRefused,
    ProtocolError,
    TransferFailed,
    TransportError,
    need,
)
from kvmover.exposition import FIRST_METRICS_PORT
from kvmover.tools.cli.advise_options import AdviseArguments, show_advice
from kvmover.tools.cli.check_options import CheckArguments, show_checked
from kvmover.tools.cli.command_options import (
    HELP,
    DemoArguments,
    Json,
    ReplayArguments,
    takes,
)
from kvmover.tools.cli.plan_options import PlanOptions, show_plan
from kvmover.tools.cli.store_commands import keep, store_app

#: Errors of a transfer. All others are errors of the input.
_HAPPENED = (TransportError, PeerRefused, ProtocolError, TransferFailed)
_FAILED, _REFUSED = 1, 2

#: The endpoint that `kvmover top` asks unless told: rank 0 of a recipe on this machine.
_NEAREST = f"http://127.0.0.1:{FIRST_METRICS_PORT}/metrics"

app = typer.Typer(
    name="kvmover",
    help="Moves the KV cache of running language models between memories that do not agree.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command. Wrong input is one line on stderr and exit status 2; a closed pipe is no error."""
    _escape_where_letters_lack(sys.stdout)
    try:
        status = app(arguments, prog_name="kvmover", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _hang_up()
    except SystemExit as leaving:  # printing to a closed pipe ends so
        if isinstance(leaving.__context__, BrokenPipeError):
            _hang_up()
        raise
    except typer.TyperException as error:
        _leave(error.format_message().replace("Value error, ", ""), _REFUSED)
    except KvmoverError as error:
        _leave(str(error), _FAILED if isinstance(error, _HAPPENED) else _REFUSED)
    except typer.Abort:
        _leave("aborted", _FAILED)
    sys.exit(status or 0)


def _escape_where_letters_lack(stream: object) -> None:
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def _hang_up() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _leave(message: str, status: int) -> NoReturn:
    print("kvmover:", " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print("kvmover", __version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def version() -> None:
    """Print the version."""
    print("kvmover", __version__)


@app.command()
@takes(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show which rank sends which bytes to which rank, by which route, and why."""
    show_plan(options)


@app.command()
def doctor(as_json: Json = False) -> int:
    """Show the abilities of this machine. Exit status 1 if an installed part does not work."""
    from kvmover.tools.doctor.examination import Status, examine, findings_as_data, print_findings

    findings = examine()
    if as_json:
        print(json.dumps(findings_as_data(findings)))
    else:
        print_findings(findings)
    return _FAILED if any(each.status is Status.PROBLEM for each in findings) else 0


@app.command()
@takes(DemoArguments)
def demo(given: DemoArguments) -> int:
    """Move KV between two fleets of real processes of different shape, and compare the tokens they generate."""
    need("torch", "the demo", "torch")
    from kvmover.tools.demo.run import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            scenarios=tuple(given.scenario or ()),
            requests=given.requests,
            trace=given.trace,
            scale=given.scale,
            seed=given.seed,
            as_json=given.as_json,
            report=given.report,
            watch=given.watch,
            device=given.device,
            store=given.store,
        )
    )


@app.command()
@takes(ReplayArguments)
def replay(given: ReplayArguments) -> None:
    """Replay a trace through the prefix tree, and say which tier its hits came from and why others were lost."""
    from kvmover.tools.replay import (
        ReplayConfig,
        ReplayOptions,
        TraceOptions,
        policy_named,
        run_replay,
        write_policy_named,
    )
    from kvmover.tools.tables import console

    capacities = given.capacity_tokens.values if given.capacity_tokens else (None,)
    policies = [policy_named(name) for name in dict.fromkeys(given.policy.split(","))]
    writes = write_policy_named(given.write_policy)
    host, storage = given.host_tokens or 0, given.storage_tokens or 0
    caches = tuple(
        ReplayConfig(given.page_size, capacity, host, storage, policy, writes)
        for capacity in capacities
        for policy in policies
    )
    reading = TraceOptions(given.trace_format, given.block_tokens, given.sessions)
    run_replay(ReplayOptions(given.trace, caches, given.plot, given.requests, given.as_json, reading), console())


@app.command()
@takes(AdviseArguments)
def advise(given: AdviseArguments) -> None:
    """Compare shapes and sizes of fleets by the KV share of the time to first token of a trace's requests."""
    show_advice(given)


@app.command()
@takes(CheckArguments)
def check(given: CheckArguments) -> int:
    """Ask a prefill and a decode one prompt, and say whether its KV came over kvmover, or what is at fault.

    Exit status: 0 it came; 1 it did not; 2 wrong options; 3 it came, and the tokens differ; 4 no metrics tell.
    """
    return show_checked(given)


@app.command("config")
def show_config(
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; $KVMOVER_CONFIG if not given.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Print every setting as TOML. A default is a comment; behind any other value stands where it was set.

    Settings that cannot work on this host are refused.
    """
    from kvmover.config import load
    from kvmover.config.load import as_data, as_toml

    loaded = load(config)
    loaded.settings.check_here()
    typer.echo(json.dumps(as_data(loaded)) if as_json else as_toml(loaded), nl=as_json)


@app.command("top")
def show_top(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Where ranks serve their metrics: http://decode-0:{FIRST_METRICS_PORT}/metrics, or"
            f" decode-0:{FIRST_METRICS_PORT}-{FIRST_METRICS_PORT + 7} for eight ranks; {_NEAREST} if not given.",
            metavar="[URL]...",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two frames.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, of all since the start.")] = False,
    fold: Annotated[
        Literal["many", "engines", "ranks"],
        typer.Option(help="A row an engine, a row a rank, or a row an engine where there are more than 16 ranks."),
    ] = "many",
    sort: Annotated[str, typer.Option(help="By which column: name, received, p99 ...", metavar="COLUMN")] = "name",
    only: Annotated[
        str, typer.Option("--filter", help="Rows whose name, engine and rank, has this in it.", metavar="TEXT")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one frame as JSON, with every rank.")] = False,
) -> None:
    """Watch transfers, hits by tier, bandwidth, arenas and failures, from metrics endpoints.

    Keys: f folds, s sorts, / filters, arrows scroll, q ends it.
    """
    from kvmover.tools import top
    from kvmover.tools.scrape import endpoints
    from kvmover.tools.tables import console
    from kvmover.tools.top_keys import Fold, TopState

    state = TopState(Fold(fold), sort, only)

    found = [each for text in addresses or [_NEAREST] for each in endpoints(text)]
    if as_json:
        top.show_json(found)
    elif once:
        top.show(found, console(), state)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            top.watch(found, interval, console(), state)


@app.command()
def report(
    logs: Annotated[list[Path], typer.Argument(help="Run logs, one a rank or several.", metavar="RUN.jsonl...")],
    trace: Annotated[
        Path | None, typer.Option(help="Also write the run as a trace for ui.perfetto.dev.", metavar="FILE.json")
    ] = None,
    most: Annotated[int, typer.Option(min=1, metavar="N", help="Slow and failed requests to list, of each.")] = 20,
    as_json: Json = False,
) -> None:
    """Sum up a run: its slowest and its failed requests, where the time went, and hits by tier."""
    from kvmover.tools.report.run_json import summary_as_data
    from kvmover.tools.report.run_summary import report_run, summed
    from kvmover.tools.tables import console

    if as_json:
        print(json.dumps(summary_as_data(*summed(logs, trace, most))))
    else:
        report_run(logs, trace, most, console())


app.command("keeper")(keep)
app.add_typer(store_app, name="store")

for _command in (*app.registered_commands, *store_app.registered_commands):
    _command.short_help = inspect.getdoc(_command.callback)  # whole, where the list of commands would cut it
