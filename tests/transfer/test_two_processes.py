"""Movers in processes of their own, over NIXL: equal bytes, strangers refused, the dead noticed, nothing leaked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import msgspec
import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from mover_peer import DEADLINE_S, MoverProcess, Side, footprint

from kvmover.plan.cost import Route
from kvmover.transfer.config import Backoff
from kvmover.transfer.protocol.handshake import read_card, write_card
from tests.proofs import family

pytestmark = pytest.mark.timeout(90)

TOKENS = 400
ROW_BYTES = 2 * 2 * 2 * 128 + 2 * 24  # of one token, both components

#: Pages of 16 tokens in NHD, and pages of 24 in HND. Odd ones, so that every page has a stranger beside it.
SRC_PAGES = [63 - 2 * n for n in range(25)]
DST_PAGES = [2 * n + 1 for n in range(17)]

#: A peer that died has to be noticed in less than this, a fraction of the deadline.
NOTICED_S = 8.0


def prefill(engine: str = "prefill") -> MoverProcess:
    """Its pools may be mapped; those of `decode` may not, so that costs choose between the other routes there."""
    return MoverProcess(engine, 16, "NHD", None, "toy", "shared")


def decode(engine: str = "decode") -> MoverProcess:
    return MoverProcess(engine, 24, "HND", None)


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, MoverProcess]]:
    """Two that last, and two that will be killed: all started at once."""
    started = {
        "prefill": prefill(),
        "decode": decode(),
        "doomed prefill": prefill("doomed-prefill"),
        "doomed decode": decode("doomed-decode"),
    }
    yield started
    for name, process in started.items():
        if name.startswith("doomed"):
            process.kill()
        else:
            assert process.leave() == 0


@pytest.fixture(scope="module")
def source(processes: dict[str, MoverProcess]) -> MoverProcess:
    return processes["prefill"]


@pytest.fixture(scope="module")
def target(processes: dict[str, MoverProcess], source: MoverProcess) -> MoverProcess:
    process = processes["decode"]
    assert process.ask("connect", source.ask("card")).startswith("prefill.")
    return process


@pytest.mark.parametrize("start", [0, 137])
def test_the_bytes_are_the_same_on_both_sides(source: MoverProcess, target: MoverProcess, start: int):
    sent = source.ask("fill", start, SRC_PAGES, TOKENS)
    assert target.ask("digest", DST_PAGES, TOKENS) != sent
    if start:  # what is there already comes from an earlier turn
        source.ask("send", "earlier", SRC_PAGES)
        target.ask("receive", "earlier", "prefill", 0, start, DST_PAGES)
        assert target.ask("outcome", "earlier", 10)[0].startswith("landed")
        assert target.ask("digest", DST_PAGES, TOKENS) != sent
    request = f"from-{start}"
    source.ask("send", request, SRC_PAGES)
    target.ask("receive", request, "prefill", start, TOKENS, DST_PAGES)
    moved = (TOKENS - start) * ROW_BYTES
    for process in (target, source):
        said, _ = process.ask("outcome", request, 10)
        assert said.startswith(f"landed {moved} bytes")
    assert target.ask("digest", DST_PAGES, TOKENS) == sent


def test_numbers_change_their_form_on_the_way_there_and_back_by_consent_of_both_sides(source: MoverProcess):
    """Random bits: NaN, infinity and subnormal numbers too. The keys beside them are bytes, and stay what they are."""
    wide, fp8, strict = (
        MoverProcess(name, 16, "NHD", None, "toy", "zeros", stored)
        for name, stored in (("wide", ("auto", 0.07)), ("fp8", ("fp8_e4m3", 0.07)), ("strict", ("fp8_e4m3", 0.06)))
    )
    wide.ask("fill", 3, SRC_PAGES, TOKENS)
    assert fp8.ask("connect", wide.ask("card")).startswith("wide.")
    assert wide.ask("connect", fp8.ask("card")).startswith("fp8.")
    refused = strict.ask("connect", source.ask("card"))
    assert "stores attention as 64 bfloat16, this side as 64 float8_e4m3fn" in refused
    assert refused.endswith("and lossy = 0.06 tolerates no more")
    want = wide.ask("digest_in", "fp8_e4m3", SRC_PAGES, TOKENS)
    wide.ask("send", "there", SRC_PAGES)
    fp8.ask("receive", "there", "wide", 0, TOKENS, SRC_PAGES)
    assert fp8.ask("outcome", "there", 10)[0].startswith(f"landed {TOKENS * (2 * 2 * 2 * 64 + 2 * 24)} bytes")
    assert fp8.ask("digest", SRC_PAGES, TOKENS) == want
    back = fp8.ask("digest_in", "bfloat16", SRC_PAGES, TOKENS)
    fp8.ask("send", "back", SRC_PAGES)
    wide.ask("receive", "back", "fp8", 0, TOKENS, SRC_PAGES)
    assert wide.ask("outcome", "back", 10)[0].startswith("landed")
    assert wide.ask("digest", SRC_PAGES, TOKENS) == back
    assert [process.leave() for process in (wide, fp8, strict)] == [0, 0, 0]


def test_every_route_gives_the_same_bytes(source: MoverProcess):
    sent = source.ask("fill", 42, SRC_PAGES, TOKENS)
    for route in Route:
        here = Side(f"decode-{route}", 24, "HND", route, pools="shared")
        assert here.connect(source.ask("card")).startswith("prefill.")
        request = f"by-{route}"
        source.ask("send", request, SRC_PAGES)
        here.receive(request, "prefill", 0, TOKENS, DST_PAGES)
        assert here.outcome(request, 10)[0] == f"landed {TOKENS * ROW_BYTES} bytes {route}"
        assert here.digest(DST_PAGES, TOKENS) == sent
        assert here.digest([page - 1 for page in DST_PAGES], TOKENS) == Side.poisoned_digest(TOKENS)
        here.mover.close()


def test_a_peer_with_another_model_is_refused_at_the_handshake_with_both_sides_values(source: MoverProcess):
    here = Side("stranger", 24, "HND", None, model="tay")
    for said in (here.connect(source.ask("card")), source.ask("connect", here.card())):
        assert said.startswith("PeerRefused: peer holds t")
        for model in ("toy", "tay"):
            assert f"{model} (attention 2x2x2x64 bfloat16, keys 2x1x1x24 uint8)" in said
    assert not here.transport._peers
    here.mover.close()


def test_a_killed_source_ends_the_request_with_its_name_long_before_the_deadline(
    processes: dict[str, MoverProcess], target: MoverProcess
):
    victim = processes["doomed prefill"]
    name = target.ask("connect", victim.ask("card"))
    assert name.startswith("doomed-prefill.")
    victim.ask("slow_down", 0.05)
    victim.ask("send", "doomed", SRC_PAGES)
    target.ask("receive", "doomed", "doomed-prefill", 0, TOKENS, DST_PAGES)
    half_way(target)
    victim.kill()
    said, seconds = target.ask("outcome", "doomed", DEADLINE_S)
    assert said.startswith(f"TransferFailed: doomed: {name} is lost")
    assert seconds < NOTICED_S


def test_a_killed_destination_ends_the_request_with_its_name_long_before_the_deadline(
    processes: dict[str, MoverProcess], source: MoverProcess
):
    victim = processes["doomed decode"]
    name = victim.ask("name")
    assert victim.ask("connect", source.ask("card")).startswith("prefill.")
    victim.ask("slow_down", 0.05)
    source.ask("send", "doomed", SRC_PAGES)
    victim.ask("receive", "doomed", "prefill", 0, TOKENS, DST_PAGES)
    half_way(source)
    victim.kill()
    said, seconds = source.ask("outcome", "doomed", DEADLINE_S)
    assert said.startswith(f"TransferFailed: doomed: {name} is lost")
    assert seconds < NOTICED_S


def half_way(process: MoverProcess) -> None:
    """Wait until some chunks have been moved, of the 14 that there are."""
    deadline = time.monotonic() + 10
    while (chunks := process.ask("progress")) < 2:
        assert time.monotonic() < deadline, "nothing moves"
    assert chunks < 12


def killed_and_given_up(here: Side, victim: MoverProcess, engine: str, name: str) -> None:
    """The peer serves a request, is killed while it is asked for another, and is dialled until that is given up."""
    victim.ask("send", "first", SRC_PAGES)
    here.receive("first", engine, 0, TOKENS, DST_PAGES)
    assert here.outcome("first", DEADLINE_S)[0].startswith("landed")
    here.receive("second", engine, 0, 24, [40 + int(engine[-1])])  # which the dead may still write
    victim.kill()
    assert here.outcome("second", DEADLINE_S)[0].startswith(f"TransferFailed: second: {name} is lost")
    until = time.monotonic() + DEADLINE_S
    while len(here.mover._reconnector):
        assert time.monotonic() < until, "it is dialled for ever"
        here.poll()


@pytest.mark.proof
def test_killed_peers_of_this_host_are_dialled_no_more_and_leave_no_descriptor():
    here, left = Side("here", 24, "HND", None), list[int]()
    here.mover.configure(replace(here.mover.config, backoff=Backoff(0.02, 0.05), silence_s=2.0, ping_s=0.1))
    for number in range(5):
        victim = MoverProcess(f"victim{number}", 24, "HND", None)
        card = victim.ask("card")
        name = here.connect(card)
        killed_and_given_up(here, victim, f"victim{number}", name)
        assert here.connect(card) == f"PeerRefused: {name} has ended"
        left.append(here.footprint()["file descriptors"])
    here.mover.close()
    assert left == left[:1] * len(left)


@pytest.mark.proof
def test_killed_peers_of_another_host_leave_no_descriptor_however_often_they_are_dialled():
    here, left = Side("here", 24, "HND", None), list[int]()
    here.mover.configure(replace(here.mover.config, backoff=Backoff(0.05, 0.1), silence_s=2.0, ping_s=0.1))
    for number in range(3):
        victim = MoverProcess(f"victim{number}", 24, "HND", None)
        model = here.mover._model
        rank = read_card(model, victim.ask("card"))
        if not rank.listeners:
            pytest.skip("this host has no way to others")
        name = here.connect(write_card(model, msgspec.structs.replace(rank, machine="of another host")))
        killed_and_given_up(here, victim, f"victim{number}", name)
        left.append(here.footprint()["file descriptors"])
    here.mover.close()
    assert left == left[:1] * len(left)


@pytest.mark.parametrize("cycles", family([14, 50], few=[14]))
def test_starting_and_stopping_many_times_leaks_nothing(source: MoverProcess, cycles: int):
    sent = source.ask("fill", 7, SRC_PAGES, TOKENS)
    card = source.ask("card")
    before: list[dict[str, int]] = []
    for cycle in range(cycles):
        here = Side("cycle", 24, "HND", None)
        here.connect(card)
        source.ask("send", f"{cycles}-{cycle}", SRC_PAGES)
        here.receive(f"{cycles}-{cycle}", "prefill", 0, 32, DST_PAGES)
        assert here.outcome(f"{cycles}-{cycle}", 10)[0] == f"landed {32 * ROW_BYTES} bytes packed"
        assert source.ask("outcome", f"{cycles}-{cycle}", 10)[0].startswith("landed")
        if cycle == cycles - 1:
            assert here.digest(DST_PAGES, 32) == source.ask("digest", SRC_PAGES, 32) != sent
        here.mover.close()
        assert not here.transport._registered
        if cycle == 9:  # caches are warm
            before = [footprint(), source.ask("footprint")]
    after = [footprint(), source.ask("footprint")]
    for was, now in zip(before, after, strict=True):
        grown = {what: now[what] - was[what] for what in was}
        assert grown["file descriptors"] <= 4, grown
        assert grown["threads"] <= 1, grown
        assert grown["child processes"] <= 0, grown
        assert grown["memory maps"] <= 20, grown
        assert grown["resident MiB"] <= 48, grown  # the pools and arenas of 40 movers are 70
    assert source.ask("peers") <= 6
