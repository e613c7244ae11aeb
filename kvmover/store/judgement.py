"""JudgedObjects decide about an object that a read did not get whole, in every storage engine by the same rules.

Evidence is two looks of different kinds; the deletion door bounds the objects that a process deletes as bad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from kvmover.errors import StoreError
from kvmover.store.deletion import Look, Permit, Seen, TwoLooks
from kvmover.store.fetch import GIVEN_BACK
from kvmover.store.files import reason_of
from kvmover.store.objects import Failure, Objects, Verdict
from kvmover.store.store_results import Verified
from kvmover.store.stored import StoredObject

Named = TypeVar("Named")

#: The first look's finding where `verify` reads the objects.
NOT_WHOLE = "not whole"


class JudgedObjects(Objects[Named], Protocol[Named]):
    """A storage engine that judges by a second look; a subclass has the steps that differ, and takes the locks."""

    def look_again(self, each: Named) -> tuple[Verdict, str]:
        """Re-read an object past all caches. Returns its verdict and the reason; SPARED if its medium fails to read it.

        Raises OSError if the system fails, or StoreError if another owner has the pages: neither is evidence.
        """
        ...

    def permit(self, looks: TwoLooks) -> Permit | None:
        """Returns a permit to delete one object, or None if the budget is spent."""
        ...

    def drop(self, each: Named, verdict: Verdict) -> None:
        """Remove an object that is GONE or SPARED from this process's index; its page can be put again."""
        ...

    def condemn(self, each: Named, permit: Permit) -> None:
        """Delete a bad object for every process. Raises OSError."""
        ...

    def judge(self, failure: Failure[Named]) -> tuple[Verdict, str]:
        """Re-examine the object of a failed read, and delete it if bad. Returns the verdict and its reason.

        A freed object counts as GONE; a failing system gives UNKNOWN.
        """
        try:
            verdict, reason = judge_object(self, failure.read.each, failure.reason)
        except OSError as error:
            return Verdict.UNKNOWN, reason_of(error)
        except StoreError as error:
            return Verdict.UNKNOWN, str(error)
        return (Verdict.GONE if verdict is Verdict.BAD and reason in GIVEN_BACK else verdict), reason


def judge_object(engine: JudgedObjects[Named], each: Named, read: str) -> tuple[Verdict, str]:
    """Look again at an object whose read failed for reason `read`. Returns verdict and reason.

    Raises as `look_again` and `condemn` do.
    """
    verdict, reason = engine.look_again(each)
    if verdict is Verdict.WELL:
        return verdict, reason
    if verdict is Verdict.BAD:
        permit = engine.permit(TwoLooks(Look(Seen.READ, read), Look(Seen.ANEW, reason), 1))
        if permit is not None:
            engine.condemn(each, permit)
            if reason not in GIVEN_BACK:
                engine.counters.poisoned[reason] += 1
            return verdict, reason
        verdict = Verdict.SPARED
    engine.drop(each, verdict)
    engine.counters.spared += verdict is Verdict.SPARED
    return verdict, reason


def judged(
    engine: JudgedObjects[StoredObject], objects: Iterable[tuple[StoredObject, bool]]
) -> Iterator[tuple[int, Verdict, str]]:
    """Yield bytes, verdict and reason of each object; True marks one whose bytes differ from its digests."""
    for each, is_suspect in objects:
        verdict, reason = judge_object(engine, each, NOT_WHOLE) if is_suspect else (Verdict.WELL, "")
        yield each.nbytes, verdict, reason


def verified(found: Iterable[tuple[int, Verdict, str]], progress: Callable[[int], None] | None) -> Verified:
    """Returns the report on objects, given as bytes, verdict and reason. `progress` hears the bytes of each."""
    count, total, bad, spared = 0, 0, Counter[str](), Counter[str]()
    for nbytes, verdict, reason in found:
        bad[reason] += verdict is Verdict.BAD
        spared[reason] += verdict is Verdict.SPARED
        count += 1
        total += nbytes
        if progress:
            progress(nbytes)
    return Verified(count, total, dict(+bad), dict(+spared))
