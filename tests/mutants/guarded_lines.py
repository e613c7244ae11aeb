"""The functions that guard memory and accounts, by part, and the tests that are run against their mutants.

A test holds each name to the code: a function that is renamed or moved is moved here too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guarded:
    """The guarded functions of a part, by module, and the paths of its tests: each a few seconds as a whole."""

    functions: dict[str, tuple[str, ...]]
    tests: tuple[str, ...]


def methods(owner: str, *names: str) -> tuple[str, ...]:
    """Returns the names of methods of a class."""
    return tuple(f"{owner}.{name}" for name in names)


def in_folder(folder: str, *names: str) -> tuple[str, ...]:
    """Returns the paths of test files of a folder below tests/."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


def schedules(*profiles: str) -> tuple[str, ...]:
    """Returns the tests of seeded schedules of whole movers, in which every invariant is checked after every step."""
    name = "tests/sim/test_simulator.py::test_every_invariant_holds_after_every_step_of_a_schedule"
    return tuple(f"{name}[{profile}-0]" for profile in profiles)


TRANSFER, STORE, PREFIX = "kvmover.transfer", "kvmover.store", "kvmover.cache.prefix"

GUARDED: dict[str, Guarded] = {
    "leases": Guarded(
        {
            f"{TRANSFER}.destination.quarantine": methods("WriteLeases", "heard", "renewed", "retire", "expire"),
            f"{TRANSFER}.source.writes": methods(
                "Writes",
                "renew",
                "lost",
                "_until",
                "_lapse",
                "_start",
                "_gathered",
                "_direct",
                "_packed",
                "forget",
                "drop",
            ),
            f"{TRANSFER}.destination.credits": ("within_share", *methods("EagerGrants", "reserve", "freed")),
            "kvmover.transport.checks": methods("Operation", "check_until"),
        },
        (
            *in_folder(
                "transfer", "source_leases", "conditions", "quarantine", "credits", "mover_pull", "mover_endings"
            ),
            *in_folder("transfer", "source_machine", "source_writes", "mapped", "lost_messages", "registrations"),
            *in_folder("transfer", "staging"),
            *in_folder("transport", "checks"),
            *schedules("drowsy", "frail"),
        ),
    ),
    "quarantine": Guarded(
        {
            f"{TRANSFER}.destination.quarantine": (
                *methods("Isolated", "is_over", "due"),
                *methods("Quarantine", "hold", "keep", "drained", "expired", "settled", "forget", "offsets"),
                *methods("Quarantine", "revoked", "outlive", "clear", "_release"),
                *methods("Retransmissions", "said", "heard", "lost", "due", "again"),
            ),
            f"{TRANSFER}.destination.claims": (
                "written",
                *methods("PageClaims", "take", "give", "sweep", "_refuse_shared"),
            ),
            f"{TRANSFER}.destination.destination_driver": methods(
                "DestinationDriver", "_isolate", "look_at_quarantine", "forget", "_settled", "lost"
            ),
        },
        (
            *in_folder("transfer", "quarantine", "conditions", "claims", "mapped", "mover_endings", "mover_pull"),
            *in_folder("transfer", "quarantined_pages", "destination_failures", "registrations", "deadlines"),
            *schedules("frail", "revoked"),
        ),
    ),
    "tombstones": Guarded(
        {
            f"{TRANSFER}.tombstones": (
                *methods("Budget", "take", "give", "kept_bytes"),
                *methods("TtlMap", "keep", "get", "forget", "expire"),
                *methods(
                    "Tombstones", "__post_init__", "close", "of", "end", "ending", "go_on_from", "reopen", "expire"
                ),
                "_bytes",
            ),
            f"{TRANSFER}.source.source_driver": (
                *methods("EarlyWants", "wait", "follow", "withdraw", "take", "lost", "drop_late", "expire", "_drop"),
                *methods("EarlyWants", "_give", "_forget"),
                *methods(
                    "SourceDriver", "_past", "_close", "_close_all", "_unknown", "_asked_again", "reopen", "expire"
                ),
            ),
        },
        (
            *in_folder("transfer", "tombstones", "early_wants", "repeated_service", "several_engines", "source_orders"),
            *in_folder("transfer", "waiting", "late_messages", "lost_messages", "hostile_peers"),
            *schedules("reordered", "hostile"),
        ),
    ),
    "arena": Guarded(
        {
            f"{TRANSFER}.memory.arena": (
                *methods("Arena", "__post_init__", "fits", "reserve", "release", "quarantine", "renew", "registration"),
                *methods(
                    "Arena", "registration_of", "reserved_by", "free_bytes", "reserved_bytes", "quarantined_bytes"
                ),
                "region_bytes",
                "slab_bytes",
                "renewal",
            ),
            "kvmover.cache.tiers.allocator": methods("FreeList", "__init__", "take", "claim", "give"),
        },
        (
            *in_folder("transfer", "arena", "conditions", "registrations", "staging"),
            "tests/cache/tiers/test_free_list.py",
        ),
    ),
    "registrations": Guarded(
        {
            f"{TRANSFER}.memory.registrations": (
                *methods("Renewals", "renew", "_renew", "offered", "lost", "granted"),
                *methods("Registrations", "known", "stamped", "waits", "heard", "_load", "poll", "lost"),
            ),
            "kvmover.transport.checks": (
                *methods("Ranges", "add", "remove", "check", "beside", "_holds", "_check_rows"),
                "touches",
                "check_runs",
                *methods("Operation", "check"),
            ),
        },
        (*in_folder("transfer", "registrations", "conditions"), *in_folder("transport", "checks", "conformance")),
    ),
    "catalog": Guarded(
        {
            f"{STORE}.deletion": (
                *methods("DeletionBudget", "spend"),
                *methods("TwoLooks", "__post_init__"),
                *methods("DeletionDoor", "ask", "order"),
            ),
            f"{STORE}.absence": (
                "read_head_anew",
                "why_empty",
                "is_data_missing",
                "why_orphan",
                "remove_stillborn",
                "gaps",
            ),
            f"{STORE}.judgement": (*methods("JudgedObjects", "judge"), "judge_object", "judged", "verified"),
            f"{STORE}.segment_catalog": methods(
                "Catalog", "_try_tail", "_tail", "delete_at", "_kill", "sweep", "_remove_empty", "_is_over"
            ),
            f"{STORE}.takeover": methods("SegmentTakeover", "_is_silent", "_take_over", "_judge", "_delete"),
        },
        (
            *in_folder(
                "store", "absence", "deletion_door", "judgement", "recovery", "store_hazard", "unused", "upkeep"
            ),
            *in_folder("store", "flush_stories", "store", "store_conformance", "store_faults", "takeover"),
        ),
    ),
    "ledger": Guarded(
        {
            "kvmover.cache.ledger.account": (
                *methods("Credit", "tokens", "least_tokens"),
                *methods("Account", "credited_tokens", "lost_tokens", "check"),
                *methods("OpenAccount", "credited_tokens", "frozen", "matched", "predicted", "admitted", "computed"),
                *methods("OpenAccount", "withdrawn", "ended"),
            ),
            "kvmover.cache.ledger.ledger": (
                *methods("Totals", "credited_tokens", "add", "merge", "check"),
                *methods("PredictionTotals", "add", "merge"),
                *methods("Ledger", "matched", "admitted", "computed", "withdrawn", "finished", "retracted", "aborted"),
                *methods("Ledger", "total", "check", "_account", "_end", "_turn", "_refuse"),
            ),
        },
        in_folder("cache/ledger", "account_laws", "counted_once", "ledger_model", "sums_and_exports"),
    ),
    "locks": Guarded(
        {
            f"{PREFIX}.locks": (
                "segments",
                *methods("Locks", "device", "host", "release", "release_component", "locked", "_release_host"),
                *methods("Locks", "_pin", "_unpin", "_shift"),
            ),
            f"{PREFIX}.evict": methods("Eviction", "path", "_may_go", "_held", "_drop_below", "_bury"),
            "kvmover.cache.tiers.gated_loads": methods("GatedLoads", "begin", "_ended", "_unlock"),
            f"{STORE}.guard_lock": methods("GuardLock", "__enter__", "__exit__"),
        },
        (
            *in_folder("cache/prefix", "locks", "tiers", "components", "eviction_steps", "check", "machine"),
            *in_folder("cache/tiers", "asked_moves", "gated_loads", "one_rank", "write_back", "tier_machine"),
            "tests/store/test_store_lock.py",
        ),
    ),
    "digests": Guarded(
        {
            f"{STORE}.record": ("holds", "decode", "decode_part"),
            f"{STORE}.fetch": ("look_again", "_look_at_payload", "_digests", "_tokens", "scatter", "suspects"),
            f"{STORE}.bucket.bucket_reader": methods("BucketReader", "_fetch_some", "_place"),
            f"{STORE}.mooncake.pool_objects": methods("MooncakeObjects", "_place", "_flaw"),
            f"{TRANSFER}.destination.destination_machine": ("_scattered", "_mismatch"),
            f"{TRANSFER}.memory.copier": methods("Copier", "poll"),
        },
        (
            *in_folder(
                "store", "records", "bucket_conformance", "pool_conformance", "store_conformance", "cell_digests"
            ),
            *in_folder("store", "bucket_store", "pool_store", "judgement", "recovery", "store_faults", "absence"),
            *in_folder("store", "store", "journal_fuzz", "bucket_faults", "crashes", "fetch"),
            *in_folder("transfer", "mover_integrity", "destination_machine", "copier_engines", "copier_late"),
        ),
    ),
    "identity": Guarded(
        {
            f"{TRANSFER}.protocol.content": ("disagreement", *methods("Content", "__post_init__")),
            f"{TRANSFER}.protocol.handshake": (
                "_unlike",
                "_check_fields",
                "check_generation",
                "agreed_version",
            ),
            f"{TRANSFER}.protocol.auth": (
                *methods("Window", "look", "mark"),
                *methods("MessageAuth", "sign", "verify", "verify_card"),
                "_parts",
            ),
            f"{TRANSFER}.peers.peer_table": methods(
                "Peers", "rivals", "admit", "add", "check", "remove", "is_back", "vacate", "bury", "seen"
            ),
            f"{TRANSFER}.source.source_attempts": methods("Request", "name_contents", "disagrees", "is_behind"),
            f"{STORE}.namespace": ("_digest", *methods("Namespace", "__post_init__", "digest_for")),
            f"{PREFIX}.hashes": ("_digest", "chain_in_python", "_words"),
        },
        (
            *in_folder(
                "transfer",
                "content",
                "handshake",
                "auth",
                "mover_auth",
                "seat_table",
                "seats",
                "incarnations",
                "hostile_cards",
            ),
            "tests/store/test_identity.py",
            *in_folder("cache/prefix", "namespace", "hashes"),
        ),
    ),
}
