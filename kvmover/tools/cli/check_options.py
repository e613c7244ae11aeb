"""`kvmover check` takes the URLs of a prefill, a decode and their router, and what HTTP cannot tell of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvmover.tools.cli.command_options import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckArguments:
    """The options of `kvmover check`: the servers, and where kvmover counts."""

    urls: Annotated[
        list[str],
        typer.Argument(
            help="The prefill, the decode, and perhaps the router in front of both: http://prefill-0:8100.",
            metavar="URL...",
        ),
    ]
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            help="Where ranks of both serve kvmover's metrics, as for top: HOST:PORT or HOST:FIRST-LAST; may be"
            " repeated. They tell the route, and for SGLang the bytes.",
            metavar="URL",
        ),
    ] = None
    bootstrap: Annotated[
        str | None,
        typer.Option(help="Where an SGLang prefill's ranks are found, if not at its own host.", metavar="HOST:PORT"),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            help="A plain server of the same model, whose tokens are compared. Else a vLLM half answers alone.",
            metavar="URL",
        ),
    ] = None
    patience: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest wait for an answer.")] = 60.0
    as_json: Json = False


def show_checked(given: CheckArguments) -> int:
    """Check the pair and print the verdict. Returns the exit status."""
    from kvmover.tools.check.check_command import CheckOptions, print_check, show_check
    from kvmover.tools.tables import console

    options = CheckOptions(given.urls, given.metrics or (), given.bootstrap, given.reference, given.patience)
    return print_check(options) if given.as_json else show_check(options, console())
