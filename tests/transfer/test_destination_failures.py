"""What a destination must not believe, nor free too soon: each of these was once a line that no test missed."""

from __future__ import annotations

import dataclasses

import pytest
from mover_fleets import CONFIG, HandClock, Pair
from msgspec.structs import replace

from kvmover.plan.cost import Route
from kvmover.transfer.destination.destination_machine import (
    Action,
    EndReceive,
    Event,
    Free,
    ReadEnded,
    Receiving,
    Reserved,
    Scatter,
    Scattered,
    Source,
    step,
)
from kvmover.transfer.events import Cancel, Patience
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunk_sets import WriterChunks
from kvmover.transfer.protocol.wire import Verb
from tests.transfer.protocol_words import says_chunk, says_offered, says_staged


def receiving(source: Source) -> Receiving:
    return Receiving("r", 7, {"a": source}, Patience(100.0, 2.0, 1.0), 100.0)


def run(state: Receiving, *events: Event) -> tuple[Receiving, list[Action]]:
    """The state after all events, and the actions of the last."""
    actions: list[Action] = []
    for event in events:
        state, actions = step(state, event, 0.0)
        state.check()
    return state, actions


@pytest.mark.parametrize(
    ("source", "event"),
    [
        (Source(2, direct=True), says_chunk("a", 1)),
        (Source(2, verb=Verb.PULL), says_staged("a", 1, 0)),
    ],
    ids=["pushed", "to be read"],
)
def test_a_chunk_that_has_no_pages_here_cannot_have_been_sent(source: Source, event: Event):
    state = replace(receiving(source), unnamed=WriterChunks({("a", 1)}))
    state, _ = run(state, says_offered("a", ((0, 2),)), event)
    assert "chunk 1, which has no pages here" in str(state.reason)
    assert not state.arrived


def test_a_chunk_that_was_read_keeps_its_region_until_it_is_scattered_whatever_fails_meanwhile():
    state, _ = run(receiving(Source(2, verb=Verb.PULL)), says_offered("a", ((0, 2),)), Reserved("a", ((0, 512),)))
    state, actions = run(state, Reserved("a", ((1, 1024),)), says_staged("a", 0, 0), ReadEnded("a", 0))
    assert Scatter("a", 0, 512) in actions
    state, actions = run(state, Cancel("enough"))
    assert [action for action in actions if isinstance(action, Free)] == [Free(1024)]
    assert not state.finished
    state, actions = run(state, Scattered("a", 0))
    assert actions == [Free(512), EndReceive("enough")]


@pytest.mark.parametrize("beyond", [-100, 0, 1 << 61])
def test_nothing_is_read_from_outside_of_the_staging_memory_that_a_source_has_named(beyond: int):
    """What lies behind it may be its pages, or another's."""
    pair = Pair.of(config=dataclasses.replace(CONFIG, verb=Verb.PULL, route=Route.PACKED), clock=HandClock())
    (landed,) = pair.receive()
    pair.bench.turn()
    liar, target = pair.src.movers[0], pair.dst.movers[0]
    generation = target._destination.generation
    offset = liar._core.card.staging.nbytes + beyond
    for message in (wire.Offered("request", generation, ((0, 25),)), wire.Staged("request", generation, 0, offset)):
        liar._core.say(target._transport.name, message)
        pair.bench.turn()
    assert landed.result is not None
    assert f"staged a chunk at {offset}, outside of its staging memory" in str(landed.result.reason)
    pair.dst.assert_holds(pair.before)
    pair.bench.assert_nothing_is_left()
