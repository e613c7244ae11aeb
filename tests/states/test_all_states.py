"""Every state of whole movers on small stages: no property breaks, the end is reached, and a broken rule is found.

`python -m perf.all_states` visits the stages that take longer, and keeps their numbers in all_states.csv.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.proofs import family, tries
from tests.sim import mutations
from tests.sim.mutations import Mutation
from tests.states import search as searching
from tests.states.migration_play import MigrationPlay
from tests.states.play import Play
from tests.states.search import Begin, Counterexample, Found, State, replayed, search, stuck
from tests.states.sequence_chart import charted
from tests.states.stages import FAULTS, LOST_AND_REPEATED, WAITED_FOR, Stage, growing, one_to_one, one_to_two


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Movers say much of faults, and nobody reads it here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def visited(stage: Stage, most: int = sys.maxsize) -> Found:
    """Returns what a search of a stage has found. A counterexample is shown as a chart."""
    return searched(str(stage), partial(Play, stage), most)


def searched(title: str, begin: Begin, most: int) -> Found:
    try:
        return search(begin, most=most)
    except Counterexample as broken:
        raise AssertionError(charted(title, begin, broken)) from None


CALM = one_to_one()
#: A loss and a repetition, each way that a request may go.
STAGES = [*CALM, *one_to_one(*LOST_AND_REPEATED), *one_to_two()[:1], *growing()[2:4], *one_to_one(("abort", 1))]
FEW = [*CALM, one_to_one(("lose", 1))[1]]


@pytest.mark.parametrize(
    "stage", family([*FEW, *STAGES[len(CALM) :]], few=FEW, proved=one_to_one(*LOST_AND_REPEATED)[2:4]), ids=str
)
@pytest.mark.timeout(600)
def test_every_state_of_a_stage_is_visited_and_its_end_is_reached(stage: Stage):
    found = visited(stage)
    assert found.whole
    assert found.ends
    assert not list(stuck(found))


@pytest.mark.parametrize("faults", [(), (("lose", 1),), (("abort", 1),)])
def test_a_request_that_migrates_is_at_one_engine_in_every_state(faults: tuple[tuple[str, int], ...]):
    """The states nearest the beginning: the whole of them is for the night."""
    searched("migration", partial(MigrationPlay, faults), tries(plain=100, prove=300, night=20_000))


@pytest.mark.parametrize("stage", [one_to_one(*LOST_AND_REPEATED)[1], one_to_one(("crash", 1))[3]], ids=str)
def test_movers_of_equal_state_answer_every_choice_alike(stage: Stage):
    """The second way to a state is gone again, and each choice there leads both movers to equal states."""
    found, begin = visited(stage, tries(plain=150, prove=600, night=5000)), partial(Play, stage)
    others = [(state.path(), before, choice) for state in found.visited.values() for before, choice in state.ways[1:]]
    assert others
    for first, before, choice in others[:: tries(plain=10, prove=4, night=1)]:
        second = [*before.path(), choice]
        assert first != second
        for more in replayed(begin, first).choices():
            one, other = replayed(begin, [*first, more]), replayed(begin, [*second, more])
            assert one.picture() == other.picture(), (first, second, more)
            assert sorted(one.choices()) == sorted(other.choices())


#: A stage of two processes and one of three, and each kind of fault in one of them.
COMMUTING = [CALM[1], one_to_two()[2], one_to_one(*LOST_AND_REPEATED)[1]]
COMMUTING += [replace(one_to_two()[2], faults=(("abort", 1),))]
COMMUTING += [one_to_one((fault, 1))[2] for fault in FAULTS if fault != "delay"]


@pytest.mark.parametrize("stage", family(COMMUTING, few=COMMUTING[:1], proved=COMMUTING[1:3]), ids=str)
@pytest.mark.timeout(600)
def test_a_choice_that_is_not_run_twice_leads_where_it_would(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """Without the rule that choices of two processes commute, the same states are found."""
    fewer = visited(stage)
    monkeypatch.setattr(searching, "_commute", lambda one, other: False)
    more = visited(stage)
    assert more.visited.keys() == fewer.visited.keys()
    assert more.runs > fewer.runs


#: Rules as they were before a mend, each with a stage on which it shows.
BEFORE_A_MEND: list[tuple[Mutation, Stage]] = [
    (mutations.a_want_opens_what_is_over, one_to_one(("overtake", 1), ("abort", 1))[0]),
    (mutations.a_want_is_said_once, one_to_one(("lose", 1))[1]),
    (mutations.regions_are_freed_at_abort, one_to_one(("abort", 1))[1]),
    (mutations.a_lease_is_not_looked_at, one_to_one(("stop", 1))[0]),
    (
        mutations.what_one_engine_said_is_heard_before_another_asked,
        replace(WAITED_FOR, opening=(*WAITED_FOR.opening, ("call", "p", 0), ("land", "p0.1", 1, "d0.1"))),
    ),
]


@pytest.mark.parametrize(("mutation", "stage"), family(BEFORE_A_MEND, few=BEFORE_A_MEND[:3]))
def test_a_rule_that_is_broken_is_found_and_drawn_as_a_chart(
    mutation: Mutation, stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    mutation(monkeypatch)
    begin = partial(Play, stage)
    with pytest.raises(Counterexample) as broken:
        search(begin)
    chart = charted(str(stage), begin, broken.value).splitlines()
    assert chart[1].split()[0] == "p0.1"
    assert any(line.strip().startswith(("|", "<")) and "Want" in line for line in chart[2:]) or stage.opening
    assert chart[-3] == broken.value.why
    with pytest.raises(Counterexample) as again:
        replayed(begin, broken.value.path)
    assert again.value.why == broken.value.why


def test_a_state_without_a_way_to_an_end_is_told():
    """A search that saw no choice of a state says that the state is stuck."""
    found = visited(CALM[2])
    over = next(state for state in found.visited.values() if state.over)
    over.over = False
    assert any(state is over for state in stuck(found))
    lonely = State(depth=1, over=False)
    found.visited[b"another"] = lonely
    assert any(state is lonely for state in stuck(found))
