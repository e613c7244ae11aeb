"""The command line: what can be asked of kvmover, and with which exit status it answers.

Nothing heavy is imported before a command runs: `kvmover --help` needs neither torch nor nixl, nor numpy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from kvmover import __version__
from kvmover.errors import KvmoverError, LayoutError, PeerRefused, ProtocolError, TransferFailed, TransportError

if TYPE_CHECKING:
    from kvmover.layout import Component
    from kvmover.plan.text import FleetText

#: Errors that say what happened to a transfer. All others say what is wrong with the input.
_HAPPENED = (TransportError, PeerRefused, ProtocolError, TransferFailed)
_FAILED, _REFUSED = 1, 2

app = typer.Typer(
    name="kvmover",
    help="Moves the KV cache of running language models between memories that do not agree.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _count(text: str) -> int:
    """A number of things that there must be: the message names the value, which typer's own does not."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"{text} is not a number of at least 1")
    return int(text)


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_FLEET = "tp=4,pp=1,cp=1,cp_order=page|token|block,page=64,order=NHD|HND"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command. Input that cannot be is one line on stderr, naming the value, and exit status 2."""
    try:
        status = app(arguments, standalone_mode=False)
    except typer.TyperException as error:
        _leave(error.format_message(), _REFUSED)
    except KvmoverError as error:
        _leave(str(error), _FAILED if isinstance(error, _HAPPENED) else _REFUSED)
    except typer.Abort:
        _leave("aborted", _FAILED)
    sys.exit(status or 0)


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
def plan(
    src: Annotated[str, typer.Option(help="The fleet that holds the KV.", metavar=_FLEET)],
    dst: Annotated[str, typer.Option(help="The fleet that wants it.", metavar=_FLEET)],
    layers: Annotated[int, typer.Option(parser=_count, metavar="N", help="Layers of the model.")],
    tokens: Annotated[int, typer.Option(parser=_count, metavar="N", help="Tokens of the request.")],
    component: Annotated[Literal["attention", "mla"], typer.Option(help="Kind of cache.")] = "attention",
    kv_heads: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="KV heads of the model (attention).")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="Elements of a head (attention).")
    ] = None,
    latent_dim: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="Elements of a token's latent (mla).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type, by torch's name.")] = "bfloat16",
    replicas: Annotated[
        Literal["stripe", "elect"],
        typer.Option(help="Sources that hold the same bytes share the pages out, or one sends them all."),
    ] = "stripe",
    svg: Annotated[Path | None, typer.Option(help="Also draw it.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """Show who sends what to whom, by which route, and why."""
    from kvmover.plan import RDMA, Plan, Replicas
    from kvmover.plan.text import explain, plan_as_data

    model = _component(component, layers, dtype, kv_heads=kv_heads, head_dim=head_dim, latent_dim=latent_dim)
    source, target = _fleet("--src", src), _fleet("--dst", dst)
    answer = Plan(model, source.fleet, target.fleet, 0, tokens, Replicas(replicas))
    legs = list(explain(answer, source.order, target.order, RDMA))
    if svg:
        from kvmover.observe.picture import draw

        _write(svg, draw(answer, source, target, legs))
    if as_json:
        print(json.dumps(plan_as_data(answer, legs)))
        return
    from kvmover.observe.plan_table import print_plan

    print_plan(answer, source, target, legs)


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
    from kvmover.plan.text import FleetText

    try:
        return FleetText.parse(text)
    except LayoutError as error:
        raise LayoutError(f"{option} {text}: {error}") from None


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
    scenario: Annotated[list[str] | None, typer.Option(help="Run this one only; may be repeated.")] = None,
    requests: Annotated[int | None, typer.Option(parser=_count, metavar="N", help="Requests of a scenario.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Take requests from a Mooncake JSONL trace.", metavar="FILE")
    ] = None,
    scale: Annotated[float, typer.Option(help="Lengths of the trace are multiplied by this.")] = 0.02,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and conversations.")] = 0,
    as_json: Json = False,
) -> int:
    """Move KV between two fleets of real processes of different shape, and compare the tokens they generate."""
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
