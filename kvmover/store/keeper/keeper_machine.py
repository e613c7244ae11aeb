"""The state machine of a keeper: it grants slabs, accepts commits, fences and evicts. Pure but for its state.

`step` changes the state and returns the actions to take, in order. One client fills a slab once, by rising offsets; it
is sealed when the client asks for another, disconnects or is fenced. Eviction removes whole slabs, so memory is never
reused under a reader. `rewritten` shortens a journal to its living objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, islice, takewhile

import numpy as np

from kvmover.fields import common_version
from kvmover.store.eviction import EvictionCandidate, carried, victim
from kvmover.store.index import Index
from kvmover.store.keeper.journal import (
    JOURNAL,
    ROW_BYTES,
    AddedObject,
    JournalChange,
    encode_added,
    encode_entry,
    page_and_digests,
    places_of,
    slab_number,
)
from kvmover.store.keeper.messages import (
    LISTED,
    SPEAKS,
    Agreed,
    AllocateSlab,
    Attach,
    Cleared,
    ClearNamespace,
    CommitObjects,
    CommittedObject,
    FollowJournal,
    JournalToFollow,
    KeeperRefusal,
    Listed,
    ListNamespaces,
    NoteUses,
    OpenSlabs,
    Refused,
    RemoveObjects,
    Request,
    SlabsToRead,
    SlabToFill,
    Trimmed,
    TrimNamespace,
    Welcome,
)
from kvmover.store.keeper.state import (
    AppendEntry,
    CopyObjects,
    DropSlab,
    FillGrant,
    JournalGrant,
    KeeperAction,
    KeeperEvent,
    KeeperSession,
    KeeperState,
    KeeperTick,
    KeptNamespace,
    MakeSlab,
    ReadGrant,
    Reply,
    SealSlab,
    SessionHeard,
    SessionOpened,
    SessionOver,
    Slab,
    SlabFailed,
    SlabProved,
)
from kvmover.store.part import PartKey
from kvmover.store.record import BLOCK_BYTES, DIGEST_BYTES, LIVE, RecordTable, decode_part
from kvmover.store.stored import padded

#: Upper limits of a keeper's namespaces, fleets and slabs.
NAMESPACES, FLEETS, SLABS = 256, 4096, 4096

#: Seconds without a commit after which a slab is sealed if room is needed.
IDLE_S = 10

#: A page's use is published if it is this many seconds later than the last known use.
_TOLD_S = 30

#: Least recently used pages that an eviction examines.
_LOOKED_AT = 1024

Actions = list[KeeperAction]


def step(state: KeeperState, event: KeeperEvent, now: int) -> Actions:
    """Apply `event` at second `now` to `state`. Returns the actions to take, in order."""
    match event:
        case SessionOpened(number):
            state.sessions[number] = KeeperSession(number)
            return []
        case SessionHeard(number, request):
            return _heard(state, state.sessions[number], request, now)
        case SessionOver(number):
            session = state.sessions[number]
            actions = _seal(state, session.slab, now)
            del state.sessions[number]
            return actions
        case SlabFailed(number):
            return _drop(state, state.slabs[number], now) if number in state.slabs else []
        case SlabProved(number, bad):
            return _prove(state, state.slabs[number], bad, now) if number in state.slabs else []
        case KeeperTick():
            return []


def _heard(state: KeeperState, session: KeeperSession, request: Request | None, now: int) -> Actions:
    match request:
        case ListNamespaces(first):
            manifests = [kept.manifest for kept in state.namespaces.values()]
            return [Reply(session.number, Listed(manifests[first : first + LISTED]))]
        case Attach():
            return _attach(state, session, request, now)
        case None:
            return _refuse(session, KeeperRefusal.INVALID, "nothing that a keeper understands")
        case _ if session.namespace is None:
            return _refuse(session, KeeperRefusal.INVALID, "nobody has attached here")
        case OpenSlabs() | FollowJournal() | NoteUses():
            return _serve(state, session, session.namespace, request, now)
        case _ if session.fenced_by is not None:
            return _refuse_fenced(session, session.fenced_by)
        case _:
            return _change(state, session, session.namespace, request, now)


def _serve(
    state: KeeperState, session: KeeperSession, namespace: bytes, asked: OpenSlabs | FollowJournal | NoteUses, now: int
) -> Actions:
    """Answer a request open to every attached client, fenced or not."""
    kept = state.namespaces[namespace]
    match asked:
        case OpenSlabs(numbers):
            there = [n for n in numbers if n in state.slabs and state.slabs[n].namespace == namespace]
            return [Reply(session.number, SlabsToRead(there), ReadGrant(there))]
        case FollowJournal():
            return [Reply(session.number, JournalToFollow(kept.base), JournalGrant(namespace))]
        case NoteUses(pages):
            return _use(namespace, kept, pages, now)


def _change(
    state: KeeperState,
    session: KeeperSession,
    namespace: bytes,
    asked: AllocateSlab | CommitObjects | RemoveObjects | TrimNamespace | ClearNamespace,
    now: int,
) -> Actions:
    """Answer a request that changes the namespace, from a client that is not fenced."""
    match asked:
        case AllocateSlab():
            return _allocate(state, session, asked, now)
        case CommitObjects():
            return _commit(state, session, asked, now)
        case RemoveObjects(number, records):
            slab = state.slabs.get(number)
            is_mine = slab is not None and slab.namespace == namespace
            return [*(_remove(state, slab, records, now) if slab and is_mine else ()), Reply(session.number, Agreed())]
        case TrimNamespace():
            return _trim(state, session.number, namespace, asked, now)
        case ClearNamespace():
            return _clear(state, session.number, namespace, now)


def _refuse(session: KeeperSession, refusal: KeeperRefusal, words: str) -> Actions:
    return [Reply(session.number, Refused(refusal, words))]


def _refuse_fenced(session: KeeperSession, newest: int) -> Actions:
    words = f"generation {session.generation} of fleet {session.fleet!r} is fenced by generation {newest}"
    return _refuse(session, KeeperRefusal.FENCED, words)


# Ownership


def _attach(state: KeeperState, session: KeeperSession, asked: Attach, now: int) -> Actions:
    """Attach a client to its namespace, and fence older generations of its fleet."""
    version = common_version(SPEAKS, asked.speaks)
    if version is None:
        theirs, own = (f"versions {least} to {most}" for least, most in (asked.speaks, SPEAKS))
        return _refuse(session, KeeperRefusal.INVALID, f"the client speaks {theirs}, this keeper {own}")
    if session.namespace is not None:
        return _refuse(session, KeeperRefusal.INVALID, "attached already")
    if asked.generation and not asked.fleet:
        return _refuse(session, KeeperRefusal.INVALID, f"generation {asked.generation} of no fleet")
    known_fleet = asked.fleet in state.generations or not asked.fleet
    if (asked.namespace not in state.namespaces and len(state.namespaces) >= NAMESPACES) or (
        not known_fleet and len(state.generations) >= FLEETS
    ):
        return _refuse(session, KeeperRefusal.FULL, f"more than {NAMESPACES} namespaces or {FLEETS} fleets")
    session.fleet, session.generation = asked.fleet, asked.generation
    newest = state.generations.get(asked.fleet, 0)
    if asked.generation < newest:
        refused = _refuse_fenced(session, newest)
        session.fleet, session.generation = "", 0
        return refused
    actions: Actions = []
    if asked.fleet:
        mine = [other for other in state.sessions.values() if other.fleet == asked.fleet]
        older = [other for other in mine if other.generation < asked.generation and other.fenced_by is None]
        for other in older:  # sealed before fencing: a fenced client must hold no slab
            actions += _seal(state, other.slab, now)
        for other in older:
            other.fenced_by = asked.generation
        state.generations[asked.fleet] = asked.generation
    session.namespace = asked.namespace
    kept = state.namespaces.setdefault(asked.namespace, KeptNamespace(asked.manifest))
    kept.manifest = kept.manifest or asked.manifest
    welcome = Welcome(kept.base, state.slab_bytes, version, JOURNAL)
    return [*actions, Reply(session.number, welcome, JournalGrant(asked.namespace))]


# Writing


def _allocate(state: KeeperState, session: KeeperSession, asked: AllocateSlab, now: int) -> Actions:
    assert session.namespace is not None
    sealed = _seal(state, session.slab, now)
    wanted = max(padded(max(1, asked.nbytes)), min(padded(asked.slab_bytes), state.slab_bytes))
    fits, evicted = _make_room(state, session.namespace, asked, wanted, now)
    if not fits:
        words = f"no room for {wanted} bytes: the keeper has {state.capacity_bytes}, the quota is {asked.quota_bytes}"
        return [*sealed, *evicted, *_refuse(session, KeeperRefusal.FULL, words)]
    slab = Slab(state.next_slab, session.namespace, wanted, session.number, now)
    state.next_slab += 1
    state.slabs[slab.number], session.slab = slab, slab.number
    reply = Reply(session.number, SlabToFill(slab.number, wanted), FillGrant(slab.number))
    return [*sealed, *evicted, MakeSlab(slab.number, wanted), reply]


def _commit(state: KeeperState, session: KeeperSession, asked: CommitObjects, now: int) -> Actions:
    """Publish all objects in the client's own slab, or refuse all. A page's part already held is skipped."""
    if asked.slab != session.slab:
        return _refuse(session, KeeperRefusal.GONE, "the slab was taken back")
    slab = state.slabs[asked.slab]
    parts = [decode_part(each.part) for each in asked.objects]
    end = slab.end
    for each, part in zip(asked.objects, parts, strict=True):
        if part is None or not _is_sound(each, part, end, slab):
            return _refuse(session, KeeperRefusal.INVALID, f"no object at {each.offset} of slab {slab.number}")
        end = each.offset + padded(each.nbytes)
    kept = state.namespaces[slab.namespace]
    fresh = [(e, p) for e, p in zip(asked.objects, parts, strict=True) if p and not _is_there(kept, e.page, p)]
    slab.end, slab.touched_s = end, now
    return [*_add(slab, kept, fresh, now), Reply(session.number, Agreed())]


def _is_sound(each: CommittedObject, part: PartKey, end: int, slab: Slab) -> bool:
    """Return True if an object lies in the slab at or after byte `end`, with size and digests that fit its part."""
    cells = part.box.cells
    fits = end <= each.offset and each.offset + padded(each.nbytes) <= slab.nbytes and not each.offset % BLOCK_BYTES
    return fits and len(each.digests) == cells * DIGEST_BYTES and each.nbytes > 0 and not each.nbytes % cells


def _is_there(kept: KeptNamespace, page: bytes, part: PartKey) -> bool:
    found = kept.index.get(page)
    return found is not None and part in found.parts


def _add(slab: Slab, kept: KeptNamespace, fresh: list[tuple[CommittedObject, PartKey]], now: int) -> Actions:
    """Add objects to index and journal, the first of each page and part."""
    first: dict[tuple[bytes, PartKey], CommittedObject] = {}
    for each, part in fresh:
        first.setdefault((each.page, part), each)
    return _added(slab, kept, [_object(each, part, now) for (_, part), each in first.items()], now)


def _object(each: CommittedObject, part: PartKey, now: int) -> AddedObject:
    return AddedObject(each.offset, each.nbytes, each.page, part, now, each.digests)


def _added(slab: Slab, kept: KeptNamespace, objects: list[AddedObject], now: int) -> Actions:
    """Add new objects of a slab, by rising offsets, to index and journal."""
    if not objects:
        return []
    entry = encode_added(objects, kept.end, now, slab.number)
    kept.index.add_table(slab.name, _table(objects, kept.end), now)
    kept.index.use([each.page for each in objects], now)
    kept.added += len(objects)
    kept.added_bytes += len(entry)
    return [_append(slab.namespace, kept, entry)]


def _table(objects: list[AddedObject], at: int) -> RecordTable:
    """Return the record table of objects whose entry is at place `at`."""
    parts = list(dict.fromkeys(each.part for each in objects))
    numbers = {part: number for number, part in enumerate(parts)}
    columns = [(each.offset, each.nbytes, numbers[each.part], each.stamp) for each in objects]
    offset, nbytes, part, stamp = np.array(columns, np.int64).T
    pages = np.frombuffer(b"".join(each.page for each in objects), np.uint8).reshape(len(objects), -1)
    places, alike = places_of(at, len(objects)), np.full(len(objects), LIVE)
    return RecordTable(places, alike, stamp, offset, nbytes, pages, part, tuple(parts), int(places[-1]) + ROW_BYTES)


def _append(namespace: bytes, kept: KeptNamespace, entry: bytes) -> AppendEntry:
    kept.end += len(entry)
    return AppendEntry(namespace, entry)


def _use(namespace: bytes, kept: KeptNamespace, pages: list[bytes], now: int) -> Actions:
    """Mark pages as most recently used, and publish uses that are _TOLD_S later than the last known."""
    stamps = kept.index.stamps_of(pages)
    told = [page for page, stamp in zip(pages, stamps, strict=True) if 0 < stamp <= now - _TOLD_S]
    kept.index.use(pages, now)
    if not told:
        return []
    return [_append(namespace, kept, encode_entry(JournalChange.USED, kept.end, now, 0, b"".join(told)))]


# Removal


def _seal(state: KeeperState, number: int | None, now: int) -> Actions:
    """Seal a slab and shrink it to its committed bytes; drop it if it holds no object."""
    if number is None:
        return []
    slab = state.slabs[number]
    if slab.writer is not None:
        state.sessions[slab.writer].slab = None
        slab.writer = None
    slab.nbytes = slab.end
    if state.namespaces[slab.namespace].index.empty(slab.name):
        return _drop(state, slab, now)
    return [SealSlab(slab.number, slab.end)]


def _prove(state: KeeperState, slab: Slab, bad: Collection[int], now: int) -> Actions:
    """Remove the `bad` objects (by offset) of a sealed slab, then publish it as proved."""
    assert slab.writer is None, "a slab that may still change"
    kept = state.namespaces[slab.namespace]
    places = [each.record for each in kept.index.objects(slab.name) if each.offset in bad]
    removed = _remove(state, slab, places, now)
    if slab.number not in state.slabs:
        return removed
    slab.is_proved = True
    proved = encode_entry(JournalChange.PROVED, kept.end, now, slab.number)
    return [*removed, _append(slab.namespace, kept, proved)]


def _drop(state: KeeperState, slab: Slab, now: int) -> Actions:
    """Drop a slab with all its objects."""
    if slab.writer is not None:
        state.sessions[slab.writer].slab = None
    kept = state.namespaces[slab.namespace]
    del state.slabs[slab.number]
    dropped: Actions = [DropSlab(slab.number)]
    if slab.end:  # else the journal has no entry of it
        dropped.insert(
            0, _append(slab.namespace, kept, encode_entry(JournalChange.DROPPED, kept.end, now, slab.number))
        )
    kept.index.drop(slab.name)
    return dropped


def _remove(state: KeeperState, slab: Slab, records: Collection[int], now: int) -> Actions:
    """Remove objects by their rows' places, and drop a sealed slab with its last object."""
    kept = state.namespaces[slab.namespace]
    if not kept.index.remove_at(slab.name, records):
        return []
    places = np.array(sorted(records), "<u8").tobytes()
    entry = encode_entry(JournalChange.REMOVED, kept.end, now, slab.number, places)
    removed: Actions = [_append(slab.namespace, kept, entry)]
    if slab.writer is None and kept.index.empty(slab.name):
        removed += _drop(state, slab, now)
    return removed


def _make_room(
    state: KeeperState, namespace: bytes, asked: AllocateSlab, nbytes: int, now: int
) -> tuple[bool, Actions]:
    """Evict until `nbytes` more fit the keeper and the quota. Returns whether they fit, and the actions."""
    quota = state.capacity_bytes if asked.quota_bytes is None else min(asked.quota_bytes, state.capacity_bytes)
    actions: Actions = []
    while nbytes <= quota:
        if state.held_of(namespace) + nbytes > quota:
            went = _evict(state, [namespace], asked.keep, now)
        elif state.held_bytes + nbytes > state.capacity_bytes or len(state.slabs) >= SLABS:
            went = _evict(state, list(state.namespaces), asked.keep, now)
        else:
            return True, actions
        if not went:
            break
        actions += went
    return False, actions


def _evict(state: KeeperState, among: Sequence[bytes], keep: Collection[int], now: int) -> Actions:
    """Seal the slabs of all writers idle for IDLE_S, or else evict one sealed slab not in `keep`.

    The slab is of the namespace with the oldest page; its hot objects are carried. Returns [] if no slab can go.
    """
    slabs = [slab for slab in state.slabs.values() if slab.namespace in among]
    idle = [slab for slab in slabs if slab.writer is not None and now - slab.touched_s > IDLE_S]
    if idle:
        return [action for slab in idle for action in _seal(state, slab.number, now)]
    able = [slab for slab in slabs if slab.writer is None and slab.number not in keep]
    if not able:
        return []
    oldest = min((state.namespaces[slab.namespace].index.span_s[0], slab.namespace) for slab in able)[1]
    slab, cold = _victim(state, [slab for slab in able if slab.namespace == oldest])
    moves = _carry(state, slab, cold, now) if len(state.slabs) < SLABS else []
    return [*moves, *_drop(state, slab, now)]


def _victim(state: KeeperState, able: Sequence[Slab]) -> tuple[Slab, set[bytes]]:
    """Return the slab with the smallest share of hot bytes, and the cold pages.

    Cold pages are the least recently used: _LOOKED_AT at most, or one slab's bytes together.
    """
    index, cold = state.namespaces[able[0].namespace].index, Counter[str]()
    pages = set[bytes]()
    for name, page in islice(index.pages(), _LOOKED_AT):
        pages.add(name)
        for each in page.objects:
            cold[each.segment] += each.held_bytes
        if cold.total() >= state.slab_bytes:
            break
    order = {name: number for number, name in enumerate(cold)}
    by_age = sorted(able, key=lambda slab: (order.get(slab.name, len(order)), slab.number))
    candidates = {
        EvictionCandidate(slab.name, slab.nbytes, index.live_bytes(slab.name) - cold[slab.name]): slab
        for slab in by_age
    }
    chosen = victim(list(candidates))
    return (candidates[chosen] if chosen else by_age[0]), pages


def _carry(state: KeeperState, old: Slab, cold: Collection[bytes], now: int) -> Actions:
    """Copy hot objects of an evicted slab to a new slab, the most recently used first, up to CARRIED_SHARE."""
    kept = state.namespaces[old.namespace]
    hot = [each for each in kept.index.objects(old.name) if each.page not in cold]
    stamps = kept.index.stamps_of([each.page for each in hot])
    taken = [hot[at] for at in carried(old.nbytes, [each.held_bytes for each in hot], stamps)]
    if not taken:
        return []
    starts = [0, *accumulate(each.held_bytes for each in taken)]
    slab = Slab(state.next_slab, old.namespace, starts[-1], None, now, starts[-1])
    state.next_slab += 1
    state.slabs[slab.number] = slab
    rows = [
        AddedObject(start, each.nbytes, each.page, each.part, max(1, stamp), each.record)
        for start, each, stamp in zip(starts, taken, kept.index.stamps_of([each.page for each in taken]), strict=False)
    ]
    entry = encode_added(rows, kept.end, now, slab.number)
    kept.index.add_table(slab.name, _table(rows, kept.end), now)
    moves = [(each.offset, start, each.nbytes) for each, start in zip(taken, starts, strict=False)]
    return [
        MakeSlab(slab.number, slab.nbytes),
        CopyObjects(old.number, slab.number, moves),
        _append(slab.namespace, kept, entry),
        SealSlab(slab.number, slab.nbytes),
    ]


def _trim(state: KeeperState, session: int, namespace: bytes, asked: TrimNamespace, now: int) -> Actions:
    """Expire pages one by one, then evict slabs until the namespace is small enough."""
    kept, held = state.namespaces[namespace], state.held_of(namespace)
    actions, pages = list[KeeperAction](), len(kept.index)
    by_slab: dict[str, list[int]] = {}
    before = asked.before or 0
    for _, page in takewhile(lambda item: item[1].stamp < before, kept.index.pages()):
        for each in page.objects:
            by_slab.setdefault(each.segment, []).append(each.record)
    for name, records in by_slab.items():
        actions += _remove(state, state.slabs[slab_number(name)], records, now)
    expired = pages - len(kept.index)
    least = max(0, min(held if asked.quota_bytes is None else asked.quota_bytes, held - asked.free_bytes))
    while state.held_of(namespace) > least:
        went = _evict(state, [namespace], (), now) or _seal(state, state.sessions[session].slab, now)
        if not went:
            break
        actions += went
    answer = Trimmed(expired, pages - expired - len(kept.index), held - state.held_of(namespace))
    return [*actions, Reply(session, answer)]


def _clear(state: KeeperState, session: int, namespace: bytes, now: int) -> Actions:
    """Drop all slabs of a namespace, including those being filled."""
    pages = len(state.namespaces[namespace].index)
    mine = [slab for slab in state.slabs.values() if slab.namespace == namespace]
    gone: Actions = [action for slab in mine for action in _drop(state, slab, now)]
    return [*gone, Reply(session, Cleared(pages))]


#: A journal is rewritten beyond this size, once it is this many times the size needed by its living objects.
_LEAST_BYTES, _TIMES = 1 << 20, 4

#: Limit of places: an index keeps them as 32-bit counts of 8 bytes. Past half of it, the next journal begins at 0.
_PLACES = 1 << 35


def is_overgrown(kept: KeptNamespace) -> bool:
    """Return True if a journal is _TIMES as long as its living objects need, and longer than _LEAST_BYTES."""
    living_bytes = kept.index.holdings.objects * kept.added_bytes // max(1, kept.added)
    return kept.end - kept.base > max(_LEAST_BYTES, _TIMES * living_bytes)


def rewritten(kept: KeptNamespace, journal: bytes, now: int, proved: Collection[str] = ()) -> bytes:
    """Return a new journal of the living objects of `kept`, and switch `kept` to it: index, base, end and counts.

    `journal`: bytes of the current journal, the source of digests. `proved`: names of proved slabs.
    """
    base = kept.end if kept.end < _PLACES // 2 else 0
    names = sorted({each.segment for _, page in kept.index.pages() for each in page.objects})
    index, entries, at, count, nbytes = Index(), list[bytes](), base, 0, 0
    for name in names:
        table = kept.index.table(name)
        objects = _objects_of(table, journal, kept.base)
        entries.append(encode_added(objects, at, now, slab_number(name)))
        index.add_table(name, replace(table, at=places_of(at, len(objects))), now)
        count, nbytes = count + len(objects), nbytes + len(entries[-1])
        at += len(entries[-1])
        if name in proved:
            entries.append(encode_entry(JournalChange.PROVED, at, now, slab_number(name)))
            at += len(entries[-1])
    index.sort()
    kept.index, kept.base, kept.end, kept.added, kept.added_bytes = index, base, at, count, nbytes
    return b"".join(entries)


def _objects_of(table: RecordTable, journal: bytes, base: int) -> list[AddedObject]:
    """Return the objects of a slab's table, with their digests from `journal`."""
    objects: list[AddedObject] = []
    columns = np.stack([table.at, table.offset, table.nbytes, table.part, table.stamp], 1)
    numbers: list[list[int]] = columns.tolist()
    for row, (at, offset, nbytes, part, stamp) in enumerate(numbers):
        page, digests = page_and_digests(lambda place, count: journal[place - base : place - base + count], at)
        assert page == table.page[row].tobytes()
        objects.append(AddedObject(offset, nbytes, page, table.parts[part], stamp, digests))
    return objects
