"""Tables fit terminals of any width: a table too wide continues below itself, with no cell cut.

Off a terminal a table is printed 200 columns wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvmover.foreign_text import printable

#: Spaces between two columns, in characters.
_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a `Sheet`. Text longer than `folds_at` characters takes several lines; None: always one line."""

    heading: str
    justify: Literal["left", "right"] = "right"
    folds_at: int | None = None


@dataclass(slots=True)
class Sheet:
    """A rich renderable of rows under columns; the first `keys` columns name the row and are repeated in each part.

    At 60 columns a table of 90 is printed as two, each with the keys; as one of the two if `band` is its number.
    """

    columns: Sequence[Column]
    keys: int = 1
    heading_style: str = "bold"
    rows: list[tuple[Text, ...]] = field(default_factory=list[tuple[Text, ...]])
    band: int | None = None

    def add(self, *cells: str | Text) -> None:
        """Append a row; missing cells at its end are empty. Unprintable characters of a `str` are escaped."""
        texts = [cell if isinstance(cell, Text) else Text(printable(cell)) for cell in cells]
        self.rows.append((*texts, *(Text() for _ in self.columns[len(texts) :])))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [self._width(number) for number in range(len(self.columns))]
        parts = bands(widths, self.keys, options.max_width)
        if self.band is not None and len(parts) > 1:
            number = self.band % len(parts)
            yield self._table(parts[number])
            yield Text(f"columns {number + 1} of {len(parts)}: left and right", "dim")
            return
        for number, band in enumerate(parts):
            if number:
                yield Text()
            yield self._table(band)

    def _width(self, number: int) -> int:
        column = self.columns[number]
        longest = max((row[number].cell_len for row in self.rows), default=0)
        if column.folds_at is not None:
            longest = min(longest, column.folds_at)
        return max(longest, Text(column.heading).cell_len)

    def _table(self, band: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style=self.heading_style)
        for number in band:
            column = self.columns[number]
            fixed = self._width(number) if column.folds_at is None else None
            table.add_column(
                Text(column.heading),
                justify=column.justify,
                no_wrap=fixed is not None,
                min_width=fixed,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(row[number] for number in band))
        return table


def bands(widths: Sequence[int], keys: int, most: int) -> list[list[int]]:
    """Split columns of these widths (characters) into tables. Returns each table's column numbers. Pure.

    Each begins with the first `keys` columns and has one more at least; only that one may exceed the width `most`.

    >>> bands([4, 10, 10, 10], 1, 30), bands([4, 10, 10, 10], 1, 80), bands([4, 90], 1, 30)
    ([[0, 1, 2], [0, 3]], [[0, 1, 2, 3]], [[0, 1]])
    """
    return list(_bands(widths, keys, most))


def _bands(widths: Sequence[int], keys: int, most: int) -> Iterator[list[int]]:
    named = list(range(min(keys, len(widths))))
    start = sum(widths[number] + _GAP for number in named)
    band, used = list(named), start
    for number in range(len(named), len(widths)):
        if len(band) > len(named) and used + widths[number] > most:
            yield band
            band, used = list(named), start
        band.append(number)
        used += widths[number] + _GAP
    if band:
        yield band


_PIPE_COLUMNS = 200


def console() -> Console:
    """Return a console without markup and highlighting, 200 columns wide off a terminal."""
    terminal = Console(highlight=False, markup=False)
    return terminal if terminal.is_terminal else Console(highlight=False, markup=False, width=_PIPE_COLUMNS)
