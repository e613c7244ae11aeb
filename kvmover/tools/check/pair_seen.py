"""A PairSeen is all that a check saw of a prefill and a decode: values without any connection, for the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmover.engines.common import EngineMake
from kvmover.transfer.meter import UNBEGUN

#: The name by which SGLang's options choose kvmover.
KVMOVER = "kvmover"


class Half(StrEnum):
    """A part of the pair that can be at fault."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """A server by its own words. `error`: why it told nothing.

    `mover`: what moves its KV, "" for nothing, None where the server does not tell. `mode`: SGLang's
    `--disaggregation-mode`. `prompt`: token ids of the prompt by its tokenizer, empty where it does not tell.
    """

    url: str
    error: str = ""
    make: EngineMake | None = None
    model: str = ""
    mover: str | None = None
    mode: str = ""
    prompt: tuple[int, ...] = ()
    bootstrap_port: int = 0


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The tokens of an answer, or the error in its place.

    `leads`: for each token by how much its log probability is above that of the second, None if unknown. `params`:
    vLLM's `kv_transfer_params` for the other half.
    """

    error: str = ""
    tokens: tuple[int, ...] = ()
    leads: tuple[float | None, ...] = ()
    params: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Ranks:
    """The address at which decode finds the ranks of the prefill. `error`: why this machine does not find them."""

    address: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Counted:
    """Increases of counters while the prompt was asked. `routes`: chunks by route, `ends`: failed receives by end.

    `refused`: peers turned away, by reason. `errors`: endpoints that could not be read.
    """

    received_bytes: int = 0
    failures: int = 0
    mistaken: int = 0
    routes: Mapping[str, int] = field(default_factory=dict[str, int])
    ends: Mapping[str, int] = field(default_factory=dict[str, int])
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    errors: tuple[str, ...] = ()
    sources: int = 0

    @property
    def is_known(self) -> bool:
        """Returns True if some endpoint counts what decode receives."""
        return self.sources > 0

    @property
    def route(self) -> str:
        """Returns the routes by falling chunks, "" if no endpoint tells them."""
        used = sorted((route for route, chunks in self.routes.items() if chunks), key=lambda name: -self.routes[name])
        return " and ".join(used)

    @property
    def never_met(self) -> bool:
        """Returns True if decode did not reach the prefill's ranks to ask them."""
        return bool(self.ends.get(UNBEGUN))


@dataclass(frozen=True, slots=True)
class PromptAsked:
    """A prompt asked of both halves, and of `alone`, a server that answers it by itself. `by`: that server's name."""

    first: EngineAnswer
    second: EngineAnswer
    counted: Counted
    alone: EngineAnswer | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class PairSeen:
    """A prefill and a decode. `unlike`: the sentence with which their cards refuse each other, "" otherwise.

    `asked` and `routed` are None where an earlier fault kept the prompt from being asked, directly and by the router.
    """

    prefill: ServerSeen
    decode: ServerSeen
    ranks: Ranks = Ranks("")
    asked: PromptAsked | None = None
    unlike: str = ""
    routed: PromptAsked | None = None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the index of the first unequal token; None if they are equal as far as both go.

    >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1, 2], [1, 2, 3])
    (2, None)
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), None)
