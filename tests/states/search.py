"""The search visits every state of a play, breadth first: each is reached again by the choices that led to it.

Two choices that concern different processes commute, so of their two orders one is run: the other leads to the same
state.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from tests.sim.copies import Touched
from tests.sim.scene import Broken
from tests.states.chosen_network import Choice, ChosenNetwork
from tests.states.stages import FAULTS

#: States whose play is kept, so that it can go on: it saves the last of their choices the way there.
KEPT = 1000

#: Choices that act at one process, and touch nothing of others but the end of a channel to them.
LOCAL = {"poll", "call", "hear", "told", "name"}


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
    """A state, by the first choices that led to it. `then`: its successors, by choice."""

    parent: State | None
    choice: Choice | None
    over: bool
    then: dict[Choice, State] = field(default_factory=dict["Choice", "State"])

    def path(self) -> list[Choice]:
        """Returns the choices from the beginning."""
        state, found = self, list[Choice]()
        while state.parent is not None and state.choice is not None:
            found.append(state.choice)
            state = state.parent
        return found[::-1]


@dataclass(slots=True)
class Found:
    """What a search has visited. `depth`: to which all states are visited. `other_ways`: choices that led to a state by
    another way than the first. `runs`: plays; `steps`: choices of all plays.
    """

    choices: int = 0
    depth: int = 0
    whole: bool = False
    runs: int = 0
    steps: int = 0
    seconds: float = 0.0
    other_ways: list[tuple[State, Choice]] = field(default_factory=list["tuple[State, Choice]"])
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
        began, level = time.monotonic(), [self._met(self.begin(), None, None)]
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
        found = self.found
        found.choices += 1
        known, is_new = _by_the_other_order(state, choice), False
        if known is None:
            path = [*state.path(), choice]
            play = self.kept.pop(state, None)
            if play is None:
                play = replayed(self.begin, path[:-1])
                found.runs, found.steps = found.runs + 1, found.steps + len(path)
            step(play, choice, path)
            known = found.visited.get(_key(play))
            is_new = known is None
            if known is None:
                known = self._met(play, state, choice)
            else:
                found.other_ways.append((state, choice))
        state.then[choice] = known
        return [known] if is_new else []

    def _met(self, play: Playable, parent: State | None, choice: Choice | None) -> State:
        """Add a new state."""
        state = State(parent, choice, play.is_over)
        self.found.visited[_key(play)] = state
        self.choices[state] = [] if state.over else play.choices()
        if not state.over and not self.choices[state]:
            raise Counterexample(state.path(), "nothing can happen any more, and it is not over")
        if not state.over and len(self.kept) < KEPT:
            self.kept[state] = play
        return state


def search(begin: Begin, seconds: float = math.inf, most: int = sys.maxsize) -> Found:
    """Visit all states of a play, or as many as `seconds` and `most` allow. Raises Counterexample."""
    return Search(begin).run(seconds, most)


def _key(play: Playable) -> bytes:
    return blake2b(play.picture().encode(), digest_size=16).digest()


def _by_the_other_order(state: State, choice: Choice) -> State | None:
    """Returns the successor of a state, if the state's last choice and this one commute and the other order was run."""
    if state.parent is None or state.choice is None or not _commute(state.choice, choice):
        return None
    other = state.parent.then.get(choice)
    return None if other is None else other.then.get(state.choice)


def _commute(one: Choice, other: Choice) -> bool:
    return one[0] in LOCAL and other[0] in LOCAL and _process(one) != _process(other)


def _process(choice: Choice) -> str:
    """The place of the process at which a choice acts."""
    match choice:
        case ("poll", str(name)):
            return name.partition(".")[0]
        case ("call" | "name", engine, rank):
            return f"{engine}{rank}"
        case ("hear", _, str(peer)):
            return peer.partition(".")[0]
        case ("told", str(sender), _):
            return sender.partition(".")[0]
    raise ValueError(f"{choice} acts at several processes")


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
