"""A trace of a run, in the JSON of the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

A process of the trace is a rank, or `requests`: the accounts of all ledgers. A thread holds slices that do not overlap,
because the format nests slices of one thread. Times are Unix time in whole microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvmover.errors import KvmoverError
from kvmover.observe.runlog import Accounted, AnyLine, Moved, Run

Event = dict[str, Any]

#: Fields of a line that its slice already expresses.
_PLACED = {"type", "time_s", "seconds", "engine", "rank", "verb", "request", "began_s", "ended_s"}

_SOURCES = ("device", "host", "storage", "peer", "computed", "abandoned")


def check_name(option: str, out: Path) -> None:
    """Raise KvmoverError for a trace whose name does not end in .json, naming the command's option."""
    if out.suffix != ".json":
        raise KvmoverError(f"{option} {out}: a trace is JSON; name a file that ends in .json")


def write_trace(lines: Iterable[AnyLine], out: Path) -> None:
    """Write the trace of `lines`, event by event. Raises KvmoverError if `out` cannot be written.

    `out` is replaced only when all is written, so it survives an error in reading `lines`.
    """
    part, encoder, trace = out.with_name(f"{out.name}.part"), msgspec.json.Encoder(), TraceEvents()
    try:
        with part.open("wb") as file, ExitStack() as undo:
            undo.callback(part.unlink, missing_ok=True)
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
            separator = b"\n"
            for line in lines:
                for event in trace.events_of(line):
                    file.write(separator)
                    file.write(encoder.encode(event))
                    separator = b",\n"
            file.write(b"\n]}\n")
            file.flush()
            part.replace(out)
    except OSError as error:
        raise KvmoverError(f"cannot write {out}: {error.strerror}") from error


@dataclass(slots=True)
class TraceEvents:
    """The events of a trace, made line by line: each process and thread is named before its first slice.

    It keeps only the numbers of processes and threads and the sums for counters. All numbers differ: Perfetto finds a
    thread's name by its number alone, and takes a thread with its process's number for the main one. `threads`: by
    process and word, the threads, each with the end of its last slice (us).

    >>> trace = TraceEvents()
    >>> for event in trace.events_of(Moved(10.0, 0.5, "decode", 3, "receive", "r", nbytes=400)):
    ...     print(event["ph"], event["name"], event.get("ts"), event.get("dur"), event["args"])
    M process_name None None {'name': 'decode 3'}
    M thread_name None None {'name': 'receive'}
    X r 9500000 500000 {'nbytes': 400}
    C landed bytes 10000000 None {'receive': 400}
    """

    processes: dict[str, int] = field(default_factory=dict[str, int])
    threads: dict[tuple[int, str], dict[int, int]] = field(default_factory=dict[tuple[int, str], dict[int, int]])
    _sums: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    _new: list[Event] = field(default_factory=list[Event])
    _numbers: int = 0

    def events_of(self, line: AnyLine) -> list[Event]:
        """Returns the events of one line, in file order."""
        end_us = round(line.time_s * 1e6)
        if isinstance(line, Accounted):
            self._account(line, end_us)
        else:
            pid = self._process(f"{line.engine} {line.rank}")
            if isinstance(line, Run):
                self._add("i", f"kvmover {line.kvmover} begins", pid, {}, ts=end_us, s="p")
            else:
                self._transfer(line, pid, end_us)
        new, self._new = self._new, []
        return new

    def _transfer(self, line: Moved, pid: int, end_us: int) -> None:
        self._slice(pid, line.verb, line.request, end_us, line.seconds, line)
        if line.landed:
            self._count("landed bytes", pid, end_us, {line.verb: line.nbytes})
        else:
            told = {"request": line.request, "reason": line.reason}
            self._add("i", f"failed: {line.cause or 'unknown'}", pid, told, ts=end_us, s="p")

    def _account(self, line: Accounted, end_us: int) -> None:
        account, pid = line.account, self._process("requests")
        self._slice(pid, "request", str(account.request), end_us, account.ended_s - account.began_s, account)
        if account.attempt == 1:  # a prompt counts once, however often it was retracted
            tokens = {source: getattr(account, f"{source}_tokens") for source in _SOURCES}
            self._count("prompt tokens", pid, end_us, tokens)

    def _slice(self, pid: int, word: str, name: str, end_us: int, seconds: float, said: msgspec.Struct) -> None:
        """Add a slice that ends at `end_us`, with its line's other fields as arguments."""
        args = {key: value for key, value in msgspec.to_builtins(said, str_keys=True).items() if key not in _PLACED}
        duration_us = round(seconds * 1e6)
        start_us = end_us - duration_us
        tid = self._thread(pid, word, start_us, end_us)
        self._add("X", name, pid, args, tid=tid, cat=word, ts=start_us, dur=duration_us)

    def _count(self, name: str, pid: int, at_us: int, added: dict[str, int]) -> None:
        sums = self._sums.setdefault(pid, {})
        sums |= {key: sums.get(key, 0) + value for key, value in added.items()}
        self._add("C", name, pid, dict(sums), ts=at_us)

    def _process(self, name: str) -> int:
        if name not in self.processes:
            self.processes[name] = self._number()
            self._add("M", "process_name", self.processes[name], {"name": name})
        return self.processes[name]

    def _thread(self, pid: int, word: str, start_us: int, end_us: int) -> int:
        """Returns the thread whose last slice ended latest before `start_us`, which needs the fewest threads."""
        ends = self.threads.setdefault((pid, word), {})
        tid = max((tid for tid, end in ends.items() if end <= start_us), key=ends.__getitem__, default=None)
        if tid is None:
            tid = self._number()
            self._add("M", "thread_name", pid, {"name": f"{word} {len(ends) + 1}" if ends else word}, tid=tid)
        ends[tid] = end_us
        return tid

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _add(self, phase: str, name: str, pid: int, args: Event, **placed: int | str) -> None:
        self._new.append({"ph": phase, "name": name, "pid": pid, "tid": pid, **placed, "args": args})
