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
from typing import Annotated, NoReturn

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
from kvmover.tools.cli.advise_options import AdviseArguments, show_advice
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

    config = ReplayConfig(
        given.page_size,
        given.capacity_tokens,
        given.host_tokens or 0,
        given.storage_tokens or 0,
        policy_named(given.policy),
        write_policy_named(given.write_policy),
    )
    reading = TraceOptions(given.trace_format, given.block_tokens, given.sessions)
    run_replay(ReplayOptions(given.trace, config, given.plot, given.as_json, reading), console())


@app.command()
@takes(AdviseArguments)
def advise(given: AdviseArguments) -> None:
    """Compare shapes and sizes of fleets by the KV share of the time to first token of a trace's requests."""
    show_advice(given)


@app.command("config")
def show_config(
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; $KVMOVER_CONFIG if not given.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Print every setting as TOML: defaults as comments, and behind others where they were given.

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
            help="Where ranks serve their metrics: http://decode-0:9400/metrics, or decode-0:9400-9407 for eight ranks;"
            " http://127.0.0.1:9400/metrics if not given.",
            metavar="[URL]...",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two frames.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, of all since the start.")] = False,
) -> None:
    """Watch transfers, hits by tier, bandwidth, arenas and failures, from metrics endpoints. Ctrl-C ends it."""
    from kvmover.tools import top
    from kvmover.tools.tables import console
    from kvmover.tools.top import endpoints

    found = [each for text in addresses or ["http://127.0.0.1:9400/metrics"] for each in endpoints(text)]
    if once:
        top.show(found, console())
        return
    with contextlib.suppress(KeyboardInterrupt):
        top.watch(found, interval, console())


@app.command()
def report(
    logs: Annotated[list[Path], typer.Argument(help="Run logs, one a rank or several.", metavar="RUN.jsonl...")],
    trace: Annotated[
        Path | None, typer.Option(help="Also write the run as a trace for ui.perfetto.dev.", metavar="FILE.json")
    ] = None,
    most: Annotated[int, typer.Option(min=1, metavar="N", help="Slow and failed requests to list, of each.")] = 20,
) -> None:
    """Sum up a run: its slowest and its failed requests, where the time went, and hits by tier."""
    from kvmover.tools.report.run_summary import report_run
    from kvmover.tools.tables import console

    report_run(logs, trace, most, console())


app.command("keeper")(keep)
app.add_typer(store_app, name="store")

for _command in (*app.registered_commands, *store_app.registered_commands):
    _command.short_help = inspect.getdoc(_command.callback)  # whole, where the list of commands would cut it
