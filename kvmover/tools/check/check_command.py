"""`kvmover check` looks at two servers, asks them a prompt, counts what moved, and prints the verdict."""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from kvmover.engines.common import Cards, EngineMake, fetch_cards
from kvmover.errors import KvmoverError, TransportError
from kvmover.tools.check.engine_client import EngineClient, HttpCall
from kvmover.tools.check.pair_seen import KVMOVER, Counted, EngineAnswer, PairSeen, PromptAsked, Ranks, ServerSeen
from kvmover.tools.check.pair_verdict import CheckOutcome, CheckVerdict, fault_of_servers, verdict
from kvmover.tools.scrape import Change, Scrape, ask, endpoints, fetch
from kvmover.transfer.protocol.handshake import why_refused

#: Tokens of an answer.
_TOKENS = 16

#: Longest wait for counters to grow, and for a half that nobody comes for, s.
_SETTLE_S, _LEFT_S = 3.0, 3.0

_TEXT = (
    "The cache of keys and values of this prompt is computed by one engine and read by another one. Each of its pages"
    " crosses over once, whatever the shape of either side, and the answer is the same as if one engine had done it"
    " all."
)


class CheckError(KvmoverError, ValueError):
    """Options of a check that cannot be: the message names them."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """A prefill's and a decode's URL, and optionally a router's.

    `metrics`: kvmover's endpoints of both. `bootstrap`: where SGLang's prefill has its ranks found, HOST:PORT, if not
    at its own host. `reference`: a plain server of the same model. `patience_s`: longest wait for an answer.
    """

    urls: Sequence[str]
    metrics: Sequence[str] = ()
    bootstrap: str | None = None
    reference: str | None = None
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not 2 <= len(self.urls) <= 3:
            raise CheckError(f"{len(self.urls)} URLs; a check takes a prefill, a decode, and perhaps their router")
        if self.bootstrap is not None:
            host_and_port(self.bootstrap)


def host_and_port(text: str) -> tuple[str, int]:
    """Parse HOST:PORT. Raises CheckError.

    >>> host_and_port("prefill-0:8998"), host_and_port("[fd00::1]:8998")
    (('prefill-0', 8998), ('fd00::1', 8998))
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise CheckError(f"{text} is not HOST:PORT")
    return host.strip("[]"), int(port)


def run_check(options: CheckOptions) -> tuple[PairSeen, CheckVerdict]:
    """Returns what was seen of a pair, and the verdict. Raises CheckError for options that cannot be."""
    counter = _Counter([each for text in options.metrics for each in endpoints(text)])
    prompt = _new_prompt()
    with ThreadPoolExecutor(3) as pool:
        looks = [pool.submit(EngineClient.look, url, prompt, options.patience_s) for url in options.urls[:2]]
        first, second = (look.result() for look in looks)
        seen = PairSeen(first.seen, second.seen)
        if (fault := fault_of_servers(seen)) is not None:
            return seen, fault
        pair = _Pair(first, second, _bootstrap(options, first.seen), counter, pool)
        reference = options.reference and EngineClient.look(options.reference, prompt, options.patience_s)
        asked, ranks = pair.asked(prompt)
        asked = _compared(pair, reference or None, prompt, asked)
        seen = replace(seen, ranks=ranks, asked=asked)
        if not asked.counted.received_bytes or asked.second.error:
            seen = replace(seen, unlike=pair.unlike(ranks))
        elif len(options.urls) == 3:
            prompt = _new_prompt()
            router = EngineClient(ServerSeen(options.urls[2], model=first.seen.model), options.patience_s)
            seen = replace(seen, routed=_compared(pair, reference or None, prompt, pair.routed(router, prompt)))
    return seen, verdict(seen)


def show_check(options: CheckOptions, out: Console) -> int:
    """Print the verdict, and the servers it is about. Returns the exit status."""
    seen, found = run_check(options)
    for half, server in (("prefill", seen.prefill), ("decode", seen.decode)):
        out.print(f"{half:8}{server.url}  {_words(server)}", soft_wrap=True)
    out.print(found.sentence, style="" if found.outcome is CheckOutcome.MOVED else "bold red", soft_wrap=True)
    return found.outcome.status


def print_check(options: CheckOptions) -> int:
    """Print the verdict and the servers as JSON. Returns the exit status."""
    seen, found = run_check(options)
    servers = {name: msgspec.to_builtins(getattr(seen, name)) for name in ("prefill", "decode")}
    for server in servers.values():
        server["prompt_tokens"] = len(server.pop("prompt"))
    sys.stdout.write(json.dumps({**found.as_data(), **servers, "ranks": seen.ranks.address}) + "\n")
    return found.outcome.status


def _words(server: ServerSeen) -> str:
    if server.error:
        return "no answer"
    if server.make is None:
        return "no engine"
    mover = {KVMOVER: "kvmover", "": "no kvmover", None: "a connector that it does not name"}.get(server.mover)
    return f"{server.make}, {server.model}, {mover or server.mover}"


def _new_prompt() -> str:
    """Returns a prompt that no cache has: its first words are new."""
    return f"{secrets.token_hex(8)}: {_TEXT}"


def _bootstrap(options: CheckOptions, prefill: ServerSeen) -> tuple[str, int]:
    if options.bootstrap is not None:
        return host_and_port(options.bootstrap)
    url = prefill.url if "://" in prefill.url else f"http://{prefill.url}"
    return urlsplit(url).hostname or "", prefill.bootstrap_port


def _compared(pair: _Pair, reference: EngineClient | None, prompt: str, asked: PromptAsked) -> PromptAsked:
    """Returns the prompt with the answer of a server alone: the reference, else a vLLM half, which can.

    A vLLM decode is asked under a salt, so that it computes the prompt itself. Of two SGLang halves the prefill has
    answered the first token.
    """
    if not asked.counted.received_bytes or asked.second.error:
        return asked
    if reference is not None:
        return replace(asked, alone=reference.ask(prompt, _TOKENS), by=f"the reference {reference.seen.url}")
    if pair.prefill.seen.make is EngineMake.VLLM:
        return replace(asked, alone=pair.prefill.ask(prompt, _TOKENS), by="the prefill alone")
    if pair.decode.seen.make is EngineMake.VLLM:
        salted = {"cache_salt": secrets.token_hex(8)}
        return replace(asked, alone=pair.decode.ask(prompt, _TOKENS, salted), by="the decode alone")
    return replace(asked, alone=asked.first, by="the prefill, and SGLang's halves answer no more alone (--reference)")


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two servers that say of themselves what a pair should."""

    prefill: EngineClient
    decode: EngineClient
    bootstrap: tuple[str, int]
    counter: _Counter
    pool: ThreadPoolExecutor

    def asked(self, prompt: str) -> tuple[PromptAsked, Ranks]:
        """Ask both halves as a router does. Returns their answers, and where the prefill's ranks are found."""
        room = random.randrange(1 << 62)
        count = self.counter.begin(self.decode.seen)
        if self.prefill.seen.make is EngineMake.SGLANG:
            first, second = self._at_once(prompt, _room_words(*self.bootstrap, room))
            ranks = _found_ranks(*self.bootstrap)
        else:
            first, second, ranks = self._in_turn(prompt, room)
        return PromptAsked(first, second, count()), ranks

    def _in_turn(self, prompt: str, room: int) -> tuple[EngineAnswer, EngineAnswer, Ranks]:
        """vLLM's prefill first, whose answer names its ranks."""
        to_sglang = self.decode.seen.make is EngineMake.SGLANG
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        params |= {"bootstrap_room": room} if to_sglang else {}
        first = self.prefill.ask(prompt, 1, {"kv_transfer_params": params})
        told = first.params or {}
        host, port = str(told.get("remote_host") or ""), int(str(told.get("remote_port") or 0))
        if first.error or not port:
            return first, EngineAnswer(), Ranks("")
        said = _room_words(host, port, room) if to_sglang else {"kv_transfer_params": told}
        return first, self.decode.ask(prompt, _TOKENS, said), _found_ranks(host, port)

    def _at_once(self, prompt: str, room: Mapping[str, Any]) -> tuple[EngineAnswer, EngineAnswer]:
        """SGLang's prefill begins when decode asks. Whichever half is left alone by an error is hung up on."""
        to_vllm = self.decode.seen.make is EngineMake.VLLM
        said = {"kv_transfer_params": {"do_remote_prefill": True, **room}} if to_vllm else room
        calls = self.prefill.call(), self.decode.call()
        first = self.pool.submit(self.prefill.ask, prompt, _TOKENS, room, calls[0])
        second = self.pool.submit(self.decode.ask, prompt, _TOKENS, said, calls[1])
        return _heard(first, calls[0], second)

    def routed(self, router: EngineClient, prompt: str) -> PromptAsked:
        """Ask the router. Its halves' first answer is not seen."""
        count = self.counter.begin(self.decode.seen)
        second = router.ask(prompt, _TOKENS)
        return PromptAsked(EngineAnswer(params={"kvmover_content": ""}), second, count())

    def unlike(self, ranks: Ranks) -> str:
        """Returns the sentence with which decode's card refuses the prefill's; "" if they agree or are not to be had.

        A vLLM decode that may also prefill names its ranks when it is asked to.
        """
        if self.decode.seen.make is not EngineMake.VLLM or not ranks.address or ranks.error:
            return ""
        offered = self.decode.ask("kvmover check", 1, {"kv_transfer_params": {"do_remote_decode": True}}).params or {}
        with suppress(TransportError, LookupError, ValueError):
            theirs = fetch_cards(*host_and_port(ranks.address)).cards[0]
            own = fetch_cards(str(offered["remote_host"]), int(str(offered["remote_port"]))).cards[0]
            return why_refused(own, theirs) or ""
        return ""


def _heard(
    first: Future[EngineAnswer], call: HttpCall, second: Future[EngineAnswer]
) -> tuple[EngineAnswer, EngineAnswer]:
    """Returns both answers. A prefill that has not answered soon after decode has an end put to it."""
    answer = second.result()
    try:
        return first.result(_LEFT_S), answer
    except TimeoutError:
        call.hang_up()
        first.result()
        return EngineAnswer("" if answer.error else "did not end, though decode answered"), answer


def _room_words(host: str, port: int, room: int) -> dict[str, Any]:
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


def _found_ranks(host: str, port: int) -> Ranks:
    """Look for the cards of a prefill's ranks from this machine."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found: Cards = fetch_cards(host, port)
    except TransportError as error:
        return Ranks(address, str(error))
    return Ranks(address, "" if found.cards else f"no rank is there at {address}")


class _Counter:
    """The counters of kvmover's endpoints, and of a vLLM decode."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def begin(self, decode: ServerSeen) -> Callable[[], Counted]:
        """Read all counters. Returns a call for their increase since, once it is whole."""
        before = self._read(decode)

        def since() -> Counted:
            stop, last = time.monotonic() + _SETTLE_S, Counted()
            while True:
                found = _increase(before, self._read(decode))
                told = found.received_bytes or found.failures or found.mistaken or found.refused
                if (told and found == last) or time.monotonic() > stop:
                    return found
                last = found
                time.sleep(0.2)

        return since

    def _read(self, decode: ServerSeen) -> _Reading:
        found = ask(self._addresses, fetch, time.monotonic)
        engine = None
        if decode.make is EngineMake.VLLM and decode.mover == KVMOVER:
            with suppress(KvmoverError):
                engine = Scrape.of(fetch(f"{decode.url.rstrip('/')}/metrics"), time.monotonic(), "vllm:kvmover_")
        return _Reading(found.said, engine, tuple(found.errors()))


@dataclass(frozen=True, slots=True)
class _Reading:
    """Scrapes at one time: of kvmover's endpoints by address, and of the decode engine's own."""

    ranks: Mapping[str, Scrape]
    engine: Scrape | None
    errors: tuple[str, ...]


def _increase(before: _Reading, now: _Reading) -> Counted:
    """Returns the increases between two readings, of endpoints that answered both times. Pure."""
    both = [Change(before.ranks[each], now.ranks[each]).since() for each in now.ranks if each in before.ranks]
    ranks = reduce(Scrape.and_of, both) if both else Scrape(0.0, {})
    engine = Scrape(0.0, {})
    if before.engine and now.engine:
        engine = Change(before.engine, now.engine).since()

    def grown(name: str, label: str, **fixed: str) -> dict[str, int]:
        return {key: int(count) for key, count in ranks.by(name, label, **fixed).items() if count}

    def of_engine(name: str) -> int:
        return int(engine.total(f"vllm:kvmover_{name}_total"))

    ends = grown("kvmover_transfers_total", "end", verb="receive")
    ends.pop("landed", None)
    return Counted(
        max(int(ranks.total("kvmover_received_bytes_total")), of_engine("received_bytes")),
        max(sum(ends.values()), of_engine("received_failures")),
        of_engine("mistaken_requests"),
        grown("kvmover_posted_chunks_total", "route"),
        ends,
        grown("kvmover_refused_total", "reason"),
        now.errors,
        len(both) + (now.engine is not None),
    )
