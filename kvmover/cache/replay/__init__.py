"""Replaying public traces through the prefix tree, simulated tiers and the ledger."""

from kvmover.cache.replay.config import Setup, SetupError
from kvmover.cache.replay.report import Report
from kvmover.cache.replay.simulator import Server, replay
from kvmover.cache.replay.trace import Request, TraceError, read_trace

__all__ = ["Report", "Request", "Server", "Setup", "SetupError", "TraceError", "read_trace", "replay"]
