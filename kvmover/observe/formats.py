"""Formats bytes and seconds for people."""

from __future__ import annotations


def bytes_in_words(nbytes: int) -> str:
    """Returns three figures and a binary unit.

    >>> bytes_in_words(2684354560), bytes_in_words(512)
    ('2.5 GiB', '512 B')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def seconds_in_words(seconds: float) -> str:
    """Returns three figures and a unit, from milliseconds to hours.

    >>> [seconds_in_words(each) for each in (0, 0.0042, 0.25, 12, 90, 5400, 200000)]
    ['0 s', '4.2 ms', '250 ms', '12 s', '1.5 min', '1.5 h', '55.6 h']
    """
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
