"""Replaying public traces through the prefix tree, simulated tiers and the ledger."""

from kvmover.cache.replay.report import Report
from kvmover.cache.replay.run import replay
from kvmover.cache.replay.server import Server
from kvmover.cache.replay.setup import Setup, SetupError
from kvmover.cache.replay.trace import Request, TraceError, read_trace

__all__ = ["Report", "Request", "Server", "Setup", "SetupError", "TraceError", "read_trace", "replay"]
