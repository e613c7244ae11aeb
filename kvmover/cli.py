"""The command line has every command of kvmover, its options, and the exit status of each answer.

Nothing heavy is imported before a command runs: `kvmover --help` needs neither torch nor nixl, nor numpy.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from kvmover import __version__
from kvmover.errors import (
    KvmoverError,
    LayoutError,
    PeerRefused,
    ProtocolError,
    TransferFailed,
    TransportError,
)
from kvmover.observe.command import HELP, Json, count, store_app
from kvmover.observe.command import app as operator_app

if TYPE_CHECKING:
    from kvmover.layout import Component
    from kvmover.plan.calibration import Calibration
    from kvmover.plan.text import FleetText

#: Errors that say what happened to a transfer. All others say what is wrong with the input.
_HAPPENED = (TransportError, PeerRefused, ProtocolError, TransferFailed)
_FAILED, _REFUSED = 1, 2

#: Ranks of a fleet, and pages of a request, that a plan is made for. 10 million pages take about a second and 1 GB.
_MOST_RANKS, _MOST_PAGES = 1 << 17, 10_000_000

#: What `--scenario` and `--policy` take: the modules that have them load numpy and torch.
SCENARIOS = ("gqa", "replicated-dst", "replicated-both", "uneven", "pipeline", "latent", "mapped", "storage")
POLICIES = ("lru", "lfu", "slru", "fifo", "priority", "earned")
TRACE_FORMATS = ("mooncake", "mooncake-delta", "agentic-mooncake", "weka")

app = typer.Typer(
    name="kvmover",
    help="Moves the KV cache of running language models between memories that do not agree.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


_FLEET = "tp=4,pp=1,cp=1,cp_order=page|token|block,page=64,order=NHD|HND"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command. Input that cannot be is one line on stderr, naming the value, and exit status 2.

    A reader that has had enough, as `head` has, is no error; and what a terminal has no letters for is escaped.
    """
    _escape_where_letters_lack(sys.stdout)
    try:
        status = app(arguments, prog_name="kvmover", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _hang_up()
    except SystemExit as leaving:  # what printing makes of a pipe that nobody reads
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
    """Leave without a word of what is still to be flushed."""
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
def plan(
    src: Annotated[
        str,
        typer.Option(help="The fleet that holds the KV; or as engines are told: 'vllm -tp 8'.", metavar=_FLEET),
    ],
    dst: Annotated[str, typer.Option(help="The fleet that wants it.", metavar=_FLEET)],
    tokens: Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens of the request.")],
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face config.json, or its folder: sizes that are not given.", metavar="FILE"),
    ] = None,
    layers: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Layers of the model.")] = None,
    component: Annotated[
        Literal["attention", "mla"] | None, typer.Option(help="Kind of cache; attention if not given.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="KV heads of the model (attention).")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Elements of a head (attention).")
    ] = None,
    latent_dim: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Elements of a token's latent (mla).")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Element type, by torch's name: float8_e4m3fn; bfloat16 if not given.", metavar="DTYPE"),
    ] = None,
    replicas: Annotated[
        Literal["stripe", "elect"],
        typer.Option(help="Sources that hold the same bytes share the pages out, or one sends them all."),
    ] = "stripe",
    calibration: Annotated[
        Path | None, typer.Option(help="Choose routes by the costs measured on a link.", metavar="FILE")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Which link of the calibration, if it has several.", metavar="HOST[/TRANSPORT]")
    ] = None,
    one_host: Annotated[
        bool, typer.Option("--one-host", help="Processes of one host with pools in shared memory, its costs assumed.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw it.", metavar="FILE")] = None,
    every_leg: Annotated[bool, typer.Option("--every-leg", help="Do not fold equal legs of large fleets.")] = False,
    as_json: Json = False,
) -> None:
    """Show who sends what to whom, by which route, and why."""
    from kvmover.plan import HOST, RDMA, Plan, Replicas
    from kvmover.plan.cost import BY_HOST, BY_WIRE
    from kvmover.plan.text import explain, link_as_data, plan_as_data

    given = {"kv_heads": kv_heads, "head_dim": head_dim, "latent_dim": latent_dim}
    cache, note = _cache(model, component, layers, dtype, given)
    source, target = _fleet("--src", src), _fleet("--dst", dst)
    _check_size(tokens, source, target)
    answer = Plan(cache, source.fleet, target.fleet, 0, tokens, Replicas(replicas))
    measured = _link(calibration, link)
    assumed, among = (HOST, BY_HOST) if one_host else (RDMA, BY_WIRE)
    costs = measured.costs(assumed) if measured else assumed
    legs = list(explain(answer, source.order, target.order, costs, among))
    if svg:
        from kvmover.observe.picture import draw

        _write(svg, draw(answer, source, target, legs))
    if as_json:
        print(json.dumps(plan_as_data(answer, legs) | (link_as_data(measured, assumed) if measured else {})))
        return
    from kvmover.observe.plan_table import MOST_LEGS, print_plan

    print_plan(answer, source, target, legs, len(legs) if every_leg else MOST_LEGS)
    if note:
        print(note)
    if measured:
        print(f"calibrated: {measured.why(assumed)}")


def _cache(
    model: Path | None, kind: str | None, layers: int | None, dtype: str | None, sizes: dict[str, int | None]
) -> tuple[Component, str]:
    """The component from the options, and from the model's own configuration where they say nothing; and a note."""
    note = ""
    if model is not None:
        from kvmover.plan.model_config import read_sizes

        found = read_sizes(model)
        if kind not in (None, found.kind):
            raise LayoutError(f"--component {kind}, and {model} is of {found.kind}")
        kind, layers, dtype, note = found.kind, layers or found.layers, dtype or found.dtype, found.note
        sizes = {name: value or found.sizes.get(name) for name, value in sizes.items()}
    if layers is None:
        raise LayoutError("--layers or --model is needed: nothing says how many layers there are")
    return _component(kind or "attention", layers, dtype or "bfloat16", **sizes), note


def _component(kind: str, layers: int, dtype: str, **sizes: int | None) -> Component:
    """The model's component from the sizes that its kind has, no fewer and no others."""
    from kvmover.layout import Component

    wanted = ("kv_heads", "head_dim") if kind == "attention" else ("latent_dim",)
    for name, value in sizes.items():
        option = "--" + name.replace("_", "-")
        if name in wanted and value is None:
            raise LayoutError(f"component {kind} needs {option}")
        if name not in wanted and value is not None:
            raise LayoutError(f"{option} {value} has no meaning for component {kind}")
    given = {name: sizes[name] or 0 for name in wanted}
    return getattr(Component, kind)(layers, dtype=dtype, **given)


def _fleet(option: str, text: str) -> FleetText:
    from kvmover.plan.engine_words import in_our_words
    from kvmover.plan.text import FleetText

    try:
        return FleetText.parse(in_our_words(text))
    except LayoutError as error:
        raise LayoutError(f"{option} {text}: {error}") from None


def _check_size(tokens: int, *fleets: FleetText) -> None:
    """Refuse what would take hours, or all memory, to be planned."""
    for each in fleets:
        if each.fleet.size > _MOST_RANKS:
            raise LayoutError(f"a fleet of {each.fleet.size:,} ranks; at most {_MOST_RANKS:,} can be planned for")
        pages = -(-tokens // each.fleet.page_tokens)
        if pages > _MOST_PAGES:
            raise LayoutError(
                f"--tokens {tokens} are {pages:,} pages of {each.fleet.page_tokens}; at most {_MOST_PAGES:,} can be"
                " planned"
            )


def _link(calibration: Path | None, name: str | None) -> Calibration | None:
    from kvmover.plan.calibration import link_to, load

    if calibration is not None:
        return link_to(load(calibration), name)
    if name is not None:
        raise LayoutError(f"--link {name} has no meaning without --calibration")
    return None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvmoverError(f"cannot write {path}: {error.strerror}") from error


@app.command()
def doctor(as_json: Json = False) -> int:
    """Show what this machine can do. Exit status 1 if something that is there does not work."""
    from kvmover.observe.doctor import Status, examine, findings_as_data, print_findings

    findings = examine()
    if as_json:
        print(json.dumps(findings_as_data(findings)))
    else:
        print_findings(findings)
    return _FAILED if any(each.status is Status.PROBLEM for each in findings) else 0


@app.command()
def demo(
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="Run this one only; may be repeated.", metavar="|".join(SCENARIOS), autocompletion=lambda: SCENARIOS
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Requests of a scenario.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Take requests from a Mooncake JSONL trace.", metavar="FILE")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Lengths of the trace are multiplied by this; 0.02 if not given.", metavar="FACTOR"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of weights and conversations.")] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Show `kvmover top` of its ranks while it runs.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Also write its run log, as run.jsonl, and draw it, as run.html.", metavar="FILE.html"),
    ] = None,
    as_json: Json = False,
) -> int:
    """Move KV between two fleets of real processes of different shape, and compare the tokens they generate."""
    from kvmover.needs import need

    need("torch", "the demo", "torch")
    from kvmover.demo.run import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            scenarios=tuple(scenario or ()),
            requests=requests,
            trace=trace,
            scale=scale,
            seed=seed,
            as_json=as_json,
            report=report,
            watch=watch,
        )
    )


@app.command()
def replay(
    trace: Annotated[
        Path,
        typer.Argument(help="JSON lines of Mooncake (FAST'25, delta, agentic 2) or Weka (AgentX).", metavar="TRACE"),
    ],
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a page.")] = 64,
    capacity_tokens: Annotated[
        int | None,
        typer.Option(parser=count, metavar="N", help="Tokens that the device holds; any number if not given."),
    ] = None,
    host_tokens: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Tokens that the host holds, if there is one.")
    ] = None,
    storage_tokens: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Tokens that storage behind the host holds.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help="Which page is given up first.", metavar="|".join(POLICIES), autocompletion=lambda: POLICIES),
    ] = "lru",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the hit rate against the device's capacity.", metavar="FILE")
    ] = None,
    trace_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="The trace's format, where its first line could be of two.",
            metavar="|".join(TRACE_FORMATS),
            autocompletion=lambda: TRACE_FORMATS,
        ),
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a hash id, where the trace does not say; 512.")
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sessions at a time, where the trace does not say when they begin."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace through the prefix tree, and say which tier its hits came from and why others were lost."""
    from kvmover.cache.replay import ReplayConfig, ReplayOptions, TraceOptions, policy_named, run_replay
    from kvmover.observe.tables import console

    config = ReplayConfig(page_size, capacity_tokens, host_tokens or 0, storage_tokens or 0, policy_named(policy))
    reading = TraceOptions(trace_format, block_tokens, sessions)
    run_replay(ReplayOptions(trace, config, plot, as_json, reading), console())


app.add_typer(operator_app)
app.add_typer(store_app, name="store")

for _command in (*app.registered_commands, *operator_app.registered_commands, *store_app.registered_commands):
    _command.short_help = inspect.getdoc(_command.callback)  # whole, where the list of commands would cut it
