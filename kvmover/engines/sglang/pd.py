"""KvmoverManager and KvmoverReceiver join SGLang's prefill/decode bookkeeping and sockets with kvmover's transfers."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmover.engines.common import UPDATED, EngineUnsupported, ParallelRank, ToldLogprobs, layers_of, told_logprobs
from kvmover.engines.sglang import engine_pd, sglang_api
from kvmover.engines.sglang.engine_pd import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING
from kvmover.engines.sglang.pd_aux import AuxRows
from kvmover.engines.sglang.pd_cache import (
    CacheTotals,
    by_token,
    caches_of,
    chunk_table,
    page_table,
    pool_of,
    refuse,
    whole_of,
)
from kvmover.engines.sglang.pd_driver import (
    Answer,
    Bell,
    Call,
    PagesReady,
    TransferDriver,
    Wanted,
    frames,
    read,
)
from kvmover.engines.sglang.pd_exchange import Exchange, RankCard, lay_card
from kvmover.engines.sglang.sglang_options import served_weights, transfer_settings
from kvmover.engines.sglang.sglang_weight_updates import UPDATES
from kvmover.errors import PeerRefused, PlanError, ProtocolError, RefusedFor, TransportError
from kvmover.layout import Fleet
from kvmover.layout.fleet import Coordinate
from kvmover.observe.logs import Guest
from kvmover.observe.metrics import MoverCollector
from kvmover.observe.observers import Observers
from kvmover.transfer import Content, Mover, Place
from kvmover.transfer.protocol.content import disagreement
from kvmover.transfer.result import ALL, Gate
from kvmover.transport import NixlTransport

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)

#: SGLang's setting of the layers that a pipeline stage holds.
_PARTITION = "SGLANG_PP_LAYER_PARTITION"

#: Limit of requests that decode ranks asked for or gave up before a sender was made, and of prefills that answered a
#: call; the oldest are forgotten.
_MOST_KEPT = 1 << 16

#: Failure of the second request in a room.
ROOM_TAKEN = "room {room} has another request in it: each needs a room of its own"

#: Failure of a second answer whose prefill is no SGLang: that prefill was asked once, in the room of the prompt.
ASKED_ONCE = "the prefill at {address} computes one answer to a prompt, and {answers} were asked for: ask once for each"


@dataclass(slots=True)
class Outgoing:
    """A request to send: `pages` pages computed so far, from the page in which decode begins to lack tokens.

    `begun`: decode may fetch them.
    """

    content: Content
    prefix_tokens: int = 0
    pages: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class LastChunk:
    """The parts of a request that go with its last chunk: metadata row `row`, and the indices of its states."""

    row: int
    states: Sequence[Any] | None


class KvmoverManager(engine_pd.CommonKVManager):
    """A rank's end of all transfers. A thread of its own reads SGLang's socket and turns the mover.

    A decode rank tells a failure at once; SGLang holds the request's pages until `is_abort_release_safe`.
    """

    supports_deferred_decode_kv_release = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        """Raises EngineUnsupported, before the rank registers anywhere, for caches or settings without a transfer."""
        context = engine_pd.parallel()
        refuse(args, context)
        if disaggregation_mode is not engine_pd.PREFILL:
            engine_pd.hold_failed_pages()
            engine_pd.meet_newer_prefills()
        engine_pd.tell_prompts(disaggregation_mode)
        self._rows = AuxRows(args, engine_pd.room_buffer())
        place = ParallelRank(context.attn_tp_rank, context.attn_tp_size, args.pp_rank, context.pp_size)
        self._fleet, self._rank = place.fleet(args.page_size), place.rank
        settings = transfer_settings(engine_pd.waiting_timeout_s(), engine_pd.given_timeout_s())
        self._exchange = Exchange.of(settings)
        whole = _served_model(args, is_mla_backend)
        self._caches = self._exchange.described(caches_of(args, whole, place), sglang_api.cache_dtype(args))
        layers = layers_of(engine_pd.of_all_stages({cache.name: cache.layers for cache in self._caches}), _PARTITION)
        self._components = tuple(cache.component(layers[cache.name]) for cache in self._caches)
        device, each = engine_pd.device(args.gpu_id), zip(self._caches, self._components, strict=True)
        pools = [pool_of(cache, component, args.page_size, device) for cache, component in each]
        self._name, self._patience_s = engine_pd.name_of_this_engine(), settings.mover.deadline_s
        self._identity = settings.mover.identity
        self._weights = served_weights(settings, sglang_api.model_path())
        self._wire = partial(NixlTransport, f"sglang-{disaggregation_mode.value}-{self._rank}", device=device)
        wire = self._wire()
        mover = Mover(
            wire,
            self._weights.model(self._components),
            Place(self._name, self._fleet, self._rank),
            pools,
            settings.mover_config(),
        )
        self._driver = TransferDriver(mover, self._ended, settings.progress, lost=self._lost)
        who = f"kvmover {disaggregation_mode.value} rank {self._rank} of TP{self._fleet.tp} PP{self._fleet.pp}"
        self._observers = Observers(settings, self._name, self._rank, Guest(logging.getLogger(), who))
        self._observers.watch(mover)
        self._observers.serve(MoverCollector([self._driver]))
        self._weights.log()
        if wire.nics:
            log.info("NICs nearest to its GPU: %s", ", ".join(wire.nics))
        self._outgoing: dict[int, Outgoing] = {}
        self._given_up: dict[int, float] = {}
        self._asked: dict[int, dict[str, PagesReady]] = defaultdict(dict)
        self._engines: dict[str, str] = {}
        self._losses: Counter[str] = Counter()
        self._refused: dict[str, str] = {}
        self._rows_of: dict[int, tuple[int, ToldLogprobs | None]] = {}
        self._closing = Event()
        engine_pd.CommonKVManager.__init__(self, args, disaggregation_mode, server_args, is_mla_backend)
        # Context-parallel ranks hold copies of the whole cache: the first of them sends, for every model.
        self.enable_all_cp_ranks_for_transfer = False
        self.is_dummy_cp_rank = context.attn_cp_rank > 0
        self._bell = Bell(self.server_socket)
        self._driver.wake = self._bell.ring
        self._thread = Thread(target=self._loop, daemon=True, name="kvmover-transfer")
        self._thread.start()
        if disaggregation_mode is not engine_pd.PREFILL:
            self._start_heartbeat_checker_thread()
        UPDATES.follow(self)

    def close(self) -> None:
        """End the thread, then the mover. Open requests get no final status."""
        UPDATES.leave(self)
        self._closing.set()
        self._bell.ring()
        self._thread.join()
        self._driver.close()
        self._bell.close()
        self._observers.close()

    # Both sides

    def _loop(self) -> None:
        """Hear messages and turn the mover until `close`; errors are logged, and end no loop."""
        nap_s = 0.0
        while not self._closing.is_set():
            try:
                if self._bell.nap(nap_s):
                    self._hear(self.server_socket.recv_multipart())
                nap_s = self._driver.turn()
                if self._exchange.model:
                    self._look_for_wants()
            except Exception:
                log.exception("kvmover's transfer loop")
                nap_s = self._driver.pace.idle_s

    def _hear(self, received: list[bytes]) -> None:
        message = read(received)
        match message:
            case Call():
                self._answer(message)
            case Answer():
                self._engines[message.key] = message.engine
                if message.refused:  # one rank's refusal is enough
                    self._refused[message.key] = message.refused
                for known in (self._engines, self._refused):
                    _keep_the_last(known)
            case PagesReady():
                if self._given_up.pop(message.room, None) is not None:
                    self._asked.pop(message.room, None)  # another request has the room now
                self._asked[message.room][message.rank] = message
                _keep_the_last(self._asked)
                self.opened(message.room)
            case None:
                room = engine_pd.aborted_room(received)
                if room is not None:
                    self._given_up[room] = time.monotonic()
                    _keep_the_last(self._given_up)
                    self.opened(room)

    def _ended(self, room: int, reason: str | None, aux: dict[int, bytes]) -> None:
        if reason is None and room in self._rows_of:
            try:
                (payload,) = aux.values()
                self._rows.land(*self._rows_of[room], room, payload)
            except (ValueError, ProtocolError) as error:
                reason = f"what goes beside the cache did not come: {error}"
        self._rows_of.pop(room, None)
        if reason is not None and room in self.request_status:
            self.failure_records.setdefault(room, reason)
        self.update_status(room, SUCCESS if reason is None else FAILED)

    def give_up(self, room: int, reason: str) -> None:
        """Fail the request: at once if no page moves, else when the transfer has ended."""
        if room in self.request_status:
            self.failure_records.setdefault(room, reason)
        self._driver.abort(room, reason)
        if not self._driver.has(room):
            self.update_status(room, FAILED)

    def is_moving(self, room: int) -> bool:
        """Returns True while pages of the request may be read or written."""
        return self._driver.has(room)

    def enter(self, room: int) -> int:
        """Returns the number of a request that begins: `room`, or a negative number if another request is in the room.

        The router chooses rooms. Two requests in one room would take each other's pages, and end for each other.
        """
        asked = chain([room], count(-1, -1))
        return next(number for number in asked if number not in self.request_status and not self.is_moving(number))

    def turn_away(self, number: int, room: int) -> Any:
        """Fail the request that was given `number` instead of its room. Returns FAILED."""
        self.record_failure(number, ROOM_TAKEN.format(room=room))
        self.update_status(number, FAILED)
        return FAILED

    def _tables(
        self, prefix_tokens: int, pages: npt.NDArray[np.int64], states: Sequence[Any] | None
    ) -> list[npt.NDArray[np.int64]]:
        size = self.kv_args.page_size
        return [page_table(cache, prefix_tokens // size, pages, states or (), size) for cache in self._caches]

    def reweigh(self) -> None:
        """End open requests, and meet engines with the present weights of this one.

        Raises KvmoverError, or OSError if the bootstrap server does not take a prefill's new card.
        """
        self._weights = UPDATES.current(self._weights)
        self._weights.log()
        self._driver.rejoin(self._wire, self._weights.model(self._components), UPDATED)
        if self.disaggregation_mode is engine_pd.PREFILL:
            self._lay_card()
            return
        for address in {key.rpartition(" ")[0] for key in [*self._engines, *self._refused]}:
            self._handle_node_failure(address)
        self._engines.clear()
        self._refused.clear()

    # Prefill

    def register_to_bootstrap(self) -> None:
        """Register as SGLang does, and publish this rank's card for other makes if `exchange.model` is set."""
        engine_pd.CommonKVManager.register_to_bootstrap(self)
        self._lay_card()

    def _lay_card(self) -> None:
        if self._exchange.model and engine_pd.parallel().attn_cp_rank == 0:
            laid = RankCard(self._name, self._rank, self._fleet.size, self._driver.mover.card)
            lay_card(engine_pd.bootstrap_url(self), laid, engine_pd.put)

    def _look_for_wants(self) -> None:
        """Open requests that decode ranks of another make ask for: they send no PagesReady."""
        for room in [room for room, status in list(self.request_status.items()) if status == BOOTSTRAPPING]:
            for place, wanted, content in self._driver.waiting(room):
                ready = PagesReady(room, f"{place.engine} {place.rank}", 1, wanted.start if wanted else 0, content)
                self._asked[room][ready.rank] = ready
                self.opened(room)

    def _answer(self, call: Call) -> None:
        refused = ""
        try:
            self._driver.connect(call.card)
        except (PeerRefused, TransportError) as error:
            refused = str(error)
            self._exchange.refused("a decode rank", refused)
        where = engine_pd.NetworkAddress(*call.answer_to)
        answer = frames(Answer(call.key, self._name, refused))
        self._send_multipart_locked(where.to_tcp(), answer, is_ipv6=where.is_ipv6)

    def opened(self, room: int) -> None:
        """Let a request's prefill begin if the scheduler knows it and every decode rank has pages for it.

        The request fails if a decode rank means another prompt, or gave it up, also before the scheduler knew it. An
        abort older than the deadline was an earlier request's in this room.
        """
        outgoing = self._outgoing.get(room)
        if outgoing is None or room not in self.request_status:
            return
        asked = list(self._asked[room].values())
        unlike = (disagreement(outgoing.content, each.content, self._identity) for each in asked)
        other = next((words for words in unlike if words is not None), None)
        given_up = time.monotonic() - self._given_up.pop(room, -math.inf) < self._patience_s
        if other is not None and not outgoing.begun:
            self._driver.turned_away(RefusedFor.IDENTITY)
            self.give_up(room, other)
        elif given_up:
            self.give_up(room, "decode aborted the request")
        elif asked and len(asked) >= asked[0].ranks:
            # SGLang sends from a page boundary of its own; decode's pages may be smaller.
            prefix_tokens = asked[0].prefix_tokens - asked[0].prefix_tokens % self.kv_args.page_size
            self.req_to_decode_prefix_len[room] = prefix_tokens
            outgoing.prefix_tokens = prefix_tokens
            self.update_status(room, WAITING)

    def send_chunk(self, room: int, kv_indices: Any, computed: Any, ending: LastChunk | None) -> None:
        """Send the pages of a chunk, `kv_indices` [page], once the event `computed` has passed. `ending`: with the last
        chunk.
        """
        if self.request_status.get(room, FAILED) == FAILED:
            return
        outgoing, pages = self._outgoing[room], np.asarray(kv_indices, np.int64)
        aux = self._rows.take(ending.row) if ending else None
        try:
            tables = self._chunk_tables(outgoing, pages, ending.states if ending else None)
            outgoing.pages += len(pages)
            tokens = outgoing.prefix_tokens + outgoing.pages * self.kv_args.page_size
            gate = Gate(computed, tokens=ALL if ending else tokens)
            if ending:
                self.update_status(room, TRANSFERRING)
            if outgoing.begun:
                self._driver.produced(room, gate, tables, aux)
            else:
                self._driver.send(room, tables, [gate], aux, outgoing.content)
                outgoing.begun = True
        except PlanError as error:
            self.give_up(room, str(error))

    def _chunk_tables(
        self, outgoing: Outgoing, pages: npt.NDArray[np.int64], states: Sequence[Any] | None
    ) -> list[npt.NDArray[np.int64]]:
        """Returns the entries that a chunk adds to the page tables."""
        size, before = self.kv_args.page_size, outgoing.pages if outgoing.begun else None
        prefix = outgoing.prefix_tokens // size
        return [chunk_table(cache, prefix, before, pages, states, size) for cache in self._caches]

    def expect(self, room: int, content: Content) -> None:
        """Begin a request of the scheduler's, of this number and prompt, apart from a failed one of the same number."""
        self._driver.expect(room)
        self._outgoing[room] = Outgoing(content)

    def forget(self, room: int) -> None:
        """Forget a request that the scheduler is done with."""
        self._outgoing.pop(room, None)
        self._asked.pop(room, None)

    # Decode

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Returns True if the prefill at `host:port` is known. One of another make is met by its cards."""
        known = bootstrap_addr in self.prefill_info_table
        met = None if known else self._exchange.meet(bootstrap_addr, self._driver.connect)
        if met is None:
            return engine_pd.CommonKVManager.try_ensure_parallel_info(self, bootstrap_addr)
        key = f"{bootstrap_addr} 0"
        self._engines[key], self._refused[key] = met.engine, met.refused
        info = engine_pd.foreign_prefill()
        self._resolve_rank_mapping(info)
        self.prefill_info_table[bootstrap_addr] = info
        return True

    def is_foreign(self, bootstrap_addr: str) -> bool:
        """Returns True if the prefill there is of another make."""
        return bootstrap_addr in self._exchange.foreign

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Target every prefill rank, as the transfer plan picks the senders; of context-parallel copies, the first."""
        info.target_tp_rank = None
        info.target_tp_ranks = list(range(info.attn_tp_size))
        info.target_pp_ranks = list(range(info.pp_size))
        info.target_cp_ranks = [0]
        info.required_dst_info_num = self._fleet.size
        info.required_prefill_response_num = 1

    def call(self, key: str) -> list[bytes]:
        """Returns the frames that introduce this decode rank to a prefill rank, and forget its engine's refusal.

        `key`: this rank's word for the prefill engine.
        """
        self._refused.pop(key, None)
        return frames(Call(self._driver.mover.card, (self.local_ip, self.rank_port), key))

    def ready(self, room: int, content: Content, prefix_tokens: int) -> list[bytes]:
        """Returns the frames that tell a prefill rank that this rank has pages for a request."""
        return frames(PagesReady(room, f"{self._name} {self._rank}", self._fleet.size, prefix_tokens, content))

    def fetch(self, receiver: Any, pages: npt.NDArray[np.int32], row: int, states: Any, prefix_tokens: int) -> None:
        """Begin to receive a request's `pages` [page], its states, and metadata row `row`.

        The row comes from the last pipeline stage, which samples the first token. Raises PlanError.
        """
        room, key, info = receiver.bootstrap_room, receiver.key, receiver.prefill_info
        tables = self._tables(prefix_tokens, np.asarray(pages, np.int64), states)
        if receiver.tokens is None:
            raise PlanError("SGLang's queue did not tell how long the request is")
        stop = prefix_tokens + len(pages) * self.kv_args.page_size
        if by_token(self._caches):
            stop = receiver.tokens  # the prefill's last page may end before decode's
        last_stage = Fleet(info.attn_tp_size, info.pp_size).rank(Coordinate(0, info.pp_size - 1, 0))
        told = told_logprobs(receiver.parameters, str(room)) if self.is_foreign(receiver.bootstrap_addr) else None
        self._rows_of[room] = row, told
        deadline, of = time.monotonic() + self._patience_s, range(prefix_tokens, stop)
        wanted = Wanted(lambda: self._engine(room, key), of, tables, last_stage, deadline, receiver.content)
        self._driver.receive(room, wanted)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Returns True if SGLang may free a failed request's pages: no peer can write to them on this rank any more.

        Acknowledgements of prefill ranks do not count: the transfer tracks them, and ranks that died.
        """
        return not self.is_moving(bootstrap_room)

    def _on_heartbeat_success(self, bootstrap_addr: str) -> None:
        """Forget a prefill of another make that has started again, with other ranks."""
        if self._exchange.has_changed(bootstrap_addr):
            self._handle_node_failure(bootstrap_addr)

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """Fail the requests of a prefill that answers no heartbeat, and stop fetching from it."""
        self._losses[failed_bootstrap_addr] += 1
        rooms = list(self.addr_to_rooms_tracker.get(failed_bootstrap_addr, ()))
        engine_pd.CommonKVManager._handle_node_failure(self, failed_bootstrap_addr)
        for room in rooms:
            if self.is_moving(room):
                self.give_up(room, f"lost the prefill at {failed_bootstrap_addr}")

    def losses(self, bootstrap_addr: str) -> int:
        """Returns how often the prefill at an address was lost: what was known of its ranks before is void."""
        return self._losses[bootstrap_addr]

    def _lost(self, engine: str) -> None:
        """Forget the ranks of a prefill engine that lost a rank.

        An engine that starts again at once, on the same bootstrap port, has other ranks, yet answers SGLang's
        heartbeats.
        """
        for key in [key for key, known in self._engines.items() if known == engine]:
            del self._engines[key]
            self._handle_node_failure(key.rpartition(" ")[0])

    def _engine(self, room: int, key: str) -> str | None:
        refused = self._refused.get(key)
        if not refused:
            return self._engines.get(key)
        self._driver.abort(room, refused)
        address = key.rpartition(" ")[0]
        if self.is_foreign(address):  # another engine may be there by the next request
            self.prefill_info_table.pop(address, None)
        with self.connection_lock:  # the next request introduces this rank anew
            for met in [met for met in self.connection_pool if met.startswith(f"{address}_")]:
                del self.connection_pool[met]
        return None


def _served_model(args: Any, is_mla_backend: Any) -> CacheTotals:
    """Returns the caches of the served model and its draft. Raises EngineUnsupported outside a serving SGLang."""
    config = sglang_api.model_config()
    if config is None:
        raise EngineUnsupported("kvmover's prefill/decode backend runs inside a serving SGLang only")
    whole = whole_of(config, is_mla_backend or args.is_hybrid_mla_backend)
    draft = sglang_api.draft_config() if args.num_draft_entries else None
    return replace(
        whole,
        projections=engine_pd.mamba_projections(config),
        draft=draft and whole_of(draft, engine_pd.is_latent(draft)),
    )


def _keep_the_last(kept: dict[Any, Any]) -> None:
    if len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]


class KvmoverReceiver(engine_pd.CommonKVReceiver):
    """SGLang's receiver, which calls all prefill ranks and tells a failure at once, even while pages are written."""

    #: The request's length, prompt and `custom_params`, set by SGLang's queue.
    tokens: int | None = None
    content: Content = Content(0, unknown="SGLang's queue has not said which prompt it is")
    parameters: Any = None
    #: Number of answers to the prompt, each fetched by a request like this one.
    answers = 1
    _losses = 0
    _cleared = False

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        own = mgr.enter(bootstrap_room)
        engine_pd.CommonKVReceiver.__init__(self, mgr, bootstrap_addr, own)
        if own != bootstrap_room:
            self.conclude_state = mgr.turn_away(own, bootstrap_room)

    def _setup_bootstrap_infos(self) -> None:
        self._losses = self.kv_mgr.losses(self.bootstrap_addr)
        if self.kv_mgr.is_foreign(self.bootstrap_addr):
            self.bootstrap_infos: list[Any] | None = []  # ranks of another make do not read SGLang's sockets
        else:
            engine_pd.CommonKVReceiver._setup_bootstrap_infos(self)

    def _register_kv_args(self) -> bool:
        return self._tell(self.kv_mgr.call(self.key))

    def _tell(self, message: list[bytes]) -> bool:
        """Send frames to every prefill rank. Returns False, and fails the request, if one has no socket."""
        for info in self.bootstrap_infos or ():
            try:
                socket, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    socket.send_multipart(message)
            except engine_pd.SocketError as error:
                self.kv_mgr.give_up(self.bootstrap_room, f"the prefill rank at {info['rank_ip']}: {error}")
                return False
        return True

    @property
    def key(self) -> str:
        """The manager's word for the prefill engine."""
        return f"{self.bootstrap_addr} {self.prefill_dp_rank}"

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **more: Any,
    ) -> None:
        """Tell every prefill rank that the request has pages here, and begin to fetch them.

        `kv_indices` [page]: the pages behind the prefix that decode has; `aux_index`: the metadata row. The request
        fails if they do not fit it, if no prefill rank is known, or if several answers are asked of a prefill that is
        no SGLang. Raises NotImplementedError for pages in the host's memory.
        """
        if getattr(more.get("destination"), "name", "DEVICE") != "DEVICE":
            raise NotImplementedError(f"pages at {more['destination']}")
        room, prefix_tokens = self.bootstrap_room, decode_prefix_len or 0
        if self.answers > 1 and self.kv_mgr.is_foreign(self.bootstrap_addr):
            self.kv_mgr.give_up(room, ASKED_ONCE.format(address=self.bootstrap_addr, answers=self.answers))
            return
        if self.bootstrap_infos is None:
            self.kv_mgr.give_up(room, f"the prefill at {self.bootstrap_addr} told none of its ranks")
            return
        if not self._tell(self.kv_mgr.ready(room, self.content, prefix_tokens)):
            self.invalidate_cached_bootstrap_infos()
            return
        self.init_time = time.time()
        try:
            self.kv_mgr.fetch(self, kv_indices, aux_index, state_indices, prefix_tokens)
        except PlanError as error:
            self.kv_mgr.give_up(room, str(error))

    def poll(self) -> Any:
        """Returns the request's status; the mover has the deadlines.

        The prefill is told of every failure, or it would keep the pages until its deadline.
        """
        if self.conclude_state is None:
            status = self.kv_mgr.request_status.get(self.bootstrap_room, FAILED)
            if status in (SUCCESS, FAILED):
                self.conclude_state = status
                if status == FAILED:
                    self.ensure_abort_notified()
            return status
        return self.conclude_state

    def abort(self) -> None:
        """Fail the request for the scheduler, and stop fetching."""
        engine_pd.CommonKVReceiver.abort(self)
        self.ensure_abort_notified()

    def ensure_abort_notified(self, **more: Any) -> None:
        """Tell the prefill that the request failed, on this rank or another, and stop fetching.

        Ranks of a prefill that was lost are not told: SGLang would keep a socket to each for as long as this process.
        """
        if self._losses != self.kv_mgr.losses(self.bootstrap_addr):
            self.bootstrap_infos = []
        engine_pd.ensure_abort_notified(self, **more)
        if self.kv_mgr.is_moving(self.bootstrap_room):
            self.kv_mgr.give_up(self.bootstrap_room, "decode aborted the request")

    def clear(self) -> None:
        """Forget the request, once: by SGLang's second call for a failed request, another may have its room."""
        if not self._cleared:
            self._cleared = True
            engine_pd.CommonKVReceiver.clear(self)

    def failure_exception(self) -> None:
        """Forget the request. Raises SGLang's error with the reason of its failure."""
        engine_pd.raise_failure(self)
