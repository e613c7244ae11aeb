"""Whatever takes a member of an enum takes its word, which then counts as the member does, and refuses all others."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FunctionType
from typing import Any, cast

import numpy as np
import pytest
import torch

import kvmover
from kvmover.cache.ledger import Credit, FaultPolicy, Ledger, Loss
from kvmover.cache.prefix import (
    FULL,
    ActionList,
    EvictionGranularity,
    FreePages,
    KeyUnits,
    PrefixError,
    PrefixNamespace,
    PrefixTree,
    Tier,
    WriteBack,
)
from kvmover.cache.prefix.keys import RadixKey
from kvmover.cache.prefix.kv_events import EventForm, block_removed
from kvmover.cache.prefix.publisher import EventPublisher
from kvmover.cache.prefix.tree_config import TreeConfig
from kvmover.cache.tiers.host_memory import Reach, host_pool
from kvmover.cache.tiers.tier_policy import TierPolicy
from kvmover.cache.tiers.tiered_pool import HostTier
from kvmover.config.settings import LoggingSettings
from kvmover.errors import KvmoverError
from kvmover.kernels import bulk
from kvmover.kernels.copy_engine import CopyEngine, EngineUnavailable
from kvmover.kernels.region import Region, Side
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan import Plan
from kvmover.plan.cost import RDMA, Costs, Route
from kvmover.store import Access, PlainFiles, Policy, StoragePlugin
from kvmover.store.files import OpenFile
from kvmover.tools.top_keys import TopState
from kvmover.transfer import Model, Mover, Place, Service
from kvmover.transfer.config import MoverConfig
from kvmover.transport import Descriptors, LoopbackNetwork, LoopbackTransport, Memory, MemoryKind

#: What callers make, by an example.
GIVEN: dict[type, Any] = {
    Costs: RDMA,
    Descriptors: Descriptors.runs(MemoryKind.HOST, np.array([4096]), 256),
    Fleet: Fleet(),
    HostTier: HostTier(8),
    LoggingSettings: LoggingSettings(),
    Memory: Memory(MemoryKind.HOST, 4096, 256),
    MoverConfig: MoverConfig(),
    Plan: Plan(Component.attention(1, 1, 8, "uint8"), Fleet(), Fleet(), 0, 1),
    Policy: Policy(),
    TierPolicy: TierPolicy(),
    TopState: TopState(),
    TreeConfig: TreeConfig(16),
}

#: What kvmover makes itself, for callers to read or for its own use.
TOLD = {
    "cache.hints.actions.HintRefused",
    "cache.prefix.copies.CopyRecord",
    "cache.page_tiers.page_tier.FinishedJob",
    "cache.peers.questions.PeerAnswer",
    "cache.tiers.restore_driver.Restore",
    "cache.tiers.tier_storage.StorageRead",
    "tools.check.pair_seen.ServerSeen",
    "tools.check.pair_verdict.CheckVerdict",
    "tools.demo.scenarios.Scenario",
    "exposition.Metric",
    "kernels.cuda_exports.Export",
    "kernels.launch.Tuned",
    "tools.doctor.process_checks.Finding",
    "plan.cost.Choice",
    "plan.calibration._Design",
    "store.deletion.Look",
    "store.objects.Failure",
    "store.record.Record",
    "store.store_results.GotResult",
    "store.segment.Segment",
    "store.store_results.PutResult",
    "transfer.destination.destination_attempts.ReceiveAttempt",
    "transfer.memory.copier.Copier",
    "transfer.memory.mapped.Mappings",
    "transfer.memory.programs.Rules",
    "transfer.result.Result",
    "transfer.source.source_attempts.Request",
}


def dataclasses() -> Iterator[type]:
    """Of all of kvmover but the engines' adapters, which need an engine."""
    for found in pkgutil.walk_packages(kvmover.__path__, "kvmover."):
        if not found.name.startswith("kvmover.engines"):
            module = importlib.import_module(found.name)
            classes = (each for each in vars(module).values() if isinstance(each, type) and is_dataclass(each))
            yield from (each for each in classes if each.__module__ == found.name)


def enum_fields(kind: type) -> dict[str, type[Enum]]:
    """Annotations are text; one that names no enum of its module, alone or beside None, is of no interest here."""
    module = vars(importlib.import_module(kind.__module__))
    found: dict[str, type[Enum]] = {}
    for field in fields(kind):
        for part in str(field.type).split(" | "):
            named = module.get(part)
            if isinstance(named, type) and issubclass(named, Enum):
                found[field.name] = named
    return found


def name(kind: type) -> str:
    return f"{kind.__module__.removeprefix('kvmover.')}.{kind.__name__}"


def word(each: Enum) -> str:
    return each.value if isinstance(each.value, str) else each.name.lower()


FIELDS = [(kind, field, enum) for kind in GIVEN for field, enum in enum_fields(kind).items()]


def test_every_dataclass_with_an_enum_is_known_here_as_given_or_as_told():
    found = {name(kind) for kind in dataclasses() if enum_fields(kind)}
    assert found == TOLD | {name(kind) for kind in GIVEN}


@pytest.mark.parametrize(("kind", "field", "enum"), FIELDS, ids=[f"{k.__name__}.{f}" for k, f, _ in FIELDS])
def test_a_field_takes_each_word_as_the_member_that_it_names(kind: type, field: str, enum: type[Enum]):
    for each in enum:
        assert getattr(replace(GIVEN[kind], **{field: word(each)}), field) is each
        assert getattr(replace(GIVEN[kind], **{field: each}), field) is each


@pytest.mark.parametrize(("kind", "field", "enum"), FIELDS, ids=[f"{k.__name__}.{f}" for k, f, _ in FIELDS])
@pytest.mark.parametrize("bad", ["teleport", "", 1, True, ["none"], b"none"], ids=repr)
def test_a_field_refuses_every_other_value_and_names_it_and_all_words(
    kind: type, field: str, enum: type[Enum], bad: object
):
    with pytest.raises(KvmoverError) as refused:
        replace(GIVEN[kind], **{field: bad})
    message = str(refused.value)
    assert f"{field} = {bad!r}" in message
    assert all(word(each) in message for each in enum)


FREEING = ActionList(tuple(FreePages(FULL, tier, np.array([int(tier)], np.int32)) for tier in Tier))
FREED = list(Tier)
BYTES = Component.attention(1, 1, 8, "uint8")
POOL = PoolSpec.dense(BYTES, Fleet().shard(BYTES, 0, 1), 8, 4, "NHD")


def withdrawn(reason: Any) -> object:
    """What the ledger says was lost of an account of 16 hit tokens, of which none was there after all."""
    ledger = Ledger()
    ledger.matched("r", 20, 16, 0.0)
    ledger.admitted("r", Credit(16))
    ledger.withdrawn("r", Credit(16), reason)
    ledger.computed("r", 20)
    account = ledger.finished("r", 1.0)
    return account and account.lost


def sent(service: Any) -> object:
    """How the transfer of a request that nobody asked for yet would be served."""
    wire, place = LoopbackTransport(LoopbackNetwork(), "p"), Place("p", Fleet(page_tokens=4), 0)
    mine = Mover(wire, Model("toy", (BYTES,)), place, [Pool.zeros(POOL)])
    transfer = mine.send("r", [[1]], service=service)
    return mine._source._requests[transfer.request].service


#: Every public function that takes a member of an enum: a call by which it is seen what was taken.
DOORS: dict[str, tuple[type[Enum], str, Callable[[Any], object]]] = {
    "cache.ledger.ledger.Ledger.__init__": (FaultPolicy, "fault", lambda given: vars(Ledger(given))["_fault"]),
    "cache.ledger.ledger.Ledger.withdrawn": (Loss, "reason", withdrawn),
    "cache.prefix.kv_events.block_removed": (Tier, "tier", lambda given: block_removed([bytes(32)], given)),
    "cache.prefix.keys.RadixKey.of": (
        KeyUnits,
        "units",
        lambda given: (RadixKey.of([1, 2, 3], PrefixNamespace(), given).data, given in (KeyUnits.BIGRAM, "bigram")),
    ),
    "cache.prefix.results.ActionList.page_ids": (
        Tier,
        "tier",
        lambda given: FREED[int(FREEING.page_ids(tier=given)[0])],
    ),
    "cache.prefix.tree.PrefixTree.__init__ grain": (
        EvictionGranularity,
        "grain",
        lambda given: PrefixTree(4, grain=given).config.grain,
    ),
    "cache.prefix.tree.PrefixTree.__init__ units": (
        KeyUnits,
        "units",
        lambda given: PrefixTree(4, units=given).config.units,
    ),
    "cache.prefix.publisher.EventPublisher.__init__": (EventForm, "form", lambda given: _published(given)),
    "cache.prefix.tree.PrefixTree.path_stored": (Tier, "tier", lambda given: _path_stored(given)),
    "cache.prefix.tree.PrefixTree.ids": (Tier, "tier", lambda given: _ids(given)),
    "cache.prefix.tree.PrefixTree.sizes": (Tier, "tier", lambda given: _sizes(given)),
    "cache.tiers.host_memory.host_pool": (
        Reach,
        "reach",
        lambda given: host_pool(POOL, reach=given).tensors[0].untyped_storage().nbytes(),
    ),
    "plan.cost.Costs.cut_bytes": (
        Route,
        "route",
        lambda given: replace(RDMA, pool_chunk_bytes=1).cut_bytes(given),
    ),
    "plan.cost.Costs.us": (Route, "route", lambda given: RDMA.us(given, 1 << 20, 64)),
    "store.files.OpenFile.__init__": (Access, "access", lambda given: _opened(given)),
    "store.files.PlainFiles.__init__": (Access, "access", lambda given: vars(PlainFiles(given))["_access"]),
    "transfer.mover.Mover.send": (Service, "service", sent),
    "transport.base.Descriptors.run": (MemoryKind, "kind", lambda given: Descriptors.run(given, 4096, 256).kind),
    "transport.base.Descriptors.runs": (MemoryKind, "kind", lambda given: Descriptors.runs(given, [4096], 256).kind),
}

#: Those that hand the argument to one of the above as it is, in another thread; and a word of NIXL's own, tested below.
HANDED_ON = {
    "transfer.threads.wrappers.AsyncMover.send",
    "transfer.threads.wrappers.SharedMover.send",
    "store.nixl_files.NixlFiles.__init__",
}


def _sizes(tier: Any) -> object:
    if tier in (Tier.STORAGE, "storage"):
        return None  # refused, by the member too: tested below
    return PrefixTree(4, tiers=WriteBack()).sizes(tier=tier)


def _path_stored(tier: Any) -> object:
    tree = PrefixTree(4)
    return tree.path_stored(tree.insert([1, 2, 3, 4], [7]).node, tier, 0, 1).medium


def _published(form: Any) -> object:
    with EventPublisher("inproc://events", form=form) as publisher:
        return vars(publisher)["_history"]._form


def _ids(tier: Any) -> object:
    tree = PrefixTree(4)
    tree.insert([1, 2, 3, 4], [7])
    return tree.ids(tier=tier)


def _opened(access: Any) -> object:
    with NamedTemporaryFile() as file:
        opened = OpenFile(Path(file.name), access)
        opened.close()
        return opened.direct_works


def functions() -> Iterator[FunctionType]:
    """All that the faces of kvmover's packages have, but those of adapters, and their public methods."""
    for found in pkgutil.walk_packages(kvmover.__path__, "kvmover."):
        if not found.ispkg or found.name.startswith(("kvmover.engines", "kvmover.tools.demo")):
            continue
        face = importlib.import_module(found.name)
        for exported in (getattr(face, name) for name in getattr(face, "__all__", ())):
            held = vars(exported) if isinstance(exported, type) else {"": exported}
            for called, member in held.items():
                function = getattr(member, "__func__", member)
                public = not called.startswith("_") or (called == "__init__" and not is_dataclass(exported))
                if isinstance(function, FunctionType) and public:
                    yield function


def enums_of(function: FunctionType) -> dict[str, type[Enum]]:
    """Parameters that a member of an enum is for, alone or beside None."""
    module, found = vars(importlib.import_module(function.__module__)), dict[str, type[Enum]]()
    for parameter, annotation in function.__annotations__.items():
        for part in str(annotation).split(" | "):
            kind = module.get(part)
            if isinstance(kind, type) and issubclass(kind, Enum) and parameter != "return":
                found[parameter] = kind
    return found


def test_every_public_function_with_an_enum_is_known_here():
    found = {
        f"{function.__module__.removeprefix('kvmover.')}.{function.__qualname__}": enums_of(function)
        for function in functions()
        if enums_of(function)
    }
    doors = {(name.split(" ")[0], what): enum for name, (enum, what, _) in DOORS.items()}
    assert {(name, what): enum for name, enums in found.items() for what, enum in enums.items()} == doors | {
        (name, what): enum for name in HANDED_ON for what, enum in found.get(name, {}).items()
    }
    assert found.keys() >= HANDED_ON


@pytest.mark.parametrize(("enum", "what", "call"), DOORS.values(), ids=DOORS)
def test_an_argument_takes_words_as_a_field_does(enum: type[Enum], what: str, call: Callable[[Any], object]):
    for each in enum:
        assert call(word(each)) == call(each)
    for bad in ("teleport", 7.5, ["none"]):
        with pytest.raises(KvmoverError) as refused:
            call(bad)
        assert f"{what} = {bad!r}; it is one of {', '.join(map(word, enum))}" in str(refused.value)


def test_a_word_that_is_nearly_one_is_told_the_nearest():
    with pytest.raises(KvmoverError, match=r"'hosts'; it is one of device, host, storage; did you mean host\?"):
        PrefixTree(4).sizes(tier=cast("Tier", "hosts"))


def test_a_copy_is_made_by_the_engine_that_its_word_names():
    memory = [torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)]
    none = np.zeros(1, np.int64)
    region = Region(*(Side.of((each,), none, none, none, 8, 8) for each in memory), heads=1, tokens=1, row_bytes=8)
    bulk.move([region], engine=cast("CopyEngine", "auto"))
    assert memory[0].equal(memory[1])
    with pytest.raises(EngineUnavailable, match="engine = 'warp'; it is one of auto, rows"):
        bulk.move([region], engine=cast("CopyEngine", "warp"))


def test_the_sizes_of_a_tier_are_had_by_its_word_and_storage_has_none():
    tree = PrefixTree(4)
    tree.insert(list(range(8)), [0, 1])
    assert tree.sizes(tier=cast("Tier", "device")) == tree.sizes(tier=Tier.DEVICE) != tree.sizes(tier=Tier.HOST)
    with pytest.raises(PrefixError, match="storage"):
        tree.sizes(tier=Tier.STORAGE)
    with pytest.raises(PrefixError, match="'disk'; it is one of device, host, storage"):
        tree.sizes(tier=cast("Tier", "disk"))


def test_a_plugin_is_named_by_its_word():
    assert [StoragePlugin(word(each)) for each in StoragePlugin] == list(StoragePlugin)
    with pytest.raises(KvmoverError, match="GDS, MT"):
        StoragePlugin("GDS, MT")
