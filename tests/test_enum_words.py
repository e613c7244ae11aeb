"""Whatever takes a member of an enum takes its word, which then counts as the member does, and refuses all others."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, cast

import numpy as np
import pytest

import kvmover
from kvmover.cache.ledger import FaultPolicy, Ledger
from kvmover.cache.prefix import FULL, ActionList, FreePages, PrefixError, PrefixTree, Tier
from kvmover.cache.prefix.config import TreeConfig
from kvmover.cache.tiers.policy import TierPolicy
from kvmover.cache.tiers.tiered_pool import HostTier
from kvmover.config.settings import LoggingSettings
from kvmover.errors import KvmoverError
from kvmover.layout import Component, Fleet
from kvmover.plan import Plan
from kvmover.plan.cost import RDMA, Costs
from kvmover.store import Access, PlainFiles, StoragePlugin
from kvmover.transfer.config import MoverConfig
from kvmover.transport import Descriptors, Memory, MemoryKind

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
    TierPolicy: TierPolicy(),
    TreeConfig: TreeConfig(16),
}

#: What kvmover makes itself, for callers to read or for its own use.
TOLD = {
    "cache.hints.actions.HintRefused",
    "cache.prefix.copies.CopyRecord",
    "cache.tiers.storage.StorageRead",
    "demo.scenarios.Scenario",
    "exposition.Metric",
    "kernels.cuda_exports.Export",
    "kernels.launch.Chosen",
    "kernels.launch.Tuned",
    "observe.checks.Finding",
    "observe.report_sums.PartTimes",
    "plan.cost.Choice",
    "plan.calibration._Design",
    "store.deletion.Look",
    "store.objects.Failure",
    "store.record.Record",
    "store.results.GotResult",
    "store.segment.Segment",
    "store.results.PutResult",
    "transfer.destination.attempts.ReceiveAttempt",
    "transfer.memory.copier.Copier",
    "transfer.memory.mapped.Mappings",
    "transfer.memory.programs.Rules",
    "transfer.result.Result",
    "transfer.source.attempts.Request",
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

CALLS: list[tuple[Callable[[Any], object], type[Enum], str]] = [
    (lambda given: vars(Ledger(given))["_fault"], FaultPolicy, "fault"),
    (lambda given: vars(PlainFiles(given))["_access"], Access, "access"),
    (lambda given: FREED[int(FREEING.page_ids(tier=given)[0])], Tier, "tier"),
]


@pytest.mark.parametrize(("call", "enum", "what"), CALLS, ids=[what for _, _, what in CALLS])
def test_an_argument_takes_words_as_a_field_does(call: Callable[[Any], object], enum: type[Enum], what: str):
    for each in enum:
        assert call(word(each)) is each
    with pytest.raises(KvmoverError, match=f"{what} = 'teleport'; it is one of "):
        call("teleport")


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
