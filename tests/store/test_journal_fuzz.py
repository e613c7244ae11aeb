"""A catalog that follows a journal of anything: it raises nothing, and its index stays whole."""

from __future__ import annotations

import os
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from keeper_world import KEY, OBJECT_BYTES, PAGES, PART

from kvmover.store.keeper.journal import AddedObject, JournalChange, encode_added, encode_entry
from kvmover.store.keeper.keeper_catalog import KeeperCatalog
from kvmover.store.keeper.link import FollowedJournal
from kvmover.store.record import DIGEST_BYTES
from tests.drawn_values import ODD, damaged
from tests.proofs import searched

DIGESTS = bytes(PART.box.cells * DIGEST_BYTES)


class Link:
    """A connection that is there, to a keeper that says nothing but its journal."""

    def __init__(self, journal: FollowedJournal) -> None:
        self.journal = journal

    def close(self) -> None:
        self.journal = None

    def is_over(self) -> bool:
        return False


def sound(dice: Random, at: int, slab: int) -> bytes:
    """An entry as a keeper writes it."""
    objects = [
        AddedObject(number * OBJECT_BYTES, PART.nbytes, page, KEY, 1000, DIGESTS)
        for number, page in enumerate(dice.sample(PAGES, dice.randrange(1, 4)))
    ]
    return encode_added(objects, at, 1000, slab)


def odd(dice: Random, at: int) -> bytes:
    """An entry of anything at all, sealed as a keeper seals it."""
    change: Any = dice.choice([*JournalChange, 0, 99])
    words = [dice.choice([*ODD, (1 << 64) - 1, 48, 176]).to_bytes(8, "little") for _ in range(dice.randrange(40))]
    rows = dice.choice([0, 0, 1, 2, (1 << 32) - 1])
    if rows == 1 and dice.random() < 0.5:  # a row that has another word in one place
        whole = bytearray(sound(dice, at, 1)[48 : 48 + 128])
        place = 8 * dice.randrange(16)
        whole[place : place + 8] = dice.choice([*ODD, (1 << 64) - 1]).to_bytes(8, "little")
        words.insert(0, bytes(whole))
    stamp, slab = dice.choice([0, 1000, (1 << 32) - 1]), dice.choice([0, 1, 2, (1 << 64) - 1])
    return encode_entry(change, at, stamp, slab, b"".join(words), rows)


@searched(few=30, many=1500, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_a_journal_of_anything_raises_nothing(seed: int) -> None:
    dice, base = Random(seed), Random(seed).choice([0, 48, 1 << 34])
    journal = FollowedJournal(os.memfd_create("journal"), base)
    catalog = KeeperCatalog(Link(journal))  # pyright: ignore[reportArgumentType]
    os.write(journal.fd, sound(dice, base, 7))
    for _ in range(6):
        at = base + os.fstat(journal.fd).st_size
        os.write(journal.fd, dice.choice([followed, odd, cut])(dice, at))
        with catalog.lock:
            catalog.refresh()
            if dice.random() < 0.2:
                catalog._begin(journal)
            assert len(list(catalog.index.pages())) == len(catalog.index)
    catalog.close()


def followed(dice: Random, at: int) -> bytes:
    return sound(dice, at, dice.choice([1, 2, 3]))


def cut(dice: Random, at: int) -> bytes:
    return damaged(followed(dice, at), dice)
