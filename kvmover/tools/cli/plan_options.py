"""`kvmover plan` takes two fleets and a cache, by its sizes or its model's name, and shows one plan a component."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvmover.errors import KvmoverError, LayoutError
from kvmover.tools.cli.command_options import Json, count

if TYPE_CHECKING:
    from kvmover.layout import Component
    from kvmover.plan import Costs, Plan
    from kvmover.plan.calibration import Calibration
    from kvmover.plan.explain import Explained
    from kvmover.plan.fleet_text import FleetText
    from kvmover.plan.model_config import ModelCache

#: Most ranks of a fleet and pages of a request in a plan. 10 million pages take about a second and 1 GB.
_MOST_RANKS, _MOST_PAGES = 1 << 17, 10_000_000

#: Kinds of cache, and the size options of each.
_KINDS = {"attention": ("kv_heads", "head_dim"), "mla": ("latent_dim",)}

#: The component field of each size option.
_SIZES = {"kv_heads": "heads", "head_dim": "dim", "latent_dim": "dim"}

_FLEET = "tp=4,pp=1,cp=1,cp_order=page|token|block,page=64,order=NHD|HND,dtype=auto|fp8_e4m3|nvfp4"


def _kinds() -> tuple[str, ...]:
    return tuple(_KINDS)


def known_models() -> tuple[str, ...]:
    """Return the names of public models for `--model`, imported only on request."""
    from kvmover.plan.public_models import PUBLIC

    return tuple(PUBLIC)


#: For every command with `--model`.
Assume = Annotated[
    Literal["attention"] | None,
    typer.Option(help="Take a config.json of an architecture that is not known by the keys of an attention."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `kvmover plan`: two fleets, a request, the cache by sizes or model, and the costs of routes."""

    src: Annotated[
        str,
        typer.Option(help="The fleet that holds the KV; or as engines are told: 'vllm -tp 8'.", metavar=_FLEET),
    ]
    dst: Annotated[str, typer.Option(help="The fleet that wants it.", metavar=_FLEET)]
    tokens: Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens of the request.")]
    model: Annotated[
        str | None,
        typer.Option(
            help="A public model by its name, or a Hugging Face config.json, or its folder: sizes that are not given.",
            metavar="NAME|FILE",
            autocompletion=known_models,
        ),
    ] = None
    layers: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Layers of the model.")] = None
    component: Annotated[
        str | None,
        typer.Option(
            help="Kind of cache, attention if not given; or any: name=c4,layers=30,dim=584,dtype=uint8,row_tokens=4; or"
            " one component of the model, by its name.",
            metavar="attention|mla|NAME|NAME=VALUE,...",
            autocompletion=_kinds,
        ),
    ] = None
    kv_heads: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="KV heads of the model (attention).")
    ] = None
    head_dim: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Elements of a head (attention).")] = (
        None
    )
    latent_dim: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Elements of a token's latent (mla).")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="Element type, by torch's name: float8_e4m3fn; bfloat16 if not given.", metavar="DTYPE"),
    ] = None
    assume: Assume = None
    replicas: Annotated[
        Literal["stripe", "elect"],
        typer.Option(help="Sources that hold the same bytes share the pages out, or one sends them all."),
    ] = "stripe"
    calibration: Annotated[
        Path | None, typer.Option(help="Choose routes by the costs measured on a link.", metavar="FILE")
    ] = None
    link: Annotated[
        str | None, typer.Option(help="Which link of the calibration, if it has several.", metavar="HOST[/TRANSPORT]")
    ] = None
    one_host: Annotated[
        bool, typer.Option("--one-host", help="Processes of one host with pools in shared memory, its costs assumed.")
    ] = False
    svg: Annotated[Path | None, typer.Option(help="Also draw it.", metavar="FILE")] = None
    every_leg: Annotated[bool, typer.Option("--every-leg", help="Do not fold equal legs of large fleets.")] = False
    as_json: Json = False


@dataclass(frozen=True, slots=True)
class _Shown:
    """A component's plan, with its legs as they would travel."""

    plan: Plan
    legs: list[Explained]

    def as_data(self) -> dict[str, object]:
        from kvmover.plan.explain import plan_as_data

        component = asdict(self.plan.component)
        del component["codec"]  # stated by each leg
        return {"component": component, **plan_as_data(self.plan, self.legs)}


def show_plan(options: PlanOptions) -> None:
    """Print the plan of each component, as tables or JSON, and draw it if requested. Raises LayoutError."""
    from kvmover.plan import HOST, RDMA
    from kvmover.plan.explain import link_as_data

    if options.svg and options.svg.suffix.lower() != ".svg":
        raise LayoutError(f"--svg {options.svg}: the picture is SVG; name a file that ends in .svg")
    cache = _cache(options)
    source, target = (
        fleet_option(name, text, cache.components) for name, text in (("--src", options.src), ("--dst", options.dst))
    )
    _check_size(options.tokens, source, target)
    measured = measured_link(options.calibration, options.link)
    assumed = HOST if options.one_host else RDMA
    costs = measured.costs(assumed) if measured else assumed
    tokens = range(options.tokens)
    wanted = [(component, rows) for component in cache.components if (rows := component.wanted(tokens))]
    if not wanted:
        every = min((component.row_tokens, component.name) for component in cache.components)
        raise LayoutError(f"--tokens {options.tokens}: {every[1]} has a row every {every[0]} tokens")
    shown = [_shown(options, component, rows, (source, target), costs) for component, rows in wanted]
    if options.svg:
        _draw(options.svg, shown, source, target)
    if options.as_json:
        answer = _as_data(options, shown)
        typer.echo(json.dumps(answer | (link_as_data(measured, assumed) if measured else {})))
        return
    _print(options, shown, source, target)
    if cache.note:
        typer.echo(cache.note)
    if measured:
        typer.echo(f"calibrated: {measured.why(assumed)}")


def _shown(
    options: PlanOptions, component: Component, rows: range, fleets: tuple[FleetText, FleetText], costs: Costs
) -> _Shown:
    from kvmover.plan import Plan, Replicas
    from kvmover.plan.cost import BY_HOST, BY_WIRE
    from kvmover.plan.explain import explain

    source, target = fleets
    plan = Plan(component, source.fleet, target.fleet, rows.start, rows.stop, Replicas(options.replicas))
    among = BY_HOST if options.one_host else BY_WIRE
    return _Shown(plan, list(explain(plan, source, target, costs, among)))


def _as_data(options: PlanOptions, shown: list[_Shown]) -> dict[str, object]:
    """Returns the JSON contract: of a model its components and their total, otherwise the single plan."""
    plans = [each.as_data() for each in shown]
    if options.model is None:
        return plans[0]
    total = sum(leg.nbytes for each in shown for leg in each.legs)
    return {"model": options.model, "components": plans, "total_bytes": total}


def _print(options: PlanOptions, shown: list[_Shown], source: FleetText, target: FleetText) -> None:
    from kvmover.tools.plan_views.plan_table import MOST_LEGS, print_plan, print_sums

    for each in shown:
        print_plan(each.plan, source, target, each.legs, len(each.legs) if options.every_leg else MOST_LEGS)
        if len(shown) > 1:
            typer.echo()
    if len(shown) > 1:
        print_sums([(each.plan, each.legs) for each in shown])


def _draw(path: Path, shown: list[_Shown], source: FleetText, target: FleetText) -> None:
    """Draw all plans below each other on one sheet. Raises KvmoverError if it cannot be written."""
    from kvmover.tools.plan_views.plan_picture import draw
    from kvmover.tools.plan_views.svg import below

    pictures = [draw(each.plan, source, target, each.legs) for each in shown]
    _write(path, pictures[0] if len(pictures) == 1 else below(pictures))


def _cache(given: PlanOptions) -> ModelCache:
    """Returns the components from the options, completed by the model's configuration. Raises LayoutError."""
    from kvmover.plan.model_config import ModelCache

    if given.component is not None and "=" in given.component:
        return ModelCache((_component_by_fields(given, given.component),))
    if given.model is not None:
        return _of_model(given, given.model)
    if given.layers is None:
        raise LayoutError("--layers or --model is needed: nothing says how many layers there are")
    return ModelCache((_component(given, given.component or "attention", given.layers),))


def _of_model(given: PlanOptions, model: str) -> ModelCache:
    """Returns the model's components, or only the one named; given sizes replace the model's."""
    cache = cache_of_model(model, given.dtype, given.assume)
    if given.component is not None:
        named = {each.name: each for each in cache.components}
        if given.component not in named:
            raise LayoutError(f"--component {given.component}, and {model} is of {', '.join(named)}")
        cache = replace(cache, components=(named[given.component],))
    for name in ("layers", *_SIZES):
        if (value := getattr(given, name)) is not None:
            cache = replace(cache, components=(_resized(cache, name, value),))
    return cache


def cache_of_model(model: str, dtype: str | None, assume: Literal["attention"] | None) -> ModelCache:
    """Returns the cache of a public model by its name, or of a `config.json`, or its folder.

    `assume`: take a model of any type by its keys. Raises LayoutError.
    """
    from kvmover.plan.model_config import KNOWN_TYPES, cache_of, read_config
    from kvmover.plan.public_models import public_config

    path = Path(model)
    config = read_config(path) if path.exists() else public_config(model)
    try:
        return cache_of(config, dtype, None if assume else KNOWN_TYPES)
    except LayoutError as error:
        hint = "; --assume attention takes it by its keys" if "model_type" in str(error) else ""
        raise LayoutError(f"{model}: {error}{hint}") from None


def _resized(cache: ModelCache, name: str, value: int) -> Component:
    """Returns the single component with a size replaced. Raises LayoutError for several or an unknown size."""
    option = f"--{name.replace('_', '-')} {value}"
    if len(cache.components) > 1:
        names = ", ".join(each.name for each in cache.components)
        raise LayoutError(f"{option} is a size of one component, and the model has {names}: name one by --component")
    component = next(iter(cache.components))
    if name != "layers" and name not in _KINDS.get(component.name, ("kv_heads", "head_dim")):
        raise LayoutError(f"{option} has no meaning for component {component.name}")
    return replace(component, **{_SIZES.get(name, name): value})


def _component_by_fields(given: PlanOptions, text: str) -> Component:
    from kvmover.plan.fleet_text import component_of

    for name in ("model", "layers", "dtype", *_SIZES):
        if (value := getattr(given, name)) is not None:
            raise LayoutError(f"--{name.replace('_', '-')} {value} beside --component {text}, which says all sizes")
    try:
        return component_of(text)
    except LayoutError as error:
        raise LayoutError(f"--component {error}") from None


def _component(given: PlanOptions, kind: str, layers: int) -> Component:
    """Make a component from exactly the sizes of its kind. Raises LayoutError."""
    from kvmover.layout import Component

    if kind not in _KINDS:
        raise LayoutError(
            f"--component {kind!r} is not one of {', '.join(_KINDS)}, nor fields of one, as name=c4,layers=30"
        )
    sizes: dict[str, int | None] = {name: getattr(given, name) for name in _SIZES}
    for name, value in sizes.items():
        option = "--" + name.replace("_", "-")
        if name in _KINDS[kind] and value is None:
            raise LayoutError(f"component {kind} needs {option}")
        if name not in _KINDS[kind] and value is not None:
            raise LayoutError(f"{option} {value} has no meaning for component {kind}")
    of_kind = {name: sizes[name] or 0 for name in _KINDS[kind]}
    return getattr(Component, kind)(layers, dtype=given.dtype or "bfloat16", **of_kind)


def fleet_option(option: str, text: str, components: Sequence[Component]) -> FleetText:
    """Parse a fleet in our words or an engine's; pages are of a size that fits `components` where none is given.

    Raises LayoutError naming the option.
    """
    from kvmover.plan.fleet_text import FleetText, in_our_words, usual_page

    try:
        return FleetText.parse(in_our_words(text), usual_page(components))
    except LayoutError as error:
        raise LayoutError(f"{option} {text}: {error}") from None


def _check_size(tokens: int, *fleets: FleetText) -> None:
    """Raise LayoutError for a plan that would take hours, or all memory."""
    for each in fleets:
        if each.fleet.size > _MOST_RANKS:
            raise LayoutError(f"a fleet of {each.fleet.size:,} ranks; at most {_MOST_RANKS:,} can be planned for")
        pages = -(-tokens // each.fleet.page_tokens)
        if pages > _MOST_PAGES:
            raise LayoutError(
                f"--tokens {tokens} are {pages:,} pages of {each.fleet.page_tokens}; at most {_MOST_PAGES:,} can be"
                " planned"
            )


def measured_link(calibration: Path | None, name: str | None) -> Calibration | None:
    """Returns the measurements of a link; None without a file. Raises LayoutError or PlanError."""
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
