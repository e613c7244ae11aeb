"""The loggers of kvmover write text, JSON or into an engine's log."""

from __future__ import annotations

import json
import logging
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvmover.errors import KvmoverError
from kvmover.foreign_text import printable
from kvmover.observe.formats import bytes_in_words
from kvmover.transfer.result import Ending

log = logging.getLogger("kvmover.transfers")

#: Attributes of every LogRecord: any other was passed by `extra`, and is written too.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A formatter of one JSON object a line: `time` (UTC), `level`, `logger`, `message`, `error` and the fields of
    `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN and key not in line}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Guest(logging.Handler):
    """A handler that passes records to an engine's logger, `host`, prefixed."""

    def __init__(self, host: logging.Logger, speaker: str) -> None:
        super().__init__()
        self.host, self._speaker = host, speaker

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record to the host's handlers."""
        said = copy(record)
        said.msg, said.args = printable(f"{self._speaker}: {record.getMessage()}"), None
        self.host.handle(said)


def configure(level: str, formatter: logging.Formatter, file: Path | None = None) -> logging.Handler:
    """Send kvmover's logs from `level` on only to `file`, or standard error. Returns the handler.

    Raises KvmoverError for a file that cannot be appended to.
    """
    try:
        handler = logging.FileHandler(file, encoding="utf-8") if file else logging.StreamHandler()
    except OSError as error:
        raise KvmoverError(f"cannot write {file}: {error.strerror}") from error
    handler.setFormatter(formatter)
    _hand_over(handler, level.upper())
    return handler


def speak_through(guest: Guest) -> bool:
    """Send kvmover's logs to an engine's log, at its level. Returns False if logging is configured already."""
    own, root = logging.getLogger("kvmover"), logging.getLogger()
    configured = any(handler.get_name() != __name__ for handler in own.handlers)
    if configured or (root.handlers and guest.host is not root):
        return False
    _hand_over(guest, guest.host.getEffectiveLevel())
    return True


def _hand_over(handler: logging.Handler, level: int | str) -> None:
    handler.set_name(__name__)
    own = logging.getLogger("kvmover")
    release()
    own.addHandler(handler)
    own.setLevel(level)
    own.propagate = False


def release() -> None:
    """Give kvmover's loggers back to the root logger."""
    own = logging.getLogger("kvmover")
    for handler in [each for each in own.handlers if each.get_name() == __name__]:
        own.removeHandler(handler)
        handler.close()
    own.setLevel(logging.NOTSET)
    own.propagate = True


class _Text(logging.Formatter):
    """A formatter of `time level logger: message`. The message is one line: names of requests are clients' text."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, and after it those of an exception."""
        said = copy(record)
        said.msg, said.args = printable(record.getMessage()), None
        return super().format(said)


def text_formatter() -> logging.Formatter:
    """Returns a formatter of `time level logger: message`, a line each."""
    return _Text()


def transfer(ending: Ending) -> None:
    """Log an ended transfer, a warning if it failed."""
    result = ending.result
    said: dict[str, object] = {
        "request": ending.request,
        "engine": ending.engine,
        "rank": ending.rank,
        "verb": ending.verb,
        "seconds": round(result.seconds, 6),
        "bytes": result.nbytes,
        "routes": [str(route) for route in result.routes],
    }
    words = f"{ending.verb} of {ending.request}"
    if result.landed:
        log.info("%s landed: %s in %.1f ms", words, bytes_in_words(result.nbytes), result.seconds * 1e3, extra=said)
    else:
        said |= {"cause": str(result.cause), "quarantined": result.quarantined}
        log.warning("%s failed after %.1f ms: %s", words, result.seconds * 1e3, result.reason, extra=said)
