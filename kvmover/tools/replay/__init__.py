"""A replay runs a public trace through the prefix tree, simulated tiers and the ledger."""

from kvmover.tools.replay.replay_command import ReplayOptions, run_replay
from kvmover.tools.replay.replay_config import ReplayConfig, ReplayConfigError, policy_named, write_policy_named
from kvmover.tools.replay.replay_report import Report
from kvmover.tools.replay.simulator import Requests, Server, replay
from kvmover.tools.replay.trace import ReplayTrace, TraceOptions, read_trace
from kvmover.tools.replay.trace_reader import ReplayRequest, ReplayTraceError

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
