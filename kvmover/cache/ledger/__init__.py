"""The accounts of every request's tokens: what was reused, from which tier, what was lost and why."""

from kvmover.cache.ledger.account import Account, Credit, Group, LedgerError, Loss, Phase
from kvmover.cache.ledger.export import JsonLines, read_accounts
from kvmover.cache.ledger.ledger import EVERYBODY, Book, Fault, Ledger, Totals, Window
from kvmover.cache.ledger.metrics import LedgerCollector
from kvmover.cache.ledger.residency import Histogram, Residency

__all__ = [
    "EVERYBODY",
    "Account",
    "Book",
    "Credit",
    "Fault",
    "Group",
    "Histogram",
    "JsonLines",
    "Ledger",
    "LedgerCollector",
    "LedgerError",
    "Loss",
    "Phase",
    "Residency",
    "Totals",
    "Window",
    "read_accounts",
]
