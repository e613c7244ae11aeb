"""The search visits every state of a play, breadth first: each is reached again by the choices that led to it.

Two choices that touch different processes commute, so of their two orders one is run: the other leads to the same
state.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Protocol

from tests.sim.copies import Touched
from tests.sim.scene import Broken
from tests.states.chosen_network import Choice, ChosenNetwork
from tests.states.stages import FAULTS

#: States whose play is kept, so that it can go on: it saves the last of their choices the way there.
KEPT = 10_000


class Playable(Protocol):
    """A system of which each next event is chosen. `act` raises Broken when a property does not hold after it."""

    network: ChosenNetwork

    @property
    def names(self) -> list[str]:
        """The processes, by name."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing more can happen that matters."""
        ...

    def choices(self) -> list[Choice]:
        """Returns all that may happen next."""
        ...

    def act(self, choice: Choice) -> None:
        """Let a choice happen."""
        ...

    def picture(self) -> str:
        """Returns all that decides, in words: equal for systems that go on alike."""
        ...


#: Begins a play.
Begin = Callable[[], Playable]


@dataclass(slots=True, eq=False)
class State:
    """A state that `depth` choices lead to. `ways`: states before it and the choice made at each, first that of its
    path; `then`: its successors, by choice.
    """

    depth: int
    over: bool
    ways: list[tuple[State, Choice]] = field(default_factory=list["tuple[State, Choice]"])
    then: dict[Choice, State] = field(default_factory=dict["Choice", "State"])

    def path(self) -> list[Choice]:
        """Returns the choices from the beginning, by the first way that was found."""
        state, found = self, list[Choice]()
        while state.depth:
            state, choice = state.ways[0]
            found.append(choice)
        return found[::-1]


@dataclass(slots=True)
class Found:
    """What a search has visited, all of it to a `depth`. `runs`: plays, and `steps`: their choices."""

    choices: int = 0
    depth: int = 0
    whole: bool = False
    runs: int = 0
    steps: int = 0
    seconds: float = 0.0
    visited: dict[bytes, State] = field(default_factory=dict[bytes, State])

    @property
    def states(self) -> int:
        return len(self.visited)

    @property
    def ends(self) -> int:
        """How many states are ends of the request."""
        return sum(state.over for state in self.visited.values())


class Counterexample(AssertionError):
    """A property that does not hold, with the choices that show it."""

    def __init__(self, path: list[Choice], why: str) -> None:
        super().__init__(f"{why}, after {path}")
        self.path, self.why, self.found = path, why, Found()


def replayed(begin: Begin, path: list[Choice]) -> Playable:
    """Returns a play after the choices of a path. Raises Counterexample at the first that breaks a property."""
    play = begin()
    for number, choice in enumerate(path):
        step(play, choice, path[: number + 1])
    return play


def step(play: Playable, choice: Choice, path: list[Choice]) -> None:
    """Let a choice happen, the last of a path. Raises Counterexample when a property does not hold after it."""
    try:
        play.act(choice)
    except (Broken, Touched) as error:
        raise Counterexample(path, str(error)) from error


@dataclass(slots=True, eq=False)
class Search:
    """A search under way. `choices` of states that were not gone on from yet, and the plays that some of them kept."""

    begin: Begin
    found: Found = field(default_factory=Found)
    choices: dict[State, list[Choice]] = field(default_factory=dict["State", "list[Choice]"])
    kept: dict[State, Playable] = field(default_factory=dict[State, Playable])

    def run(self, seconds: float, most: int) -> Found:
        """Visit states, level by level."""
        began, level = time.monotonic(), [self._met(self.begin(), [])]
        try:
            while level:
                after = list[State]()
                for state in level:
                    for choice in self.choices.pop(state):
                        if time.monotonic() - began > seconds or len(self.found.visited) >= most:
                            return self.found
                        after += self._go_on(state, choice)
                self.found.depth, level = self.found.depth + 1, after
            self.found.whole = True
            return self.found
        except Counterexample as broken:
            broken.found = self.found
            raise
        finally:
            self.found.seconds = time.monotonic() - began

    def _go_on(self, state: State, choice: Choice) -> list[State]:
        """Make a choice at a state. Returns the state that it leads to, if that is new."""
        self.found.choices += 1
        after = _by_the_other_order(state, choice) or self._run(state, choice)
        is_new = after.depth > 0 and not after.ways
        after.ways.append((state, choice))
        state.then[choice] = after
        return [after] if is_new else []

    def _run(self, state: State, choice: Choice) -> State:
        """Returns the state that a play comes to by a choice."""
        path, play = [*state.path(), choice], self.kept.pop(state, None)
        if play is None:
            play = replayed(self.begin, path[:-1])
            self.found.runs, self.found.steps = self.found.runs + 1, self.found.steps + len(path)
        step(play, choice, path)
        return self._met(play, path)

    def _met(self, play: Playable, path: list[Choice]) -> State:
        """Returns the state of a play, which is added if it is new."""
        key = _key(play)
        state = self.found.visited.get(key)
        if state is None:
            state = self.found.visited[key] = State(len(path), play.is_over)
            self.choices[state] = [] if state.over else play.choices()
            if not state.over and not self.choices[state]:
                raise Counterexample(path, "nothing can happen any more, and it is not over")
            if not state.over and len(self.kept) < KEPT:
                self.kept[state] = play
        return state


def search(begin: Begin, seconds: float = math.inf, most: int = sys.maxsize) -> Found:
    """Visit all states of a play, or as many as `seconds` and `most` allow. Raises Counterexample."""
    return Search(begin).run(seconds, most)


def _key(play: Playable) -> bytes:
    return blake2b(play.picture().encode(), digest_size=16).digest()


def _by_the_other_order(state: State, choice: Choice) -> State | None:
    """Returns the successor of a state, if a last choice before it and this one commute and the other order was run."""
    for before, last in state.ways:
        other = before.then.get(choice)
        found = other and other.then.get(last)
        if found is not None and _commute(last, choice):
            return found
    return None


def _commute(one: Choice, other: Choice) -> bool:
    here, there = _touched(one), _touched(other)
    return here is not None and there is not None and here.isdisjoint(there)


@cache
def _touched(choice: Choice) -> frozenset[str] | None:
    """Returns the places of the processes that a choice touches, or None where it may touch any.

    A process that hears takes a note from the head of a channel; at its tail the sender goes on as it would have.
    """
    match choice:
        case ("poll" | "stop" | "go", str(name)):
            touched = [name]
        case ("call" | "name" | "abort", str(engine), int(rank)):
            touched = [f"{engine}{rank}"]
        case ("hear" | "gather" | "overtake" | "lose" | "delay", _, str(peer)):
            touched = [peer]
        case ("told", str(sender), _, _):
            touched = [sender]
        case ("repeat", str(sender), str(peer)) | ("land" | "late", str(sender), _, str(peer)):
            touched = [sender, peer]
        case _:
            return None
    return frozenset(name.partition(".")[0] for name in touched)


def stuck(found: Found) -> Iterator[State]:
    """The states from which no end is reached, however the play goes on without further faults."""
    before: dict[State, list[State]] = {}
    for state in found.visited.values():
        for choice, after in state.then.items():
            if choice[0] not in FAULTS:
                before.setdefault(after, []).append(state)
    reach = {state for state in found.visited.values() if state.over}
    fresh = list(reach)
    while fresh:
        more = [each for each in before.get(fresh.pop(), ()) if each not in reach]
        reach.update(more)
        fresh += more
    return (state for state in found.visited.values() if state not in reach)
