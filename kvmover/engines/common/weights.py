"""ServedWeights identify the weights that an engine serves: by the operator's name or, without one, by its files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from kvmover.config import ConfigError
from kvmover.config.settings import ExchangeSettings
from kvmover.engines.common.checkpoint import UnknownWeights, combined, digest_of_checkpoint
from kvmover.layout import Component
from kvmover.store import Namespace
from kvmover.transfer import Model

log = logging.getLogger(__name__)

#: The reason for ending transfers when an engine's weights change, on both sides.
UPDATED = "the weights of this engine were updated"

#: The reason why no other engine can have this engine's weights.
NO_VERSION = (
    "no version of them is known: KV is shared with no engine and no store until the caller gives one, alike in all"
    " engines with these weights"
)

#: Engines' names of the formats that load safetensors unchanged.
_AS_THEY_ARE = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer", "layered"}
)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The place of an engine's weights, in its words: a folder, or a model of a hub at a `revision`, in `cache`.

    `form` is the load format; `quantized` names a conversion while loading, "" for none.
    """

    path: str
    revision: str | None = None
    form: str = "auto"
    cache: str | None = None
    quantized: str = ""

    def digest(self) -> str:
        """Returns the digest of the weights. Raises UnknownWeights with the reason if their files cannot identify
        them.
        """
        if self.form not in _AS_THEY_ARE:
            raise UnknownWeights(f"{self.path} is loaded as {self.form}")
        found = digest_of_checkpoint(self.folder()).digest
        return combined([found, f"quantized as {self.quantized}"]) if self.quantized else found

    def folder(self) -> Path:
        """Returns the folder of the files on this machine. Raises UnknownWeights if there is none."""
        return _folder(self.path, self.revision, self.cache)


def digest_of_sources(sources: Sequence[WeightSource]) -> str:
    """Returns the digest of a model and, if there is one, its draft: `sources` in this order.

    Raises UnknownWeights if the files of one cannot identify it.
    """
    return combined([source.digest() for source in sources])


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The identity of an engine's weights. `started` identifies them at its start. `name` is for people. `tenant`, if
    any, is the only one that shares them.

    `computed`: if `started` is the operator's name, the digest of the files, or why there is none. `version`: the
    caller's name of later weights. `unknown`: why no other engine can have these weights; then no engine is met, and
    pages are neither stored nor found.
    """

    name: str
    started: str
    computed: str = field(default="", compare=False)
    version: str = ""
    unknown: str = ""
    tenant: str = ""

    @property
    def is_known(self) -> bool:
        """Returns True if another engine can have these weights."""
        return not self.unknown

    @property
    def identity(self) -> str:
        """Returns the text that is compared, in the card of every rank and in every namespace."""
        called = ("changed as" if self.unknown else "version") + f" {self.version}"
        return self.started + (f", {called}" if self.version else "") + (f" of {self.tenant}" if self.tenant else "")

    def told(self) -> str:
        """Returns a line for the log."""
        if self.unknown:
            return f"the weights of {self.name} were changed while it runs, and {self.unknown}"
        beside = f" by exchange.weights; computed: {self.computed}" if self.computed else ""
        return f"the weights of {self.name} are {self.identity}{beside}"

    def model(self, components: tuple[Component, ...]) -> Model:
        """Returns the Model that both sides of a transfer must have equal."""
        return Model(self.name, components, self.identity)

    def namespace(self, page_tokens: int, tenant: str) -> Namespace:
        """Returns the namespace in which engines share pages of `page_tokens` tokens."""
        return Namespace("", self.identity, page_tokens, tenant, hint=self.name)

    def of_tenant(self, tenant: str) -> ServedWeights:
        """Returns these weights for one tenant's peers; "" for peers that name no tenant."""
        return replace(self, tenant=tenant)

    def updated(self, version: str | None, unknown: str = NO_VERSION) -> ServedWeights:
        """Returns the weights after an update that the caller names `version`; without a name, weights that no other
        engine has, for the reason `unknown`.

        >>> ServedWeights("llama", "ab").updated("7").updated("8").identity
        'ab, version 8'
        """
        if version:
            return replace(self, version=version, unknown="")
        return replace(self, version=token_hex(16), unknown=unknown)

    def log(self) -> None:
        """Log the identity of the weights; a warning if they are unknown."""
        log.log(logging.INFO if self.is_known else logging.WARNING, "%s", self.told())


def identified(name: str, exchange: ExchangeSettings, compute: Callable[[], str]) -> ServedWeights:
    """Returns the weights that an engine calls `name`. The configured identity comes before the computed one.

    Raises ConfigError if there is neither.
    """
    try:
        computed, unknown = compute(), ""
    except UnknownWeights as error:
        computed, unknown = "", str(error)
    if exchange.weights is not None:
        return ServedWeights(name, exchange.weights, computed or unknown)
    if unknown:
        raise ConfigError(
            f"the weights of {name} cannot be told from others: {unknown}. Name them, alike in all engines that serve"
            " the same and in no others: the option weights, or exchange.weights (KVMOVER_EXCHANGE_WEIGHTS)"
        )
    return ServedWeights(name, computed)


class RankGroup(Protocol):
    """An engine's group of ranks, one of which broadcasts to all."""

    rank_in_group: int

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Returns `obj` of rank `src`. All ranks of the group call it together."""
        ...


def computed_once(compute: Callable[[], str], groups: Sequence[RankGroup]) -> str:
    """Returns the result of `compute` on every rank: the first rank of all `groups` computes it and broadcasts it group
    by group.

    All ranks call this together. Raises UnknownWeights on all of them if `compute` does.
    """
    told: tuple[str, str] | None = None
    if all(group.rank_in_group == 0 for group in groups):
        try:
            told = compute(), ""
        except UnknownWeights as error:
            told = "", str(error)
    for group in groups:
        told = group.broadcast_object(told, 0)
    assert told is not None, "the first rank of the last group has it from the group before"
    digest, unknown = told
    if unknown:
        raise UnknownWeights(unknown)
    return digest


def _folder(path: str, revision: str | None, cache: str | None) -> Path:
    """Returns the folder of a model on this machine. Never downloads: the engine has loaded the model already."""
    here = Path(path).expanduser()
    if here.is_dir():
        return here
    if here.exists() or "://" in path:
        raise UnknownWeights(f"{path} is no folder of safetensors")
    hub: Any = import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UnknownWeights(f"{path} is in no folder that is known: {error}") from error
