"""Mutants that no caller can tell from the honest function, each with the reason: all tests pass with it in place.

`python -m perf.mutants --whole` runs them too, and ends with 1 if a test fails for one.
"""

from __future__ import annotations

ACCOUNT, LEDGER = "kvmover.cache.ledger.account", "kvmover.cache.ledger.ledger"
ARENA, CLAIMS = "kvmover.transfer.memory.arena", "kvmover.transfer.destination.claims"
AUTH, CONTENT = "kvmover.transfer.protocol.auth", "kvmover.transfer.protocol.content"
SOURCE, TOMBSTONES = "kvmover.transfer.source.source_driver", "kvmover.transfer.tombstones"

#: By part, then by module and change.
EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
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
            "Budget.give: 0 -> 1",
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
        (AUTH, "MessageAuth.sign: 0 -> 1"): "A window takes any first number, and each later one is one more.",
        (
            AUTH,
            "Window.mark: ahead > 0 -> (ahead >= 0)",
        ): "For the highest number itself, which is 0 ahead, either branch sets bit 0 and moves nothing.",
        (
            AUTH,
            "Window.mark: ahead < WINDOW -> (ahead <= WINDOW)",
        ): "A shift by WINDOW moves all bits above the mask, which leaves the 0 of the other branch.",
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
        (ACCOUNT, "OpenAccount.ended: 0 -> 1"): "Whole numbers other than 0 are below 0 exactly if they are below 1.",
        (LEDGER, "Totals.add: account.lost -> True"): "A loop over no losses has no turn: the condition saves a call.",
    },
}
