"""Mutants with a name: each breaks one promise, and the test that is named fails for it.

`make prove` runs them, a process for each part.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutants.code_exchange import Mutant, mutant


@dataclass(frozen=True)
class Killed:
    """A mutant and the test, or the file of tests, that fails for it."""

    name: str
    module: str
    function: str
    old: str
    new: str
    test: str

    @property
    def mutant(self) -> Mutant:
        """Returns the mutant of today's source."""
        return mutant(self.module, self.function, self.old, self.new)


TRANSFER, STORE, PREFIX = "kvmover.transfer", "kvmover.store", "kvmover.cache.prefix"
DRIVER, WRITES = f"{TRANSFER}.source.source_driver", f"{TRANSFER}.source.writes"

NAMED: dict[str, list[Killed]] = {
    "leases": [
        Killed(
            "a chunk is begun under a lease that is over",
            WRITES,
            "Writes._start",
            "core.clock() >= self._until(entry)",
            "False",
            "transfer/test_source_leases.py::test_a_chunk_is_copied_into_mapped_pages_under_its_lease_alone",
        ),
        Killed(
            "a lease of another term permits",
            WRITES,
            "Writes._until",
            "lease is not None and lease.term == entry.term",
            "lease is not None",
            "transfer/test_source_leases.py::test_a_write_is_posted_in_the_term_of_the_lease_and_no_other",
        ),
        Killed(
            "what was posted last does not linger",
            f"{TRANSFER}.destination.quarantine",
            "WriteLeases.retire",
            "lent.over + self.linger_s",
            "lent.over",
            "transfer/test_quarantine.py::test_what_was_leased_is_free_when_what_was_posted_last_has_landed",
        ),
    ],
    "quarantine": [
        Killed(
            "memory is free while a read is under way",
            f"{TRANSFER}.destination.quarantine",
            "Quarantine.drained",
            " or isolated.reads",
            "",
            "transfer/test_quarantine.py::test_reads_of_our_own_end_with_each_of_them_and_no_word_of_the_peer",
        ),
        Killed(
            "a request of a dead source is taken while a transfer may write its pages",
            "kvmover.migrate.arriving_rank",
            "ArrivingRank.poll",
            "if quiet:",
            "if True:",
            "migrate/test_migration.py::test_a_request_of_a_dead_source_is_taken_once_none_of_its_own_reads_may_land_in_the_pages",
        ),
        Killed(
            "pages are another receive's while the first may still be written",
            f"{TRANSFER}.destination.claims",
            "PageClaims.give",
            "if transfer.quarantined:",
            "if False:",
            "transfer/test_claims.py::test_pages_of_a_failed_receive_stay_its_own_while_they_are_held",
        ),
    ],
    "tombstones": [
        Killed(
            "an unknown attempt that is aborted is not remembered",
            DRIVER,
            "SourceDriver._unknown",
            "self._close(message.request, peer.name, message.generation, message.reason)",
            "pass",
            "transfer/test_tombstones.py::test_a_want_that_its_abort_overtook_is_answered_by_the_abort_and_opens_nothing",
        ),
        Killed(
            "a Want that its Abort overtook opens the attempt anew",
            DRIVER,
            "SourceDriver._past",
            "return outcome is not None",
            "return False",
            "transfer/test_tombstones.py::test_a_want_that_its_abort_overtook_is_answered_by_the_abort_and_opens_nothing",
        ),
        Killed(
            "a later attempt is taken for the one that ended",
            f"{TRANSFER}.tombstones",
            "Tombstones.of",
            " and generation <= outcome.generation",
            "",
            "transfer/test_tombstones.py::test_an_attempt_and_those_before_it_are_over_and_later_ones_are_not",
        ),
    ],
    "arena": [
        Killed(
            "free regions of two slabs become one",
            f"{TRANSFER}.memory.arena",
            "Arena.release",
            " and (offset + size) % self.slab_bytes",
            "",
            "transfer/test_arena.py::test_free_regions_on_both_sides_of_a_slabs_end_stay_two",
        ),
        Killed(
            "a slab is renewed under a region in use",
            f"{TRANSFER}.memory.arena",
            "renewal",
            "if slab in healthy and offset not in lost",
            "if False",
            "transfer/test_registrations.py::test_a_healthy_peer_in_the_same_slab_is_waited_for_and_not_disturbed",
        ),
        Killed(
            "a copy that raises leaves its launched part under way",
            "kvmover.regions",
            "CopyStream.launch",
            "stream.synchronize()",
            "pass",
            "test_regions.py::test_memory_of_a_copy_that_raises_is_written_by_no_part_of_it_that_was_launched",
        ),
        Killed(
            "memory of a device is given back under its work",
            "kvmover.kernels.releases",
            "wait_for",
            "torch.cuda.synchronize(device)",
            "pass",
            "kernels/test_memory_releases.py::test_memory_is_not_given_back_under_work_of_its_device",
        ),
    ],
    "registrations": [
        Killed(
            "a chunk is written by keys that are over",
            WRITES,
            "Writes._start",
            "entry.registration > self.registrations.known(job.peer.name)",
            "False",
            "transfer/test_registrations.py::test_news_of_a_registration_that_is_lost_comes_again_with_the_grant",
        ),
        Killed(
            "a grant of a renewed slab goes out without its keys",
            f"{TRANSFER}.memory.registrations",
            "Renewals.granted",
            "needed > self",
            "needed < self",
            "transfer/test_registrations.py::test_a_peer_that_connects_by_a_card_from_before_learns_of_it_too",
        ),
        Killed(
            "another peer's keys are loaded",
            f"{TRANSFER}.memory.registrations",
            "Registrations._load",
            "name != peer",
            "False",
            "transfer/test_registrations.py::test_registrations_that_are_of_somebody_else_or_nonsense_are_dropped",
        ),
    ],
    "catalog": [
        Killed(
            "one look, taken twice, deletes",
            f"{STORE}.deletion",
            "TwoLooks.__post_init__",
            "self.first.seen is self.second.seen",
            "False",
            "store/test_deletion_door.py::test_one_look_however_often_is_no_ground",
        ),
        Killed(
            "deletions have no budget",
            f"{STORE}.deletion",
            "DeletionBudget.spend",
            "self._left < cost",
            "False",
            "store/test_deletion_door.py::test_the_door_counts_by_reason_and_keeps_to_its_budget",
        ),
    ],
    "ledger": [
        Killed(
            "a finished request may lack a token",
            "kvmover.cache.ledger.account",
            "OpenAccount.ended",
            "is _FINISHED and rest:",
            "is _FINISHED and rest > 1:",
            "cache/ledger/test_counted_once.py::test_a_request_that_lacks_even_one_token_has_not_finished",
        ),
        Killed(
            "tokens of peers are not withdrawn",
            "kvmover.cache.ledger.account",
            "OpenAccount.withdrawn",
            "self.peer_tokens - credit.peer_tokens",
            "self.peer_tokens",
            "cache/ledger/test_counted_once.py::test_a_page_of_a_peer_that_was_no_good_is_lost_and_computed",
        ),
    ],
    "locks": [
        Killed(
            "a leaf with a host lock is evicted",
            f"{PREFIX}.evict",
            "Eviction._may_go",
            "if node.host_locks:",
            "if False:",
            "cache/prefix/test_tiers.py::test_a_node_that_lost_its_last_child_and_went_does_not_come_back_into_the_order",
        ),
    ],
    "digests": [
        Killed(
            "tokens of a bucket's cell are not checked",
            f"{STORE}.bucket.bucket_reader",
            "BucketReader._place",
            "not holds(payload, run.count, digests, run.source_cell)",
            "False",
            "store/test_bucket_conformance.py::TestBucketOnAServer::test_tokens_of_a_damaged_cell_are_never_served",
        ),
        Killed(
            "tokens of a pool's cell are not checked",
            f"{STORE}.mooncake.pool_objects",
            "MooncakeObjects._place",
            "not holds(cells, run.count, record.digests, run.source_cell)",
            "False",
            "store/test_pool_conformance.py::TestPoolInThisProcess::test_tokens_of_a_damaged_cell_are_never_served",
        ),
        Killed(
            "tokens of a file's cell are not checked",
            f"{STORE}.fetch",
            "_tokens",
            "not holds(memoryview(payload), run.count, digests, run.source_cell)",
            "False",
            "store/test_store_conformance.py::TestPageStore::test_tokens_of_a_damaged_cell_are_never_served",
        ),
        Killed(
            "a GPU's digest has a sign",
            f"{TRANSFER}.memory.copier",
            "Copier.poll",
            " % (1 << 64)",
            "",
            "transfer/test_copier_engines.py::test_a_digest_of_a_gpu_is_the_sum_modulo_two_to_the_64th",
        ),
    ],
    "identity": [
        Killed(
            "KV of another prompt serves a request",
            f"{TRANSFER}.protocol.content",
            "disagreement",
            "(held.tokens, held.digest) == (wanted.tokens, wanted.digest)",
            "True",
            "transfer/test_content.py::test_kv_of_another_prompt_is_refused_before_a_byte_moves",
        ),
        Killed(
            "page ids of the asker are not looked at by the source",
            WRITES,
            "Writes.check",
            "job.lane.check_named(job.lane.dst, job.target)",
            "pass",
            "transfer/test_hostile_peers.py::test_a_page_that_the_asker_does_not_have_is_refused_before_anything_is_written",
        ),
        Killed(
            "page ids of a receive are not looked at before its Want",
            f"{TRANSFER}.destination.destination_attempts",
            "attempt_of",
            "lane.check_pages(lane.dst, pages)",
            "pass",
            "transfer/test_claims.py::test_a_receive_that_is_refused_claims_nothing",
        ),
        Killed(
            "an older process takes its seat back",
            f"{TRANSFER}.peers.peer_table",
            "Peers.rivals",
            "(sitter,) if place.generation <= sitter.generation else ()",
            "()",
            "transfer/test_incarnations.py::test_an_older_card_opens_nothing_either_while_the_newer_process_is_away",
        ),
    ],
}
