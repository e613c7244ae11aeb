"""Replaying public traces through the prefix tree, simulated tiers and the ledger."""

from kvmover.cache.replay.config import ReplayConfig, ReplayConfigError
from kvmover.cache.replay.report import Report
from kvmover.cache.replay.simulator import Server, replay
from kvmover.cache.replay.trace import ReplayRequest, ReplayTraceError, read_trace

__all__ = [
    "ReplayConfig",
    "ReplayConfigError",
    "ReplayRequest",
    "ReplayTraceError",
    "Report",
    "Server",
    "read_trace",
    "replay",
]
