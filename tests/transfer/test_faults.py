"""Processes over NIXL that are killed, stopped and torn down mid-chunk: both sides end, and nothing lands late.

`KVMOVER_FAULTS=1` runs all variants.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import count

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.layout import Fleet
from kvmover.plan.cost import BY_WIRE, Route
from kvmover.transfer.protocol.wire import Verb
from tests.proofs import family
from tests.transfer.fault_crowd import Crowd, some
from tests.transfer.fault_rank import CONFIG, Job, RankProcess, Seat

pytestmark = pytest.mark.timeout(120)

TOKENS = 300
ROOMY = replace(CONFIG, arena_bytes=4 << 20)
PATIENT = replace(ROOMY, deadline_s=3600.0)
LASTING = replace(ROOMY, lease_s=3600.0)


def seat(engine: str) -> Seat:
    """Sources have pages of 16 tokens in NHD, destinations of 24 in HND. TCP has no memory to copy through."""
    pages, order = (24, "HND") if engine.startswith("decode") else (16, "NHD")
    environment = {"UCX_TLS": "tcp"} if engine.endswith("tcp") else {}
    config = {"patient": PATIENT, "lasting": LASTING}.get(engine.rpartition("-")[2], ROOMY)
    return Seat(engine, Fleet(page_tokens=pages), order=order, config=config, environment=environment)


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    """`spare` is a third party, the doomed do not live long, the patient keep what they offer for an hour, and
    the lasting lease for as long."""
    names = ["prefill", "decode", "spare", "doomed", "decode-doomed", "prefill-tcp", "decode-tcp", "prefill-patient"]
    names += ["decode-lasting"]
    here = Crowd(map(seat, names))
    for one, other in [
        ("decode", "prefill"),
        ("decode", "spare"),
        ("spare", "prefill"),
        ("decode", "doomed"),
        ("decode-doomed", "prefill"),
        ("decode-tcp", "prefill-tcp"),
    ]:
        here.meet(one, other)
    yield here
    here.kill()


@pytest.fixture(autouse=True)
def awake(crowd: Crowd) -> Iterator[None]:
    """A test that fails leaves nobody stopped to the next."""
    yield
    for rank in crowd.ranks.values():
        if rank.alive:
            rank.wake()


_numbers = count(1)


def job(verb: Verb = Verb.PUSH, route: Route = Route.PACKED, chunk_bytes: int = 32 << 10) -> Job:
    number = next(_numbers)
    return Job(f"request-{number}", number, TOKENS, verb, route, chunk_bytes=chunk_bytes)


def test_who_moves_the_bytes_is_killed_mid_chunk_and_restarts_under_the_same_name(crowd: Crowd) -> None:
    """The survivor hears of it long before the deadline, and has its memory back before anybody sits there."""
    for verb in Verb:
        source, target = ("doomed", "decode") if verb is Verb.PUSH else ("prefill", "decode-doomed")
        victim, survivor = (source, target) if verb is Verb.PUSH else (target, source)
        name = crowd[victim].ask("name")
        doomed = job(verb, Route.DIRECT, 512 << 10)  # the first two of several chunks are posted
        posts = "write" if verb is Verb.PUSH else "read"
        crowd[victim].ask("trap", posts, 1, 0.002, crowd[victim].pid, signal.SIGKILL)
        crowd.move(doomed, source, target)
        assert crowd[victim].await_death() == -signal.SIGKILL
        (ending,) = crowd.ended(doomed, survivor, CONFIG.deadline_s)
        assert ending.cause == "peer_lost"
        assert name in (ending.reason or "")
        assert ending.quarantined == (verb is Verb.PUSH), "its writes may be under way; nobody reads for a dead process"
        if verb is Verb.PUSH:
            there = crowd[survivor]
            crowd.until(lambda there=there: "limbo" not in there.ask("left"), 20, "its lease is over")
        crowd.replace(seat(victim), [survivor])
        crowd.landed(job(verb), source, target)
        crowd.assert_nothing_is_left()


def test_who_is_written_to_or_read_from_is_killed_mid_chunk(crowd: Crowd) -> None:
    for verb in Verb:
        source, target = ("prefill", "decode-doomed") if verb is Verb.PUSH else ("doomed", "decode")
        victim, survivor = (target, source) if verb is Verb.PUSH else (source, target)
        name = crowd[victim].ask("name")
        doomed = job(verb, Route.DIRECT, 512 << 10)
        posts = "write" if verb is Verb.PUSH else "read"
        crowd[survivor].ask("trap", posts, 1, 0.002, crowd[victim].pid, signal.SIGKILL)
        crowd.move(doomed, source, target)
        crowd[victim].await_death()
        (ending,) = crowd.ended(doomed, survivor, CONFIG.deadline_s)
        assert ending.cause in ("peer_lost", "transport")
        assert name in (ending.reason or "")
        crowd.replace(seat(victim), [survivor])
        crowd.landed(job(verb), source, target)
        crowd.assert_nothing_is_left()


@pytest.mark.parametrize("when", ["in mid-transfer", "after asking early", "and is noticed before it is served"])
def test_a_destination_is_killed_and_the_source_has_its_pages_back_long_before_the_deadline(
    crowd: Crowd, when: str
) -> None:
    """What nobody has asked for stays: another destination may still come for it."""
    crowd.replace(seat("decode-doomed"), ["prefill-patient"])
    source, victim = crowd["prefill-patient"], crowd["decode-doomed"]
    doomed, unasked, other = job(Verb.PULL, Route.DIRECT, 512 << 10), job(), job(Verb.PULL)
    source.tell("send", unasked)
    kept = source.ask("left")["pages"]
    if when == "in mid-transfer":
        victim.ask("trap", "read", 1, 0.002, victim.pid, signal.SIGKILL)
        crowd.move(doomed, "prefill-patient", "decode-doomed")
        assert victim.await_death() == -signal.SIGKILL
    else:
        victim.tell("receive", doomed, "prefill-patient")
        crowd.until(lambda: "early wants" in source.ask("left"), 20, "asks early")
        victim.kill()
        if when == "and is noticed before it is served":
            crowd.until(lambda: "early wants" not in source.ask("left"), 20, "is noticed")
        source.tell("send", doomed)
    (ending,) = crowd.ended(doomed, "prefill-patient", 20)
    assert ending.cause == "peer_lost"
    assert not ending.quarantined
    crowd.until(lambda: source.ask("left")["pages"] == kept, 20, "pages come back")
    crowd.replace(seat("decode-doomed"), ["prefill-patient"])
    crowd["decode-doomed"].tell("receive", unasked, "prefill-patient")
    assert crowd.ended(unasked, "prefill-patient")[0].cause is None
    crowd.landed(other, "prefill-patient", "decode-doomed")
    crowd.assert_nothing_is_left()


@pytest.mark.parametrize("route", sorted(BY_WIRE))
def test_a_source_that_was_stopped_until_its_lease_was_over_writes_nothing(crowd: Crowd, route: Route) -> None:
    """Stopped between a grant and its write, and woken when its memory is somebody else's. It has no successor."""
    source, target = crowd["prefill"], crowd["decode"]
    late = job(Verb.PUSH, route)
    source.ask("trap", "write", 3, 0, source.pid, signal.SIGSTOP)
    crowd.move(late, "prefill", "decode")
    source.await_stop()
    (ending,) = crowd.ended(late, "decode")
    assert ending.cause in ("peer_lost", "deadline")
    crowd.landed(job(), "spare", "decode")
    crowd.assert_nothing_is_left()  # but at those who are stopped
    before = target.ask("memory")
    source.wake()
    (ending,) = crowd.ended(late, "prefill")
    assert ending.cause is not None
    crowd.assert_nothing_is_left()
    assert target.ask("memory") == before
    crowd.landed(job(Verb.PUSH, route), "prefill", "decode")


@pytest.mark.parametrize("number", family([signal.SIGKILL, signal.SIGSTOP], [signal.SIGKILL]))
def test_a_source_that_dies_with_all_that_it_may_have_starves_nobody(crowd: Crowd, number: signal.Signals) -> None:
    """A request of twice the arena; its source is gone when it has half of that, and nobody takes its place."""
    source, target, arena_bytes = crowd["doomed"], crowd["decode"], ROOMY.arena_bytes
    large = replace(job(chunk_bytes=256 << 10), tokens=1900)
    source.ask("trap", "write", 1, 0, source.pid, number)
    crowd.move(large, "doomed", "decode")
    source.await_stop() if number is signal.SIGSTOP else source.await_death()
    assert target.ask("left").get("reserved", 0) <= arena_bytes // 2  # 0 where its death is known by now
    crowd.landed(job(), "spare", "decode")
    (ending,) = crowd.ended(large, "decode")
    assert ending.cause in ("peer_lost", "deadline")
    crowd.until(lambda: not target.ask("left"), 20, "all of the arena is back")
    crowd.replace(seat("doomed"), ["decode"])
    crowd.landed(job(), "doomed", "decode")
    crowd.assert_nothing_is_left()


def test_who_knows_that_a_process_is_dead_waits_for_nothing(crowd: Crowd) -> None:
    """`forget` gives back what is held, long before a patient lease is over."""
    source, target = crowd["doomed"], crowd["decode-lasting"]
    doomed = job(Verb.PUSH, Route.DIRECT)
    target.ask("connect", source.ask("card"))
    source.ask("trap", "write", 1, 0, source.pid, signal.SIGKILL)
    crowd.move(doomed, "doomed", "decode-lasting")
    assert source.await_death() == -signal.SIGKILL
    (ending,) = crowd.ended(doomed, "decode-lasting")
    assert ending.quarantined
    assert target.ask("left")["in quarantine"] == 1
    target.ask("forget", "doomed", 0)
    crowd.until(lambda: not target.ask("left"), 20, "its pages are back")
    crowd.replace(seat("doomed"), ["decode"])


def test_a_reader_that_was_stopped_takes_nothing_of_what_was_reused_meanwhile(crowd: Crowd) -> None:
    """The source does not wait for it: its staging memory and pages go to others, and the reader's copy is refused."""
    for route in some(Route.PACKED, Route.DIRECT):
        reader = crowd["decode"]
        late = job(Verb.PULL, route)
        reader.ask("trap", "read", 3, 0, reader.pid, signal.SIGSTOP)
        crowd.move(late, "prefill", "decode")
        reader.await_stop()
        (ending,) = crowd.ended(late, "prefill")
        assert ending.cause in ("peer_lost", "deadline")
        assert not ending.quarantined
        crowd.landed(job(Verb.PULL), "prefill", "spare")
        _rest(crowd["prefill"])
        assert "pages" not in crowd["prefill"].ask("left")
        reader.wake()
        (ending,) = crowd.ended(late, "decode")
        assert ending.cause is not None
        crowd.assert_nothing_is_left()
        crowd.landed(job(Verb.PULL, route), "prefill", "decode")


def test_what_a_stopped_process_was_sent_stays_untouched_until_the_wire_lets_go(crowd: Crowd) -> None:
    """Over TCP a write to a stopped process neither ends nor fails; the source's memory is in it until it wakes."""
    source, target = crowd["prefill-tcp"], crowd["decode-tcp"]
    for route in some(Route.DIRECT, Route.PACKED):
        stuck = job(Verb.PUSH, route, 512 << 10)
        source.ask("trap", "write", 1, 0, target.pid, signal.SIGSTOP)
        crowd.move(stuck, "prefill-tcp", "decode-tcp")
        target.await_stop()
        (ending,) = crowd.ended(stuck, "prefill-tcp")
        assert ending.cause in ("peer_lost", "deadline", "transport")
        assert ending.quarantined
        left = source.ask("left")
        assert left["operations"] >= 1
        assert left["pages"] > 0
        assert (route is Route.DIRECT) or left["reserved"] > 0
        target.wake()
        crowd.ended(stuck, "decode-tcp")  # one that has all its bytes may say so
        crowd.assert_nothing_is_left()
        crowd.landed(job(Verb.PUSH, route), "prefill-tcp", "decode-tcp")


@pytest.mark.parametrize(
    ("verb", "source", "target"),
    [
        *some((Verb.PUSH, "prefill", "decode-doomed"), (Verb.PULL, "doomed", "decode")),
        (Verb.PUSH, "prefill-tcp", "decode-tcp"),
    ],
)
def test_a_mover_that_closes_under_a_write_may_free_its_memory_and_its_process_lives(
    crowd: Crowd, verb: Verb, source: str, target: str
) -> None:
    """Its peer is about to write to what it knew of, or to read it. (To deregister memory and go on has no defence:
    over TCP the process that unmaps it dies. `close` takes the agent down first.)"""
    posts, peer, closing = ("write", source, target) if verb is Verb.PUSH else ("read", target, source)
    torn = job(verb)
    crowd[peer].ask("trap", posts, 2, 0, crowd[peer].pid, signal.SIGSTOP)
    crowd.move(torn, source, target)
    crowd[peer].await_stop()
    crowd[closing].ask("drop_memory")
    crowd[peer].wake()
    (ending,) = crowd.ended(torn, peer)
    assert ending.cause is not None
    assert crowd[closing].ask("footprint")["threads"] >= 1, "the process is gone"
    crowd.replace(seat(closing), [peer])
    crowd.landed(job(verb), source, target)
    crowd.assert_nothing_is_left()


def _rest(rank: RankProcess) -> None:
    """Wait until a rank has given back the pages of all that ended but what is held."""
    deadline = time.monotonic() + 10
    while (left := rank.ask("left")).get("open jobs", 0) > left.get("in quarantine", 0):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
