"""The workers' half of the vLLM connector over NIXL: two engines of one rank each in this process, without vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Event

import pytest
import torch

from kvmover.engines.common import Cards, ParallelRank, Remote
from kvmover.engines.vllm.caches import BackedTransport, CacheGroup, LayerCache, ModelTotals, component_caches, pools_of
from kvmover.engines.vllm.connector_metadata import (
    AbortSpec,
    AttachSpec,
    GrowSpec,
    KvmoverConnectorMetadata,
    RankEnding,
    ReceiveSpec,
    RefuseSpec,
    ReleaseSpec,
    SendSpec,
    Tables,
    Tally,
)
from kvmover.engines.vllm.transfers import Over, RequestTransfers
from kvmover.engines.vllm.worker import ConnectorWorker, Ended, FailureLog
from kvmover.errors import TransportError
from kvmover.layout import Fleet
from kvmover.plan.cost import RDMA, Route
from kvmover.transfer import Model, Mover, MoverConfig, Place, Progress
from kvmover.transfer.meter import UNBEGUN
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import ALL, Gate

pytest.importorskip("nixl_cu13")

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 4, 12, 2, 8, 16
NAMES = tuple(f"layers.{n}" for n in range(LAYERS))
POISON = 0x6B

#: Who was asked where an engine is.
CALLS: list[int] = []

#: Cleared, nobody hears where an engine is.
OPEN = Event()
OPEN.set()

#: Whoever calls this port hears nothing before it is set.
SILENT, SILENT_PORT = Event(), 98


class Mark:
    """An event that passes when it is told to."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("nothing is stored here")


@dataclass
class Engine:
    """A rank: `cache` [layer, block, head, token, content], `marks` that were recorded, what was `told`, once each."""

    worker: ConnectorWorker
    cache: torch.Tensor
    marks: list[Mark]
    told: Ended = field(default_factory=Ended)

    def step(self, metadata: KvmoverConnectorMetadata | None = None) -> None:
        metadata = metadata or KvmoverConnectorMetadata()
        self.worker.before(metadata)
        self.worker.begin(metadata)
        for layer in NAMES:
            self.worker.computed(layer)
        self.worker.end(metadata)
        ended = self.worker.ended()
        for name in ("sent", "received", "failed", "blocks", "quarantined", "returned"):
            before, new = getattr(self.told, name), getattr(ended, name)
            assert not before & new, f"{new} {name} again"
            before |= new

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "waited 30 s"
            self.step()
            time.sleep(0.001)

    def take(self) -> Ended:
        """What was received, once something was."""
        self.until(lambda: bool(self.told.received))
        taken, self.told = self.told, Ended()
        return taken

    def heard(self) -> None:
        """Its thread has heard all that it was told."""
        self.worker.transfers.progress.snapshot()

    def rows(self, blocks: Sequence[int]) -> torch.Tensor:
        return self.cache[:, list(blocks)]


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []
    cards: dict[int, tuple[str, list[bytes]]] = {}

    def call(host: str, port: int) -> Cards:
        CALLS.append(port)
        assert (SILENT if port == SILENT_PORT else OPEN).wait(30)
        if port not in cards:
            raise TransportError(f"no cards from {host}:{port}")
        engine, its = cards[port]
        return Cards(engine, tuple(its))

    def build(
        name: str, layer_wise: int = 0, verb: Verb = Verb.PULL, chunk_bytes: int = 1 << 16, route: Route | None = None
    ) -> Engine:
        cache = torch.full((LAYERS, BLOCKS, HEADS, TOKENS, CONTENT), POISON, dtype=torch.uint8)
        strides = cache.stride()[1:]
        layer_caches = [
            LayerCache(layer, cache[n].data_ptr(), (BLOCKS, HEADS, TOKENS, CONTENT), strides, "uint8")
            for n, layer in enumerate(NAMES)
        ]
        place = ParallelRank(0, 1)
        made_of = component_caches(
            [CacheGroup(NAMES, "full_attention", TOKENS)], layer_caches, BLOCKS, ModelTotals(HEADS), place
        )
        backing = cache.view(torch.uint8).flatten()
        mover = Mover(
            BackedTransport(name, backing),
            Model("test", tuple(component_cache.component for component_cache in made_of)),
            Place(name, place.fleet(TOKENS), 0),
            pools_of(made_of, backing),
            MoverConfig(
                arena_bytes=1 << 20,
                sandbox_bytes=0,
                chunk_layers=layer_wise,
                verb=verb,
                route=route,
                drain_s=0.2,
                costs=replace(RDMA, chunk_bytes=chunk_bytes),
                deadline_s=20.0,
                resend_s=0.1,
            ),
        )
        marks: list[Mark] = []

        def mark() -> Mark:
            marks.append(Mark())
            return marks[-1]

        worker = ConnectorWorker(
            made_of, place.fleet(TOKENS), RequestTransfers(Progress(mover), call), None, mark, NAMES, 0, layer_wise
        )
        made.append(Engine(worker, cache, marks))
        cards[len(made)] = (name, [mover.card])
        return made[-1]

    CALLS.clear()
    yield build
    for engine in made:
        engine.worker.close()


REMOTE = Remote("src", "p-1", "here", 1)
SRC: Tables = ([3, 1, 4],)
DST: Tables = ([7, 2, 9],)
SEND = SendSpec("p", "p-1", SRC, None)
RECEIVE = ReceiveSpec("d", REMOTE, 0, 20, DST)


def filled(engine: Engine) -> Engine:
    engine.cache.copy_(torch.randint(0, 256, engine.cache.shape, dtype=torch.uint8))
    return engine


def assert_landed(src: Engine, dst: Engine) -> None:
    """20 tokens: two blocks and half of a third, and nothing beside them."""
    wanted = torch.full_like(dst.cache, POISON)
    wanted[:, [7, 2]] = src.rows([3, 1])
    wanted[:, 9, :, :4] = src.cache[:, 4, :, :4]
    assert torch.equal(dst.cache, wanted)


@pytest.mark.parametrize("verb", list(Verb))
def test_a_request_lands_and_both_sides_hear_of_it_once(make: Callable[..., Engine], verb: Verb) -> None:
    src, dst = filled(make("src")), make("dst", verb=verb)
    src.step(KvmoverConnectorMetadata(sends=[SEND], delayed={"p"}))
    assert src.told == Ended()
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    assert dst.take() == Ended(received={"d"})
    assert_landed(src, dst)
    src.until(lambda: src.told == Ended(sent={"p"}))
    src.step()
    dst.step()
    assert dst.told == Ended()
    (sent,), (received,) = src.worker.take_endings(), dst.worker.take_endings()
    assert (sent.way, sent.request, sent.landed) == ("sent", "p", True)
    assert (received.way, received.request, received.landed) == ("received", "d", True)
    assert sent.microseconds > 0
    assert received.microseconds > 0
    assert dst.worker.take_counts() == {"received_bytes": 20 * LAYERS * HEADS * CONTENT}
    assert (dst.worker.take_counts(), dst.worker.take_endings()) == ({}, [])


def test_an_engine_that_nobody_has_named_is_the_one_at_the_address(make: Callable[..., Engine]) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SEND]))
    for name in ("d", "e"):
        dst.step(
            KvmoverConnectorMetadata(receives=[replace(RECEIVE, request=name, remote=Remote("", "p-1", "here", 1))])
        )
        got = dst.take()
        assert got.received == {name}
        src.step(KvmoverConnectorMetadata(sends=[replace(SEND, request=f"again {name}")]) if name == "d" else None)
    assert_landed(src, dst)
    assert CALLS == [1]


def test_a_first_token_goes_beside_the_kv_when_it_has_been_sampled(make: Callable[..., Engine]) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SEND], delayed={"p"}))
    dst.step(
        KvmoverConnectorMetadata(receives=[replace(RECEIVE, request="met", remote=replace(REMOTE, transfer="p-2"))])
    )
    dst.until(lambda: bool(dst.worker.transfers.progress.submit(lambda mover: mover.ranks("src")).result()))
    got = dst.worker.transfers.progress.begin(
        lambda mover: mover.receive("p-1", "src", range(20), [[8, 5, 10]], aux_from=[0])
    ).result()
    src.step(KvmoverConnectorMetadata(attaches=[AttachSpec("p", b"token"), AttachSpec("nobody's", b"x")]))
    dst.until(lambda: got.ended)
    assert got.result is not None
    assert got.result.aux == {0: b"token"}
    src.until(lambda: src.told == Ended(sent={"p"}))


def test_layers_are_fetched_when_the_forward_pass_has_passed_them(make: Callable[..., Engine]) -> None:
    src, dst = filled(make("src", layer_wise=1)), make("dst", layer_wise=1)
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 0)]))
    assert len(src.marks) == LAYERS
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    src.marks[1].passed = True
    dst.until(lambda: torch.equal(dst.cache[:2, 9, :, :4], src.cache[:2, 4, :, :4]))
    assert (dst.cache[2:] == POISON).all()
    src.cache[2:].random_(256)
    src.marks[-1].passed = True
    assert dst.take() == Ended(received={"d"})
    assert_landed(src, dst)


def test_chunks_of_a_prompt_are_fetched_while_the_last_is_computed(make: Callable[..., Engine]) -> None:
    """A block is a chunk of the transfer here; the first was computed in the step before."""
    src, dst = filled(make("src")), make("dst", chunk_bytes=LAYERS * HEADS * TOKENS * CONTENT)
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 8)]))
    before, last = src.marks
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    before.passed = True
    dst.until(lambda: torch.equal(dst.cache[:, 7], src.cache[:, 3]))
    src.cache[:, [1, 4]] = torch.randint(0, 256, src.cache[:, [1, 4]].shape, dtype=torch.uint8)
    last.passed = True
    assert dst.take() == Ended(received={"d"})
    assert_landed(src, dst)


def test_chunks_of_a_prompt_are_fetched_as_they_are_computed_and_named(
    make: Callable[..., Engine],
) -> None:
    """A block is a chunk of the transfer here. The first step computes a block and a half, the last the rest."""
    src, dst = filled(make("src", layer_wise=2)), make("dst", layer_wise=2, chunk_bytes=2 * HEADS * TOKENS * CONTENT)
    truth = src.cache.clone()
    src.cache[:, SRC[0][1:]] = POISON
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", (SRC[0][:2],), 0, 12)]))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    src.marks[-1].passed = True
    dst.until(lambda: torch.equal(dst.cache[:, 7], truth[:, 3]))
    src.step(KvmoverConnectorMetadata(growths=[GrowSpec("p", (SRC[0][2:],), None)]))
    layers, rest = src.marks[-2:]
    src.cache[:2, SRC[0][1:]] = truth[:2, SRC[0][1:]]
    layers.passed = True
    dst.until(lambda: torch.equal(dst.cache[:2, 9, :, :4], truth[:2, 4, :, :4]))
    assert (dst.cache[2:, 9] == POISON).all()
    src.cache[2:, SRC[0][1:]] = truth[2:, SRC[0][1:]]
    rest.passed = True
    assert dst.take() == Ended(received={"d"})
    assert_landed(src, dst)


def test_a_chunk_of_a_request_whose_transfer_is_over_is_told_to_nobody(make: Callable[..., Engine]) -> None:
    src = filled(make("src"))
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", (SRC[0][:1],), 0, 8)]))
    src.worker.transfers.abort("p", "the decode engine left")
    src.until(lambda: not src.worker.transfers.is_sending("p") or bool(src.step()))
    src.step(KvmoverConnectorMetadata(growths=[GrowSpec("p", (SRC[0][1:],), None)]))
    src.step(KvmoverConnectorMetadata(delayed={"p"}))
    assert src.told == Ended(sent={"p"})


def test_a_release_serves_the_request_and_is_told_to_nobody(make: Callable[..., Engine]) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SEND], delayed={"p"}))
    dst.step(KvmoverConnectorMetadata(releases=[ReleaseSpec(REMOTE, 20)]))
    src.until(lambda: src.told == Ended(sent={"p"}))
    dst.step()
    assert dst.told == Ended()
    assert (dst.cache == POISON).all()
    assert (dst.worker.take_counts(), dst.worker.take_endings()) == ({}, [])


def test_the_movers_counts_of_requests_are_vllms(make: Callable[..., Engine]) -> None:
    """A release is no landing, and a fetch that never began is a failure."""
    src, dst = filled(make("src")), make("dst")
    names = [f"r{n}" for n in range(3)]
    sends = [SendSpec(name, name, ([n],), None) for n, name in enumerate(names)]
    src.step(KvmoverConnectorMetadata(sends=sends, delayed=set(names)))
    remotes = [Remote("src", name, "here", 1) for name in names]
    receives = [
        ReceiveSpec("landed", remotes[0], 0, 8, ([1],)),
        ReceiveSpec("unmet", Remote("gone", "p", "nowhere", 99), 0, 8, ([2],)),
    ]
    dst.step(KvmoverConnectorMetadata(receives=receives, releases=[ReleaseSpec(remote, 8) for remote in remotes[1:]]))
    src.until(lambda: src.told == Ended(sent=set(names)))
    dst.until(lambda: dst.told.received == {"landed", "unmet"})
    src.worker.transfers.progress.snapshot()
    tally = Tally(1)
    for engine in (src, dst):
        tally.hear(engine.worker.take_endings())
    counted = tally.take()
    ended = dst.worker.transfers.progress.snapshot().meter.ended
    assert ended == {("receive", "landed"): 1, ("receive", UNBEGUN): 1}
    assert (counted["received_requests"], counted["received_failures"]) == (1, 1)
    assert src.worker.transfers.progress.snapshot().meter.ended == {("send", "landed"): counted["sent_requests"]}
    assert counted["sent_requests"] == 3


def test_an_engine_that_nobody_finds_fails_the_blocks_that_were_asked_for(make: Callable[..., Engine]) -> None:
    dst = make("dst")
    dst.step(KvmoverConnectorMetadata(receives=[ReceiveSpec("d", Remote("gone", "p-1", "nowhere", 99), 8, 20, DST)]))
    assert dst.take() == Ended(received={"d"}, blocks={2, 9})
    assert dst.worker.take_endings() == [RankEnding("received", "d", False, 0)]


def test_requests_that_are_asked_for_at_once_meet_their_engine_once(make: Callable[..., Engine]) -> None:
    src, dst = filled(make("src")), make("dst")
    names = [f"r{n}" for n in range(4)]
    src.step(
        KvmoverConnectorMetadata(
            sends=[SendSpec(name, name, ([n],), None) for n, name in enumerate(names)], delayed=set(names)
        )
    )
    asked = [
        ReceiveSpec(name, Remote("src", name, "here", 1), 0, TOKENS, ([BLOCKS - 1 - n],))
        for n, name in enumerate(names)
    ]
    dst.step(KvmoverConnectorMetadata(receives=asked))
    dst.until(lambda: dst.told == Ended(received=set(names)))
    src.until(lambda: src.told == Ended(sent=set(names)))
    assert torch.equal(dst.cache[:, 8:].flip(1), src.cache[:, :4])
    assert len(CALLS) == 1


def test_an_engine_that_does_not_answer_keeps_no_other_waiting(make: Callable[..., Engine]) -> None:
    """It is called once, whoever asks for it, and all its requests fail together."""
    SILENT.clear()
    src, dst = filled(make("src")), make("dst")
    lost = [f"lost-{n}" for n in range(6)]
    gone = Remote("gone", "p-1", "nowhere", SILENT_PORT)
    dst.step(
        KvmoverConnectorMetadata(receives=[ReceiveSpec(name, gone, 0, TOKENS, ([n],)) for n, name in enumerate(lost)])
    )
    dst.until(lambda: SILENT_PORT in CALLS)
    src.step(KvmoverConnectorMetadata(sends=[SEND], delayed={"p"}))
    dst.step(KvmoverConnectorMetadata(receives=[replace(RECEIVE, tables=([7, 8, 9],))]))
    assert dst.take() == Ended(received={"d"})
    SILENT.set()
    dst.until(lambda: dst.told.received == set(lost))
    assert dst.told.blocks == set(range(6))
    assert CALLS.count(SILENT_PORT) == 1


def test_an_engine_that_is_there_later_is_called_again(make: Callable[..., Engine]) -> None:
    dst, late = make("dst"), ReceiveSpec("d", Remote("src", "p-1", "here", 2), 0, 20, DST)
    dst.step(KvmoverConnectorMetadata(receives=[late]))
    assert dst.take().blocks == {7, 2, 9}
    src = filled(make("src"))
    src.step(KvmoverConnectorMetadata(sends=[SEND], delayed={"p"}))
    dst.step(KvmoverConnectorMetadata(receives=[late]))
    assert dst.take() == Ended(received={"d"})
    assert CALLS == [2, 2]


def test_a_rank_whose_mover_is_closed_fails_what_it_is_told_to_move(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    src, dst = make("src"), make("dst")
    for engine in (src, dst):
        engine.worker.transfers.progress.close()
    src.step(
        KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 8)], delayed={"p"}, refusals=[RefuseSpec("q", "no")])
    )
    src.step(KvmoverConnectorMetadata(aborts=[AbortSpec("p", "no")], preempted={"p"}))
    assert src.told == Ended(sent={"p"})
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    assert dst.take() == Ended(received={"d"}, blocks={7, 2, 9})
    assert "q was not refused: the mover of src rank 0 is closed" in caplog.text


def test_another_engine_at_the_address_is_not_asked(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    filled(make("src"))
    dst = make("dst")
    dst.step(KvmoverConnectorMetadata(receives=[ReceiveSpec("d", Remote("another", "p-1", "here", 1), 0, 20, DST)]))
    dst.take()
    assert "here:1 is engine src now, not another" in caplog.text


def test_a_refusal_is_heard_with_its_reason(make: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    src, dst = make("src"), make("dst")
    src.step(KvmoverConnectorMetadata(refusals=[RefuseSpec("p-1", "the prefill was aborted")]))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    assert dst.take() == Ended(received={"d"}, blocks={7, 2, 9})
    assert "the prefill was aborted" in caplog.text


@pytest.mark.parametrize("name", ["d", "p"])
def test_an_abort_of_either_side_ends_both(make: Callable[..., Engine], name: str) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 0)], delayed={"p"}))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    (src if name == "p" else dst).step(KvmoverConnectorMetadata(aborts=[AbortSpec(name, "enough")]))
    assert dst.take() == Ended(received={"d"}, blocks={7, 2, 9})
    src.until(lambda: src.told == Ended(sent={"p"}))
    assert (dst.cache == POISON).all()


def test_a_failure_is_told_while_pages_may_be_written_and_so_is_that_they_are_not_any_more(
    make: Callable[..., Engine],
) -> None:
    """The source has written a block of three, may write the others, and answers no more: it might be dead, or not."""
    src, answers = filled(make("src")), Event()
    dst = make("dst", verb=Verb.PUSH, route=Route.DIRECT, chunk_bytes=LAYERS * HEADS * TOKENS * CONTENT)
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 8)], delayed={"p"}))
    src.marks[0].passed = True
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    dst.until(lambda: torch.equal(dst.cache[:, 7], src.cache[:, 3]))
    asleep = Event()
    silent = src.worker.transfers.progress.submit(lambda _: asleep.set() or answers.wait(30))
    assert asleep.wait(30), "its thread would still answer"
    dst.step(KvmoverConnectorMetadata(aborts=[AbortSpec("d", "enough")]))
    assert dst.take() == Ended(received={"d"}, failed={"d"}, quarantined={"d"})
    assert [end.landed for end in dst.worker.take_endings()] == [False]
    for _ in range(20):
        dst.step()
    assert dst.told == Ended()
    answers.set()
    assert silent.result()
    dst.until(lambda: dst.told == Ended(returned={"d"}))
    assert (dst.cache[:, [2, 9]] == POISON).all()
    src.until(lambda: src.told == Ended(sent={"p"}))
    dst.step()
    assert dst.told == Ended(returned={"d"})


def test_an_abort_before_the_source_was_found_is_told_to_it_when_it_is(make: Callable[..., Engine]) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 0)], delayed={"p"}))
    OPEN.clear()
    try:
        dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
        dst.step(KvmoverConnectorMetadata(aborts=[AbortSpec("d", "enough")]))
        assert (dst.told, src.told) == (Ended(), Ended())
    finally:
        OPEN.set()
    assert dst.take() == Ended(received={"d"}, blocks={7, 2, 9})
    src.until(lambda: src.told == Ended(sent={"p"}))
    assert [(end.way, end.landed) for end in src.worker.take_endings()] == [("sent", False)]


def test_an_answer_that_is_used_again_is_computed_at_once(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SEND], delayed={"p"}))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    dst.take()
    src.until(lambda: src.told == Ended(sent={"p"}))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    assert dst.take() == Ended(received={"d"}, blocks={7, 2, 9})
    assert "it was served already" in caplog.text


def test_a_preempted_prefill_says_so_until_it_is_offered_again(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 0)]))
    src.step(KvmoverConnectorMetadata(aborts=[AbortSpec("p", "the prefill was preempted")], preempted={"p"}))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    assert dst.take() == Ended(received={"d"}, blocks={7, 2, 9})
    assert "the prefill was preempted" in caplog.text
    src.step(KvmoverConnectorMetadata(sends=[SEND], delayed={"p"}))
    src.heard()
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    assert dst.take() == Ended(received={"d"})
    assert_landed(src, dst)


def said_of(caplog: pytest.LogCaptureFixture, request: str) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith(f"{request} was not")]


def test_a_send_that_fails_says_why_once(make: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 0)], delayed={"p"}))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    dst.step(KvmoverConnectorMetadata(aborts=[AbortSpec("d", "the client left")]))
    src.until(lambda: src.told == Ended(sent={"p"}))
    src.step()
    assert said_of(caplog, "p") == [("WARNING", "p was not sent: the client left")]


def test_what_the_engine_gives_up_itself_is_no_warning(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 0)], delayed={"p"}))
    src.step(KvmoverConnectorMetadata(aborts=[AbortSpec("p", "the client left")]))
    src.until(lambda: src.told == Ended(sent={"p"}))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    dst.take()
    assert said_of(caplog, "p") == [("INFO", "p was not sent: the client left")]
    assert said_of(caplog, "d") == [("WARNING", "d was not received: the client left")]


def test_transfers_that_fail_for_one_reason_are_a_line_a_minute_and_none_is_left_uncounted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    log = FailureLog(lambda: now)
    for number in range(200):
        request = f"r-{number}"
        log.failed("received", Over(request, f"request p-{number} is already being received"))
        now += 0.5
    log.failed("received", Over("other", "peer holds toy"))
    log.failed("sent", Over("other", "peer holds toy"))
    assert [record.getMessage() for record in caplog.records] == [
        "r-0 was not received: request p-0 is already being received",
        "r-120 was not received: request p-120 is already being received (119 more like it since the last line)",
        "other was not received: peer holds toy",
        "other was not sent: peer holds toy",
    ]


def test_where_the_mover_tells_of_transfers_the_worker_tells_of_those_that_never_began(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    make("src")
    dst = make("dst")
    dst.worker.told = FailureLog().unbegun
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    dst.step(KvmoverConnectorMetadata(aborts=[AbortSpec("d", "enough")]))
    dst.take()
    assert said_of(caplog, "d") == []
    dst.step(KvmoverConnectorMetadata(receives=[ReceiveSpec("d", Remote("gone", "p-1", "nowhere", 99), 8, 20, DST)]))
    dst.take()
    assert said_of(caplog, "d") == [("WARNING", "d was not received: no cards from nowhere:99")]


class Recorder(RequestTransfers):
    """Traffic that goes nowhere: what was offered, and behind which gates."""

    def __init__(self) -> None:
        self.gates: dict[str, list[Gate]] = {}
        self.named: dict[str, list[list[list[int]] | None]] = {}

    def send(self, spec: SendSpec, pages: object, gates: Sequence[Gate] | None) -> None:
        self.gates[spec.request] = list(gates or ())

    def produced(self, request: str, gate: Gate, pages: list[list[int]] | None, contents: object) -> None:
        self.gates[request].append(gate)
        self.named.setdefault(request, []).append(pages)


def test_gates_count_layers_of_the_whole_model_and_tokens_of_earlier_steps() -> None:
    transfers = Recorder()
    names = tuple(f"layers.{n}" for n in range(8, 13))
    worker = ConnectorWorker((), Fleet(), transfers, None, Mark, names, first_layer=8, layer_wise=2)
    sends = [SendSpec("first", "a", (), 0), SendSpec("last", "b", (), 48)]
    metadata = KvmoverConnectorMetadata(sends=sends)
    worker.before(metadata)
    worker.begin(metadata)
    for layer in (*names, "draft.0"):
        worker.computed(layer)
    worker.end(metadata)
    assert [(gate.layers, gate.tokens) for gate in transfers.gates["first"]] == [(10, ALL), (12, ALL), (ALL, ALL)]
    assert [(gate.layers, gate.tokens) for gate in transfers.gates["last"]] == [
        (ALL, 48),
        (10, ALL),
        (12, ALL),
        (ALL, ALL),
    ]
    worker.end(KvmoverConnectorMetadata())
    assert len(transfers.gates["first"]) == 3


def test_a_chunks_gates_end_at_its_tokens_and_its_pages_are_named_once() -> None:
    transfers = Recorder()
    names = tuple(f"layers.{n}" for n in range(4))
    worker = ConnectorWorker((), Fleet(), transfers, None, Mark, names, layer_wise=2)
    for metadata in (
        KvmoverConnectorMetadata(sends=[SendSpec("p", "a", (), 0, 32)]),
        KvmoverConnectorMetadata(growths=[GrowSpec("p", (), 64)]),
        KvmoverConnectorMetadata(growths=[GrowSpec("p", (), None)]),
    ):
        worker.before(metadata)
        worker.begin(metadata)
        for layer in names:
            worker.computed(layer)
        worker.end(metadata)
    corners = [(2, 32), (ALL, 32), (2, 64), (ALL, 64), (2, ALL), (ALL, ALL)]
    assert [(gate.layers, gate.tokens) for gate in transfers.gates["p"]] == corners
    assert transfers.named["p"] == [None, None, [], None, [], None]


def test_pages_of_a_preempted_prefill_are_free_when_the_step_begins(make: Callable[..., Engine]) -> None:
    src, dst = filled(make("src")), make("dst")
    src.step(KvmoverConnectorMetadata(sends=[SendSpec("p", "p-1", SRC, 0)]))
    dst.step(KvmoverConnectorMetadata(receives=[RECEIVE]))
    preempted = KvmoverConnectorMetadata(aborts=[AbortSpec("p", "the prefill was preempted")], preempted={"p"})
    src.worker.before(preempted)
    assert not src.worker.transfers.is_sending("p")
    src.cache.fill_(1)
    src.step(preempted)
    assert dst.take() == Ended(received={"d"}, blocks={7, 2, 9})
    assert (dst.cache == POISON).all()
    filled(src).step(KvmoverConnectorMetadata(sends=[SEND], delayed={"p"}))
    src.heard()
    dst.step(KvmoverConnectorMetadata(receives=[ReceiveSpec("d", REMOTE, 0, 20, DST)]))
    assert dst.take() == Ended(received={"d"})
    assert_landed(src, dst)
