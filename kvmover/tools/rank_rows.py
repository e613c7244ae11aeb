"""A RankRow has the numbers of one rank, or of several together, between two scrapes; `kvmover top` sorts and folds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmover.tools.scrape import Scrape, quantile_s


@dataclass(frozen=True, slots=True)
class RankRow:
    """Counts since the scrape before, and gauges of now. `arena_out`, `arena_in`: the share that is reserved.

    `receive_p50_s`, `receive_p99_s`: upper bounds of buckets, None without a receive. `ranks`: how many it sums up.
    """

    engine: str
    rank: str
    ranks: int
    open: int
    landed: int
    failed: int
    sent_bytes: int
    received_bytes: int
    receive_p50_s: float | None
    receive_p99_s: float | None
    arena_out: float
    arena_in: float
    quarantined_bytes: int
    peers: int

    @property
    def name(self) -> str:
        """Returns `decode 0` for a rank, `decode, 8 ranks` for several, `all` for those of every engine."""
        if self.rank:
            return f"{self.engine} {self.rank}"
        return f"{self.engine}, {self.ranks} ranks" if self.engine else "all"


#: Fields to sort by, by the headings of their columns. A name ascends, every number descends.
SORTS: Mapping[str, str] = {
    "name": "name",
    "open": "open",
    "landed": "landed",
    "failed": "failed",
    "sent": "sent_bytes",
    "received": "received_bytes",
    "p50": "receive_p50_s",
    "p99": "receive_p99_s",
    "out": "arena_out",
    "in": "arena_in",
    "quarantine": "quarantined_bytes",
    "peers": "peers",
}

_PLACE = ("engine", "rank")


def rank_rows(now: Scrape, new: Scrape) -> list[RankRow]:
    """Returns a row for each rank that has transfers, by engine and number. Pure."""
    gauges, counts = now.split(_PLACE), new.split(_PLACE)
    places = now.values("kvmover_open_sends", *_PLACE)
    rows = (
        _row(engine, rank, 1, gauges[engine, rank], counts.get((engine, rank), _NOTHING)) for engine, rank in places
    )
    return sorted(rows, key=_by_name)


def engine_rows(now: Scrape, new: Scrape) -> list[RankRow]:
    """Returns a row for each engine, by name: the sums over its ranks. Pure."""
    gauges, counts = now.split(_PLACE[:1]), new.split(_PLACE[:1])
    ranks: dict[str, int] = {}
    for engine, _ in now.values("kvmover_open_sends", *_PLACE):
        ranks[engine] = ranks.get(engine, 0) + 1
    return [
        _row(engine, "", ranks[engine], gauges[engine,], counts.get((engine,), _NOTHING)) for engine in sorted(ranks)
    ]


def sum_row(now: Scrape, new: Scrape) -> RankRow:
    """Returns the sums over every rank. Pure."""
    return _row("", "", len(now.values("kvmover_open_sends", *_PLACE)), now, new)


def ordered(rows: Iterable[RankRow], sort: str) -> list[RankRow]:
    """Returns rows by a column of SORTS; rows without its number are last, and equal ones by name. Pure."""
    named = sorted(rows, key=_by_name)
    if sort == "name":
        return named
    return sorted(named, key=lambda row: -_number(getattr(row, SORTS[sort])))


def holding(rows: Iterable[RankRow], text: str) -> list[RankRow]:
    """Returns the rows whose name has `text` in it, in any case. Pure."""
    return [row for row in rows if text.lower() in row.name.lower()]


def _number(value: float | None) -> float:
    return -1.0 if value is None else value


def _by_name(row: RankRow) -> tuple[str, int, str]:
    """Returns a sort key that puts rank 2 before rank 10."""
    return row.engine, len(row.rank), row.rank


_NOTHING = Scrape(0.0, {})


def _row(engine: str, rank: str, ranks: int, now: Scrape, new: Scrape) -> RankRow:
    ends = new.by("kvmover_transfers_total", "end")
    landed = ends.get("landed", 0.0)
    buckets = new.by("kvmover_receive_seconds_bucket", "le")
    return RankRow(
        engine,
        rank,
        ranks,
        open=int(now.total("kvmover_open_sends") + now.total("kvmover_open_receives")),
        landed=int(landed),
        failed=int(sum(ends.values()) - landed),
        sent_bytes=int(new.total("kvmover_sent_bytes_total")),
        received_bytes=int(new.total("kvmover_received_bytes_total")),
        receive_p50_s=quantile_s(buckets, 0.5),
        receive_p99_s=quantile_s(buckets, 0.99),
        arena_out=_share(now, "outgoing"),
        arena_in=_share(now, "incoming"),
        quarantined_bytes=int(now.total("kvmover_incoming_quarantined_bytes")),
        peers=int(now.total("kvmover_peers")),
    )


def _share(now: Scrape, side: str) -> float:
    reserved, whole = (now.total(f"kvmover_{side}_{each}_bytes") for each in ("reserved", "arena"))
    return reserved / whole if whole else 0.0


def window(rows: Sequence[RankRow], first: int, room: int) -> tuple[Sequence[RankRow], int]:
    """Returns the rows from `first` on that fit into `room` lines, and how many there are beside them. Pure.

    >>> window([], 3, 2)
    ([], 0)
    """
    first = max(0, min(first, len(rows) - room))
    shown = rows[first : first + room]
    return shown, len(rows) - len(shown)
