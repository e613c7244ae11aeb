"""Write leases: a source's own stamps come back to it, and end what it may do, on its clock and on ours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmover.transfer.destination.quarantine import CLOCK_DRIFT, WriteLeases
from kvmover.transfer.protocol.wire import WriteLease

LEASE_S, LINGER_S = 5.0, 40.0
A, B = "a.1", "b.1"


def leases() -> WriteLeases:
    return WriteLeases(LEASE_S, LINGER_S)


def test_a_source_that_was_never_heard_gets_a_lease_that_is_over():
    lease = leases().renewed(A)
    assert lease.until_us == 0
    assert leases().retire(A) == 0.0


def test_the_newest_stamp_comes_back_however_late_others_are_heard():
    lent = leases()
    lent.heard(A, 7_000_000, 100.0)
    lent.heard(A, 6_000_000, 101.0)
    lent.heard(B, 9_000_000, 101.0)
    assert lent.renewed(A) == WriteLease(1, 7_000_000, 5_000_000)
    assert lent.renewed(A).until_us == 12_000_000


def test_what_was_leased_is_free_when_what_was_posted_last_has_landed():
    lent = leases()
    lent.heard(A, 1, 100.0)
    assert lent.retire(A) == LINGER_S, "nothing was leased"
    lent.renewed(A)
    lent.heard(A, 2, 103.0)  # and not leased on
    assert lent.retire(A) == 100.0 + LEASE_S * CLOCK_DRIFT + LINGER_S
    lent.renewed(A)
    assert lent.retire(A) == 103.0 + LEASE_S * CLOCK_DRIFT + LINGER_S


def test_a_renewal_after_memory_was_given_up_is_of_a_later_term():
    lent = leases()
    lent.heard(A, 1, 100.0)
    lent.heard(B, 1, 100.0)
    before, other = lent.renewed(A), lent.renewed(B)
    lent.retire(A)
    assert lent.renewed(A).term > before.term
    assert lent.renewed(B) == other, "it is no affair of others"


def test_a_source_that_was_forgotten_gets_a_later_term():
    lent = leases()
    lent.heard(A, 1, 100.0)
    before = lent.renewed(A)
    lent.expire(100.0 + LINGER_S)
    assert len(lent) == 1
    lent.expire(101.0 + LEASE_S * CLOCK_DRIFT + LINGER_S)
    assert len(lent) == 0
    assert lent.renewed(A).until_us == 0
    lent.heard(A, 2, 200.0)
    assert lent.renewed(A).term > before.term


def test_a_lease_that_was_shortened_meanwhile_is_waited_for_as_it_was_given():
    lent = leases()
    lent.heard(A, 1, 100.0)
    lent.renewed(A)
    lent.lease_s = 1.0
    lent.renewed(A)
    assert lent.retire(A) == 100.0 + LEASE_S * CLOCK_DRIFT + LINGER_S


@given(
    st.lists(st.tuples(st.floats(0.01, 9.0), st.sampled_from(["heard", "renewed", "retired"])), max_size=30),
    st.floats(-1e6, 1e6),
    st.floats(1 / CLOCK_DRIFT, 1.0),
    st.floats(0.0, 5.0),
)
def test_whatever_the_two_clocks_show_no_grant_is_posted_once_its_memory_is_free(
    steps: list[tuple[float, str]], offset_s: float, rate: float, delay_s: float
):
    """Times are ours. The source's clock shows another time, and is up to CLOCK_DRIFT slower."""
    lent, now, terms = leases(), 1000.0, dict[int, float]()

    def shown(time: float) -> float:
        return 1e7 + offset_s + time * rate

    for wait_s, what in steps:
        now += wait_s
        if what == "heard":
            lent.heard(A, int(shown(now - delay_s) * 1e6), now)
        elif what == "renewed":
            lease = lent.renewed(A)
            terms[lease.term] = max(terms.get(lease.term, 0.0), (lease.until_us / 1e6 - 1e7 - offset_s) / rate)
        else:
            term = lent.renewed(A).term
            free = lent.retire(A) - LINGER_S
            assert terms.get(term, -1e9) <= free + 1e-3 or free == -LINGER_S
