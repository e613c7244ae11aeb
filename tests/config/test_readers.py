"""A key is a promise that something reads it: what the parts read of their settings, and which of them are handed any.

The settings that the parts are given here note who reads them. Checks and copies of a section by itself do not count,
nor does what the configuration does with them before it hands them out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvmover
from kvmover import cli, config
from kvmover.config import Loaded, Settings, keys, load
from kvmover.engines.common import Cards, Neighbours, ServedWeights, Upkeep, identified, open_peer_tier, pin_limits
from kvmover.engines.sglang.pd_exchange import Exchange
from kvmover.errors import TransportError
from kvmover.layout import PACKED_ORDER, Component, Fleet, Pool, PoolSpec
from kvmover.observe.observers import Observers
from kvmover.store import Namespace, PagePart, PageStore, memory_of_buffer
from kvmover.tools.doctor.host_checks import configuration
from kvmover.tools.doctor.process_checks import Status
from kvmover.transfer import Model, Mover, Place, Progress
from kvmover.transport import LoopbackNetwork, LoopbackTransport

PACKAGE = Path(kvmover.__file__).parent
CACHE, TOKENS = Component.attention(2, kv_heads=2, head_dim=8, dtype="float32"), 16
SPACE = Namespace("model", "", TOKENS)

NAMES = {key.name for key in keys()}

#: What a dataclass does with its own fields.
_OWN = {"__post_init__", "__eq__", "__hash__", "__repr__"}


#: Modules that a dataclass has its own fields checked by.
_CHECKS = ("kvmover.fields",)


class Noted:
    """Settings whose fields note that they are read, and the names of those that were."""

    def __init__(self, settings: Settings) -> None:
        self.read: set[str] = set()
        self.settings: Settings = self._noting(settings, ())

    def _noting(self, section: Any, path: tuple[str, ...]) -> Any:
        kind, names, read = type(section), {field.name for field in fields(section)}, self.read

        def noted(own: Any, name: str) -> object:
            if name in names and is_reader(sys._getframe(1)):
                read.add(".".join((*path, name)))
            return object.__getattribute__(own, name)

        made = object.__new__(type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": noted}))
        for name in names:
            value = getattr(section, name)
            object.__setattr__(made, name, self._noting(value, (*path, name)) if is_dataclass(value) else value)
        return made


def is_reader(frame: FrameType | None) -> bool:
    """Whether a part of kvmover, itself or by a method of the settings, is what reads."""
    while frame is not None and frame.f_globals["__name__"].startswith(("kvmover.config.", *_CHECKS)):
        frame = frame.f_back
    name = frame.f_globals["__name__"] if frame else ""
    return frame is not None and name.startswith("kvmover.") and frame.f_code.co_name not in _OWN


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    environ = {
        "KVMOVER_STORE_ROOT": str(tmp_path),
        "KVMOVER_SECURITY_SHARED_KEY_FILE": str(key),
        "KVMOVER_LOGGING_LEVEL": "error",
        "KVMOVER_LOGGING_FILE": str(tmp_path / "log"),
        "KVMOVER_METRICS_PORT": "0",
        "KVMOVER_RECORD_RUN_LOG": str(tmp_path / "run.jsonl"),
        "KVMOVER_MOVER_SANDBOX_BYTES": "0",
        "KVMOVER_MOVER_ARENA_BYTES": "64KiB",
        "KVMOVER_MOVER_COSTS_CHUNK_BYTES": "16KiB",
        "KVMOVER_MOVER_SILENCE_S": "0.2",
        "KVMOVER_MOVER_LEASE_S": "0.2",
        "KVMOVER_MOVER_PING_S": "0.05",
        "KVMOVER_MOVER_DRAIN_S": "0.05",
        "KVMOVER_PEERS_ADDRESS": "127.0.0.1:1",
    }
    return Noted(load(environ=environ).settings)


def use_movers(settings: Settings) -> None:
    """A request lands, its source dies and is not found again, and a thread waits for another that never comes."""
    network, clock = LoopbackNetwork(), [1000.0]
    fitted, fleet = settings.mover_config(), Fleet(page_tokens=4)

    def mover(engine: str) -> Mover:
        pool = Pool.zeros(PoolSpec.dense(CACHE, fleet.shard(CACHE, 0, 1), 8, fleet.page_tokens, "NHD"))
        wire = LoopbackTransport(network, engine, lambda: clock[0])
        return Mover(wire, Model("toy", (CACHE,)), Place(engine, fleet, 0), [pool], fitted, lambda: clock[0])

    def turn(seconds: float) -> None:
        for _ in range(40):
            clock[0] += seconds / 40
            for each in (src, dst, idle):
                each.poll()

    src, dst, idle = mover("p"), mover("d"), mover("q")
    src.connect(dst.card)
    idle.connect(dst.card)
    turn(0.0)
    both = src.send("r", [[0, 1]]), dst.receive("r", "p", range(8), [[2, 3]])
    turn(0.0)
    assert all(transfer.landed().nbytes for transfer in both)
    network.cut("p")
    turn(2 * fitted.silence_s + fitted.backoff.first_s)
    with closing(src), closing(idle), closing(Progress(dst, settings.progress)) as progress:
        progress.begin(lambda own: own.receive("s", "q", range(8), [[2, 3]])).result()
        for _ in range(3):  # each ends a nap
            progress.snapshot()


def use_store(settings: Settings) -> None:
    """A page is stored and read, and looked after."""
    part = PagePart.whole(CACHE, TOKENS)
    page = bytearray(part.nbytes)
    memory = memory_of_buffer(page)
    with PageStore.open(settings.store.location(), SPACE, settings.store) as store:
        store.register(memory)
        view = store.view(SPACE, part)
        assert view.put([bytes(32)], [memory.address])[0].ok
        assert view.get([bytes(32)], [memory.address])[0].ok
        Upkeep(store, settings.store).close()
        store.collect()


def use_commands(settings: Settings) -> None:
    """Commands that read the configuration for themselves, of one that is already loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "load", lambda: Loaded(settings, {}))
        assert [finding.status for finding in configuration()] == [Status.OK]
        with pytest.raises(SystemExit) as end:
            cli.main(["store", "gc", "--json"])
        assert not end.value.code


def use_observers(settings: Settings) -> None:
    with Observers(settings, "decode", 0) as observers:
        assert observers.serve()


def use_exchange(settings: Settings) -> None:
    """No other make is met where the model has no name for all, and weights have the name that they are given."""
    assert identified("tiny", settings.exchange, lambda: "7" * 64).identity == "7" * 64
    assert Exchange.of(settings).meet("127.0.0.1:1", lambda _: None) is None


def use_hints(settings: Settings) -> None:
    assert pin_limits(settings.hints).share


def use_peers(settings: Settings) -> None:
    """Nobody is where cards are looked for."""
    spec = PoolSpec.dense(CACHE, Fleet(page_tokens=TOKENS).shard(CACHE, 0, TOKENS), 2, TOKENS, PACKED_ORDER)
    pool = Pool.zeros(spec)
    with closing(LoopbackTransport(LoopbackNetwork(), "p")) as wire:
        tier = open_peer_tier(settings, ServedWeights("model", "1"), Fleet(page_tokens=TOKENS), 0, [pool], wire)
        assert tier is not None
        with closing(tier), closing(Neighbours([tier], settings, no_cards)) as neighbours:
            assert not neighbours.connected()
            assert tier.question("r", b"").engines == ()


def no_cards(host: str, port: int, timeout_s: float, allow: Sequence[str]) -> Cards:
    raise TransportError(f"no cards at {host}:{port}")


def test_every_key_is_read_by_a_part_of_kvmover(noted: Noted) -> None:
    for use in (use_movers, use_store, use_commands, use_observers, use_exchange, use_peers, use_hints):
        use(noted.settings)
    assert sorted(noted.read & NAMES) == sorted(NAMES)


def test_what_a_section_does_with_its_own_fields_is_no_reading(noted: Noted) -> None:
    settings = noted.settings
    assert replace(settings, store=replace(settings.store, ttl_s=5.0)) != settings
    assert repr(settings)
    assert hash(settings.progress)
    assert settings.mover_config()  # asked for by a test, not by a part
    assert not noted.read


#: Who is handed what: without the part that it is for, a section that parts read is read by nobody.
HANDED = {
    "engines/sglang/linker.py": {"store"},
    "engines/sglang/pd.py": {"mover", "mover_config", "progress"},
    "engines/common/neighbours.py": {"mover_config", "peers"},
    "engines/sglang/radix_tiers.py": {"hints"},
    "engines/sglang/hicache_store.py": {"store"},
    "engines/vllm/connector.py": {"exchange", "hints", "mover", "mover_config", "progress", "store"},
    "observe/observers.py": {"logging", "metrics", "record"},
    "tools/cli/store_commands.py": {"store"},
}
#: Adapters that move requests begin what an operator wants to see of them.
OBSERVED = {"engines/sglang/pd.py", "engines/vllm/connector.py"}


def names_after_settings(path: Path) -> set[str]:
    """What is asked of something called `settings`: `x` of `settings.x`, `self._settings.x` and `load().settings.x`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            of = node.value
            name = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
            found |= {node.attr} if name.lstrip("_") == "settings" else set()
    return found


@pytest.mark.parametrize("module", HANDED)
def test_an_entry_point_hands_its_sections_to_the_parts_that_read_them(module: str) -> None:
    text = (PACKAGE / module).read_text(encoding="utf-8")
    assert HANDED[module] <= names_after_settings(PACKAGE / module)
    assert ("Observers(settings" in text) == (module in OBSERVED)


def test_every_section_is_handed_to_somebody() -> None:
    """Those of `mover_config` are `mover` and `security`."""
    assert {field.name for field in fields(Settings)} == set().union(*HANDED.values()) - {"mover_config"} | {"security"}
