"""ConnectorScheduler is the scheduler's half of the connector: requests come in, metadata for workers goes out.

It touches no memory and never waits. Requests and scheduler outputs are vLLM's, and are only read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, Flag, auto
from time import monotonic
from typing import Any, Protocol

from kvmover.engines.common import (
    FirstToken,
    LastTurn,
    Remote,
    RequestAsk,
    Running,
    Serve,
    answer,
    answer_of_turn,
    asked,
)
from kvmover.engines.vllm.connector_metadata import (
    AbortSpec,
    AttachSpec,
    GrowSpec,
    KvmoverConnectorMetadata,
    LoadSpec,
    ReceiveSpec,
    RefuseSpec,
    ReleaseSpec,
    SaveSpec,
    SendSpec,
    Tables,
)
from kvmover.engines.vllm.families import Families, Family, is_told_of
from kvmover.engines.vllm.readers import Key, Readers, ReaderTurn
from kvmover.engines.vllm.vllm_content import RequestContent
from kvmover.repeats import Repeats, form_of
from kvmover.transfer.protocol.content import Content, IdentityCheck, disagreement
from kvmover.transfer.result import Service

log = logging.getLogger(__name__)

#: A function that returns the number of leading hashes whose blocks are in the store, on every rank.
Leading = Callable[[Sequence[bytes]], int]


class Finished(Protocol):
    """The requests that all ranks have reported, as vLLM collects them."""

    finished_recving: set[str] | None


class BlockPool(Protocol):
    """The blocks of vLLM, which are reused once their reference count is 0."""

    def of(self, request: str) -> Sequence[Any]:
        """Returns the blocks of a request."""
        ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to blocks."""
        ...

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        """Drop a reference to blocks."""
        ...


@dataclass(slots=True)
class QuarantinedBlocks:
    """The blocks of failed fetches that may still be written on some rank.

    vLLM gives the request other blocks meanwhile, or ends it; these keep a reference until all ranks have reported that
    no write can follow.
    """

    pool: BlockPool
    _ranks: Counter[str] = field(default_factory=Counter[str])
    _blocks: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    def heard(self, ranks: Mapping[str, int], received: Iterable[str]) -> None:
        """Note, by request, the change in the number of ranks that hold its blocks. `received` requests lose theirs in
        this step.
        """
        self._ranks.update(ranks)
        for request in received:
            if self._ranks[request] > 0:
                self._blocks[request] = list(self.pool.of(request))
                self.pool.touch(self._blocks[request])
        for request in ranks:
            if self._ranks[request] == 0:
                del self._ranks[request]
                self.pool.free_blocks(self._blocks.pop(request, ()))

    def __len__(self) -> int:
        return len(self._blocks)


@dataclass(frozen=True, slots=True)
class Home:
    """The address of this engine for other engines, once it serves its cards."""

    engine: str
    host: str
    port: int


class Role(Flag):
    """The roles that vLLM gives an engine: `kv_producer`, `kv_consumer`, or both.

    An engine that does not load gets pages freed while a step may still write them; one that does not give may have
    preempted requests end.
    """

    GIVES = auto()
    TAKES = auto()


class RequestOutcome(Enum):
    """The outcome of a request: DELIVERED normally, so that other engines may have its KV, or ABORTED."""

    DELIVERED = "delivered"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Fetch:
    """The part of a request that another engine has: its first `stop` positions, of `content`, at `remote`. `key`
    identifies the requests that read the same; None if each reads its own.
    """

    remote: Remote
    stop: int
    content: Content
    key: Key | None = None


@dataclass(slots=True)
class Live:
    """A request that the scheduler knows. `preemptions` is its count when its pages were last seen.

    `offered`: positions that its transfer waits for, in `named` blocks of each group; 0 before its order. `begun`: its
    fetch began, or needs none; `settled`: other requests find its blocks. `fetching`: its pages are being written.
    `fetch`: the engine that has a part of it. `content`: its prompt, if engines exchange it. `family`: the requests of
    one client that are offered as one. `movable`: the name by which other engines may ask for it while it is decoded.
    `hashes`: of its whole blocks, common to all engines. `saved`: blocks ordered to be stored. `first`: the block from
    which on the store was asked. `looked`: the preemption after which the store was read, once: blocks that failed then
    are computed.
    """

    request: Any
    ask: Serve | Remote | Running | None
    preemptions: int
    movable: str | None = None
    content: RequestContent | None = None
    fetch: Fetch | None = None
    family: Family | None = None
    offered: int = 0
    named: tuple[int, ...] = ()
    begun: bool = False
    settled: bool = False
    fetching: bool = False
    hashes: list[bytes] = field(default_factory=list[bytes])
    saved: int = 0
    first: int = 0
    looked: int = -1


def vllm_hashes(known: Live, _: int) -> Sequence[bytes]:
    """Returns vLLM's own hashes of a request's whole blocks, by which only vLLM finds pages."""
    return known.request.block_hashes


@dataclass(slots=True)
class ConnectorScheduler:
    """The scheduler's half. `block_tokens` is that of the one group whose blocks are stored. `leading` is None without
    a store. `page_names` returns the names of a request's blocks in it.

    `late`: some pages are freed before a request ends, or hold a state of all of it, so it is offered at its end.
    `left_tokens`: tokens at a prompt's end that are left to the decode engine: a window would otherwise need one
    position more than a prefill keeps, and a state cannot be rewound by the token that decode computes. `keep_s`:
    seconds for which a decode keeps a request for its next turn, None for not at all; at least `fewest` tokens are
    worth a fetch. `move_s`: seconds for which a request that may move is kept after its client has left; None: it may
    not. `identity`: how to treat a request whose prompt one half cannot name. `alone`: the reason for meeting no
    engine, "" otherwise.
    """

    block_tokens: int
    role: Role = Role.GIVES | Role.TAKES
    late: bool = False
    left_tokens: int = 0
    keep_s: float | None = None
    fewest: int = 0
    move_s: float | None = None
    leading: Leading | None = None
    home: Home | None = None
    identity: IdentityCheck = IdentityCheck.CHECKED
    alone: str = ""
    readers: Readers = field(default_factory=Readers)
    families: Families = field(default_factory=Families)
    repeats: Repeats = field(default_factory=Repeats)
    counts: Counter[str] = field(default_factory=Counter[str])
    page_names: Callable[[Live, int], Sequence[bytes]] = vllm_hashes
    live: dict[str, Live] = field(default_factory=dict[str, Live])
    metadata: KvmoverConnectorMetadata = field(default_factory=KvmoverConnectorMetadata)

    def new(self, request: Any) -> None:
        """Note a new request. A prefill for another engine is cut before the tokens left to that engine."""
        known, left = self._live(request), self.left_tokens
        if isinstance(known.ask, Serve) and self._cuts(request):
            del request.prompt_token_ids[-left:]
            del request._all_token_ids[-left:]
            request.num_prompt_tokens -= left
            request.max_tokens = 1

    @property
    def may(self) -> Role:
        """Returns the roles in effect now."""
        return Role(0) if self.alone else self.role

    def part(self, why: str) -> None:
        """Meet no engine until `join`, for the reason `why`: requests with blocks are no longer given, fetched or
        stored; others from when they have blocks.
        """
        self.alone = why
        for known in self.live.values():
            if known.fetching or known.request.num_computed_tokens:
                self._keep_here(known)

    def join(self) -> None:
        """Meet other engines again. Call it while no request has blocks."""
        self.alone = ""

    def matched(self, request: Any, computed: int) -> int | None:
        """Returns the number of tokens beyond the first `computed` that can be loaded; None while another request
        fetches the same.
        """
        known = self._live(request)
        if self.alone:
            self._keep_here(known)
        if known.fetch and not known.begun:
            turn = self.readers.turn(known.fetch.key) if known.fetch.key else ReaderTurn.FETCH
            if turn is ReaderTurn.WAIT:
                return None
            if turn is ReaderTurn.COMPUTE:
                self._leave(known)
        if known.fetch and not known.begun:
            found = max(0, known.fetch.stop - computed)
            return 0 if isinstance(known.ask, Serve) and found < self.fewest else found
        if self.leading is None or Role.TAKES not in self.may or known.looked == request.num_preemptions:
            return 0
        hashes = self.page_names(known, self.block_tokens)[: request.num_tokens // self.block_tokens]
        known.first = computed // self.block_tokens
        found = self.leading(hashes[known.first :]) if len(hashes) > known.first else 0
        return found * self.block_tokens

    def allocated(self, request: Any, tables: Tables, external: int) -> None:
        """Order the load of the last `external` computed tokens of a request into its pages."""
        known = self._live(request)
        if (fetch := known.fetch) and not known.begun:
            known.begun, known.fetching = True, external > 0
            name = request.request_id
            if fetch.key:
                (self.readers.begun if external else self.readers.spared)(fetch.key, name)
            if external:
                receive = ReceiveSpec(
                    name, fetch.remote, fetch.stop - external, fetch.stop, _copied(tables), fetch.content
                )
                self.metadata.receives.append(receive)
            else:
                self._release(known)
        elif external:
            known.looked, known.fetching = request.num_preemptions, True
            blocks = slice(known.first, known.first + external // self.block_tokens)
            hashes, held = tuple(self.page_names(known, self.block_tokens)[blocks]), tuple(tables[0][blocks])
            self.metadata.loads.append(LoadSpec(request.request_id, hashes, held))

    def build(self, output: Any) -> KvmoverConnectorMetadata:
        """Returns the metadata of a step, once."""
        for known in self.live.values():
            if known.preemptions != known.request.num_preemptions:
                self._preempted(known)
        state = output.kv_connector_block_state
        for name, count in output.num_scheduled_tokens.items():
            known = self.live.get(name)
            if known is None:
                continue
            if known.begun and not known.settled and known.fetch and known.fetch.key:
                known.settled = True
                if self.readers.settled(known.fetch.key, name):
                    self._release(known)
            before = known.request.num_computed_tokens
            offers, saves = self._offers(known), self._saves(known, before + count)
            tables = state.get_block_ids(name) if offers or saves else None  # a copy, as long as the request
            if tables is not None and offers:
                self._offer(known, before, before + count, tables)
            if known.movable:
                self._give(known, before, count, state)
            if tables is not None and saves:
                self._save(known, saves, tables)
        metadata, self.metadata = self.metadata, KvmoverConnectorMetadata()
        return metadata

    def output(self, finished: Finished) -> None:
        """Note requests that every rank has received, or failed to."""
        for name in finished.finished_recving or ():
            if name in self.live:
                self.live[name].fetching = False
                if isinstance(self.live[name].ask, Running):
                    self._release(self.live[name])
            if self.live.get(name) and self.live[name].request.is_finished():
                del self.live[name]

    def finished(self, request: Any, tables: Tables, outcome: RequestOutcome) -> tuple[bool, dict[str, Any] | None]:
        """Returns True if the request keeps its pages until all ranks report it, and the parameters for its other
        half.
        """
        name = request.request_id
        known = self._live(request)
        if known.preemptions != request.num_preemptions:
            self._preempted(known)
        if known.fetch and known.fetch.key:
            if self.readers.gone(known.fetch.key, name):
                self._release(known)
        elif known.fetch and not known.begun and not isinstance(known.ask, Running):
            self._release(known)
        keep = known.saved > 0
        if known.movable and known.offered:
            keep, written = True, min(request.num_computed_tokens, request.num_tokens)
            if outcome is RequestOutcome.DELIVERED:
                self.metadata.aborts.append(AbortSpec(name, "it was answered where it was"))
            elif written > known.offered:  # steps ordered ahead of their tokens
                assert known.content is not None
                more, contents = tuple([] for _ in known.named), known.content.grown_to(written)
                self.metadata.growths.append(GrowSpec(name, more, written, contents))
        if isinstance(known.ask, Serve):
            keep = self._served(known, known.ask, tables, outcome) or keep
        if known.fetching:  # the scheduler keeps the pages until every rank says that it has received
            self.metadata.aborts.append(AbortSpec(name, "aborted by the scheduler"))
            return False, None
        del self.live[name]
        kept = self._kept(known, outcome)
        if kept is not None:
            send = SendSpec(name, name, _copied(tables), None, keep_s=self.keep_s, content=kept.content)
            self.metadata.sends.append(send)
        if keep or kept is not None:
            self.metadata.delayed.add(name)
        if outcome is not RequestOutcome.DELIVERED:
            return keep, None
        return keep or kept is not None, self._answer(known) if kept is None else answer_of_turn(kept)

    def _kept(self, known: Live, outcome: RequestOutcome) -> LastTurn | None:
        """Returns the part of a request prefilled elsewhere that stays here for its next turn: all but the last token's
        KV.
        """
        request, has_fetched = known.request, isinstance(known.ask, Remote | Running)
        may = self.keep_s is not None and Role.GIVES in self.may and not self.late and not known.offered
        if not (may and has_fetched and self.home and outcome is RequestOutcome.DELIVERED):
            return None
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        remote = Remote(self.home.engine, request.request_id, self.home.host, self.home.port)
        content = (known.content or RequestContent(request)).of_first(tokens)
        return LastTurn(remote, content) if content.digest else None

    def _answer(self, known: Live) -> dict[str, Any] | None:
        if known.family is None or known.content is None or self.home is None:
            return None
        served = Remote(self.home.engine, known.family.transfer, self.home.host, self.home.port)
        return answer(served, known.content.whole, known.family.readers)

    def take_counts(self) -> Counter[str]:
        """Returns the counts since the last call: requests that named KV of another prompt."""
        taken, self.counts = self.counts, Counter[str]()
        return taken

    def is_of_peer(self, request: Any) -> bool:
        """Returns True if a part of a request is fetched from the engine of the turn before, or from where it was
        decoded.
        """
        known = self.live.get(request.request_id)
        return known is not None and known.fetch is not None and not isinstance(known.ask, Remote)

    def _live(self, request: Any) -> Live:
        name = request.request_id
        if name not in self.live:
            said = self._ask(request)
            known = self.live[name] = Live(request, said.whole, request.num_preemptions)
            if said.movable and self.move_s is not None and Role.GIVES in self.role and not self.late:
                known.movable = said.movable
            if said.whole or known.movable:
                known.content = RequestContent(request)
            known.fetch = self._fetch(known, said)
            if isinstance(said.whole, Serve) and known.content and (said.whole.transfer != name or is_told_of(name)):
                known.family = self.families.of(name, said.whole.transfer, known.content.whole)
        return self.live[name]

    def _fetch(self, known: Live, said: RequestAsk) -> Fetch | None:
        """Returns the part of a request that is fetched: from its prefill, from the decode of the turn before, or from
        where it was decoded until now. Returns None if the KV there is of another prompt.
        """
        request, own, ask = known.request, known.content, said.whole
        tokens: int = request.num_prompt_tokens
        wanted = tokens - self.left_tokens if tokens > self.left_tokens else tokens
        if own is None:
            return None
        if isinstance(ask, Remote):
            if not self._agrees(request, said.content or own.whole, own.whole):
                return None
            key = ask, own.whole
            self.readers.came(key, request.request_id, said.readers)
            return Fetch(ask, wanted, own.whole, key)
        if isinstance(ask, Running):
            stop = min(ask.tokens, wanted)
            return Fetch(ask.remote, stop, own.of_first(stop))
        last = ask.last if ask else None
        if last is None or Role.TAKES not in self.role or self.late or last.content.tokens > tokens:
            return None if last is None else Fetch(last.remote, 0, last.content)
        same = own.of_first(last.content.tokens) == last.content
        return Fetch(last.remote, min(last.content.tokens, wanted) if same else 0, last.content)

    def _agrees(self, request: Any, said: Content, own: Content) -> bool:
        """Returns True if the prefill's prompt is this request's. A disagreement is logged once a minute."""
        unlike = disagreement(said, own, self.identity)
        self.counts["mistaken_requests"] += unlike is not None
        if unlike is not None:
            self._computed_here(request, unlike)
        return unlike is None

    def _computed_here(self, request: Any, why: str) -> None:
        """Log that this engine computes a request alone, once a minute for reasons of one form."""
        if (more := self.repeats.more(form_of(why), monotonic())) is not None:
            log.warning("%s is computed here: %s%s", request.request_id, why, more)

    def _ask(self, request: Any) -> RequestAsk:
        try:
            said = asked(request.kv_transfer_params, request.request_id)
        except ValueError as error:
            log.warning("%s; it is computed here", error)
            return RequestAsk()
        if (isinstance(said.whole, Serve) and Role.GIVES not in self.role) or (
            isinstance(said.whole, Remote | Running) and Role.TAKES not in self.role
        ):
            log.warning("%s is for an engine of another kv_role; it is computed here", request.request_id)
            return RequestAsk()
        if isinstance(said.whole, Serve) and self._cuts(request) and is_asked_for_its_prompt(request):
            reason = "log probabilities of the prompt were asked for, and the pages of a whole prompt cannot be served"
            self.metadata.refusals.append(RefuseSpec(said.whole.transfer, reason))
            log.info("%s is computed for this engine alone: %s", request.request_id, reason)
            return replace(said, whole=None)
        return said

    def _cuts(self, request: Any) -> bool:
        """Returns True if a prefill of this engine leaves the end of a prompt to the decode engine."""
        return 0 < self.left_tokens < request.num_prompt_tokens and request.prompt_token_ids is not None

    def _release(self, known: Live) -> None:
        """Tell the source that a request's KV is not needed any more; the source of a copy still needs it."""
        fetch = known.fetch
        if fetch is not None and not (isinstance(known.ask, Running) and known.ask.goes_on):
            self.metadata.releases.append(ReleaseSpec(fetch.remote, fetch.content.tokens, fetch.content))

    def _leave(self, known: Live) -> None:
        """Let a request compute, or find blocks that another one has fetched."""
        assert known.fetch is not None
        assert known.fetch.key is not None
        if self.readers.gone(known.fetch.key, known.request.request_id):
            self._release(known)
        known.fetch = None

    def _keep_here(self, known: Live) -> None:
        """Withdraw all of a request from other engines, for its present and its later KV."""
        if known.family or known.movable or known.fetch:
            self._computed_here(known.request, self.alone)
        self._withdraw(known, self.alone)
        if self._leads(known):
            assert known.family is not None
            known.family.first = ""  # and no sibling leads
        if known.fetch and not known.begun:
            if known.fetch.key:
                self.readers.gone(known.fetch.key, known.request.request_id)
            known.fetch = None
        known.family = known.movable = None

    def _leads(self, known: Live) -> bool:
        """Returns True if a request is the one of its family that is offered."""
        return known.family is not None and known.family.first == known.request.request_id

    def _offers(self, known: Live) -> bool:
        """Returns True if this step computes tokens of a prompt that another engine fetches."""
        is_due = self._leads(known) and not self.late
        return is_due and known.offered < known.request.num_prompt_tokens

    def _offer(self, known: Live, before: int, after: int, tables: Tables) -> None:
        """Name the blocks that this step fills: all at the prompt's first step, then the new ones."""
        assert isinstance(known.ask, Serve)
        request, stop = known.request, after if after < known.request.num_prompt_tokens else None
        if known.offered:
            more = tuple(table[named:] for table, named in zip(tables, known.named, strict=True))
            self.metadata.growths.append(GrowSpec(request.request_id, more, stop))
        else:
            self._send(known, known.ask, tables, before, stop)
        known.offered, known.named = after, tuple(map(len, tables))

    def _send(self, known: Live, ask: Serve, tables: Tables, computed: int | None, stop: int | None = None) -> None:
        """Offer a request, to as many engines as its client wants answers."""
        assert known.content is not None
        assert known.family is not None
        service = Service.ONCE if known.family.readers == 1 else Service.REPEATED
        name, content = known.request.request_id, known.content.whole
        spec = SendSpec(name, ask.transfer, _copied(tables), computed, stop, service=service, content=content)
        self.metadata.sends.append(spec)

    def _give(self, known: Live, before: int, count: int, state: Any) -> None:
        """Offer a request that may move, to any engine that asks; then the additions of each token. Speculated tokens
        count once accepted.
        """
        request = known.request
        stop = min(before + count, request.num_tokens)
        if not known.offered:
            assert known.movable is not None
            assert known.content is not None
            contents = (*known.content.latest, *known.content.grown_to(stop))
            tables = _copied(state.get_block_ids(request.request_id))
            name, computed = request.request_id, min(before, stop)
            service, way, whole = Service.REPEATED, "moved", known.content.whole
            send = SendSpec(name, known.movable, tables, computed, stop, self.move_s, service, way, whole, contents)
            self.metadata.sends.append(send)
            known.named = tuple(map(len, tables))
        else:
            more = tuple([] for _ in known.named)
            if count > 1 or before % self.block_tokens == 0 or len(known.named) > 1:  # the token may begin a block
                tables = state.get_block_ids(request.request_id)
                more = tuple(table[named:] for table, named in zip(tables, known.named, strict=True))
                known.named = tuple(map(len, tables))
            assert known.content is not None
            self.metadata.growths.append(GrowSpec(request.request_id, more, stop, known.content.grown_to(stop)))
        known.offered = max(1, stop)

    def _saves(self, known: Live, after: int) -> range:
        """Returns the blocks that are whole after this step and not yet ordered to be stored."""
        if self.leading is None or Role.GIVES not in self.may:
            return range(0)
        named = len(self.page_names(known, self.block_tokens))
        return range(known.saved, min(after // self.block_tokens, named))

    def _save(self, known: Live, blocks: range, tables: Tables) -> None:
        request, new = known.request, slice(blocks.start, blocks.stop)
        names = tuple(self.page_names(known, self.block_tokens)[new])
        self.metadata.saves.append(SaveSpec(request.request_id, names, tuple(tables[0][new])))
        known.saved = blocks.stop

    def _served(self, known: Live, ask: Serve, tables: Tables, outcome: RequestOutcome) -> bool:
        """Returns True if the pages of a prefill for another engine are still needed."""
        name = known.request.request_id
        if not self._leads(known):
            return False
        if outcome is not RequestOutcome.DELIVERED:
            if known.offered:
                self.metadata.aborts.append(AbortSpec(name, "the prefill was aborted"))
            else:
                self.metadata.refusals.append(RefuseSpec(ask.transfer, "the prefill was aborted"))
            return known.offered > 0
        if not known.offered:
            self._send(known, ask, tables, None)
        sampled = known.request.output_token_ids
        if len(sampled):
            self.metadata.attaches.append(AttachSpec(name, FirstToken(sampled[0]).encode()))
        return True

    def _preempted(self, known: Live) -> None:
        """Withdraw a request that lost its pages. Its stored blocks stay; offered ones are computed again."""
        self._withdraw(known, "it was preempted" if known.movable else "the prefill was preempted")
        known.preemptions = known.request.num_preemptions

    def _withdraw(self, known: Live, reason: str) -> None:
        """Stop offering and storing a request's pages: they are not read any more when the next step begins."""
        name = known.request.request_id
        if known.offered:
            self.metadata.aborts.append(AbortSpec(name, reason))
        if known.offered or known.saved:
            self.metadata.preempted.add(name)
        known.offered = known.saved = 0


def _copied(tables: Tables) -> Tables:
    return tuple(list(table) for table in tables)


def is_asked_for_its_prompt(request: Any) -> bool:
    """Returns True if the request wants log probabilities of its prompt: vLLM needs one for each token, and an engine
    asked for them fetches no KV.
    """
    sampling = getattr(request, "sampling_params", None)
    return getattr(sampling, "prompt_logprobs", None) is not None
