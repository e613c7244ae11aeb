"""`kvmover advise` takes a trace, and all shapes, ratios and tiers to compare."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from kvmover.errors import LayoutError
from kvmover.tools.cli.command_options import POLICIES, TRACE_FORMATS, Json, count
from kvmover.tools.cli.plan_options import Assume, cache_of_model, fleet_option, known_models, measured_link

_FLEET = "tp=4,pp=1,cp=1,page=64,order=NHD|HND"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseArguments:
    """The options of `kvmover advise`: repeated options are compared, in all combinations."""

    trace: Annotated[
        Path,
        typer.Argument(help="JSON lines of Mooncake (FAST'25, delta, agentic 2) or Weka (AgentX).", metavar="TRACE"),
    ]
    model: Annotated[
        str,
        typer.Option(
            help="A public model by its name, or a Hugging Face config.json, or its folder.",
            metavar="NAME|FILE",
            autocompletion=known_models,
        ),
    ]
    assume: Assume = None
    src: Annotated[
        list[str], typer.Option(help="A prefill engine's ranks; or as engines are told: 'vllm -tp 8'.", metavar=_FLEET)
    ]
    dst: Annotated[list[str], typer.Option(help="A decode engine's ranks.", metavar=_FLEET)]
    ratio: Annotated[
        list[str] | None, typer.Option(help="Engines that prefill and that decode; 1:1 if not given.", metavar="P:D")
    ] = None
    device_tokens: Annotated[
        list[int] | None,
        typer.Option(
            parser=count, metavar="N", help="Tokens that fit a prefill engine's device; unlimited if not given."
        ),
    ] = None
    host_tokens: Annotated[
        list[int] | None, typer.Option(min=0, max=1 << 53, metavar="N", help="Tokens that fit its host memory.")
    ] = None
    storage_tokens: Annotated[
        list[int] | None,
        typer.Option(min=0, max=1 << 53, metavar="N", help="Tokens that fit the storage behind the host."),
    ] = None
    target_ms: Annotated[
        float | None,
        typer.Option(min=0, metavar="MS", help="Most that KV may add to the first token of 99 in 100 requests."),
    ] = None
    calibration: Annotated[
        Path | None, typer.Option(help="Costs measured on a link; a NIC of 400 Gb/s if not given.", metavar="FILE")
    ] = None
    link: Annotated[
        str | None, typer.Option(help="Which link of the calibration, if it has several.", metavar="HOST[/TRANSPORT]")
    ] = None
    request_us: Annotated[
        float, typer.Option(min=0, metavar="US", help="Fixed time of a transfer, beside the time of its bytes.")
    ] = 500.0
    host_rate: Annotated[float, typer.Option(metavar="GB/S", help="Rate at which a rank loads from its host.")] = 50.0
    storage_rate: Annotated[float, typer.Option(metavar="GB/S", help="Rate at which an engine reads storage.")] = 5.0
    prefill_rate: Annotated[
        float | None,
        typer.Option(metavar="TOKENS/S", help="Rate at which a prefill engine computes; counts in the share then."),
    ] = None
    policy: Annotated[str, typer.Option(help="Which page is evicted first.", metavar="|".join(POLICIES))] = "lru"
    cost_table: Annotated[
        Path | None, typer.Option(help="Also write the times of transfers, for simulators of serving.", metavar="FILE")
    ] = None
    trace_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="The trace's format, where its first line could be of two.",
            metavar="|".join(TRACE_FORMATS),
        ),
    ] = None
    as_json: Json = False


def show_advice(given: AdviseArguments) -> None:
    """Print the time that KV adds to each candidate's first token, and the cheapest candidate that meets the target."""
    from kvmover.plan import RDMA
    from kvmover.tools.advise import AdviseOptions, LinkCosts, TierRates, run_advise
    from kvmover.tools.replay import ReplayConfig, TraceOptions, policy_named
    from kvmover.tools.tables import console

    measured = measured_link(given.calibration, given.link)
    policy = policy_named(given.policy)
    components = cache_of_model(given.model, None, given.assume).components
    sizes = product(given.device_tokens or [None], given.host_tokens or [0], given.storage_tokens or [0])
    run_advise(
        AdviseOptions(
            trace=given.trace,
            components=components,
            src=tuple((text, fleet_option("--src", text, components)) for text in dict.fromkeys(given.src)),
            dst=tuple((text, fleet_option("--dst", text, components)) for text in dict.fromkeys(given.dst)),
            ratios=tuple(dict.fromkeys(map(_ratio, given.ratio or ["1:1"]))),
            caches=tuple(ReplayConfig(1, *each, policy=policy) for each in sizes),
            link=LinkCosts(measured.costs(RDMA) if measured else RDMA, request_us=given.request_us),
            rates=TierRates(
                given.host_rate * 1e3,
                given.storage_rate * 1e3,
                None if given.prefill_rate is None else given.prefill_rate / 1e6,
            ),
            target_us=None if given.target_ms is None else given.target_ms * 1e3,
            cost_table=given.cost_table,
            as_json=given.as_json,
            reading=TraceOptions(given.trace_format),
        ),
        console(),
    )


def _ratio(text: str) -> tuple[int, int]:
    prefills, _, decodes = text.partition(":")
    try:
        ratio = int(prefills), int(decodes)
    except ValueError:
        raise LayoutError(f"--ratio {text} is not two numbers, as 2:1") from None
    if min(ratio) < 1 or max(ratio) > 1 << 10:
        raise LayoutError(f"--ratio {text} has engines of which there are none, or more than {1 << 10}")
    return ratio
