"""A replay runs a public trace through the prefix tree, simulated tiers and the ledger."""

from kvmover.cache.replay.command import ReplayOptions, run_replay
from kvmover.cache.replay.config import ReplayConfig, ReplayConfigError, policy_named, write_policy_named
from kvmover.cache.replay.report import Report
from kvmover.cache.replay.simulator import Requests, Server, replay
from kvmover.cache.replay.trace import ReplayTrace, TraceOptions, read_trace
from kvmover.cache.replay.trace_reader import ReplayRequest, ReplayTraceError

__all__ = [
    "ReplayConfig",
    "ReplayConfigError",
    "ReplayOptions",
    "ReplayRequest",
    "ReplayTrace",
    "ReplayTraceError",
    "Report",
    "Requests",
    "Server",
    "TraceOptions",
    "policy_named",
    "read_trace",
    "replay",
    "run_replay",
    "write_policy_named",
]
