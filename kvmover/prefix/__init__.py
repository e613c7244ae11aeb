"""Which pages already hold the KV of a prompt: pure Python, no torch."""

from kvmover.prefix.tree import Match, PrefixTree

__all__ = ["Match", "PrefixTree"]
