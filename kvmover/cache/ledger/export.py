"""JsonLines writes accounts as JSON, one ended attempt a line, for whoever wants other sums than ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from kvmover.cache.ledger.account import Account
from kvmover.errors import KvmoverError

_FLUSH_BYTES = 1 << 16


class JsonLines:
    """Appends accounts to a file, 64 KiB at a time: `Ledger(sink=lines.write)`. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: IO[bytes] = path.open("ab", buffering=0)
        except OSError as error:
            raise KvmoverError(f"cannot write {path}: {error.strerror}") from error
        self._encoder = msgspec.json.Encoder()
        self._lines = bytearray()

    def write(self, account: Account) -> None:
        """Buffer one line; the file has it after 64 KiB, `flush` or `close`. Raises OSError when the disk is full."""
        self._encoder.encode_into(account, self._lines, len(self._lines))
        self._lines += b"\n"
        if len(self._lines) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered. Nothing is synced."""
        self._file.write(self._lines)
        self._lines.clear()

    def close(self) -> None:
        """Write the rest and close the file. Again is no error."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_accounts(path: Path) -> Iterator[Account]:
    """The accounts of a file, as they were. A last line that was cut off is refused like any other bad one."""
    decoder = msgspec.json.Decoder(Account)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise KvmoverError(f"{path.name} line {number}: {error}") from error
