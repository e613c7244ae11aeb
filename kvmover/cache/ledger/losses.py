"""Why tokens that could have been reused were computed again: one word for each cause."""

from __future__ import annotations

from enum import StrEnum


class Loss(StrEnum):
    """Reasons, in the order in which a request meets them. A token is lost for the first that applies."""

    #: Computed before, and no tier was asked to keep them: below a write threshold, or not cached by choice.
    NEVER_WRITTEN = "never_written"
    #: A tier held them and gave them up for room.
    CAPACITY_EVICTED = "capacity_evicted"
    #: Another request was computing the same tokens at the same time, or inserted them before this one could.
    CONCURRENT = "concurrent"
    #: Equal tokens in a page that is not equal as a whole.
    PARTIAL_PAGE = "partial_page"
    #: The last token of a prompt is always computed, for its logits, and the rest of its page with it.
    LAST_TOKEN = "last_token"
    #: Attention has them, and another component (sliding window, state) does not.
    COMPONENT_MISSING = "component_missing"
    #: Another rank that must load the same request holds fewer.
    RANK_MINIMUM = "rank_minimum"
    #: Too few to be worth a transfer.
    THRESHOLD = "threshold"
    #: Storage has them, and there was no room in host memory to read them into.
    HOST_CAPACITY = "host_capacity"
    #: A slower tier has them, and there was no room on the device to load them into.
    DEVICE_CAPACITY = "device_capacity"
    #: Their source was pinned by another transfer.
    BUSY = "busy"
    #: The read was not done when the request had to start.
    LATE = "late"
    #: Storage said that it has them, and could not read them.
    READ_FAILED = "read_failed"
    #: Read, and not what was written: their digest differs.
    POISONED = "poisoned"
    #: The copy to the device failed.
    LOAD_FAILED = "load_failed"
