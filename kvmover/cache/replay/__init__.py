"""A replay runs a public trace through the prefix tree, simulated tiers and the ledger."""

from kvmover.cache.replay.command import ReplayOptions, run_replay
from kvmover.cache.replay.config import ReplayConfig, ReplayConfigError, policy_named
from kvmover.cache.replay.report import Report
from kvmover.cache.replay.simulator import Server, replay
from kvmover.cache.replay.trace import ReplayRequest, ReplayTraceError, read_trace

__all__ = [
    "ReplayConfig",
    "ReplayConfigError",
    "ReplayOptions",
    "ReplayRequest",
    "ReplayTraceError",
    "Report",
    "Server",
    "policy_named",
    "read_trace",
    "replay",
    "run_replay",
]
