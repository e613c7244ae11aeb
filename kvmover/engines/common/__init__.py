"""The modules that both engines' adapters share. Each name is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmover.faces import public

if TYPE_CHECKING:
    from kvmover.engines.common.cards import CARDS_PATH, Cards, CardServer, EngineMake, caller, fetch_cards
    from kvmover.engines.common.checkpoint import (
        CheckpointDigest,
        UnknownWeights,
        combined,
        digest_of_adapter,
        digest_of_checkpoint,
    )
    from kvmover.engines.common.contract import Contract, EngineUnsupported, Need, is_of, odd_ones, of_known_fields
    from kvmover.engines.common.device_marks import Event, Mark, marks
    from kvmover.engines.common.dialling import HostNotAllowed, address_of
    from kvmover.engines.common.directories import Directory, open_directory
    from kvmover.engines.common.exchange import EXCHANGED_DTYPES, exchanged
    from kvmover.engines.common.first_token import FirstToken, ToldLogprobs, told_logprobs
    from kvmover.engines.common.hinted_requests import HINTS_KEYS, HintedRequests, outcome_of, pin_limits
    from kvmover.engines.common.loaded_weights import changes_of, check_loaded
    from kvmover.engines.common.lone_rank import RANK_DEFAULTS, RANK_KEYS, Fetched, LoneRank, RankOptions
    from kvmover.engines.common.meetings import Call, Meetings, begun_or_failed
    from kvmover.engines.common.neighbours import Neighbours, open_peer_tier, peer_wire
    from kvmover.engines.common.options import STORE_KEYS, WEIGHT_KEYS, ContentOptions, read_options
    from kvmover.engines.common.page_allotment import NoFreePages, PageAllotment
    from kvmover.engines.common.pages import (
        BounceBuffer,
        Election,
        EmptyBackend,
        InPlaceBackend,
        Numbers,
        PackedBackend,
        PoolBackend,
        as_bytes,
        election,
        of_all,
        page_ids,
    )
    from kvmover.engines.common.parallel_rank import ParallelRank, layers_of
    from kvmover.engines.common.pool_store import PoolStore
    from kvmover.engines.common.prompt_content import (
        TOKENS_ALONE,
        PromptHasher,
        PromptInput,
        PromptParts,
        adapter_parts,
        content_of,
        digest_of_tensors,
    )
    from kvmover.engines.common.request_pages import RequestPages
    from kvmover.engines.common.routing_hints import RoutingHints, TenantGroups, hints_of
    from kvmover.engines.common.store import Upkeep, open_row_tier, open_store
    from kvmover.engines.common.transfer_params import (
        LastTurn,
        Remote,
        RequestAsk,
        Running,
        Serve,
        answer,
        answer_of_turn,
        asked,
    )
    from kvmover.engines.common.weights import (
        NO_VERSION,
        UPDATED,
        RankGroup,
        ServedWeights,
        WeightSource,
        computed_once,
        digest_of_sources,
        identified,
    )

_HOMES = {
    "cards": (
        "CARDS_PATH",
        "CardServer",
        "Cards",
        "EngineMake",
        "caller",
        "fetch_cards",
    ),
    "contract": (
        "Contract",
        "EngineUnsupported",
        "Need",
        "is_of",
        "odd_ones",
        "of_known_fields",
    ),
    "dialling": ("HostNotAllowed", "address_of"),
    "directories": ("Directory", "open_directory"),
    "checkpoint": (
        "CheckpointDigest",
        "UnknownWeights",
        "combined",
        "digest_of_adapter",
        "digest_of_checkpoint",
    ),
    "page_allotment": ("PageAllotment", "NoFreePages"),
    "lone_rank": ("RANK_DEFAULTS", "RANK_KEYS", "Fetched", "LoneRank", "RankOptions"),
    "pool_store": ("PoolStore",),
    "request_pages": ("RequestPages",),
    "loaded_weights": ("changes_of", "check_loaded"),
    "exchange": (
        "EXCHANGED_DTYPES",
        "exchanged",
    ),
    "first_token": (
        "FirstToken",
        "ToldLogprobs",
        "told_logprobs",
    ),
    "hinted_requests": (
        "HINTS_KEYS",
        "HintedRequests",
        "outcome_of",
        "pin_limits",
    ),
    "device_marks": (
        "Event",
        "Mark",
        "marks",
    ),
    "meetings": (
        "Call",
        "Meetings",
        "begun_or_failed",
    ),
    "neighbours": (
        "Neighbours",
        "open_peer_tier",
        "peer_wire",
    ),
    "options": (
        "STORE_KEYS",
        "WEIGHT_KEYS",
        "ContentOptions",
        "read_options",
    ),
    "pages": (
        "BounceBuffer",
        "Election",
        "EmptyBackend",
        "InPlaceBackend",
        "Numbers",
        "PackedBackend",
        "PoolBackend",
        "as_bytes",
        "election",
        "of_all",
        "page_ids",
    ),
    "parallel_rank": (
        "ParallelRank",
        "layers_of",
    ),
    "prompt_content": (
        "TOKENS_ALONE",
        "PromptHasher",
        "PromptInput",
        "PromptParts",
        "adapter_parts",
        "content_of",
        "digest_of_tensors",
    ),
    "routing_hints": (
        "RoutingHints",
        "TenantGroups",
        "hints_of",
    ),
    "store": (
        "Upkeep",
        "open_row_tier",
        "open_store",
    ),
    "transfer_params": (
        "LastTurn",
        "Remote",
        "RequestAsk",
        "Running",
        "Serve",
        "answer",
        "answer_of_turn",
        "asked",
    ),
    "weights": (
        "NO_VERSION",
        "UPDATED",
        "RankGroup",
        "ServedWeights",
        "WeightSource",
        "computed_once",
        "digest_of_sources",
        "identified",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CARDS_PATH",
    "EXCHANGED_DTYPES",
    "HINTS_KEYS",
    "NO_VERSION",
    "RANK_DEFAULTS",
    "RANK_KEYS",
    "STORE_KEYS",
    "TOKENS_ALONE",
    "UPDATED",
    "WEIGHT_KEYS",
    "BounceBuffer",
    "Call",
    "CardServer",
    "Cards",
    "CheckpointDigest",
    "ContentOptions",
    "Contract",
    "Directory",
    "Election",
    "EmptyBackend",
    "EngineMake",
    "EngineUnsupported",
    "Event",
    "Fetched",
    "FirstToken",
    "HintedRequests",
    "HostNotAllowed",
    "InPlaceBackend",
    "LastTurn",
    "LoneRank",
    "Mark",
    "Meetings",
    "Need",
    "Neighbours",
    "NoFreePages",
    "Numbers",
    "PackedBackend",
    "PageAllotment",
    "ParallelRank",
    "PoolBackend",
    "PoolStore",
    "PromptHasher",
    "PromptInput",
    "PromptParts",
    "RankGroup",
    "RankOptions",
    "Remote",
    "RequestAsk",
    "RequestPages",
    "RoutingHints",
    "Running",
    "Serve",
    "ServedWeights",
    "TenantGroups",
    "ToldLogprobs",
    "UnknownWeights",
    "Upkeep",
    "WeightSource",
    "adapter_parts",
    "address_of",
    "answer",
    "answer_of_turn",
    "as_bytes",
    "asked",
    "begun_or_failed",
    "caller",
    "changes_of",
    "check_loaded",
    "combined",
    "computed_once",
    "content_of",
    "digest_of_adapter",
    "digest_of_checkpoint",
    "digest_of_sources",
    "digest_of_tensors",
    "election",
    "exchanged",
    "fetch_cards",
    "hints_of",
    "identified",
    "is_of",
    "layers_of",
    "marks",
    "odd_ones",
    "of_all",
    "of_known_fields",
    "open_directory",
    "open_peer_tier",
    "open_row_tier",
    "open_store",
    "outcome_of",
    "page_ids",
    "peer_wire",
    "pin_limits",
    "read_options",
    "told_logprobs",
]


def __getattr__(name: str) -> object:
    return public(__name__, _HOME, name)
