"""A directory's entries: the newest of each rank, and the changes between two looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmover.transfer.rendezvous import Appeared, Entry, Vanished, changes, newest

ENTRIES = st.lists(
    st.builds(
        Entry, st.sampled_from(["prefill", "decode"]), st.integers(0, 3), st.integers(0, 4), st.binary(max_size=3)
    )
)


@given(ENTRIES)
def test_of_each_rank_the_highest_generation_counts_whatever_the_order(entries: list[Entry]) -> None:
    found = newest(entries)
    assert [(entry.engine, entry.rank) for entry in found] == sorted({(entry.engine, entry.rank) for entry in entries})
    for entry in found:
        assert entry in entries
        rivals = [each for each in entries if (each.engine, each.rank) == (entry.engine, entry.rank)]
        assert entry.generation == max(each.generation for each in rivals)
    generations = [(entry.engine, entry.rank, entry.generation) for entry in found]
    assert [(entry.engine, entry.rank, entry.generation) for entry in newest(reversed(entries))] == generations


@given(ENTRIES, ENTRIES)
def test_what_changed_leads_from_what_was_to_what_is(before: list[Entry], after: list[Entry]) -> None:
    there = {(entry.engine, entry.rank): entry.generation for entry in newest(before)}
    for change in changes(before, after):
        place = (change.entry.engine, change.entry.rank)
        if isinstance(change, Vanished):
            assert there.pop(place) == change.entry.generation
        else:
            assert place not in there, "a successor appears only where its predecessor vanished"
            there[place] = change.entry.generation
    assert there == {(entry.engine, entry.rank): entry.generation for entry in newest(after)}


def test_a_restart_is_told_as_two_changes_and_an_entry_published_again_as_none() -> None:
    old, new, other = Entry("prefill", 0, 1, b"a"), Entry("prefill", 0, 2, b"b"), Entry("prefill", 1, 1, b"c")
    assert changes([old, other], [new, other]) == (Vanished(old), Appeared(new))
    assert changes([old], [old, new]) == (Vanished(old), Appeared(new))
    assert changes([new], [old, new]) == ()
