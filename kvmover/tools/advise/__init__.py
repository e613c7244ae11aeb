"""`kvmover advise` estimates KV's share of the time to first token, by shapes and sizes of fleets."""

from kvmover.tools.advise.advise_command import AdviseOptions, run_advise
from kvmover.tools.advise.candidate import Advice, AdviseError, Candidate, TierRates, advice, cheapest, waits
from kvmover.tools.advise.prefill_replay import Prefills, prefills
from kvmover.tools.advise.transfer_table import LinkCosts, TransferPoint, TransferTable, transfer_table

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
