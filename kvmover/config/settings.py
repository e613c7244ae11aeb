"""Settings are the values of a configuration by section; where a part of kvmover has a value of its own, that is it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from kvmover.enums import settle
from kvmover.errors import KvmoverError
from kvmover.store import Policy
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.protocol.auth import Key, Keys
from kvmover.transfer.threads.pace import Pace


class ConfigError(KvmoverError, ValueError):
    """A key that does not exist, or a value that cannot be: the message names both, and where they were given."""


#: No key file is longer: a path that was mistaken for one is not read to its end.
_MOST_KEY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StoreSettings(Policy):
    """A page store's policy; the directory that the stores are in, the same on all ranks; and how often one is kept.

    `upkeep_s`: how often quota and TTL are. `flush_s`: how often pages are made safe from a power cut and visible to
    other machines.
    """

    root: Path | None = None
    upkeep_s: float = 5.0
    flush_s: float = 30.0

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        for name in ("upkeep_s", "flush_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"store has {name} = {getattr(self, name)}; it must be positive")

    def directory(self) -> Path:
        """`root`, for those that cannot do without. Raises ConfigError."""
        if self.root is None:
            raise ConfigError("no directory of page stores is given, here or as store.root (KVMOVER_STORE_ROOT)")
        return self.root


class Level(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """A line of text a record, or a JSON object a line."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """What kvmover's own loggers say, and where. None leaves handlers and levels to the engine."""

    level: Level | None = None
    format: LogFormat = LogFormat.TEXT
    file: Path | None = None

    def __post_init__(self) -> None:
        settle(self, "logging", ConfigError, format=LogFormat)
        if self.level is not None:
            settle(self, "logging", ConfigError, level=Level)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where Prometheus scrapes."""

    port: int | None = None
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port = {self.port}; a port is at most 65535, and 0 takes any that is free")


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """What is kept of a run beside its metrics: the run log that `kvmover report` reads, and spans."""

    run_log: Path | None = None
    spans: bool = False


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """Files with the keys that control messages are sealed with. The keys themselves are in no configuration."""

    shared_key_file: Path | None = None
    accepted_key_files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.accepted_key_files and self.shared_key_file is None:
            raise ConfigError("accepted_key_files without shared_key_file: no message would be authenticated")

    def keys(self) -> Keys | None:
        """What the files hold, without white space at either end; None where no key is configured."""
        if self.shared_key_file is None:
            return None
        return Keys(_key(self.shared_key_file), tuple(_key(path) for path in self.accepted_key_files))


@dataclass(frozen=True, slots=True)
class Settings:
    """All of it. `mover` has no keys yet: `mover_config` reads them."""

    mover: MoverConfig = field(default_factory=MoverConfig)
    progress: Pace = field(default_factory=Pace)
    store: StoreSettings = field(default_factory=StoreSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)

    def mover_config(self) -> MoverConfig:
        """For `Mover`, with the keys. Raises ConfigError for a key file that cannot be read or is too short."""
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
