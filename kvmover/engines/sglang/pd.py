"""Prefill/decode disaggregation: SGLang's bookkeeping and sockets, kvmover's transfer."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmover.engines.sglang import engine, engine_pd, pd_wire
from kvmover.engines.sglang.engine_pd import FAILED, SUCCESS, TRANSFERRING, WAITING
from kvmover.engines.sglang.haul import Haul, Wanted
from kvmover.engines.sglang.pd_pool import Rows, component_of, pool_of, refuse
from kvmover.engines.sglang.version import EngineUnsupported
from kvmover.errors import PeerRefused, TransportError
from kvmover.layout import Fleet
from kvmover.transfer import Model, Mover, MoverConfig, Place
from kvmover.transfer.result import Gate
from kvmover.transport import NixlTransport

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)

#: Between turns of the loop: while a transfer is open and nothing came of the last turn, and while none is open.
_BUSY_S, _IDLE_MS = 100e-6, 2

#: Requests that decode ranks have asked for and no sender was made for: the oldest are forgotten beyond so many.
_MOST_ROOMS = 1 << 16


@dataclass(slots=True)
class Outgoing:
    """A request whose pages the prefill has produced so far, in order from the first that decode lacks."""

    pages: list[npt.NDArray[np.int64]] = field(default_factory=list["npt.NDArray[np.int64]"])
    gates: list[Gate] = field(default_factory=list[Gate])


class KvmoverManager(engine_pd.CommonKVManager):
    """A rank's end of all transfers. A thread of its own reads SGLang's socket and turns the mover."""

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        """Raises EngineUnsupported before anything is registered anywhere."""
        context = engine_pd.parallel()
        refuse(args, context.attn_cp_size, context.pp_size)
        self._rows = Rows(args)
        fleet, rank = Fleet(tp=context.attn_tp_size, page_tokens=args.page_size), context.attn_tp_rank
        config = engine.model_config()
        if config is None:
            raise EngineUnsupported("kvmover's prefill/decode backend runs inside a serving SGLang only")
        kv, heads = (1, 1) if is_mla_backend else (2, config.get_total_num_kv_heads())
        component = component_of(args, kv, heads, fleet, rank)
        pool = pool_of(args, component, fleet, rank, engine_pd.device(args.gpu_id))
        self._name, self._patience_s = engine_pd.name_of_this_engine(), engine_pd.waiting_timeout_s()
        transport = NixlTransport(f"sglang-{disaggregation_mode.value}-{rank}")
        mover = Mover(
            transport,
            Model("sglang", (component,)),
            Place(self._name, fleet, rank),
            [pool],
            MoverConfig(deadline_s=self._patience_s),
        )
        self._haul = Haul(mover, self._ended)
        self._outgoing: dict[int, Outgoing] = defaultdict(Outgoing)
        self._asked: dict[int, dict[str, pd_wire.Asked]] = defaultdict(dict)
        self._engines: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._rows_of: dict[int, int] = {}
        self._closing = Event()
        engine_pd.CommonKVManager.__init__(self, args, disaggregation_mode, server_args, is_mla_backend)
        self._thread = Thread(target=self._loop, daemon=True, name="kvmover-transfer")
        self._thread.start()
        if disaggregation_mode is not engine_pd.PREFILL:
            self._start_heartbeat_checker_thread()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._haul.close()

    # Both sides

    def _loop(self) -> None:
        """No message and no transfer ends it."""
        while not self._closing.is_set():
            try:
                heard = self.server_socket.poll(0 if self._haul.busy else _IDLE_MS)
                if heard:
                    self._hear(self.server_socket.recv_multipart())
                if not self._haul.turn() and not heard and self._haul.busy:
                    time.sleep(_BUSY_S)
            except Exception:
                log.exception("kvmover's transfer loop")

    def _hear(self, received: list[bytes]) -> None:
        message = pd_wire.read(received)
        match message:
            case pd_wire.Call():
                self._answer(message)
            case pd_wire.Answer():
                self._engines[message.key] = message.engine
                self._refused[message.key] = message.refused
            case pd_wire.Asked():
                self._asked[message.room][message.rank] = message
                if len(self._asked) > _MOST_ROOMS:
                    del self._asked[next(iter(self._asked))]
                self.opened(message.room)
            case None:
                notice = engine_pd.AbortNotification.from_zmq(received) if received[0] == b"ABORT" else None
                if notice is not None:
                    self.give_up(notice.room, "decode aborted the request")

    def _ended(self, room: int, reason: str | None, aux: dict[int, bytes]) -> None:
        if reason is None and room in self._rows_of:
            try:
                self._rows.put(self._rows_of[room], aux[0])
            except (KeyError, ValueError) as error:
                reason = f"what goes beside the cache did not come: {error}"
        self._rows_of.pop(room, None)
        if reason is not None and room in self.request_status:
            self.failure_records.setdefault(room, reason)
        self.update_status(room, SUCCESS if reason is None else FAILED)

    def give_up(self, room: int, reason: str) -> None:
        """The request fails at once where nothing moves, else when nothing does any more."""
        if room in self.request_status:
            self.failure_records.setdefault(room, reason)
        self._haul.abort(room, reason)
        if not self._haul.has(room):
            self.update_status(room, FAILED)

    def is_moving(self, room: int) -> bool:
        return self._haul.has(room)

    # Prefill

    def _answer(self, call: pd_wire.Call) -> None:
        refused = ""
        try:
            self._haul.connect(call.card)
        except (PeerRefused, TransportError) as error:
            refused = str(error)
            log.error("refused a decode rank: %s", error)
        where = engine_pd.NetworkAddress(*call.answer_to)
        answer = pd_wire.frames(pd_wire.Answer(call.key, self._name, refused))
        self._send_multipart_locked(where.to_tcp(), answer, is_ipv6=where.is_ipv6)

    def opened(self, room: int) -> None:
        """Every decode rank has pages for the request, and the scheduler knows it: its prefill may begin."""
        asked = list(self._asked[room].values())
        if room in self.request_status and asked and len(asked) == asked[0].ranks:
            self.req_to_decode_prefix_len[room] = asked[0].prefix_tokens
            self.update_status(room, WAITING)

    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool, **more: Any
    ) -> None:
        """Pages of a chunk. They move when the last are there: the mover takes a request's page table whole."""
        room, event = bootstrap_room, more.get("wait_event")
        if self.request_status.get(room, FAILED) == FAILED:
            return
        outgoing = self._outgoing[room]
        outgoing.pages.append(np.asarray(kv_indices, np.int64))
        outgoing.gates += [Gate(event)] if event is not None else []
        if is_last_chunk:
            prefix = next(iter(self._asked[room].values())).prefix_tokens // self.kv_args.page_size
            pages = np.concatenate([np.zeros(prefix, np.int64), *outgoing.pages])
            self.update_status(room, TRANSFERRING)
            self._haul.send(room, pages, outgoing.gates or None, self._rows.take(more["aux_index"]))

    def forget(self, room: int) -> None:
        self._outgoing.pop(room, None)
        self._asked.pop(room, None)

    # Decode

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Every prefill rank: which of them send what is the plan's matter."""
        if info.attn_cp_size > 1 or info.pp_size > 1:
            raise EngineUnsupported(
                f"a prefill of {info.attn_cp_size} context-parallel ranks and {info.pp_size} pipeline stages"
            )
        info.target_tp_rank = None
        info.target_tp_ranks = list(range(info.attn_tp_size))
        info.target_cp_ranks = info.target_pp_ranks = [0]
        info.required_dst_info_num = self.attn_tp_size
        info.required_prefill_response_num = 1

    def call(self, key: str) -> list[bytes]:
        return pd_wire.frames(pd_wire.Call(self._haul.mover.card, (self.local_ip, self.rank_port), key))

    def build_receiver_metadata_message(
        self, *, bootstrap_room: int, decode_prefix_len: int | None, **_: Any
    ) -> list[bytes]:
        rank = f"{self._name} {self.attn_tp_rank}"
        return pd_wire.frames(pd_wire.Asked(bootstrap_room, rank, self.attn_tp_size, decode_prefix_len or 0))

    def fetch(self, room: int, key: str, pages: npt.NDArray[np.int32], prefix_tokens: int, row: int) -> None:
        """Begin to receive a request's pages, and row `row` of what goes beside them."""
        size = self.kv_args.page_size
        table = np.concatenate([np.zeros(prefix_tokens // size, np.int64), np.asarray(pages, np.int64)])
        self._rows_of[room] = row
        deadline = time.monotonic() + self._patience_s
        positions = range(prefix_tokens, len(table) * size)
        self._haul.receive(room, Wanted(lambda: self._engine(room, key), positions, table, 0, deadline))

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """SGLang fails the requests of a prefill that answers no heartbeat; they are over when nothing writes here."""
        rooms = list(self.addr_to_rooms_tracker.get(failed_bootstrap_addr, ()))
        engine_pd.CommonKVManager._handle_node_failure(self, failed_bootstrap_addr)
        for room in rooms:
            if self.is_moving(room):
                self.give_up(room, f"lost the prefill at {failed_bootstrap_addr}")

    def _engine(self, room: int, key: str) -> str | None:
        if self._refused.get(key):
            self._haul.abort(room, self._refused[key])
            return None
        return self._engines.get(key)


class KvmoverSender(engine_pd.CommonKVSender):
    """SGLang's sender; what it sends, the manager collects."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *more: Any, **named: Any) -> None:
        engine_pd.CommonKVSender.__init__(self, mgr, bootstrap_addr, bootstrap_room, *more, **named)
        mgr.opened(bootstrap_room)

    def abort(self) -> None:
        engine_pd.CommonKVSender.abort(self)
        self.kv_mgr.give_up(self.bootstrap_room, "aborted by the scheduler")

    def clear(self) -> None:
        engine_pd.CommonKVSender.clear(self)
        self.kv_mgr.forget(self.bootstrap_room)


class KvmoverReceiver(engine_pd.CommonKVReceiver):
    """SGLang's receiver, which calls all prefill ranks and tells of no failure while its pages may be written."""

    def _register_kv_args(self) -> bool:
        message = self.kv_mgr.call(self._key)
        return all(
            self._send_bootstrap_message(bootstrap_info=info, message=message, operation="_register_kv_args")
            for info in self.bootstrap_infos or ()
        )

    @property
    def _key(self) -> str:
        return f"{self.bootstrap_addr} {self.prefill_dp_rank}"

    def send_metadata(self, kv_indices: Any, aux_index: int | None = None, *more: Any, **named: Any) -> None:
        engine_pd.CommonKVReceiver.send_metadata(self, kv_indices, aux_index, *more, **named)
        if self.conclude_state is None:
            prefix = named.get("decode_prefix_len") or 0
            self.kv_mgr.fetch(self.bootstrap_room, self._key, kv_indices, prefix, aux_index)

    def poll(self) -> Any:
        """The mover has the deadlines: a request that timed out is not over before nothing writes its pages."""
        if self.conclude_state is None:
            status = self.kv_mgr.request_status.get(self.bootstrap_room, FAILED)
            if status in (SUCCESS, FAILED) and not self.kv_mgr.is_moving(self.bootstrap_room):
                self.conclude_state = status
            return TRANSFERRING if status == FAILED and self.conclude_state is None else status
        return self.conclude_state

    def abort(self) -> None:
        self.kv_mgr.give_up(self.bootstrap_room, "Aborted by AbortReq.")
        self.ensure_abort_notified()


class KvmoverBootstrapServer(engine_pd.CommonKVBootstrapServer):
    """SGLang's own: who serves what, over HTTP."""
