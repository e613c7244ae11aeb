"""Peers lend each other host pages: fleets of any TP, page size, order and engine, for one model."""

from kvmover.cache.peers.loans import MOST_LOANS, HostInventory, Loan, Loans
from kvmover.cache.peers.peer_tier import Lent, PeerPrefix, PeerRead, PeerTerms, PeerTier
from kvmover.cache.peers.questions import PeerAnswer, PeerMiss, PeerQuestion

__all__ = [
    "MOST_LOANS",
    "HostInventory",
    "Lent",
    "Loan",
    "Loans",
    "PeerAnswer",
    "PeerMiss",
    "PeerPrefix",
    "PeerQuestion",
    "PeerRead",
    "PeerTerms",
    "PeerTier",
]
