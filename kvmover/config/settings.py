"""Settings are a configuration's values by section; a SettingKey describes one setting."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum, EnumType, StrEnum
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from kvmover.errors import KvmoverError
from kvmover.fields import settle, settle_whole
from kvmover.store import Policy
from kvmover.transfer.config import MoverConfig, Pace
from kvmover.transfer.protocol.auth import Key, Keys


class ConfigError(KvmoverError, ValueError):
    """An unknown key or an invalid value, whose message names both and their origin."""


#: Longest key file: a wrong path may lead to a large one.
_MOST_KEY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """The engines that exchange KV with this one. `model`: its name among engines of any make; None: only one make.

    `weights`: a name in place of the checkpoint's digest. `allow`: networks (CIDR) and hosts that a request may have a
    worker dial; empty: any for a transfer, the engines of `peers` for a hint's source of pages.
    """

    model: str | None = None
    weights: str | None = None
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("model", "weights"):
            if getattr(self, name) == "":
                raise ConfigError(f'exchange has {name} = ""; name them, or say "none"')
        for each in self.allow:
            if not (is_host(each) or _is_network(each)):
                raise ConfigError(f"exchange has {each!r} in allow; it is a network as 10.0.0.0/8, or a host")


@dataclass(frozen=True, slots=True)
class StoreSettings(Policy):
    """A page store's policy, its location, the same on all ranks, and its periods in seconds.

    `root`: a directory, as a path; or as text `s3://bucket/prefix` or `mooncake://HOST:PORT`.

    `namespace_ttl_s`: time without use until a namespace under `root` is emptied.

    `upkeep_s`: between checks of quota and TTL. `flush_s`: between flushes, which make pages safe from a power cut and
    visible to other machines.
    """

    root: Path | str | None = None
    namespace_ttl_s: float | None = None
    upkeep_s: float = 5.0
    flush_s: float = 30.0

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        for name in ("upkeep_s", "flush_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"store has {name} = {getattr(self, name)}; it must be positive")
        if self.namespace_ttl_s is not None and self.namespace_ttl_s <= 0:
            raise ConfigError(f"store has namespace_ttl_s = {self.namespace_ttl_s}; it must be positive")

    def location(self) -> Path | str:
        """Returns `root`. Raises ConfigError if it is unset."""
        if self.root is None:
            raise ConfigError("no directory of page stores is given, here or as store.root (KVMOVER_STORE_ROOT)")
        return self.root


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The engines whose host memory is read before storage, and the address that offers this engine's.

    `address`: of this engine's rank cards, and its name in `engines`, a list of all that share. `directory`: a file
    with such a list, or a service of Kubernetes, for engines that come and go. `most_asked`: engines asked for a prompt
    whose request has no source, the same on all ranks.
    """

    address: str | None = None
    engines: tuple[str, ...] = ()
    directory: str | None = None
    most_asked: int = 16
    ask_s: float = 0.2
    quiet_s: float = 1.0
    lend_s: float = 5.0
    read_s: float = 10.0
    silence_s: float = 2.0
    meet_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("ask_s", "quiet_s", "lend_s", "read_s", "silence_s", "meet_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"peers has {name} = {getattr(self, name)}; it must be a time above 0")
        settle_whole(self, "peers", ConfigError, most_asked=1)
        if (self.engines or self.directory) and self.address is None:
            raise ConfigError("peers has engines and no address: an engine that reads from peers is read by them")
        object.__setattr__(self, "engines", tuple(canonical_address(each) for each in self.engines))
        if self.address is not None:
            object.__setattr__(self, "address", canonical_address(self.address))
        if len({*self.engines}) < len(self.engines):
            raise ConfigError(f"peers has engines = {list(self.engines)}, of which one is there twice")

    def others(self) -> tuple[str, ...]:
        """Returns the addresses in `engines` but this engine's own; all of them if `address` is None."""
        return tuple(each for each in self.engines if each != self.address)


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port`, or `[host]:port` for a host with colons. Raises ConfigError.

    >>> host_and_port("10.0.0.7:8400"), host_and_port("[fd00::7]:8400")
    (('10.0.0.7', 8400), ('fd00::7', 8400))
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host.strip("[]") and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"an engine at {address!r}; an address is host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def canonical_address(address: str) -> str:
    """Returns `host:port` as all write it: host names in lower case, IP addresses in their shortest form.

    Raises ConfigError for other text.

    >>> canonical_address("Chat-0.svc:8400"), canonical_address("[FD00:0::7]:8400")
    ('chat-0.svc:8400', '[fd00::7]:8400')
    """
    host, port = host_and_port(address)
    try:
        host = ip_address(host).compressed
    except ValueError:
        host = host.lower()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host(text: str) -> bool:
    """Returns True for an IP address or a valid host name (RFC 1123).

    >>> is_host("10.0.0.7"), is_host("fd00::7"), is_host("decode-0.svc"), is_host("not an address"), is_host("1.2.3")
    (True, True, True, False, False)
    """
    try:
        ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        return not labels[-1].isdigit() and len(text) <= 253 and all(map(_HOST_LABEL.fullmatch, labels))
    return True


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class Level(StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """A log's format: a line or a JSON object a record."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """The settings of kvmover's loggers. `level` None leaves them to the engine."""

    level: Level | None = None
    format: LogFormat = LogFormat.TEXT
    file: Path | None = None

    def __post_init__(self) -> None:
        settle(self, "logging", ConfigError, format=LogFormat)
        if self.level is not None:
            settle(self, "logging", ConfigError, level=Level)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The Prometheus endpoint's port and address."""

    port: int | None = None
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port = {self.port}; a port is at most 65535, and 0 takes any that is free")
        if self.address and not is_host(self.address):
            raise ConfigError(f"metrics has address = {self.address!r}; it is an IP address or a host's name")


@dataclass(frozen=True, slots=True)
class HintSettings:
    """The limits of an orchestrator's hints."""

    pin_share: float = 0.25
    longest_pin_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.pin_share <= 1:
            raise ConfigError(f"pin_share = {self.pin_share}; a share is within 0 and 1")
        if not 0 <= self.longest_pin_s < math.inf:
            raise ConfigError(f"longest_pin_s = {self.longest_pin_s}; it must be a time of 0 or more")


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """The run log for `kvmover report`, and spans."""

    run_log: Path | None = None
    spans: bool = False


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """Files with the keys that seal control messages."""

    shared_key_file: Path | None = None
    accepted_key_files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.accepted_key_files and self.shared_key_file is None:
            raise ConfigError("accepted_key_files without shared_key_file: no message would be authenticated")

    def keys(self) -> Keys | None:
        """Read the stripped keys; None without a key file. Raises ConfigError."""
        if self.shared_key_file is None:
            return None
        return Keys(_key(self.shared_key_file), tuple(_key(path) for path in self.accepted_key_files))


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. `mover` has no keys: `mover_config` reads them."""

    mover: MoverConfig = field(default_factory=MoverConfig)
    progress: Pace = field(default_factory=Pace)
    exchange: ExchangeSettings = field(default_factory=ExchangeSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    peers: PeerSettings = field(default_factory=PeerSettings)
    hints: HintSettings = field(default_factory=HintSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)

    def check_here(self) -> None:
        """Check the settings that depend on this machine or on each other: sizes and times of the mover, key files,
        folders of log files. Raises ConfigError for the first that cannot work.
        """
        mover, chunk_bytes = self.mover, self.mover.costs.chunk_bytes
        if chunk_bytes > mover.arena_bytes:
            raise ConfigError(
                f"mover.costs.chunk_bytes = {chunk_bytes} and mover.arena_bytes = {mover.arena_bytes}; an arena holds a"
                " chunk, better several"
            )
        if mover.lease_s > mover.silence_s:
            raise ConfigError(
                f"mover.lease_s = {mover.lease_s} and mover.silence_s = {mover.silence_s}; memory of a lost"
                " peer would stay out of use long after its loss"
            )
        self.mover_config()
        for name, path in (("logging.file", self.logging.file), ("record.run_log", self.record.run_log)):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"{name} = {str(path)!r}; there is no directory {path.parent}")

    def mover_config(self) -> MoverConfig:
        """Returns `mover` with its keys. Raises ConfigError for a key file unread or too short."""
        return replace(self.mover, keys=self.security.keys())


def _key(path: Path) -> Key:
    try:
        with path.open("rb") as file:
            found = file.read(_MOST_KEY_BYTES + 1)
        if len(found) > _MOST_KEY_BYTES:
            raise ConfigError(f"key file {path} is longer than {_MOST_KEY_BYTES} bytes")
        return Key(found.strip())
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"key file {path}: {error}") from None


#: Prefix of environment variables; settings have two words or more behind it.
PREFIX = "KVMOVER_"

#: Settings read from files that the configuration names, so that they are never printed.
_ELSEWHERE = {("mover", "keys")}


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One setting. `path`: sections and name, ("mover", "backoff", "first_s")."""

    path: tuple[str, ...]
    hint: Any
    default: object

    @property
    def name(self) -> str:
        """Returns the dotted name: `mover.backoff.first_s`."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """Returns the variable: `KVMOVER_MOVER_BACKOFF_FIRST_S`."""
        return PREFIX + "_".join(self.path).upper()

    @property
    def text(self) -> str:
        """Returns its meaning, with its unit."""
        return TEXTS[self.name]

    @property
    def optional(self) -> bool:
        """Returns True if it may be left out."""
        return NoneType in get_args(self.hint)

    @property
    def kind(self) -> str:
        """Returns the type in words: `integer`, `push or pull`."""
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
    return _WORDS.get(hint) or ("list of paths" if get_args(hint)[0] is Path else "list of texts")


@cache
def keys() -> tuple[SettingKey, ...]:
    """Returns all settings, by sections."""
    return tuple(_walk(Settings(), ()))


@cache
def sections() -> frozenset[str]:
    """Returns all tables' names: `mover`, `mover.backoff`."""
    return frozenset(".".join(key.path[:depth]) for key in keys() for depth in range(1, len(key.path)))


def value_of(settings: Settings, key: SettingKey) -> object:
    """Returns the value of a setting."""
    found: object = settings
    for name in key.path:
        found = getattr(found, name)
    return found


def _walk(section: Any, path: tuple[str, ...]) -> Iterator[SettingKey]:
    """Yields values before tables, as TOML requires."""
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
    "mover.integrity": "digest: a digest of each chunk is compared after it has landed; `none`: no check.",
    "mover.identity": "checked: a request whose prompt one side cannot name by content is refused; trust: it is served."
    " A prompt that differs is refused by either.",
    "mover.sms": "Streaming multiprocessors that a copy kernel on the GPU may use; `none`: all.",
    "mover.engine": "Engine that copies on the GPU. auto, rows: the row mover. copy, copy_each: the copy engine."
    " Experimental, measured on no GPU and never taken by auto: green_context: the row mover on SMs set aside for it;"
    " ring: bulk copies through shared memory; tensor_ring: the same, a head's rows of a page at once; copy_3d: the"
    " copy engine, by boxes of rows. One that cannot run or cannot move the rows is refused.",
    "mover.exports": "Memory of a GPU that peers may map: `none`; arenas, over the NVLink fabric; pools, and arenas.",
    "mover.lossy": "How much a number of the cache may be off, against the largest that shares its scale, where a peer"
    " stores it in another form: 0.0625 for fp8, 0.177 for NVFP4. 0: such peers are refused.",
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
    "mover.costs.posting": "ahead: a NIC sends meanwhile; socket: TCP between hosts; inline: posting copies (CPU).",
    "mover.costs.pool_chunk_bytes": "The same of a chunk that takes no arena (direct, mapped); 0: as the others.",
    "mover.costs.latency_us": "Time of the way there and back, which each route pays once, in microseconds.",
    "progress.share": "The polling thread sleeps for this fraction of the time since the last event.",
    "progress.shortest_s": "Shortest sleep between polls, seconds.",
    "progress.open_s": "Longest sleep between polls while a transfer is open, seconds.",
    "progress.idle_s": "Longest sleep between polls while no transfer is open, seconds.",
    "exchange.model": "Name of the model, for engines of unlike make that exchange KV; `none`: no such peers.",
    "exchange.weights": "Which weights are served, in engines that share KV; `none`: a digest of the checkpoint.",
    "exchange.allow": "Networks (10.0.0.0/8) and hosts that a request may have a worker dial; empty: any host for a"
    " transfer, the engines of `peers` for a hint's source of pages.",
    "store.quota_bytes": "Payload bytes that a namespace may hold on disk; `none`: no limit.",
    "store.ttl_s": "Seconds without a read after which a page is deleted; `none`: never.",
    "store.segment_bytes": "Size at which a new data file is begun, in bytes.",
    "store.stamp_s": "Last-read times in object headers are updated at most every so many seconds.",
    "store.eviction": "Which page goes first: `lru`; in a directory also `hazard`, the page least likely to be read"
    " again, as each process learns from its own reads.",
    "store.root": "Directory, `s3://bucket/prefix` or `mooncake://HOST:PORT`, for all ranks; `none`: no store in vLLM.",
    "store.namespace_ttl_s": "Seconds without use after which other namespaces under `store.root`, of replaced weights"
    " for example, are emptied; `none`: never.",
    "store.upkeep_s": "Seconds between two checks of quota and TTL in an engine.",
    "store.flush_s": "Seconds between flushes. Flushed pages survive a power cut, and other machines see them.",
    "peers.address": "host:port where other engines find this one's ranks, and its name among them; `none`: no peers.",
    "peers.engines": "Addresses of all engines that read each other's host memory; this one's own may be among them.",
    "peers.directory": "Engines that come and go: a file with an address a line, or `kubernetes://NAMESPACE/SERVICE/PORT`.",
    "peers.most_asked": "Engines asked for a prompt whose request names no source; the same on all ranks.",
    "peers.ask_s": "Seconds to wait for a peer's answer; a late peer counts as holding no page.",
    "peers.quiet_s": "Seconds that a peer which gave no answer is not asked again.",
    "peers.lend_s": "Seconds an answered lookup stays valid: the peer must start reading within it.",
    "peers.read_s": "Seconds until a read from a peer has failed, and its tokens are read elsewhere or computed.",
    "peers.silence_s": "Seconds without a word until a peer that owes an answer is lost, and reads from it fail.",
    "peers.meet_s": "Seconds between two tries to find the engines that are not connected.",
    "hints.pin_share": "Fraction of the device's pages that pinned prefixes may take together; 0: no pins.",
    "hints.longest_pin_s": "The longest time that a prefix may be pinned for, in seconds; longer pins are refused.",
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
