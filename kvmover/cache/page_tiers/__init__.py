"""Page tiers hold pages by name behind one interface: the page store, and the host memory of other engines."""

from kvmover.cache.page_tiers.page_tier import FinishedJob, PageJob, PageRequest, PageTier, PageVerb
from kvmover.cache.page_tiers.remote_tier import LENT, RemoteTier
from kvmover.cache.page_tiers.store_tier import DROPPED, StoredPages, StoreTier, StoreWorker, has_become

__all__ = [
    "DROPPED",
    "LENT",
    "FinishedJob",
    "PageJob",
    "PageRequest",
    "PageTier",
    "PageVerb",
    "RemoteTier",
    "StoreTier",
    "StoreWorker",
    "StoredPages",
    "has_become",
]
