"""FileSizes are the sizes of files as they were last heard of, and their sum, without a question to the system."""

from __future__ import annotations


class FileSizes:
    """Sizes by name. What is not known is asked for once by who needs it, and noted here.

    >>> sizes = FileSizes()
    >>> sizes.note("a", 5), sizes.note("b", 7), sizes.note("a", 6)
    (5, 7, 6)
    >>> sizes.drop("b")
    >>> sizes.total, len(sizes), sizes.get("b")
    (6, 1, None)
    """

    __slots__ = ("_of", "total")

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        #: Of all that are known.
        self.total = 0

    def __len__(self) -> int:
        return len(self._of)

    def get(self, name: str) -> int | None:
        """The size that was noted last."""
        return self._of.get(name)

    def note(self, name: str, nbytes: int) -> int:
        """How large a file is now, which is returned."""
        self.total += nbytes - self._of.get(name, 0)
        self._of[name] = nbytes
        return nbytes

    def drop(self, name: str) -> None:
        """A file that is gone, or may be of another size."""
        self.total -= self._of.pop(name, 0)
