"""Mutants that no caller can tell from the honest function, each with the reason: all tests pass with it in place.

`python -m perf.mutants --whole` runs them too, and ends with 1 if a test fails for one.
"""

from __future__ import annotations

ACCOUNT, LEDGER = "kvmover.cache.ledger.account", "kvmover.cache.ledger.ledger"
ARENA, CLAIMS = "kvmover.transfer.memory.arena", "kvmover.transfer.destination.claims"
AUTH, CONTENT = "kvmover.transfer.protocol.auth", "kvmover.transfer.protocol.content"
STORE = "kvmover.store"
ABSENCE, CATALOG, TAKEOVER = f"{STORE}.absence", f"{STORE}.segment_catalog", f"{STORE}.takeover"
BUCKET_READER, FETCH = f"{STORE}.bucket.bucket_reader", f"{STORE}.fetch"
CHECKS, CREDITS = "kvmover.transport.checks", "kvmover.transfer.destination.credits"
GATED_LOADS, GUARD_LOCK = "kvmover.cache.tiers.gated_loads", f"{STORE}.guard_lock"
EVICT, LOCKS = "kvmover.cache.prefix.evict", "kvmover.cache.prefix.locks"
REGISTRATIONS, WRITES = "kvmover.transfer.memory.registrations", "kvmover.transfer.source.writes"
SOURCE, TOMBSTONES = "kvmover.transfer.source.source_driver", "kvmover.transfer.tombstones"

#: By part, then by module and change.
EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
    "locks": {
        (
            GATED_LOADS,
            "GatedLoads.begin: collective.done(1) -> collective.done(2)",
        ): "`_ended` asks only that all ranks are done, whatever they say.",
        (
            LOCKS,
            "segments: not components or node.parent is None -> (node.parent is None)",
        ): "Of no components there are no segments: the condition saves an empty tuple.",
        (
            LOCKS,
            "Locks.host: at.pages is None and at.host is not None and not at.locks ->"
            " ((at.pages is None) and (not at.locks))",
        ): "A node below the root has pages on the device or the host; the root's own lock ends the loop.",
        (
            LOCKS,
            "Locks._release_host: at.pages is None and at.host is not None and not at.locks ->"
            " ((at.pages is None) and (not at.locks))",
        ): "A node below the root has pages on the device or the host; the root's own lock ends the loop.",
        (
            LOCKS,
            "Locks.host: forest.writes_back -> True",
        ): "`doubles` is empty in a tree that does not write back: the condition saves the call.",
        (
            LOCKS,
            "Locks._release_host: forest.columns.clock += 1 -> forest.columns.clock += 2",
        ): "Uses are compared with each other alone: any later time will do.",
        (
            EVICT,
            "Eviction.path: at.parent is not None and at.pages is not None and not (at.locks or at.device_children) ->"
            " ((at.pages is not None) and (not (at.locks or at.device_children)))",
        ): "A root has no pages: the condition is for the type of the next node.",
        (GUARD_LOCK, "GuardLock.__exit__: self._owner = 0 -> self._owner = 1"): "No thread has either number.",
        (
            EVICT,
            "Eviction._drop_below: each.locks or each.host_locks -> each.host_locks",
        ): "A condition that stays on looks at it, and nothing else does.",
        (
            EVICT,
            "Eviction._drop_below: each.locks or each.host_locks -> each.locks",
        ): "A condition that stays on looks at it, and nothing else does.",
    },
    "catalog": {
        (
            CATALOG,
            "Catalog._tail: segment.waiting -> True",
        ): "If no object waits, none is added, and the list is made anew of nothing.",
        (
            CATALOG,
            "Catalog.sweep: not names and not ranges -> False",
        ): "Loops over nothing have no turn, and files of ended segments are closed by the next sweep anyway.",
        (CATALOG, "Catalog.sweep: -1 -> (-2)"): "No folder was written at a time below 0.",
        (ABSENCE, "remove_stillborn: -1 -> (-2)"): "`close_quietly` passes over any negative descriptor.",
        (
            TAKEOVER,
            "SegmentTakeover._take_over: not segment.is_sealed and self._settled(segment) -> self._settled(segment)",
        ): "`_finish` marks a segment as synced only if it is not sealed: the condition saves a sync.",
        (
            TAKEOVER,
            "SegmentTakeover._take_over: catalog.sweep() -> pass",
        ): "`recover`, which alone calls it, sweeps when all segments are taken over: a sweep in between saves space.",
    },
    "digests": {
        (
            FETCH,
            "_digests: len(set(counts)) == 1 -> False",
        ): "A table for each view is what one call for all of them gives: the condition saves calls.",
        (FETCH, "_look_at_payload: -1 -> (-2)"): "`close_quietly` passes over any negative descriptor.",
        (FETCH, "suspects: default=0 -> default=1"): "Of no objects nothing is read into the buffer.",
        (
            BUCKET_READER,
            "BucketReader._fetch_some: not isinstance(each, str) -> True",
        ): "The list is made if there is no reason, which is the first text among the answers.",
    },
    "leases": {
        (
            WRITES,
            "Writes.renew: (lease.term, lease.until_us) > (known.term, known.until_us) ->"
            " (((lease.term, lease.until_us)) >= ((known.term, known.until_us)))",
        ): "Of two leases with one term and one end either may be kept: nothing else of a lease is looked at.",
        (WRITES, "Writes.renew: newer or known is None -> newer"): "A lease beside no other is newer.",
        (WRITES, "Writes._gathered: ends[0] -> ends[1]"): "A write is refused whose ends have unlike counts of runs.",
        (WRITES, "Writes.drop: other is job -> True"): "`unstage` looks for the chunk under the ended job, and ignores"
        " one that is not there.",
        (CREDITS, "EagerGrants.freed: size -> True"): 'A region of another kind is of the source "" with 0 bytes: its'
        " count is made, is 0, and is deleted.",
    },
    "registrations": {
        (
            REGISTRATIONS,
            "Renewals.renew: core.revocation is Revocation.UNPROVEN -> True",
        ): "`shut` is set before every end: to `_broken` if nothing is quarantined, else by what `renewal` finds, which"
        " does not look at it.",
        (
            REGISTRATIONS,
            "Renewals.renew: core.revocation is Revocation.UNPROVEN or not (arena.shut or arena.quarantined_bytes) ->"
            " (core.revocation is Revocation.UNPROVEN)",
        ): "If no slab is shut and nothing is quarantined, no slab is renewed, none waits, and none is broken, as"
        " broken slabs are shut: the condition saves the search.",
        (
            CHECKS,
            "Ranges.check: len(table) == 1 and self._holds(descriptors.kind, *table[0].tolist()) -> False",
        ): "A row that `_holds` passes is passed by `_check_rows` too, which takes longer.",
        (
            CHECKS,
            "Ranges.check: (devices == devices[0]).all() -> False",
        ): "The loop below looks at one device if there is one.",
        (
            CHECKS,
            "Ranges.check: devices == devices[0] -> (devices != devices[0])",
        ): "The first device is itself: the condition is False, and the loop below looks at each device.",
        (
            CHECKS,
            "Ranges._holds: int(found.ends[at]) - address if at > 0 else -1 -> (-1)",
        ): "A row that `_holds` does not pass is looked at by `_check_rows`.",
        (
            CHECKS,
            "Ranges._holds: at > 0 -> (at >= 0)",
        ): "The sentinel ends where it begins, at or before the address: it has room for no byte.",
        (CHECKS, "Ranges._holds: -1 -> (-2)"): "No row is that short, and `_check_rows` looks at it.",
        (CHECKS, "Ranges._check_rows: -1 -> (-2)"): "No row is that short.",
        (CHECKS, "Ranges._check_rows: at >= 0 -> (at >= 1)"): "The sentinel has room for no byte either.",
        (CHECKS, "Ranges._holds: at > 0 -> (at > 1)"): "A row of the first range is then looked at by `_check_rows`.",
        (
            CHECKS,
            "Ranges._holds: nbytes <= room -> (nbytes < room)",
        ): "A row to the last byte is then looked at by `_check_rows`.",
        (
            CHECKS,
            "Ranges._holds: count == 1 or nbytes <= stride <= (room - nbytes) // (count - 1) -> (count == 1)",
        ): "A row of several runs is then looked at by `_check_rows`.",
        (
            CHECKS,
            "Ranges._holds: count - 1 -> (count + 1)",
        ): "Fewer rows pass; the others are looked at by `_check_rows`.",
        (
            CHECKS,
            "Ranges._check_rows: at >= 0 -> (at > 0)",
        ): "The sentinel ends where it begins, at or before the address: with or without it there is room for no byte.",
        (
            CHECKS,
            "check_runs: len(local.table) == len(remote.table) == 1 -> False",
        ): "Two equal rows are equal tables, too.",
        (
            CHECKS,
            "check_runs: (here[NBYTES], here[COUNT]) == (there[NBYTES], there[COUNT]) -> False",
        ): "Two equal rows are equal tables, too.",
        (
            CHECKS,
            "check_runs: np.array_equal(ours, theirs) -> False",
        ): "Equal tables expand to equal runs: the condition saves the expansion.",
        (
            CHECKS,
            "Operation.check: NATIVE is not None and"
            " NATIVE.runs_fit(*ours.beside(self.local), *theirs.beside(self.remote)) -> False",
        ): "C passes the operations that Python passes, in less time.",
    },
    "quarantine": {
        (
            CLAIMS,
            "PageClaims.take: "
            "sum([np.count_nonzero(taken[ids]) for taken, ids in zip(self._taken, pages, strict=True)]) -> True",
        ): "The flags are a quick look: `_refuse_shared` compares the pages themselves, and raises only for a page that"
        " another receive has. `sweep` may come at any time.",
        (
            CLAIMS,
            "PageClaims.sweep: over -> True",
        ): "If nothing is over, the loop has no turn, and the list is made anew of all that it had.",
    },
    "tombstones": {
        (
            TOMBSTONES,
            "Budget.give: self._kept[peer] <= 0 -> (self._kept[peer] <= 1)",
        ): "What is kept is a sum of entries of ENTRY_BYTES or more: 0, or above 1,023.",
        (
            SOURCE,
            "EarlyWants.lost: peer not in self._waiting -> False",
        ): "Of a peer that waits for nothing no request is found, and none is dropped.",
        (TOMBSTONES, "TtlMap.keep: key in self._entries -> True"): "`forget` ignores a key that is not there.",
    },
    "identity": {
        (
            CONTENT,
            "Content.__post_init__: len(self.unknown) > MAX_UNKNOWN_CHARACTERS -> True",
        ): "A text of as many characters or fewer is not changed by being cut there.",
        (
            CONTENT,
            "Content.__post_init__: len(self.unknown) > MAX_UNKNOWN_CHARACTERS ->"
            " (len(self.unknown) >= MAX_UNKNOWN_CHARACTERS)",
        ): "A text of just as many characters is not changed by being cut there.",
        (
            AUTH,
            "MessageAuth.sign: self._next.get(peer, 0) -> self._next.get(peer, 1)",
        ): "A window takes any first number, and each later one is one more.",
        (
            AUTH,
            "Window.mark: ahead > 0 -> (ahead >= 0)",
        ): "For the highest number itself, which is 0 ahead, either branch sets bit 0 and moves nothing.",
        (
            AUTH,
            "Window.mark: ahead < WINDOW -> (ahead <= WINDOW)",
        ): "A shift by WINDOW moves all bits above the mask, which leaves the 0 of the other branch.",
        (
            AUTH,
            "Window.mark: self.seen << ahead if ahead < WINDOW else 0 -> (self.seen << ahead if ahead < WINDOW else 1)",
        ): "Bit 0 is set in either case.",
        (AUTH, "Window.mark: (1 << WINDOW) - 1 -> ((1 << WINDOW) - 2)"): "Bit 0 is set in either case.",
    },
    "arena": {
        (ARENA, "Arena.release: 0 -> 1"): "No free region begins at `offset`, which was reserved: (offset, 0) and"
        " (offset, 1) have one place among them.",
        (
            ARENA,
            "Arena.reserve: self.shut and self.slab_of(offset) in self.shut -> (self.slab_of(offset) in self.shut)",
        ): "No slab is in an empty set: `self.shut` alone saves the division where none is shut.",
    },
    "ledger": {
        (
            ACCOUNT,
            "OpenAccount.admitted: sum(lost.values()) if lost else 0 -> sum(lost.values())",
        ): "The sum over no losses is 0: the condition saves a call.",
        (ACCOUNT, "OpenAccount.ended: concurrent_tokens < 0 -> (concurrent_tokens <= 0)"): "The line is reached for"
        " numbers other than 0 alone.",
        (
            ACCOUNT,
            "OpenAccount.ended: concurrent_tokens < 0 -> (concurrent_tokens < 1)",
        ): "Whole numbers other than 0 are below 0 exactly if they are below 1.",
        (LEDGER, "Totals.add: account.lost -> True"): "A loop over no losses has no turn: the condition saves a call.",
    },
}
