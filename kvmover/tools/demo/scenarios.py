"""A Scenario fixes the model and the fleets between which the demo moves requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvmover.errors import LayoutError
from kvmover.layout.component import Component
from kvmover.plan.cost import Route
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.demo.model import GQA, LATENT, ModelConfig
from kvmover.tools.demo.smollm2 import SMOLLM2, missing

#: Logit gaps of two runs over the same rows differ by 1e-14; one wrong element moves them by far more than this.
GAP_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model served by fleets of different shape."""

    name: str
    title: str
    model: ModelConfig
    src: FleetText
    dst: FleetText
    route: Route | None = None
    #: Fleets that serve one after another over a page store, instead of `src` and `dst`.
    lives: tuple[FleetText, ...] = ()
    #: Fleets that live together, serve in turn and lend each other host pages.
    lenders: tuple[FleetText, ...] = ()
    #: Memory of the keeper under `lives`, each killed before the next begins; 0: no keeper, and each ends by itself.
    keeper_bytes: int = 0
    #: Engines of each fleet, each replaced while the others serve; 0: one of each, for the whole run.
    replaced: int = 0
    #: Tolerated relative error if the fleets' stored forms differ, and tolerated change of a logit's gap.
    lossy: float = 0.0
    gap_tolerance: float = GAP_TOLERANCE
    #: Length of answers that move from the first fleet to the second while computed (0: answers stay).
    answer_tokens: int = 0
    #: True for real weights, unpacked from installed packages: the fleets answer questions.
    speaks: bool = False

    @property
    def processes(self) -> int:
        """Returns the processes needed: every fleet has its own, later ones too."""
        engines = 2 * self.replaced or 1
        return engines * sum(fleet.fleet.size for fleet in self.fleets)

    @property
    def fleets(self) -> tuple[FleetText, ...]:
        """Returns all fleets that take part, in order."""
        return self.lives or self.lenders or (self.src, self.dst)

    @property
    def unit_tokens(self) -> int:
        """Returns the tokens of a unit of comparison: every fleet's page is a whole number of units."""
        return math.gcd(*(fleet.fleet.page_tokens for fleet in self.fleets))

    @classmethod
    def of(cls, name: str, title: str, model: ModelConfig, src: str, dst: str) -> Scenario:
        """Make a scenario with the route left to the cost model."""
        return cls(name, title, model, FleetText.parse(src), FleetText.parse(dst))

    @classmethod
    def stored(cls, name: str, title: str, model: ModelConfig, *lives: str) -> Scenario:
        """Make a scenario of fleets in the order of their lives."""
        fleets = tuple(FleetText.parse(text) for text in lives)
        return cls(name, title, model, fleets[0], fleets[-1], lives=fleets)

    @classmethod
    def lent(cls, name: str, title: str, model: ModelConfig, *lenders: str) -> Scenario:
        """Make a scenario of fleets in the order in which they serve."""
        fleets = tuple(FleetText.parse(text) for text in lenders)
        return cls(name, title, model, fleets[0], fleets[-1], lenders=fleets)

    @property
    def component(self) -> Component:
        """Returns the cached component: float64 as computed, for a move never looks inside an element.

        It is bfloat16 if either fleet names a stored form, and a trained model's own dtype.
        """
        model = self.model
        dtype = "bfloat16" if model.dtype == "float64" and {self.src.form, self.dst.form} != {"auto"} else model.dtype
        return Component(model.name, model.layers, model.kv, model.kv_heads, model.head_dim, dtype)


SCENARIOS = (
    replace(
        Scenario.of(
            "smollm2",
            "SmolLM2-135M-Instruct, 3 KV heads, TP3 to TP1: English moved, migrated in mid-sentence, and after a kill",
            SMOLLM2,
            "tp=3,page=16,order=NHD",
            "tp=1,page=64,order=HND",
        ),
        gap_tolerance=1e-2,
        speaks=True,
    ),
    Scenario.of(
        "gqa",
        "GQA, 8 KV heads, TP4 to TP2, pages of 16 in NHD to pages of 64 in HND",
        replace(GQA, kv_heads=8),
        "tp=4,page=16,order=NHD",
        "tp=2,page=64,order=HND",
    ),
    Scenario.of(
        "replicated-dst",
        "GQA, 2 KV heads, TP1 to TP4: each head lands on two ranks",
        GQA,
        "tp=1,page=16,order=NHD",
        "tp=4,page=16,order=HND",
    ),
    Scenario.of(
        "replicated-both",
        "GQA, 2 KV heads, TP4 to TP8: heads replicated on both sides",
        GQA,
        "tp=4,page=16,order=NHD",
        "tp=8,page=32,order=NHD",
    ),
    Scenario.of(
        "uneven",
        "6 KV heads, TP3 to TP2: neither size divides the other",
        replace(GQA, query_heads=6, kv_heads=6, mlp=96),
        "tp=3,page=16,order=HND",
        "tp=2,page=24,order=NHD",
    ),
    Scenario.of(
        "pipeline",
        "GQA, 4 KV heads, PP2 x TP2 to TP2",
        replace(GQA, kv_heads=4),
        "tp=2,pp=2,page=16,order=NHD",
        "tp=2,page=32,order=page-layer-kv-head-token-dim",
    ),
    replace(
        Scenario.of(
            "latent",
            "MLA latent, TP4 to TP2: pages striped over the replicas, layers interleaved on the wire",
            LATENT,
            "tp=4,page=16,order=NHD",
            "tp=2,page=64,order=NHD",
        ),
        route=Route.PACKED,  # few enough runs to go direct, which would not show the interleaving
    ),
    replace(
        Scenario.of(
            "mapped",
            "GQA, 2 KV heads, TP2 to TP1, pools in shared memory: each rank copies into the other's pages",
            GQA,
            "tp=2,page=16,order=NHD",
            "tp=1,page=64,order=HND",
        ),
        route=Route.MAPPED,
    ),
    replace(
        Scenario.of(
            "fp8",
            "GQA, 4 KV heads, TP4 in bfloat16 to TP2 in fp8: converted as it is gathered, half the bytes on the wire",
            replace(GQA, kv_heads=4),
            "tp=4,page=16,order=NHD,dtype=bfloat16",
            "tp=2,page=64,order=HND,dtype=fp8_e4m3",
        ),
        lossy=0.0625,
        gap_tolerance=0.5,
    ),
    replace(
        Scenario.of(
            "migrate",
            "GQA, 4 KV heads: an answer begins on TP2 and goes on on TP1 with pages of 64, moved while it is computed",
            replace(GQA, kv_heads=4),
            "tp=2,page=16,order=NHD",
            "tp=1,page=64,order=HND",
        ),
        answer_tokens=64,
    ),
    Scenario.stored(
        "storage",
        "GQA, 8 KV heads, TP4, then TP2, then TP4 again: each starts empty, over one page store",
        replace(GQA, kv_heads=8),
        "tp=4,page=16,order=NHD",
        "tp=2,page=16,order=HND",
        "tp=4,page=16,order=NHD",
    ),
    Scenario.lent(
        "peer",
        "GQA, 8 KV heads, TP4, TP2 and TP1 by turns, each from the others' hosts; TP4 is killed as it lends",
        replace(GQA, kv_heads=8),
        "tp=4,page=16,order=NHD",
        "tp=2,page=32,order=HND",
        "tp=1,page=64,order=NHD",
    ),
    replace(
        Scenario.stored(
            "keeper",
            "GQA, 8 KV heads, TP4, killed with SIGKILL, and back as TP8: a keeper has what it had committed",
            replace(GQA, kv_heads=8),
            "tp=4,page=16,order=NHD",
            "tp=8,page=16,order=HND",
        ),
        keeper_bytes=256 << 20,
    ),
    replace(
        Scenario.of(
            "rolling",
            "GQA, 2 KV heads, two engines of TP2 and two of TP1: one after another is replaced, two of them by kill -9",
            GQA,
            "tp=2,page=16,order=NHD",
            "tp=1,page=64,order=HND",
        ),
        replaced=2,
    ),
)


def choose(names: tuple[str, ...]) -> tuple[Scenario, ...]:
    """Returns the named scenarios in order; if no name is given, all whose packages are installed.

    Raises LayoutError for an unknown name.
    """
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for name in names:
        if name not in known:
            raise LayoutError(f"unknown scenario {name!r}; known are {', '.join(known)}")
    named = tuple(known[name] for name in names)
    return named or tuple(each for each in SCENARIOS if not each.speaks or not missing())
