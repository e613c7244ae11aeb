"""Hints say how an orchestrator wants a prefix's KV treated: shared, fetched, kept for a time, ranked, or moved down.

SGLang 0.5.23 and vLLM 0.33.0 carry them beside a request in the same envelope, KvHintsEnvelope, and leave an action's
payload to its executor. These classes are the payloads: a field is a key of the same name, seconds are `ttl_seconds`,
and a key of unknown effect is refused. Dynamo's router sends `kv.fetch`; llm-d's names the same source in other words,
RemoteKvSource.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvmover.errors import HintError
from kvmover.prepared import prepared

#: Most actions of an envelope, and most tokens of an action: more are refused before any is carried out.
MOST_ACTIONS = 16
MOST_TOKENS = 1 << 20

#: The metrics label of unknown action types: a client's own words are no label.
OTHER = "other"

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Tokens = Annotated[tuple[_Token, ...], msgspec.Meta(min_length=1, max_length=MOST_TOKENS)]


@prepared
class ShareHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hint to write the prefix to the page store, where other engines find it.

    `token_ids`, here and below: another prefix than the request's own, in the request's namespace.
    """

    token_ids: _Tokens | None = None


@prepared
class PrefetchHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hint to bring the prefix up from the page store and the host before it is requested."""

    token_ids: _Tokens | None = None


@prepared
class PinHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"ttl_s": "ttl_seconds"}):
    """A hint to keep the prefix on the device for `ttl_s`, whatever else is evicted; 0 ends the pin of this name."""

    ttl_s: Annotated[float, msgspec.Meta(ge=0)]
    token_ids: _Tokens | None = None


class LeaseHint(PinHint, frozen=True, forbid_unknown_fields=True):
    """A pin in the words of Dynamo's policies: `kv.retain` with a time, a `priority` that lasts so long.

    The priority has no effect: a pinned prefix is not ranked. `block_hashes` are Dynamo's, of all requests of a
    conversation; only the request's own prefix is kept, at `execute_at`. Raises ValueError if `ttl_s` is 0 or
    `include_current_request` false.
    """

    priority: Annotated[int, msgspec.Meta(ge=0)] = 0
    execute_at: Literal["request_completion"] = "request_completion"
    include_current_request: bool = True
    block_hashes: Annotated[tuple[str | int, ...], msgspec.Meta(max_length=MOST_TOKENS)] = ()

    def __post_init__(self) -> None:
        if not self.ttl_s:
            raise ValueError("ttl_seconds must be more than 0; a pin of 0 seconds ends one")
        if not self.include_current_request:
            raise ValueError("include_current_request must be true: blocks of other requests are not found by hashes")


@prepared
class RetainHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hint to evict pages of lower priority before the prefix."""

    priority: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    token_ids: _Tokens | None = None


@prepared
class DemoteHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hint to move the prefix from device to host now, as its conversation rests."""

    token_ids: _Tokens | None = None


#: An address with a name, or an IP address, before its port. Digits of a port are ASCII.
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


@prepared
class FetchHint(msgspec.Struct, frozen=True):
    """A hint to read the prefix from the engine at `source`, host:port, before it is computed.

    Raises ValueError for another address.
    """

    source: str
    token_ids: None = None

    def __post_init__(self) -> None:
        found = _ADDRESS.fullmatch(self.source)
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise ValueError(f"the source is at {self.source!r}, and an address is host:port")


@prepared
class DynamoFetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of `kv.fetch` as Dynamo's router sends it. `source_control_endpoint`: tcp://host:port.

    `block_hashes` are the router's names for blocks that the source has. They select none here: pages are found by the
    digest of their tokens, which depends on no engine's block size.
    """

    source_control_endpoint: str
    block_hashes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1, max_length=MOST_TOKENS)
    ]
    mode: Literal["copy"] = "copy"

    def hint(self) -> FetchHint:
        """Returns the hint. Raises ValueError for an endpoint without host or port."""
        return FetchHint(self.source_control_endpoint.removeprefix("tcp://"))


@prepared
class RemoteKvSource(msgspec.Struct, frozen=True):
    """The source of a prefix in llm-d's words. `kv_request_id`: its router's name of the fetch."""

    kv_request_id: _Text
    remote_host: str
    remote_port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]

    def hint(self) -> FetchHint:
        """Returns the hint. Raises ValueError for a host that is no name and no address."""
        host = f"[{self.remote_host}]" if ":" in self.remote_host else self.remote_host
        return FetchHint(f"{host}:{self.remote_port}")


Hint: TypeAlias = FetchHint | ShareHint | PrefetchHint | PinHint | RetainHint | DemoteHint

#: The payload of each action type.
KINDS: Mapping[str, type[Hint] | type[DynamoFetch]] = {
    "kv.fetch": DynamoFetch,
    "kv.share": ShareHint,
    "kv.prefetch": PrefetchHint,
    "kv.pin": PinHint,
    "kv.retain": RetainHint,
    "kv.demote": DemoteHint,
}
_KIND_OF = {made: kind.removeprefix("kv.") for kind, made in KINDS.items()} | {LeaseHint: "retain", FetchHint: "fetch"}

#: The keys of llm-d among the parameters of a request: the source of a prefix, and a prefill that has computed it.
SOURCE_KEYS = ("remote_kv_source", "remote_prefiller")


class HintRefusal(StrEnum):
    """The reason why a hint was refused."""

    UNKNOWN = "unknown"
    MALFORMED = "malformed"
    ABSENT = "absent"
    TOO_LONG = "too_long"
    SHARE_TAKEN = "share_taken"
    NO_PRIORITIES = "no_priorities"
    NO_HOST = "no_host"
    NO_STORE = "no_store"
    IN_USE = "in_use"
    BUSY = "busy"
    OWN_ALONE = "own_alone"
    ABORTED = "aborted"
    NO_PEERS = "no_peers"
    NOT_ALLOWED = "not_allowed"
    UNREACHABLE = "unreachable"
    NOT_A_PEER = "not_a_peer"
    READ_FAILED = "read_failed"
    NEEDLESS = "needless"


@dataclass(frozen=True, slots=True)
class HintMet:
    """An answer: the hint was met, or begun, for the first `tokens` tokens of the prefix."""

    tokens: int


@dataclass(frozen=True, slots=True)
class HintRefused:
    """An answer: the hint was refused and changed no state; `words` name the values."""

    why: HintRefusal
    words: str


HintAnswer: TypeAlias = HintMet | HintRefused


@dataclass(frozen=True, slots=True)
class HintAction:
    """A hint and its name. A pin replaces an older one of the same name."""

    name: str
    hint: Hint

    @property
    def kind(self) -> str:
        """The action type without its `kv.`."""
        return _KIND_OF[type(self.hint)]

    @property
    def is_due_at_once(self) -> bool:
        """True if the hint runs on arrival.

        A hint on the request's own KV waits for the request's end, unless it brings KV for the request.
        """
        return self.hint.token_ids is not None or isinstance(self.hint, PrefetchHint | FetchHint)


@dataclass(frozen=True, slots=True)
class Declined:
    """An action refused while reading. `kind`: as of `HintAction`, or OTHER."""

    kind: str
    answer: HintRefused


@prepared
class _Action(msgspec.Struct):
    """An action as both engines write it; a later version's further keys are ignored."""

    action_id: _Text
    action_type: str
    action_version: str
    payload: dict[str, Any] = {}


@prepared
class _Envelope(msgspec.Struct):
    protocol_version: str
    message_id: str
    actions: list[Any] = []


def read_hints(envelope: object) -> tuple[HintAction | Declined, ...]:
    """Return the actions of an engine's KvHintsEnvelope, or of its JSON mapping, each read or declined by itself.

    Raises HintError for a value that is no envelope, or has more than `MOST_ACTIONS`.

    >>> pin = {"action_id": "turn 17", "action_type": "kv.pin", "action_version": "1.0", "payload": {"ttl_seconds": 30}}
    >>> read_hints({"protocol_version": "0.1", "message_id": "m", "actions": [pin]})
    (HintAction(name='turn 17', hint=PinHint(ttl_s=30.0, token_ids=None)),)
    """
    try:
        said = msgspec.convert(msgspec.to_builtins(envelope), _Envelope)
    except (msgspec.ValidationError, TypeError) as error:
        raise HintError(f"an envelope of hints: {error}") from error
    if len(said.actions) > MOST_ACTIONS:
        raise HintError(f"an envelope of {len(said.actions)} hints; it may have {MOST_ACTIONS}")
    return tuple(_read(action) for action in said.actions)


def _read(said: object) -> HintAction | Declined:
    try:
        action = msgspec.convert(said, _Action)
    except msgspec.ValidationError as error:
        return Declined(OTHER, HintRefused(HintRefusal.MALFORMED, f"an action: {error}"))
    made = KINDS.get(action.action_type)
    if made is None:
        words = f"{action.action_id}: actions of type {action.action_type!r} are none of {', '.join(KINDS)}"
        return Declined(OTHER, HintRefused(HintRefusal.UNKNOWN, words))
    kind = action.action_type.removeprefix("kv.")
    if action.action_version.partition(".")[0] != "1":
        words = f"{action.action_id}: {action.action_type} of version {action.action_version!r}; known is 1"
        return Declined(kind, HintRefused(HintRefusal.UNKNOWN, words))
    if made is RetainHint and "ttl_seconds" in action.payload:
        made = LeaseHint
    return _made(action.action_id, kind, action.payload, made)


def read_source(params: Mapping[str, Any]) -> HintAction | Declined | None:
    """Return the fetch that llm-d asks for among the parameters of a request, under the first of `SOURCE_KEYS`.

    >>> read_source({"remote_kv_source": {"kv_request_id": "q-3", "remote_host": "10.0.0.7", "remote_port": 8400}})
    HintAction(name='q-3', hint=FetchHint(source='10.0.0.7:8400', token_ids=None))
    """
    for key in SOURCE_KEYS:
        if params.get(key) is not None:
            found = _made(key, "fetch", params[key], RemoteKvSource)
            return HintAction(params[key]["kv_request_id"], found.hint) if isinstance(found, HintAction) else found
    return None


def _made(name: str, kind: str, payload: object, made: type[Any]) -> HintAction | Declined:
    try:
        read: Hint | DynamoFetch | RemoteKvSource = msgspec.convert(payload, made)
        hint = read.hint() if isinstance(read, DynamoFetch | RemoteKvSource) else read
    except (msgspec.ValidationError, ValueError) as error:
        return Declined(kind, HintRefused(HintRefusal.MALFORMED, f"{name}: kv.{kind}: {error}"))
    if isinstance(hint, PinHint) and not math.isfinite(hint.ttl_s):
        return Declined(kind, HintRefused(HintRefusal.MALFORMED, f"{name}: kv.{kind}: ttl_seconds = {hint.ttl_s}"))
    return HintAction(name, hint)
