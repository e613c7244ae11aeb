"""Arguments that callers hand to a mover are checked and brought into one form before any byte is sent or written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvmover.errors import LayoutError, PeerRefused, PlanError
from kvmover.fields import member, whole
from kvmover.kernels.region import least_and_most
from kvmover.layout.component import Component
from kvmover.layout.fleet import Fleet
from kvmover.layout.pool import Pool, PoolSpec
from kvmover.transfer.memory.arena import ALIGN_BYTES
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.handshake import Model, Place, check_fleet_pages
from kvmover.transfer.protocol.wire import MAX_REQUEST_CHARACTERS
from kvmover.transfer.result import Gate, Service, Transfer

#: Most pages of any pool: ids of any type can be compared with a pool's size.
_MOST = int(np.iinfo(np.int64).max)

#: Up to so many ids are compared as a set in 1 us, where arrays of any length take 4.
FEW_PAGES = 64

PageTables = tuple[npt.NDArray[np.int64], ...]


def checked_pools(model: object, place: object, pools: object) -> tuple[Pool, ...]:
    """Return the pools of one rank. Raises LayoutError unless given a Model, a Place, and one Pool a component."""
    for given, kind in ((model, Model), (place, Place)):
        if not isinstance(given, kind):
            raise LayoutError(f"a mover takes a {kind.__name__}, got {given!r}")
    assert isinstance(model, Model)
    if not isinstance(pools, Iterable):
        raise LayoutError(f"pools are given one a component, as [pool]; got {type(pools).__name__}")
    found: list[Pool] = []
    for each in pools:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(each, Pool):
            raise LayoutError(f"pool {len(found)} is no Pool but {each!r}")
        found.append(each)
    if not found or len(found) != len(model.components):
        raise LayoutError(f"{len(found)} pools for {len(model.components)} components of {model.name}")
    assert isinstance(place, Place)
    check_fleet_pages(place.fleet, model.components)
    return tuple(found)


def least_chunk_bytes(pools: Sequence[Pool], arena_bytes: int) -> int:
    """Return the bytes of one layer of a page of the largest pool.

    262,144 for 64 tokens with K and V of 8 heads of 128 bfloat16. Chunks are cut by pages and layers, no finer, and
    peers' pages make no chunk larger: an arena of so many bytes holds a chunk of every request. Raises LayoutError for
    a smaller arena, of which only whole multiples of 256 bytes count.
    """
    least, name = max((_layer_bytes(pool.spec), pool.spec.component.name) for pool in pools)
    if arena_bytes // ALIGN_BYTES * ALIGN_BYTES < least:
        raise LayoutError(f"arena_bytes = {arena_bytes}; one layer of a page of {name} is a chunk of {least} bytes")
    return least


def _layer_bytes(spec: PoolSpec) -> int:
    rows = math.prod(spec.layout.extent_of(axis) for axis in ("kv", "head", "token"))
    return rows * spec.component.row_bytes


def page_tables(pages: object) -> PageTables:
    """Return a new table a component, of lists, ranges, arrays or tensors. Raises PlanError for other values."""
    if not isinstance(pages, (list, tuple)) and (isinstance(pages, (str, bytes)) or not isinstance(pages, Iterable)):
        raise PlanError(f"pages = {pages!r}; give one list of page ids a component")
    return tuple([_table(number, table) for number, table in enumerate(pages)])  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _table(number: int, given: object) -> npt.NDArray[np.int64]:
    try:
        table = np.asarray(given)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"page table {number} cannot be read: {error}") from None
    if table.ndim != 1:
        raise PlanError(f"page table {number} is {given!r}; give one list of page ids a component, as [[0, 1]]")
    if table.size and table.dtype.kind not in "iu":
        odd = [each for each in table.tolist() if not isinstance(each, int) or isinstance(each, bool)]
        if odd:
            raise PlanError(f"page table {number} names page {odd[0]!r}; page ids are whole numbers")
    if table.dtype == np.int64:
        return table.copy()
    largest = max(table.tolist(), key=abs) if table.size and table.dtype.kind == "O" else table.max(initial=0)
    if abs(int(largest)) > _MOST:
        raise PlanError(f"page id {largest} of page table {number} is outside every pool")
    return table.astype(np.int64)


def check_named(tables: Sequence[npt.NDArray[np.int64]], pools: Sequence[Pool]) -> None:
    """Raise PlanError for tables of a request to be sent, or of its beginning, with a page outside the pool, or twice.

    Two parts of a request are never in one page. All entries are checked: only destinations know which pages are
    wanted. A table may begin with -1, which is no page: before a window, or before the pages that an engine knows a
    destination to lack; a destination that wants such an entry is refused. Pages of windows and states may repeat, as
    engines fill up earlier entries with any page.
    """
    if len(tables) != len(pools):
        raise PlanError(f"{len(tables)} page tables for {len(pools)} components")
    for table, pool in zip(tables, pools, strict=True):
        component, held = pool.spec.component, table
        least, most = least_and_most(held) if held.size else (0, -1)
        if least < 0 and (gaps := _leading_gaps(component, table)):
            held = table[gaps:]
            least, most = least_and_most(held) if held.size else (0, -1)
        if least < 0 or most >= pool.spec.pages:
            odd = least if least < 0 else most
            raise PlanError(f"page id {odd} is outside a pool of {pool.spec.pages} pages of {component.name}")
        if component.window is None and not component.states:
            _check_once(held, pool)


def check_fits(positions: range, pools: Sequence[Pool], fleet: Fleet) -> None:
    """Raise PlanError for more positions than all pages of a pool hold, before a plan is computed.

    Under context parallelism, and for windows, whose last page may be their first, a page more a part may be touched.
    """
    for pool in pools:
        component = pool.spec.component
        parts, of_page, wanted = component.cp_parts(fleet.cp), fleet.page_rows(component), component.wanted(positions)
        needed = -(-wanted.stop // of_page) - wanted.start // of_page if wanted else 0
        spare = parts if parts > 1 or component.window is not None else 0
        if needed > pool.spec.pages * parts + spare:
            raise PlanError(
                f"positions {positions.start} to {positions.stop} take {needed} pages of {component.name}, of which"
                f" there are {pool.spec.pages * parts}"
            )


def check_wanted(tables: PageTables, pools: Sequence[Pool], positions: range, fleet: Fleet) -> None:
    """Raise PlanError if two parts of a request would land in one page. The plan checks which pages are due.

    Pages before the wanted positions may repeat, as may pages of windows and states: engines fill up earlier entries
    with any page. Under context parallelism only the plan knows which entries are wanted.
    """
    for table, pool in zip(tables, pools, strict=False):
        component = pool.spec.component
        if component.window is None and not component.states and component.cp_parts(fleet.cp) == 1:
            rows, of_page = component.wanted(positions), fleet.page_rows(component)
            _check_once(table[rows.start // of_page : -(-rows.stop // of_page)] if rows else table[:0], pool)


def _check_once(ids: npt.NDArray[np.int64], pool: Pool) -> None:
    """Raise PlanError for an id that occurs twice. O(pages): 8 us for 2,048. Other checks find ids outside the pool."""
    if ids.size <= FEW_PAGES and len({*ids.tolist()}) == ids.size:
        return
    low = int(ids.min(initial=0))
    extent = int(ids.max(initial=0)) - low + 1
    if extent > pool.spec.pages:
        return
    seen = np.zeros(extent, np.bool_)
    seen[ids - low] = True
    if np.count_nonzero(seen) < ids.size:
        ordered = np.sort(ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        raise PlanError(f"page id {int(twice[0])} is twice in the page table of {pool.spec.component.name}")


def check_allocated(tables: PageTables, pools: Sequence[Pool], most: Sequence[int]) -> None:
    """Raise PlanError if a table of a request to be received exceeds its need of `most` pages."""
    for table, pool, needed in zip(tables, pools, most, strict=True):
        if len(table) > needed:
            name = pool.spec.component.name
            raise PlanError(f"{len(table)} pages are named of {name}, of which the request needs {needed} here")


def table_lengths(components: Sequence[Component], fleet: Fleet, rank: int, tokens: int) -> tuple[int, ...]:
    """Return a rank's number of pages of each component for a request of `tokens` tokens, from its beginning."""
    lengths = list[int]()
    for component in components:
        held = fleet.shard(component, rank, max(tokens, 1)).positions
        lengths.append(-(-held.tokens // fleet.page_rows(component)) if held else 0)
    return tuple(lengths)


def _leading_gaps(component: Component, table: npt.NDArray[np.int64]) -> int:
    """Return the number of leading entries that are no page."""
    if component.states or not table.size:
        return 0
    there = np.flatnonzero(table != -1)
    return int(there[0]) if there.size else table.size


def token_range(positions: object) -> range:
    """Returns `positions`. Raises LayoutError unless they are a range of step 1, from 0 or later, below 2**63."""
    if not isinstance(positions, range):
        raise LayoutError(f"positions = {positions!r}; give a range of tokens, as range(0, 4096)")
    if positions.step != 1 or positions.start < 0:
        raise LayoutError(f"positions {positions} are not a range of tokens")
    if positions.stop > _MOST:
        raise LayoutError(f"positions {positions} do not fit 63 bits")
    return positions


def request_name(given: object) -> str:
    """Return a request's name. Raises PlanError for other than text, for empty text, and for too long a text."""
    if not isinstance(given, str) or not given:
        raise PlanError(f"a request is named by text, got {given!r}")
    if len(given) > MAX_REQUEST_CHARACTERS:
        most = MAX_REQUEST_CHARACTERS
        raise PlanError(f"a request's name has {len(given)} characters, and at most {most} may be: {given[:40]}...")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"a request's name {given!r} is not Unicode text: {error}") from None
    return given


def gates_of(given: object) -> list[Gate] | None:
    """Return the gates of a request still being computed; None: it is whole. Raises PlanError for other values."""
    if given is None:
        return None
    if not isinstance(given, Iterable):
        raise PlanError(f"gates = {given!r}; give a list of Gate, or None where all is computed")
    return [gate_of(each) for each in cast("Iterable[object]", given)]


def gate_of(given: object) -> Gate:
    """Return a Gate. Raises PlanError for other values."""
    if not isinstance(given, Gate):
        raise PlanError(f"a gate is a Gate(event), got {given!r}")
    return given


def transfer_of(given: object) -> Transfer:
    """Return a transfer of a Mover's `send` or `receive`. Raises PlanError for other values."""
    if not isinstance(given, Transfer):
        raise PlanError(f"a transfer is what send or receive returned, got {given!r}")
    return given


def payload_of(given: object) -> bytes:
    """Return the bytes that go beside the cache. Raises PlanError for other values."""
    if not isinstance(given, bytes | bytearray | memoryview):
        raise PlanError(f"aux = {given!r:.60}; it must be bytes")
    return bytes(cast("bytes", given))


def ranks_of(given: object) -> tuple[int, ...]:
    """Return numbers of ranks. Raises PlanError for other values."""
    if given == ():
        return ()
    if not isinstance(given, Iterable):
        raise PlanError(f"aux_from = {given!r}; give a list of ranks, as [0]")
    return tuple(whole(rank, "a rank of aux_from", PlanError) for rank in cast("Iterable[object]", given))


def card_of(given: object) -> bytes:
    """Return a card. Raises PeerRefused for other than bytes."""
    if not isinstance(given, bytes | bytearray | memoryview):
        raise PeerRefused(f"a card is bytes, got {given!r:.60}")
    return bytes(cast("bytes", given))


def deadline_of(given: object) -> float | None:
    """Return the seconds that a request may take; None: as configured. Raises PlanError unless finite and above 0."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise PlanError(f"deadline_s = {given!r}; it must be a number of seconds above 0")
    return given


def content_of(given: object) -> Content | None:
    """Return the prompt that a caller names, or None. Raises PlanError for other than a Content."""
    if given is not None and not isinstance(given, Content):
        raise PlanError(f"content = {given!r:.60}; it must be a Content, or None")
    return given


def contents_of(given: object) -> tuple[Content, ...]:
    """Returns the contents of beginnings of a request. Raises PlanError for other values."""
    if not isinstance(given, Iterable):
        raise PlanError(f"contents = {given!r:.60}; give a list of Content")
    return tuple(content for each in cast("Iterable[object]", given) if (content := content_of(each)) is not None)


class SendArguments(NamedTuple):
    """The arguments of `send`, read and copied: the caller may change its lists from then on.

    Raises PlanError for unreadable arguments. The mover checks that they fit the pools.
    """

    request: str
    pages: PageTables
    gates: list[Gate] | None
    aux: bytes | None
    deadline_s: float | None
    service: Service
    content: Content | None

    @classmethod
    def of(
        cls,
        request: object,
        pages: object,
        gates: object,
        aux: object,
        deadline_s: object,
        service: object,
        content: object,
    ) -> SendArguments:
        """Returns the arguments that were given, read and copied."""
        return cls(
            request_name(request),
            page_tables(pages),
            gates_of(gates),
            None if aux is None else payload_of(aux),
            deadline_of(deadline_s),
            member(Service, service, "service", PlanError),
            content_of(content),
        )


class ReceiveArguments(NamedTuple):
    """The arguments of `receive`, read and copied, as those of `send`. Raises LayoutError for other than a range."""

    request: str
    engine: str
    positions: range
    pages: PageTables | None
    aux_from: tuple[int, ...]
    deadline_s: float | None
    content: Content | None

    @classmethod
    def of(
        cls,
        request: object,
        engine: str,
        positions: object,
        pages: object,
        aux_from: object,
        deadline_s: object,
        content: object,
    ) -> ReceiveArguments:
        """Returns the arguments that were given, read and copied."""
        return cls(
            request_name(request),
            engine,
            token_range(positions),
            None if pages is None else page_tables(pages),
            ranks_of(aux_from),
            deadline_of(deadline_s),
            content_of(content),
        )


def check_sent(given: SendArguments, pools: Sequence[Pool], fleet: Fleet) -> None:
    """Raise PlanError if tables of a request to be sent do not fit these pools.

    Of a whole request, a rank may hold no page only where context parallelism divides it.
    """
    check_named(given.pages, pools)
    for table, pool in zip(given.pages, pools, strict=True) if given.gates is None else ():
        component = pool.spec.component
        if not (table != -1).any() and component.cp_parts(fleet.cp) == 1 and component.extent(1):
            raise PlanError(f"page table of {component.name} is empty; a request has at least one page")
