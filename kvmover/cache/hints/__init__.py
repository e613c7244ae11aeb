"""Hints of an orchestrator, carried out on a prefix tree and its tiers or refused with a reason. Needs no torch."""

from kvmover.cache.hints.actions import (
    Declined,
    DemoteHint,
    FetchHint,
    Hint,
    HintAction,
    HintAnswer,
    HintMet,
    HintRefusal,
    HintRefused,
    LeaseHint,
    PinHint,
    PrefetchHint,
    RetainHint,
    ShareHint,
    read_hints,
    read_source,
)
from kvmover.cache.hints.desk import HintDesk, HintedTiers
from kvmover.cache.hints.pin_collector import PinCollector, PinGauges
from kvmover.cache.hints.pins import Pin, PinLimits, PinnedPool, Pins, Prefix
from kvmover.errors import HintError

__all__ = [
    "Declined",
    "DemoteHint",
    "FetchHint",
    "Hint",
    "HintAction",
    "HintAnswer",
    "HintDesk",
    "HintError",
    "HintMet",
    "HintRefusal",
    "HintRefused",
    "HintedTiers",
    "LeaseHint",
    "Pin",
    "PinCollector",
    "PinGauges",
    "PinHint",
    "PinLimits",
    "PinnedPool",
    "Pins",
    "PrefetchHint",
    "Prefix",
    "RetainHint",
    "ShareHint",
    "read_hints",
    "read_source",
]
