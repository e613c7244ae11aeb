"""The accounts of every request's tokens: what was reused, from which tier, what was lost and why."""

from kvmover.ledger.account import Account, Credit, Group, LedgerError, Phase
from kvmover.ledger.export import JsonLines, read_accounts
from kvmover.ledger.ledger import EVERYBODY, Book, Fault, Ledger, Window
from kvmover.ledger.losses import Loss
from kvmover.ledger.metrics import LedgerCollector
from kvmover.ledger.residency import Residency
from kvmover.ledger.totals import Histogram, Totals

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
