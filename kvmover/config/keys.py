"""A SettingKey is one setting: its name, type, default and text. All of them are found by walking the Settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from kvmover.config.settings import Settings

#: How environment variables begin; those with one word behind it are no settings.
PREFIX = "KVMOVER_"

#: Read from files that the configuration names, so that they are printed nowhere.
_ELSEWHERE = {("mover", "keys")}


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One setting. `path` is its sections and its name: ("mover", "backoff", "first_s")."""

    path: tuple[str, ...]
    hint: Any
    default: object

    @property
    def name(self) -> str:
        """As in messages and in TOML's dotted form: `mover.backoff.first_s`."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """The environment variable: `KVMOVER_MOVER_BACKOFF_FIRST_S`."""
        return PREFIX + "_".join(self.path).upper()

    @property
    def text(self) -> str:
        """What the setting says, in a sentence with its unit."""
        return TEXTS[self.name]

    @property
    def optional(self) -> bool:
        """Whether it may be `none`."""
        return NoneType in get_args(self.hint)

    @property
    def kind(self) -> str:
        """Its type in words: `integer`, `number or none`, `push or pull`."""
        parts = get_args(self.hint) if get_origin(self.hint) is UnionType else (self.hint,)
        return " or ".join(_word(part) for part in parts)


_WORDS: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    NoneType: "none",
}


def _word(hint: Any) -> str:
    if isinstance(hint, EnumType):
        return " or ".join(str(each.value) for each in cast("type[Enum]", hint))
    return _WORDS.get(hint) or "list of paths"


@cache
def keys() -> tuple[SettingKey, ...]:
    """All settings, in the order of their sections."""
    return tuple(_walk(Settings(), ()))


@cache
def sections() -> frozenset[str]:
    """Names of all tables: `mover`, `mover.backoff`."""
    return frozenset(".".join(key.path[:depth]) for key in keys() for depth in range(1, len(key.path)))


def value_of(settings: Settings, key: SettingKey) -> object:
    """The value of a setting, by its key."""
    found: object = settings
    for name in key.path:
        found = getattr(found, name)
    return found


def _walk(section: Any, path: tuple[str, ...]) -> Iterator[SettingKey]:
    """The values of a section first, so that they stand above its tables, as TOML wants them."""
    hints = get_type_hints(section.__class__)
    inner: list[tuple[str, object]] = []
    for each in fields(section):
        value = cast(object, getattr(section, each.name))
        if is_dataclass(value):
            inner.append((each.name, value))
        elif (*path, each.name) not in _ELSEWHERE:
            yield SettingKey((*path, each.name), hints[each.name], value)
    for name, value in inner:
        yield from _walk(value, (*path, name))


TEXTS: Mapping[str, str] = {
    "mover.arena_bytes": "Staging memory of a rank, in bytes, allocated twice: once for sending, once for receiving.",
    "mover.deadline_s": "Seconds until an open transfer fails. Unset: in vLLM 120, in SGLang its own timeout.",
    "mover.drain_s": "Seconds that a failed transfer waits for its sources to stop; then its memory is quarantined.",
    "mover.ping_s": "Seconds between pings of a peer that owes an answer.",
    "mover.resend_s": "Seconds before an unanswered control message is resent.",
    "mover.silence_s": "Seconds without an answer until a peer is lost; longer than an engine may go without a poll.",
    "mover.lease_s": "Seconds that a source may write after it was last heard. Renewed by pings: several of them long.",
    "mover.linger_s": "Seconds from the end of a source's lease until memory that it may still write is reused.",
    "mover.revocation": "Whether deregistering memory is taken to shut writers out. Unset: as the transport proves.",
    "mover.sandbox_bytes": "Bytes of memory that peers write to, to measure the link: at least 128 KiB; 0: no probes.",
    "mover.route": "The route of every chunk; `none`: measured costs choose it for each pair of ranks.",
    "mover.verb": "push: the source writes; pull: the destination reads. Unset: in vLLM pull.",
    "mover.replicas": "stripe: ranks with equal shards each send a part of the pages; elect: one of them sends all.",
    "mover.chunk_layers": "Layers in a chunk, so that chunks can leave while a prefill computes; 0: all layers.",
    "mover.integrity": "digest: a digest of each chunk is compared after it has landed; none: nothing is.",
    "mover.sms": "Streaming multiprocessors that a copy kernel on the GPU may use; `none`: all.",
    "mover.backoff.first_s": "Seconds before the first attempt to reconnect a lost peer; doubled after each failure.",
    "mover.backoff.most_s": "The longest wait between two such attempts, in seconds.",
    "mover.backoff.jitter": "Fraction [0, 1) by which a wait may be shortened, so that ranks do not retry at once.",
    "mover.backoff.attempts": "Attempts to reconnect before a lost peer is given up.",
    "mover.costs.descriptor_us": "Microseconds to post one descriptor, assumed until measured.",
    "mover.costs.wire_rate": "Bytes per microsecond on the network, assumed until measured.",
    "mover.costs.gather_rate": "Bytes per microsecond of the gather kernel, assumed until measured.",
    "mover.costs.scatter_rate": "Bytes per microsecond of the scatter kernel, assumed until measured.",
    "mover.costs.chunk_us": "Microseconds that a chunk takes beside its bytes, whatever its size.",
    "mover.costs.chunk_bytes": "Target size of a chunk, in bytes. The arena must hold one, better several.",
    "mover.costs.posting": "ahead: descriptors are posted while others travel (NIC); inline: posting copies (CPU).",
    "mover.costs.pool_chunk_bytes": "The same of a chunk that takes no arena (direct, mapped); 0: as the others.",
    "progress.share": "The polling thread sleeps for this fraction of the time since the last event.",
    "progress.shortest_s": "Shortest sleep between polls, seconds.",
    "progress.open_s": "Longest sleep between polls while a transfer is open, seconds.",
    "progress.idle_s": "Longest sleep between polls while no transfer is open, seconds.",
    "store.quota_bytes": "Payload bytes that a namespace may hold on disk; `none`: no limit.",
    "store.ttl_s": "Seconds without a read after which a page is deleted; `none`: never.",
    "store.segment_bytes": "Size at which a new data file is begun, in bytes.",
    "store.stamp_s": "Last-read times in object headers are updated at most every so many seconds.",
    "store.root": "Directory of the page stores, the same on all ranks; `none`: vLLM stores nothing.",
    "store.upkeep_s": "Seconds between two checks of quota and TTL in an engine.",
    "store.flush_s": "Seconds between flushes. Flushed pages survive a power cut, and other machines see them.",
    "logging.level": "The lowest level that is logged; `none` leaves it to the engine.",
    "logging.format": "text: a line a record; json: a JSON object a line, with the request's id.",
    "logging.file": "File that log lines are appended to; `none`: standard error.",
    "metrics.port": "TCP port of rank 0's Prometheus endpoint; rank r has port + r; `none`: no endpoint; 0: any free.",
    "metrics.address": "Address that the endpoint listens on; empty: all addresses, for a Prometheus elsewhere.",
    "record.run_log": "File of JSON lines for `kvmover report`; `none`: not written.",
    "record.spans": "Whether each transfer is recorded as an OpenTelemetry span.",
    "security.shared_key_file": "File with a key that authenticates control messages (HMAC-SHA256); `none`: no check.",
    "security.accepted_key_files": "Files with further keys that are accepted while the shared key is being changed.",
}
