"""CONTRIBUTING.md's recipes, followed: a component, a transport, files and an engine that kvmover has never heard of.

The conformance tests of transports and stores hold `Mailbox` and `OneCallFiles` to what every other one is held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch

from kvmover import Component, Fleet, Model, Mover, MoverConfig, Place, Pool, PoolSpec, Route, Transport
from kvmover.config import ConfigError, Settings
from kvmover.engines.common import read_options
from kvmover.observe.observers import Observers
from kvmover.store import Files
from tests.docs.test_docs_paths import ROOT
from tests.store.one_call_files import OneCallFiles
from tests.transport.mailbox import Mailbox

#: Three components with nothing in common but that they are numbers; no constructor knows the first two.
STRANGE = (
    Component("strange", layers=3, kv=5, heads=6, dim=7, dtype="uint8"),
    Component("strange window", layers=3, kv=1, heads=2, dim=48, dtype="int16", window=20),
    Component.state("strange state", layers=3, heads=4, dim=11, dtype="float32", states=2),
)
TOKENS = 50


class Engine:
    """A fleet whose ranks have pools full of poison, and a mover over a mailbox."""

    def __init__(self, street: dict[str, Mailbox], name: str, fleet: Fleet, config: MoverConfig, order: str) -> None:
        self.fleet, self.pools, self.movers = fleet, list[list[Pool]](), list[Mover]()
        for rank in range(fleet.size):
            specs = [PoolSpec.dense(c, fleet.shard(c, rank, TOKENS), 16, fleet.page_rows(c), order) for c in STRANGE]
            pools = [Pool.shared(spec) if config.route is Route.MAPPED else Pool.zeros(spec) for spec in specs]
            for pool in pools:
                pool.tensors[0].fill_(0xEE)
            transport = Mailbox(street, f"{name}-{rank}")
            self.movers.append(Mover(transport, Model("strange", STRANGE), Place(name, fleet, rank), pools, config))
            self.pools.append(pools)

    def pages(self) -> list[list[int]]:
        """A page table for each component, backwards from page 14 on: pages 15 and those below are neighbours."""
        return [[14 - n for n in range(-(-c.extent(TOKENS) // self.fleet.page_rows(c)))] for c in STRANGE]

    def rows(self, component: int, rank: int) -> torch.Tensor:
        """Bytes of the request as a rank holds it: [layer, kv, position, head, byte of dim]."""
        pool, table = self.pools[rank][component], self.pages()[component]
        spec = STRANGE[component]
        planes = [pool.plane(layer, kv)[table].flatten(0, 1) for layer in range(spec.layers) for kv in range(spec.kv)]
        rows = torch.stack([plane.contiguous().view(torch.uint8) for plane in planes])
        return rows.unflatten(0, (spec.layers, spec.kv))[:, :, : spec.extent(TOKENS)]


@pytest.mark.parametrize(("verb", "route"), [*product(("push", "pull"), Route)])
def test_a_component_nobody_has_heard_of_moves_over_a_transport_nobody_has_heard_of(verb: str, route: Route) -> None:
    street = dict[str, Mailbox]()
    config = MoverConfig(arena_bytes=1 << 20, verb=verb, route=route)  # type: ignore[arg-type]
    src = Engine(street, "prefill", Fleet(tp=2, page_tokens=8), config, "NHD")
    dst = Engine(street, "decode", Fleet(page_tokens=16), config, "HND")
    for number, pools in enumerate(src.pools):
        for pool in pools:
            pool.tensors[0].random_(0, 0xEE, generator=torch.Generator().manual_seed(number))
    (decode,) = dst.movers
    for mover in src.movers:
        decode.connect(mover.card)
    sent = [mover.send("request", src.pages()) for mover in src.movers]
    received = decode.receive("request", "prefill", range(TOKENS), dst.pages())
    while not all(transfer.ended for transfer in (received, *sent)):
        for mover in (*src.movers, decode):
            mover.poll()
    received.landed()
    for number, component in enumerate(STRANGE):
        wanted = component.wanted(range(TOKENS))
        truth = torch.cat([src.rows(number, rank) for rank in range(2)], dim=3)
        landed = dst.rows(number, 0)
        positions = slice(wanted.start, wanted.stop)
        assert torch.equal(landed[:, :, positions], truth[:, :, positions]), component.name
        assert landed[:, :, : wanted.start].eq(0xEE).all(), "positions before the window are not touched"
        pool = dst.pools[0][number]
        assert pool.plane(0, 0)[15].contiguous().view(torch.uint8).eq(0xEE).all(), "nor is a neighbouring page"
    for mover in (*src.movers, decode):
        mover.close()


def test_what_the_recipes_make_fits_the_protocols() -> None:
    transport: Transport = Mailbox({}, "one")
    files: Files = OneCallFiles()
    assert transport.name == transport.name
    assert files.name == "a call a run"
    methods = {name for name in vars(Transport) if not name.startswith("_")}
    assert len(methods) == 14, "CONTRIBUTING says how many there are"
    assert methods <= set(dir(transport))


class ToyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator says to the toy's adapter alone."""

    layer_wise: bool = False


def test_an_adapters_options_are_its_own_or_stand_for_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVMOVER_CONFIG", raising=False)
    log = tmp_path / "run.jsonl"
    keys = {"verb": "mover.verb", "run_log": "record.run_log"}
    said = {"layer_wise": True, "verb": "pull", "run_log": str(log)}
    options, settings = read_options(said, ToyOptions, keys, "the toy's JSON")
    assert options.layer_wise
    assert settings.mover.verb == "pull"
    with Observers(settings, "toy", 0) as observers:
        assert isinstance(observers, Observers)
    assert log.exists()
    with pytest.raises(ConfigError, match="the toy's JSON.*shove"):
        read_options({"shove": 1}, ToyOptions, keys, "the toy's JSON")
    assert read_options({}, ToyOptions, keys, "the toy's JSON")[1] == Settings()


def test_the_recipes_send_a_reader_to_what_was_made_by_them() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    made: Sequence[str] = ("tests/transport/mailbox.py", "tests/store/one_call_files.py", "tests/docs/test_recipes.py")
    assert [path for path in made if f"`{path}`" not in text] == []
