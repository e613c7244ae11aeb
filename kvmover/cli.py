"""The command line has every command of kvmover, its options, and the exit status of each answer.

Nothing heavy is imported before a command runs: `kvmover --help` needs neither torch nor nixl, nor numpy.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from kvmover import __version__
from kvmover.errors import (
    KvmoverError,
    LayoutError,
    PeerRefused,
    ProtocolError,
    StoreError,
    TransferFailed,
    TransportError,
)
from kvmover.observe.command import app as operator_app

if TYPE_CHECKING:
    from kvmover.layout import Component
    from kvmover.plan.calibration import Calibration
    from kvmover.plan.text import FleetText

#: Errors that say what happened to a transfer. All others say what is wrong with the input.
_HAPPENED = (TransportError, PeerRefused, ProtocolError, TransferFailed)
_FAILED, _REFUSED = 1, 2

_HELP = {"help_option_names": ["-h", "--help"]}

#: What a number on the command line may be: larger ones overflow on their way, and nothing has so many of anything.
_MOST = 1 << 53

#: Ranks of a fleet, and pages of a request, that a plan is made for. 10 million pages take about a second and 1 GB.
_MOST_RANKS, _MOST_PAGES = 1 << 17, 10_000_000

app = typer.Typer(
    name="kvmover",
    help="Moves the KV cache of running language models between memories that do not agree.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)


def _count(text: str) -> int:
    """A number of things that there must be: the message names the value, which typer's own does not."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"{text} is not a number of at least 1")
    if int(text) > _MOST:
        raise typer.BadParameter(f"{text} is more than {_MOST}, the most that there may be of anything")
    return int(text)


def _size(text: str) -> int:
    """A number of bytes, with a unit or without."""
    from kvmover.config.load import bytes_in

    try:
        size = bytes_in(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text}: {error}") from None
    return _count(str(size))


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_FLEET = "tp=4,pp=1,cp=1,cp_order=page|token|block,page=64,order=NHD|HND"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command. Input that cannot be is one line on stderr, naming the value, and exit status 2.

    A reader that has had enough, as `head` has, is no error.
    """
    try:
        status = app(arguments, standalone_mode=False)
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
    tokens: Annotated[int, typer.Option(parser=_count, metavar="N", help="Tokens of the request.")],
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face config.json, or its folder: sizes that are not given.", metavar="FILE"),
    ] = None,
    layers: Annotated[int | None, typer.Option(parser=_count, metavar="N", help="Layers of the model.")] = None,
    component: Annotated[
        Literal["attention", "mla"] | None, typer.Option(help="Kind of cache; attention if not given.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="KV heads of the model (attention).")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="Elements of a head (attention).")
    ] = None,
    latent_dim: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="Elements of a token's latent (mla).")
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
        list[str] | None, typer.Option(help="Run this one only, as gqa; may be repeated.", metavar="NAME")
    ] = None,
    requests: Annotated[int | None, typer.Option(parser=_count, metavar="N", help="Requests of a scenario.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Take requests from a Mooncake JSONL trace.", metavar="FILE")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Lengths of the trace are multiplied by this; 0.02 if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of weights and conversations.")] = 0,
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
        )
    )


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Requests in Mooncake's JSON lines.", metavar="TRACE")],
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a page.")] = 64,
    capacity_tokens: Annotated[
        int | None,
        typer.Option(parser=_count, metavar="N", help="Tokens that the device holds; any number if not given."),
    ] = None,
    host_tokens: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="Tokens that the host holds, if there is one.")
    ] = None,
    storage_tokens: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="Tokens that storage behind the host holds.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Which page is given up first, as lru.", metavar="NAME")] = "lru",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the hit rate against the device's capacity.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace through the prefix tree, and say which tier its hits came from and why others were lost."""
    from kvmover.cache.replay import ReplayConfig, ReplayOptions, policy_named, run_replay
    from kvmover.observe.console import console

    config = ReplayConfig(page_size, capacity_tokens, host_tokens or 0, storage_tokens or 0, policy_named(policy))
    run_replay(ReplayOptions(trace, config, plot, as_json), console())


app.add_typer(operator_app)

store_app = typer.Typer(help="Look after page stores: directories of KV pages.", context_settings=_HELP)
app.add_typer(store_app, name="store")


@store_app.callback(invoke_without_command=True)
def _store(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


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
    from kvmover.observe.store_table import print_rows
    from kvmover.store import command

    return print_rows(command.stat(_directory(root), namespace), as_json)


@store_app.command("verify")
def store_verify(root: Root = None, namespace: OneNamespace = None, as_json: Json = False) -> int:
    """Read every object and delete the bad ones. Exit status 1 if there were any."""
    from kvmover.observe.store_table import print_rows
    from kvmover.store import command

    where = _directory(root)
    if not command.chosen(where, namespace):
        raise StoreError(f"no page store in {where}: nothing was verified")
    return print_rows(command.verify(where, namespace), as_json)


@store_app.command("gc")
def store_gc(
    root: Root = None,
    namespace: OneNamespace = None,
    quota: Annotated[
        int | None,
        typer.Option(
            parser=_size,
            metavar="BYTES",
            help="Evict until each namespace holds no more, as 10GB or 64MiB; store.quota_bytes if not given.",
        ),
    ] = None,
    ttl: Annotated[
        int | None,
        typer.Option(
            parser=_count, metavar="SECONDS", help="Delete pages unused for so long; store.ttl_s if not given."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Take over what dead writers left, and keep to a quota or an age."""
    from kvmover.config import load
    from kvmover.observe.store_table import print_rows
    from kvmover.store import command

    configured = load().settings.store
    policy = replace(configured, quota_bytes=quota or configured.quota_bytes, ttl_s=ttl or configured.ttl_s)
    return print_rows(command.collect(root or configured.directory(), namespace, policy), as_json)


@store_app.command("clear")
def store_clear(
    namespace: Annotated[str, typer.Option(help="Those whose name begins so; '' is all.", metavar="PREFIX")],
    root: Root = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> int:
    """Delete all pages of a namespace, and nothing else. Asks before it does."""
    from kvmover.observe.store_table import print_rows
    from kvmover.store import command

    where = _directory(root)
    if not yes:
        _ask_to_clear(where, namespace)
    return print_rows(command.clear(where, namespace), as_json)


def _ask_to_clear(root: Path, namespace: str) -> None:
    """Say what would be deleted, and go on only if a person agrees: pages are not had back."""
    from kvmover.store import command

    rows = command.stat(root, namespace)
    names = ", ".join(f"{row.found.manifest.model} ({row.found.folder.name[:12]})" for row in rows)
    what = f"{sum(row.stat.pages for row in rows):,} pages of {len(rows)} namespaces in {root}: {names}"
    if not sys.stdin.isatty():
        raise StoreError(f"would delete {what}; say --yes to do it")
    typer.confirm(f"Delete {what}?", abort=True, err=True)


for _command in (*app.registered_commands, *operator_app.registered_commands, *store_app.registered_commands):
    _command.short_help = inspect.getdoc(_command.callback)  # whole, where the list of commands would cut it
