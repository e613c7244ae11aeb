"""A keeper's state machine with clients that keep to the protocol, on time that a test moves: no socket, no memory."""

from __future__ import annotations

from collections.abc import Callable

from store_rank import GQA, PAGE, SPACE, pages_of

from kvmover.layout import Fleet
from kvmover.store import PagePart
from kvmover.store.index import Index
from kvmover.store.keeper.journal import JournalChange, decode_entries, removed_places, runs_of, slab_name, table_of
from kvmover.store.keeper.keeper_machine import rewritten, step
from kvmover.store.keeper.messages import (
    SPEAKS,
    Agreed,
    AllocateSlab,
    Answer,
    Attach,
    ClearNamespace,
    CommitObjects,
    CommittedObject,
    KeeperRefusal,
    NoteUses,
    Refused,
    RemoveObjects,
    Request,
    SlabToFill,
    TrimNamespace,
)
from kvmover.store.keeper.state import (
    AppendEntry,
    CopyObjects,
    DropSlab,
    FillGrant,
    KeeperEvent,
    KeeperState,
    KeeperTick,
    MakeSlab,
    Reply,
    SealSlab,
    SessionHeard,
    SessionOpened,
    SessionOver,
    SlabFailed,
    SlabProved,
)
from kvmover.store.record import DIGEST_BYTES, encode_part
from kvmover.store.stored import padded

PART = PagePart.held(GQA, Fleet(tp=4, page_tokens=PAGE), 0, PAGE)
KEY = PART.key(SPACE)
OBJECT_BYTES = padded(PART.nbytes)
SLAB_BYTES = 2 * OBJECT_BYTES
PAGES = pages_of(6)
#: Who may come, by session: two generations of one fleet, and one of nobody's.
WHO = {1: ("a", 1), 2: ("a", 2), 3: ("", 0)}


class World:
    """What a keeper has been told and has done. Every step is checked."""

    def __init__(self) -> None:
        self.state = KeeperState(3 * SLAB_BYTES, SLAB_BYTES)
        self.now, self.journal = 1000, b""
        self.made, self.sealed, self.dropped = set[int](), set[int](), set[int]()
        #: The slab that each session believes to fill, and from which byte on.
        self.filling: dict[int, tuple[int, int]] = {}
        self.answers: list[Answer] = []
        #: Pages in the order in which they are put.
        self.put = 0

    def step(self, event: KeeperEvent) -> None:
        for action in step(self.state, event, self.now):
            match action:
                case MakeSlab(slab, _):
                    assert slab not in self.made, "memory was used anew"
                    self.made.add(slab)
                case CopyObjects(source, slab, moves):
                    assert source in self.sealed - self.dropped
                    assert slab in self.made - self.sealed - self.dropped
                    assert moves
                case SealSlab(slab, _):
                    assert slab in self.made - self.sealed - self.dropped
                    self.sealed.add(slab)
                case DropSlab(slab):
                    assert slab in self.made - self.dropped
                    self.dropped.add(slab)
                case AppendEntry(_, entry):
                    self.journal += entry
                case Reply(_, answer, grant):
                    self.answers.append(answer)
                    if isinstance(answer, SlabToFill):
                        assert grant == FillGrant(answer.slab)
                        assert answer.slab in self.made - self.sealed - self.dropped
        self.state.check()
        assert set(self.state.slabs) == self.made - self.dropped
        assert {slab.number for slab in self.state.slabs.values() if slab.writer is None} == self.sealed - self.dropped
        self._compare()

    def _compare(self) -> None:
        """Who reads the journal knows what the keeper knows."""
        index, proved = Index(), set[str]()
        for kept in self.state.namespaces.values():
            for entry in decode_entries(self.journal, kept.base):
                name = slab_name(entry.slab)
                match entry.change:
                    case JournalChange.ADDED:
                        index.add_tables(runs_of([entry]), table_of([entry]), self.now)
                    case JournalChange.REMOVED:
                        index.remove_at(name, removed_places(entry))
                    case JournalChange.DROPPED:
                        index.drop(name)
                        proved.discard(name)
                    case JournalChange.PROVED:
                        proved.add(name)
                    case _:
                        pass
            assert contents(index) == contents(kept.index)
        assert proved == {slab.name for slab in self.state.slabs.values() if slab.is_proved}

    def ask(self, session: int, request: Request) -> Answer | None:
        """The answer, of a session that is connected."""
        if session not in self.state.sessions:
            return None
        self.step(SessionHeard(session, request))
        return self.answers[-1]

    # What a client does

    def attach(self, session: int) -> None:
        if session in self.state.sessions:
            return
        self.step(SessionOpened(session))
        fleet, generation = WHO[session]
        newest = self.state.generations.get(fleet, 0)
        answer = self.ask(session, Attach(SPEAKS, SPACE.digest, b"{}", fleet, generation))
        assert isinstance(answer, Refused) == (generation < newest), "who is older got in, or who is not did not"
        if generation < newest:
            self.end(session)

    def allocate(self, session: int) -> None:
        answer = self.ask(session, AllocateSlab(OBJECT_BYTES, SLAB_BYTES, None, []))
        self._is_honest(session, answer)
        if isinstance(answer, SlabToFill):
            self.filling[session] = (answer.slab, 0)

    def commit(self, session: int) -> None:
        slab, end = self.filling.get(session, (77, 0))
        page = PAGES[self.put % len(PAGES)]
        digests = bytes(PART.box.cells * DIGEST_BYTES)
        put = CommittedObject(end, PART.nbytes, page, encode_part(KEY), digests)
        fits = slab in self.state.slabs and self.state.slabs[slab].writer == session and end < SLAB_BYTES
        answer = self.ask(session, CommitObjects(slab, [put]))
        self._is_honest(session, answer)
        if isinstance(answer, Agreed):
            assert fits, "a commit to a slab that is not this session's"
            self.put += 1
            self.filling[session] = (slab, end + OBJECT_BYTES)

    def remove(self, session: int) -> None:
        for kept in self.state.namespaces.values():
            for _, page in list(kept.index.pages())[:1]:
                each = page.objects[0]
                self._is_honest(session, self.ask(session, RemoveObjects(int(each.segment, 16), [each.record])))

    def use(self, session: int) -> None:
        self.ask(session, NoteUses(PAGES[:2]))

    def trim(self, session: int) -> None:
        self._is_honest(session, self.ask(session, TrimNamespace(self.now - 15, None, OBJECT_BYTES)))

    def clear(self, session: int) -> None:
        self._is_honest(session, self.ask(session, ClearNamespace()))

    def end(self, session: int) -> None:
        if session in self.state.sessions:
            self.step(SessionOver(session))
            self.filling.pop(session, None)

    def fail(self, _session: int) -> None:
        """The newest slab's memory cannot be sealed."""
        for slab in sorted(self.state.slabs)[-1:]:
            self.step(SlabFailed(slab))

    def prove(self, bad: int) -> None:
        """The oldest slab that is sealed was compared with its digests, and so many of its objects are bad."""
        for slab in [slab for slab in self.state.slabs.values() if slab.writer is None and not slab.is_proved][:1]:
            objects = self.state.namespaces[slab.namespace].index.objects(slab.name)
            self.step(SlabProved(slab.number, frozenset(each.offset for each in objects[:bad])))

    def wait(self, _session: int) -> None:
        self.now += 11
        self.step(KeeperTick())

    def rewrite(self, _session: int) -> None:
        proved = {slab.name for slab in self.state.slabs.values() if slab.is_proved}
        for kept in self.state.namespaces.values():
            self.journal = rewritten(kept, self.journal, self.now, proved)
        self.state.check()
        self._compare()

    def _is_honest(self, session: int, answer: Answer | None) -> None:
        """Who is fenced changes nothing, and hears why."""
        if answer is not None and self.state.sessions[session].fenced_by is not None:
            assert isinstance(answer, Refused)
            assert answer.refusal is KeeperRefusal.FENCED


def contents(index: Index) -> list[tuple[bytes, str, int, int]]:
    """Every object of an index, by page."""
    return sorted((page, each.segment, each.record, each.offset) for page, p in index.pages() for each in p.objects)


#: Everything that can happen, by name and session.
EVENTS: dict[str, tuple[Callable[[World, int], None], int]] = {
    f"{verb.__name__} {session}": (verb, session)
    for verb, sessions in {
        World.attach: (1, 2, 3),
        World.allocate: (1, 2, 3),
        World.commit: (1, 2, 3),
        World.end: (1, 2),
        World.remove: (1, 3),
        World.trim: (3,),
        World.clear: (1, 3),
        World.use: (1,),
        World.fail: (0,),
        World.prove: (0, 1),
        World.wait: (0,),
        World.rewrite: (0,),
    }.items()
    for session in sessions
}
