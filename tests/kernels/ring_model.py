"""A model of the bulk kernel's ring: every interleaving of its two warps and of the copies that they begin.

The steps of the model are those of the CUDA text: `cuda_text` runs it as each thread would, and the PTX that it comes
to is what the thread does here. The producer is the warp that loads stages, the consumer the one that stores them. Of
each warp two lanes take part, the one that speaks for all and any other; the others have nothing to copy.

The rules are PTX's. A barrier's phase ends once its arrivals have come and the bytes that it expects have landed; a
wait of a parity passes once the phase of that parity is over. A copy into a stage lands whenever it likes. A copy out
of one reads and writes as late as its thread's waits allow: earlier, it would be in nobody's way. In one point the
model asks for more than PTX, as the file does: no byte lands that its barrier does not expect yet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from bulk_cases import AT, Piece, locate
from cuda_text import UnknownText, loaded

from kvmover.kernels.experimental import KERNEL, MAP_WORDS, RING, THREADS, Ring, words

PIECE_BYTES = 128
WARP = 32
#: Lanes of a warp that take part.
LANES = 2
#: Threads whose steps are interleaved: two lanes of the producer, two of the consumer.
TAKING_PART = (0, 1, WARP, WARP + 1)
#: Addresses that no two things share.
BARRIERS, STAGES = 1 << 12, 1 << 20
SOURCE, TARGET = 1 << 40, 1 << 41


class RingFault(Exception):
    """An order of steps in which the ring loses or mixes bytes, or stops."""


@dataclass(frozen=True)
class TablePointer:
    """A place in the table of a launch."""

    table: np.ndarray
    at: int = 0

    def __add__(self, words: int) -> TablePointer:
        return TablePointer(self.table, self.at + words)

    def __getitem__(self, word: int) -> int:
        return int(self.table[self.at + word])


@dataclass(frozen=True)
class RingLaunch:
    """A launch: items of two pieces, of which the last may have one; `boxes` go by tensor maps, as a second region."""

    ring: Ring
    items: int
    blocks: int = 1
    odd: bool = False
    boxes: int = 0

    def __str__(self) -> str:
        said = f"{self.items} items and {self.boxes} of boxes, {self.ring.stages} stages, lag {self.ring.lag}"
        return f"{said}{', half a stage' * self.odd}{', two blocks' * (self.blocks > 1)}"

    @property
    def table(self) -> np.ndarray:
        """The table of the launch, as `experimental.describe` lays one out."""
        sizes = [n for n in (self.items, self.boxes) if n]
        mapped = [m for n, m in ((self.items, 0), (self.boxes, 3)) if n]
        header = np.zeros(len(sizes) * AT.WORDS, np.int64)
        extra, first = list[int](), 0
        for number, (size, maps) in enumerate(zip(sizes, mapped, strict=True)):
            word = header[number * AT.WORDS :]
            planes = 2 if maps and size > 1 else 1
            count = 2 * size - (self.odd and number == len(sizes) - 1)
            units = -(-count // planes)
            named = {"FIRST_TILE": first, "PLANES": planes, "HEADS": 1, "TOKENS": 1, "PIECES": 1, "END": first + size}
            named |= {"COUNT": count, "PER_ITEM": 2, "PIECE_BYTES": PIECE_BYTES, "RUN_BYTES": PIECE_BYTES}
            for name, value in {**named, "MAPPED": maps}.items():
                word[getattr(AT, name)] = value
            for side, begin in ((AT.SRC, SOURCE), (AT.DST, TARGET)):
                at = len(header) + len(extra)
                extra += [0] * (planes * MAP_WORDS) if maps else [begin] * planes
                word[side + AT.ADDRESSES], word[side + AT.LIST] = at, len(header) + len(extra)
                extra += [(number << 20 | each) * PIECE_BYTES for each in range(units)]
            first += size
        return np.array([*header, *extra], np.int64)


#: A step of a thread: its name and its numbers.
Step = tuple[Any, ...]
Value = TypeVar("Value")


def steps_of(source: str, launch: RingLaunch) -> tuple[list[list[Step]], int]:
    """Returns the steps of each of a block's threads, for the last block of the launch, and its number of pieces.

    Raises RingFault if the threads do not meet where they should.
    """
    table, ring = launch.table, launch.ring
    items, block = launch.items + launch.boxes, launch.blocks - 1
    pieces = _Pieces(TablePointer(table))
    given: dict[str, Any] = {"STAGES": ring.stages, "STAGE_BYTES": ring.stage_bytes, "LAG": ring.lag, **words()}
    given |= {"MAP_WORDS": MAP_WORDS, "ring": "ring", "locate": pieces.locate, "Piece": None}
    kernel = loaded(source, given)[KERNEL]
    axes = {"blockIdx": block, "gridDim": launch.blocks, "blockDim": THREADS}
    threads = [
        SimpleNamespace(threadIdx=SimpleNamespace(x=x), **{name: SimpleNamespace(x=n) for name, n in axes.items()})
        for x in range(THREADS)
    ]
    running = [kernel(thread, TablePointer(table), items) for thread in threads]
    steps: list[list[Step]] = []
    for warp in (running[:WARP], running[WARP:]):
        steps += _warp_steps(warp, pieces, ring)
    mine = range(block, items, launch.blocks)
    due = sum(bool(locate(table, pieces.region_of(item), item, lane, AT.SRC)[1]) for item in mine for lane in (0, 1))
    return steps, due


class _Pieces:
    """The pieces of a launch by their addresses: a load and a store of one piece have the same number."""

    def __init__(self, table: TablePointer) -> None:
        self.table, self.numbers = table, dict[object, int]()

    def region_of(self, item: int) -> int:
        at = 0
        while item >= self.table[at + AT.END]:
            at += AT.WORDS
        return at

    def locate(self, table: TablePointer, region: TablePointer, item: int, lane: int, side: int) -> SimpleNamespace:
        found: Piece = locate(table.table, region.at, item, lane, side)
        address, nbytes, place = found
        if nbytes:
            self.numbers[side, address, place] = item * 2 + lane
        return SimpleNamespace(address=address, bytes=nbytes, map=place)


def _warp_steps(running: Sequence[Generator[Step, int, None]], pieces: _Pieces, ring: Ring) -> list[list[Step]]:
    """Returns the steps of a warp's lanes, which are brought together wherever they speak to each other."""
    steps: list[list[Step]] = [[] for _ in running]
    answers = [0] * len(running)
    begun = False
    while True:
        met = [
            _until_meeting(each, answer if begun else None, steps[lane], pieces, ring)
            for lane, (each, answer) in enumerate(zip(running, answers, strict=True))
        ]
        begun = True
        kinds = Counter(step[0] if step else "end" for step in met)
        if len(kinds) > 1:
            raise RingFault(f"lanes of a warp wait for each other at {' and '.join(kinds)}")
        if met[0] is None:
            return steps
        total = sum(step[2] for step in met) if met[0][0] == "__reduce_add_sync" else 0
        for each in steps:
            each.append(("block",) if met[0][0] == "__syncthreads" else ("warp",))
        answers = [total] * len(running)


def _until_meeting(
    running: Generator[Step, int, None], answer: int | None, steps: list[Step], pieces: _Pieces, ring: Ring
) -> Any:
    """Runs a thread to where it meets its warp. Returns that step, or None at its end."""
    try:
        said = running.send(answer) if answer is not None else next(running)
        while not said[0].startswith("__") or said[0] == "__cvta_generic_to_shared":
            if said[0] == "__cvta_generic_to_shared":
                said = running.send({"ring": STAGES, "barriers": BARRIERS}[said[1]])
                continue
            steps.append(_step(said[0], said[1:], pieces, ring))
            said = running.send(1)
    except StopIteration:
        return None
    return said


def _step(text: str, given: Sequence[Any], pieces: _Pieces, ring: Ring) -> Step:
    """Returns a PTX instruction as a step of the model. Raises UnknownText."""
    text = text.strip()

    def barrier(address: int) -> int:
        return (address - BARRIERS) // 8

    def slot(address: int) -> int:
        stage, inside = divmod(address - STAGES, ring.stage_bytes)
        if not 0 <= stage < ring.stages:
            raise RingFault("a copy outside of the ring")
        return stage * LANES + inside // PIECE_BYTES

    def piece(side: int, at: Any, row: int = 0, word: int = 0) -> int:
        if isinstance(at, TablePointer):
            return pieces.numbers[side, row << 32 | word, at.at]
        return pieces.numbers[side, at, 0]

    if text.startswith("mbarrier.init"):
        return "init", barrier(given[0]), int(text.rstrip(";").split(",")[1])
    if text.startswith("mbarrier.arrive.expect_tx"):
        return "expect", barrier(given[0]), given[1]
    if text.startswith("mbarrier.arrive."):
        return "arrive", barrier(given[0])
    if "mbarrier.try_wait.parity" in text:
        return "wait", barrier(given[0]), given[1]
    if text.startswith("cp.async.bulk.tensor.2d.shared::cluster.global"):
        stage, at, word, row, full = given
        return "load", slot(stage), piece(AT.SRC, at, row, word), PIECE_BYTES, barrier(full), at.at
    if text.startswith("cp.async.bulk.shared::cluster.global"):
        stage, at, nbytes, full = given
        return "load", slot(stage), piece(AT.SRC, at), nbytes, barrier(full), 0
    if text.startswith("cp.async.bulk.tensor.2d.global.shared::cta"):
        at, word, row, stage = given
        return "store", slot(stage), piece(AT.DST, at, row, word), at.at
    if text.startswith("cp.async.bulk.global.shared::cta"):
        return "store", slot(given[1]), piece(AT.DST, given[0]), 0
    if text.startswith("cp.async.bulk.commit_group"):
        return ("commit",)
    if found := re.fullmatch(r"cp\.async\.bulk\.wait_group(\.read)? (\d+|%0);", text):
        return "wait_read" if found[1] else "wait_all", int(given[0] if found[2] == "%0" else found[2])
    if text.startswith("fence.proxy.tensormap::generic.acquire"):
        return "acquire", given[0].at
    if text.startswith(("fence.mbarrier_init.release", "fence.proxy.async")):
        return ("fence",)
    raise UnknownText(text)


# The search. A slot is one piece's place in a stage.
FREE, LOADING, FULL, STORING = range(4)


class _State(NamedTuple):
    """All of a block at one time.

    `at`: the next step of each thread. `barriers`: of each, the parity of its phase, the arrivals and the bytes that
    it awaits. `slots`: of each, what it holds and of which piece. `groups`: of each thread, the slots that its
    groups may still read, the newest last, which is open. `unwritten`: how many of its groups may not be written.
    """

    at: tuple[int, ...]
    barriers: tuple[tuple[int, int, int], ...]
    slots: tuple[tuple[int, int], ...]
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    unwritten: tuple[int, ...]


class RingBlock:
    """One block of a launch: `explore` takes every step in every order."""

    def __init__(self, source: str, launch: RingLaunch) -> None:
        self.ring = launch.ring
        steps, self.due = steps_of(source, launch)
        prologues, self.threads = zip(*map(_divided, steps), strict=True)
        self.counts = self._prepared(prologues)
        self.loads = {step[2]: step for thread in self.threads for step in thread if step[0] == "load"}
        self.threads = [self.threads[each] for each in TAKING_PART]
        stored = Counter(step[2] for thread in self.threads for step in thread if step[0] == "store")
        if set(stored) != set(self.loads) or len(stored) != self.due or set(stored.values()) - {1}:
            raise RingFault("a piece is not loaded and stored once")

    def _prepared(self, prologues: Sequence[Sequence[Step]]) -> list[int]:
        """Returns the arrivals that each barrier awaits, once all that precedes the ring is in order."""
        every = [step for prologue in prologues for step in prologue]
        counts = {step[1]: step[2] for step in every if step[0] == "init"}
        for prologue in prologues:
            names = [step[0] for step in prologue]
            if "init" in names and "fence" not in names[len(names) - names[::-1].index("init") :]:
                raise RingFault("a copy may not see that its barrier was initialised")
        if set(counts) != set(range(2 * self.ring.stages)):
            raise RingFault("a barrier is not initialised")
        acquired = {step[1] for step in every if step[0] == "acquire"}
        used = {step[-1] for thread in self.threads for step in thread if step[0] in ("load", "store")} - {0}
        if not used <= acquired:
            raise RingFault("a copy may see another tensor map than the one that was uploaded")
        return [counts[each] for each in range(2 * self.ring.stages)]

    def explore(self) -> int:
        """Returns the number of states. Raises RingFault for the first in which the ring fails."""
        none = ((),)
        slots = ((FREE, -1),) * (self.ring.stages * LANES)
        first = _State((0,) * 4, tuple((0, n, 0) for n in self.counts), slots, (none,) * 4, (0,) * 4)
        first = self._met(first)
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            found = list(self._next(state))
            if not found:
                self._ended(state)
            for each in found:
                if each not in seen:
                    seen.add(each)
                    left.append(each)
        return len(seen)

    def _ended(self, state: _State) -> None:
        waiting = [thread[at] for thread, at in zip(self.threads, state.at, strict=True) if at < len(thread)]
        if waiting:
            raise RingFault(f"nothing goes on: {waiting}")
        if any(state.unwritten) or any(groups[-1] for groups in state.groups):
            raise RingFault("the kernel ends before its bytes are written")
        if any(kind == LOADING for kind, _ in state.slots):
            raise RingFault("the kernel ends while bytes land in its ring")

    def _next(self, state: _State) -> Iterator[_State]:
        """Yields the states after any one step: of a thread, or of a copy that lands."""
        for slot, (kind, piece) in enumerate(state.slots):
            if kind == LOADING:
                nbytes, barrier = self.loads[piece][3:5]
                landed = state._replace(slots=_set(state.slots, slot, (FULL, piece)))
                yield self._told(landed, barrier, 0, -nbytes)
        for thread, at in enumerate(state.at):
            if at < len(self.threads[thread]) and (found := self._step(state, thread, self.threads[thread][at])):
                yield self._met(found._replace(at=_set(found.at, thread, at + 1)))

    def _step(self, state: _State, thread: int, step: Step) -> _State | None:
        """Returns the state after a thread's step, but for the thread's place; None if the step has to wait."""
        name, groups = step[0], state.groups[thread]
        if name == "wait":
            return state if state.barriers[step[1]][0] != step[2] else None
        if name == "warp":
            return None
        if name == "expect":
            return self._told(state, step[1], 1, step[2])
        if name == "arrive":
            return self._told(state, step[1], 1, 0)
        if name == "load":
            if state.slots[step[1]][0] != FREE:
                said = {LOADING: "being loaded", FULL: "not stored yet", STORING: "being read"}
                raise RingFault(f"a stage is loaded over that is {said[state.slots[step[1]][0]]}")
            return state._replace(slots=_set(state.slots, step[1], (LOADING, step[2])))
        if name == "store":
            if state.slots[step[1]] != (FULL, step[2]):
                raise RingFault("a stage is stored that does not hold the bytes yet")
            groups = (*groups[:-1], (*groups[-1], step[1]))
            slots = _set(state.slots, step[1], (STORING, step[2]))
            return state._replace(slots=slots, groups=_set(state.groups, thread, groups))
        if name == "commit":
            unwritten = state.unwritten[thread] + bool(groups[-1])
            groups = _set(state.groups, thread, (*groups, ()))
            return state._replace(groups=groups, unwritten=_set(state.unwritten, thread, unwritten))
        if name in ("wait_read", "wait_all"):
            return self._waited(state, thread, step[1], name)
        raise RingFault(f"{name} beside the ring")

    def _waited(self, state: _State, thread: int, latest: int, name: str) -> _State:
        """All groups but the latest so many have been read; `wait_all`: and written."""
        groups = state.groups[thread]
        cut = max(0, len(groups) - 1 - latest)
        slots = list(state.slots)
        for slot in (slot for group in groups[:cut] for slot in group):
            slots[slot] = (FREE, -1)
        unwritten = state.unwritten[thread]
        if name == "wait_all":
            unwritten = min(unwritten, sum(map(bool, groups[cut:-1])))
        return state._replace(
            slots=tuple(slots),
            groups=_set(state.groups, thread, groups[cut:]),
            unwritten=_set(state.unwritten, thread, unwritten),
        )

    def _told(self, state: _State, barrier: int, arrivals: int, nbytes: int) -> _State:
        """Returns the state after arrivals at a barrier, and bytes that it is to expect or that have landed."""
        parity, awaited, due = state.barriers[barrier]
        awaited, due = awaited - arrivals, due + nbytes
        if due < 0:
            raise RingFault("bytes land that their barrier does not expect yet")
        if awaited < 0:
            raise RingFault("a barrier hears of more arrivals than it awaits")
        if not awaited and not due:
            parity, awaited = parity ^ 1, self.counts[barrier]
        return state._replace(barriers=_set(state.barriers, barrier, (parity, awaited, due)))

    def _met(self, state: _State) -> _State:
        """Lanes of a warp that have both come to where they meet go on."""
        at = list(state.at)
        for one, other in ((0, 1), (2, 3)):
            while all(at[x] < len(self.threads[x]) and self.threads[x][at[x]][0] == "warp" for x in (one, other)):
                at[one] += 1
                at[other] += 1
        return state._replace(at=tuple(at))


def _set(every: tuple[Value, ...], at: int, value: Value) -> tuple[Value, ...]:
    """Returns the values with another one at a place."""
    return (*every[:at], value, *every[at + 1 :])


def _divided(steps: list[Step]) -> tuple[list[Step], list[Step]]:
    """Returns a thread's steps before the block has met, and after."""
    if steps.count(("block",)) != 1:
        raise RingFault("the block does not meet once before the ring")
    at = steps.index(("block",))
    return steps[:at], steps[at + 1 :]


def launches(stages: int, lag: int) -> list[RingLaunch]:
    """Fewer items than stages, as many, and so many that each parity comes up again; by runs, boxes and both; with a
    stage that is half full; and blocks that have every other item, or none.
    """
    ring = Ring(stages, 256, lag)
    counts = [1, stages - 1, stages, stages + 1, 2 * stages + 1, 4 * stages + 2]
    alone = [RingLaunch(ring, items, odd=bool(items % 2)) for items in counts]
    both = [RingLaunch(ring, items // 2, boxes=items - items // 2, odd=bool(items % 3)) for items in counts]
    return [*alone, *both, RingLaunch(ring, 4 * stages + 2, 2), RingLaunch(ring, 1, 2), RingLaunch(ring, 0, boxes=2)]


#: Rings of every lag, and the one that ships.
RINGS = [(stages, lag) for stages in range(2, 6) for lag in range(1, stages)] + [(RING.stages, RING.lag)]
LAUNCHES = [launch for shape in RINGS for launch in launches(*shape)]
