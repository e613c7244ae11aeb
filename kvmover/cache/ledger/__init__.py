"""The ledger accounts for every request's tokens: reused from which tier, lost for which reason."""

from kvmover.cache.ledger.account import (
    Account,
    AccountGroup,
    AttemptPhase,
    Credit,
    LedgerError,
    Loss,
    Prediction,
    Predictor,
)
from kvmover.cache.ledger.ledger import EVERYBODY, Book, FaultPolicy, Ledger, PredictionTotals, TimeWindow, Totals
from kvmover.cache.ledger.ledger_collector import JsonLines, LedgerCollector, Residency, read_accounts
from kvmover.exposition import DurationHistogram

__all__ = [
    "EVERYBODY",
    "Account",
    "AccountGroup",
    "AttemptPhase",
    "Book",
    "Credit",
    "DurationHistogram",
    "FaultPolicy",
    "JsonLines",
    "Ledger",
    "LedgerCollector",
    "LedgerError",
    "Loss",
    "Prediction",
    "PredictionTotals",
    "Predictor",
    "Residency",
    "TimeWindow",
    "Totals",
    "read_accounts",
]
