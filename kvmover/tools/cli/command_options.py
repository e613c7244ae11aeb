"""Options of commands are values: a dataclass for each command that has many, and the options several share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, TypeVar, get_type_hints

import typer

HELP = {"help_option_names": ["-h", "--help"]}

#: Largest number on the command line: beyond it arithmetic overflows.
_MOST = 1 << 53

#: Values of `--scenario`, `--policy`, `--write-policy` and `--format`, repeated here because their modules load numpy
#: and torch.
SCENARIOS = (
    "smollm2",
    "gqa",
    "replicated-dst",
    "replicated-both",
    "uneven",
    "pipeline",
    "latent",
    "mapped",
    "fp8",
    "migrate",
    "storage",
    "peer",
    "keeper",
    "rolling",
)
POLICIES = ("lru", "hazard", "lfu", "slru", "fifo", "priority")
WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")
TRACE_FORMATS = ("mooncake", "mooncake-delta", "agentic-mooncake", "weka")

Options = TypeVar("Options")
Answer = TypeVar("Answer")


def _scenarios() -> tuple[str, ...]:
    return SCENARIOS


def _policies() -> tuple[str, ...]:
    return POLICIES


def _write_policies() -> tuple[str, ...]:
    return WRITE_POLICIES


def _formats() -> tuple[str, ...]:
    return TRACE_FORMATS


def takes(options: type[Options]) -> Callable[[Callable[[Options], Answer]], Callable[..., Answer]]:
    """Make a typer command from a function of one dataclass, with an option for each of its fields."""
    hints = get_type_hints(options, include_extras=True)
    fields = inspect.signature(options).parameters.values()
    given = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]) for each in fields]

    def made(run: Callable[[Options], Answer]) -> Callable[..., Answer]:
        @wraps(run)
        def command(**values: object) -> Answer:
            return run(options(**values))

        command.__annotations__ = {}
        command.__signature__ = inspect.Signature(given)  # pyright: ignore[reportAttributeAccessIssue]
        return command

    return made


def count(text: str) -> int:
    """Parse a positive number. Raises BadParameter with the value, which typer's own message lacks."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"{text} is not a number of at least 1")
    if int(text) > _MOST:
        raise typer.BadParameter(f"{text} is more than {_MOST}, the most that there may be of anything")
    return int(text)


def size(text: str) -> int:
    """Parse a number of bytes, with or without a unit. Raises BadParameter."""
    from kvmover.config.load import bytes_in

    try:
        nbytes = bytes_in(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text}: {error}") from None
    return count(str(nbytes))


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The values of an option that takes several, each once, in their order."""

    values: tuple[int, ...]


def token_counts(text: str) -> TokenCounts:
    """Parse numbers of tokens with commas between them, as 300000,1.5M. Raises BadParameter."""
    from kvmover.config.load import bytes_in

    found = dict[int, None]()
    for each in text.split(","):
        try:
            found[count(str(bytes_in(each if each.isdigit() else f"{each}B")))] = None
        except ValueError:
            raise typer.BadParameter(f"{each} is not a number of tokens, as 300000 or 3M") from None
    return TokenCounts(tuple(found))


#: For every command that prints tables or JSON.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

#: For all commands of `kvmover store`.
Root = Annotated[
    str | None,
    typer.Argument(
        help="A directory, s3://bucket/prefix, mooncake://HOST:PORT or keeper:///SOCKET; store.root if not given.",
        metavar="LOCATION",
    ),
]
OneNamespace = Annotated[
    str | None, typer.Option("--namespace", help="Only those whose name begins so.", metavar="PREFIX")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoArguments:
    """The options of `kvmover demo`: scenarios, requests and output."""

    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="Run this one only; may be repeated.", metavar="|".join(SCENARIOS), autocompletion=_scenarios
        ),
    ] = None
    requests: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Requests of a scenario.")] = None
    trace: Annotated[Path | None, typer.Option(help="Take requests from a Mooncake JSONL trace.", metavar="FILE")] = (
        None
    )
    scale: Annotated[
        float | None,
        typer.Option(help="Lengths of the trace are multiplied by this; 0.02 if not given.", metavar="FACTOR"),
    ] = None
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the weights and conversations.")] = 0
    watch: Annotated[bool, typer.Option("--watch", help="Show `kvmover top` of its ranks while it runs.")] = False
    report: Annotated[
        Path | None,
        typer.Option(help="Also write its run log, as run.jsonl, and its trace, as run.json.", metavar="FILE.json"),
    ] = None
    device: Annotated[str, typer.Option(help="Device of the pools: cpu, or cuda for a GPU.", metavar="NAME")] = "cpu"
    store: Annotated[
        str | None,
        typer.Option(
            help="Where the page store of `storage` is made: a directory, s3://bucket/prefix or mooncake://HOST:PORT.",
            metavar="LOCATION",
        ),
    ] = None
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayArguments:
    """The options of `kvmover replay`: a trace, the size of each tier, and the eviction policies."""

    trace: Annotated[
        Path,
        typer.Argument(help="JSON lines of Mooncake (FAST'25, delta, agentic 2) or Weka (AgentX).", metavar="TRACE"),
    ]
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a page.")] = 64
    capacity_tokens: Annotated[
        TokenCounts | None,
        typer.Option(
            parser=token_counts,
            metavar="N,...",
            help="Tokens that fit the device, as 3000000, or as 1M,3M to compare; unlimited if not given.",
        ),
    ] = None
    host_tokens: Annotated[
        int | None,
        typer.Option(parser=count, metavar="N", help="Tokens that fit the host memory, if there is one."),
    ] = None
    storage_tokens: Annotated[
        int | None,
        typer.Option(parser=count, metavar="N", help="Tokens that fit storage, if there is some."),
    ] = None
    policy: Annotated[
        str,
        typer.Option(
            help="Which page is evicted first; several, as lru,hazard, are compared.",
            metavar="|".join(POLICIES),
            autocompletion=_policies,
        ),
    ] = "lru"
    write_policy: Annotated[
        str,
        typer.Option(
            help="When pages are copied to the host: at their eviction, their first use, or their second.",
            metavar="|".join(WRITE_POLICIES),
            autocompletion=_write_policies,
        ),
    ] = "write_back"
    plot: Annotated[
        Path | None, typer.Option(help="Draw the hit rate against the device's capacity.", metavar="FILE")
    ] = None
    requests: Annotated[
        Path | None, typer.Option(help="Write the hits of each request, by policy and capacity.", metavar="FILE.csv")
    ] = None
    trace_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="The trace's format, where its first line could be of two.",
            metavar="|".join(TRACE_FORMATS),
            autocompletion=_formats,
        ),
    ] = None
    block_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a hash id, where the trace does not say; 512.")
    ] = None
    sessions: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sessions at a time, where the trace does not say when they begin."),
    ] = None
    as_json: Json = False
