"""`kvmover advise` says what moving KV adds to the time to first token, for shapes and sizes of fleets."""

from kvmover.advise.candidate import Advice, AdviseError, Candidate, TierRates, advice, cheapest, waits
from kvmover.advise.command import AdviseOptions, run_advise
from kvmover.advise.prefill_replay import Prefills, prefills
from kvmover.advise.transfer_table import LinkCosts, TransferPoint, TransferTable, transfer_table

__all__ = [
    "Advice",
    "AdviseError",
    "AdviseOptions",
    "Candidate",
    "LinkCosts",
    "Prefills",
    "TierRates",
    "TransferPoint",
    "TransferTable",
    "advice",
    "cheapest",
    "prefills",
    "run_advise",
    "transfer_table",
    "waits",
]
