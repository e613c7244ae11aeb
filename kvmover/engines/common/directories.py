"""A Directory says at which addresses engines are now: a file, or a service of Kubernetes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from kvmover.config import ConfigError
from kvmover.config.settings import canonical_address

log = logging.getLogger(__name__)

#: The scheme of a service of Kubernetes.
KUBERNETES = "kubernetes://"

#: A longer file is another file.
_MOST_FILE_BYTES = 1 << 20


class Directory(Protocol):
    """The addresses of engines that come and go. Every engine serves the cards of its ranks at its address."""

    def engines(self) -> tuple[str, ...]:
        """Returns the addresses known now, sorted, without waiting. A directory that fails repeats its last answer."""
        ...

    def close(self) -> None:
        """End the directory. Safe to call twice."""
        ...


class FileDirectory:
    """The addresses in a file, one a line, `#` before a remark. The file is read again when it has changed.

    A file that cannot be read, or has another line, is told in the log, once, and the list stays as it was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engines: tuple[str, ...] = ()
        self._seen: tuple[int, int, int] | None = None
        self._said = ""

    def engines(self) -> tuple[str, ...]:
        """Returns the addresses of the file as it is now, or as it was when it could be read."""
        try:
            found = self._path.stat()
            seen = found.st_ino, found.st_size, found.st_mtime_ns
            if seen != self._seen:
                if found.st_size > _MOST_FILE_BYTES:
                    raise ConfigError(f"it has {found.st_size} bytes, more than {_MOST_FILE_BYTES}")
                self._engines = addresses_in(self._path.read_text(encoding="utf-8"))
                self._seen, self._said = seen, ""
                log.info("%s has %d engines", self._path, len(self._engines))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("the engines of %s stay as they were, %d: %s", self._path, len(self._engines), error)
        return self._engines

    def close(self) -> None:
        """Do nothing: no file is open."""


def addresses_in(text: str) -> tuple[str, ...]:
    """Returns the addresses in a file's text, sorted, each once. Raises ConfigError for another line.

    >>> addresses_in("# the chat fleet\\n10.0.0.8:8400\\n10.0.0.7:8400  # large\\n")
    ('10.0.0.7:8400', '10.0.0.8:8400')
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(sorted({canonical_address(line) for line in lines if line}))


def open_directory(where: str) -> Directory:
    """Returns the directory of `peers.directory`. Raises ConfigError for another form, or a missing client library."""
    if not where.startswith(KUBERNETES):
        return FileDirectory(Path(where).expanduser())
    from kvmover.engines.common.kubernetes_directory import KubernetesDirectory

    parts = where.removeprefix(KUBERNETES).split("/")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(f"peers.directory = {where!r}; a service is {KUBERNETES}NAMESPACE/SERVICE/PORT")
    return KubernetesDirectory.open(*parts)
