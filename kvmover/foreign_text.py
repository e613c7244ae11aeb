"""Foreign text, of a peer, a client or an address that answered, is escaped and cut before it is logged or shown."""

from __future__ import annotations

#: The most characters of foreign text in a log line or an error, unless its place says otherwise.
MOST_SAID = 200


def printable(text: str, most: int | None = None) -> str:
    r"""Return one line: characters that do not print are escaped. A line of more than `most` characters is cut to that.

    >>> print(printable("request\n\x1b[2J"))
    request\n\x1b[2J
    >>> printable("a name of many words", most=9)
    'a name...'
    """
    start = text if most is None else text[: most + 1]
    line = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in start)
    return line if most is None or len(line) <= most else f"{line[: most - 3]}..."
