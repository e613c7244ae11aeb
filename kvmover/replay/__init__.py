"""Replaying public traces through the prefix tree, simulated tiers and the ledger."""

from kvmover.replay.report import Report
from kvmover.replay.run import replay
from kvmover.replay.server import Server
from kvmover.replay.setup import Setup, SetupError
from kvmover.replay.trace import Request, TraceError, read_trace

__all__ = ["Report", "Request", "Server", "Setup", "SetupError", "TraceError", "read_trace", "replay"]
