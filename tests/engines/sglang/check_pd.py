"""Prefill and decode ranks by SGLang's own classes and bootstrap server, with kvmover's transfer under them."""

from __future__ import annotations

import os
import re
import socket
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench import PAGE, Rank, Running, Shape, finish, pools, start

from kvmover.engines.sglang import sglang_plugin
from kvmover.engines.sglang.pd import ROOM_TAKEN
from kvmover.engines.sglang.pd_driver import TransferDriver
from kvmover.engines.sglang.sglang_contract import sends_inline
from kvmover.errors import PeerRefused
from kvmover.transfer import Pace

plugins: Any = import_module("sglang.srt.plugins.hook_registry")
sglang_plugin.register()
plugins.HookRegistry.apply_hooks()
utils: Any = import_module("sglang.srt.disaggregation.utils")
KVPoll: Any = import_module("sglang.srt.disaggregation.base.conn").KVPoll
groups: Any = import_module("sglang.srt.distributed.parallel_state")
context: Any = import_module("sglang.srt.runtime_context")
Environment: Any = import_module("sglang.srt.environ").envs
queues: Any = import_module("sglang.srt.disaggregation.decode")
senders: Any = import_module("sglang.srt.disaggregation.prefill")
batches: Any = import_module("sglang.srt.managers.schedule_batch")
params: Any = import_module("sglang.srt.sampling.sampling_params")
states: Any = import_module("sglang.srt.configs.mamba_utils")

ROOM, PAGES, ROW = 4711, 9, 3
#: What nobody may write over, and what nobody may send.
POISON, STALE = 0x6B, 0x94
#: Files by which the halves of a request that fails tell each other that they are done with it.
PREFILL_ENDED, GIVEN_BACK = "prefill ended", "decode gave its pages back"


@dataclass(frozen=True)
class Case:
    """A request: pages that decode has already, pages after which prefill ends a chunk, how it goes wrong, and how many
    tokens of its last page are none of its."""

    prefix: int = 0
    chunks: tuple[int, ...] = ()
    ending: str = ""
    spare: int = 0

    def asked(self, side: Side, first: int = 0, **more: Any) -> Any:
        """SGLang's request, whose prompt begins with token `first`."""
        return asked(range(first, first + PAGES * side.page - self.spare), **more)


def asked(tokens: range, **more: Any) -> Any:
    """SGLang's request of a prompt."""
    given = params.SamplingParams(max_new_tokens=4)
    req = batches.Req("r", "", array("q", tokens), given, bootstrap_room=ROOM, **more)
    req.bootstrap_host = "127.0.0.1"
    return req


def test_the_backend_is_a_choice_beside_the_built_in_ones() -> None:
    kinds = utils.KVClassType
    ours = utils.TransferBackend("kvmover")
    named = {kind: utils.get_kv_class(ours, kind).__name__ for kind in kinds if kind is not kinds.KVARGS}
    assert sorted(named.values()) == ["KvmoverBootstrapServer", "KvmoverManager", "KvmoverReceiver", "KvmoverSender"]
    assert utils.get_kv_class(ours, kinds.KVARGS).__name__ == "KVArgs"
    assert utils.get_kv_class(utils.TransferBackend("nixl"), kinds.SENDER).__name__ == "NixlKVSender"


@dataclass(frozen=True)
class Plane:
    """A layer of a cache on one rank. `own` [page or state, ...] bytes; `whole` [of the request, ...] of the model.

    `by`: what it is addressed by; `cut`: the rank's part of the whole.
    """

    by: str
    own: torch.Tensor
    whole: torch.Tensor
    cut: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole


class Side:
    """One rank of a prefill or a decode: a pool, metadata rows, and the classes that SGLang would make."""

    def __init__(self, rank: Rank, mode: str, **changed: Any) -> None:
        stages = stages_of(rank)
        context.get_parallel().override_permanently(pp_group=stages)
        groups._PP = stages  # where 0.5.20 looks
        self.rank, self.page = rank, 64 if rank.shape.kind == "dsa" else PAGE
        self.column, self.columns = (getattr(context.get_parallel(), f"attn_tp_{word}") for word in ("rank", "size"))
        self.pool = {"dsa": sparse, "gdn": hybrid}.get(rank.shape.kind, Rank.device_pool)(rank)
        self.draft = draft(rank) if rank.shape.kind == "draft" else None
        self.aux = torch.zeros(8, 48, dtype=torch.uint8), torch.zeros(8, 16, dtype=torch.float32)
        ours = utils.TransferBackend("kvmover")
        self.classes = {kind.value: utils.get_kv_class(ours, kind) for kind in utils.KVClassType}
        args = self.classes["kvargs"]()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank.tp, rank.pp, 0, 0
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        if self.draft is not None:
            infos = (args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
            for own, drafts in zip(infos, self.draft.get_contiguous_buf_infos(), strict=True):
                own += drafts
            args.num_draft_entries = 2
        args.kv_layer_ids, args.kv_cache_dtype_str = [], "bfloat16"
        args.aux_data_ptrs = [tensor.data_ptr() for tensor in self.aux]
        args.aux_data_lens = [tensor.nbytes for tensor in self.aux]
        args.aux_item_lens = [tensor[0].nbytes for tensor in self.aux]
        args.page_size = self.page
        utils.setup_state_kv_args(args, self.pool, None, 4)
        vars(args).update(changed)
        self.types = [str(getattr(kind, "value", kind)) for kind in args.state_types]
        kind = utils.DisaggregationMode(mode)
        latent = utils.is_mla_backend(self.pool)
        self.manager = self.classes["manager"](args, kind, context.get_context().server_args, latent)

    def share(self, heads: int) -> slice:
        own = max(1, heads // self.columns)
        first = self.column * heads // self.columns
        return slice(first, first + own)

    def planes(self) -> list[Plane]:
        """Every layer, numbered as in the whole model, so that all ranks agree on what it holds."""
        if self.rank.shape.kind == "gdn":
            return [*self._attention("kv", self.pool.full_kv_pool, 0), *self._states()]
        planes = self._attention("kv", self.pool, 0)
        if self.draft is not None:
            planes += self._attention("kv", self.draft, 30)
        for layer, keys in enumerate(getattr(self.pool, "index_k_with_scale_buffer", ())):
            planes.append(Plane("dsa", keys, content(20 + self.pool.start_layer + layer, PAGES, keys.shape[1])))
        return planes

    def _attention(self, by: str, pool: Any, first: int) -> list[Plane]:
        latent = hasattr(pool, "kv_buffer")
        kinds = [pool.kv_buffer] if latent else [pool.k_buffer, pool.v_buffer]
        planes: list[Plane] = []
        for kv, buffers in enumerate(kinds):
            for layer, buffer in enumerate(buffers):
                own = buffer.view(torch.uint8).reshape(-1, self.page, buffer.shape[1], buffer.shape[2] * 2)
                seed = first + 100 * kv + (pool.start_layer or 0) + layer
                whole = content(seed, PAGES, self.page, 1 if latent else 4, own.shape[3])
                planes.append(Plane(by, own, whole, lambda w: w if w.shape[2] == 1 else w[:, :, self.share(4)]))
        return planes

    def _states(self) -> list[Plane]:
        """Convolutions [channel, step] of q, k and v, and temporal states [head, ...]."""
        planes: list[Plane] = []
        states = self.pool.mamba_pool.mamba_cache
        for layer in range(2):
            conv, temporal = (t[layer].view(torch.uint8) for t in (states.conv[0], states.temporal))
            parts = torch.cat([torch.arange(at, at + n)[self.share(n)] for at, n in CHANNELS])
            whole = content(40 + layer, 1, sum(n for _, n in CHANNELS), conv.shape[2])
            planes.append(Plane("mamba", conv, whole, lambda w, parts=parts: w[:, parts]))
            planes.append(
                Plane("mamba", temporal, content(50 + layer, 1, 4, *temporal.shape[2:]), lambda w: w[:, self.share(4)])
            )
        return planes


def content(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


#: Where q, k and v begin in a convolution of the whole model, and how many channels they have.
CHANNELS = ((0, 8), (8, 8), (16, 16))


def sparse(rank: Rank) -> Any:
    """A latent and index keys, whose pages hold all keys before all scales."""
    layers = 4 // rank.shape.pp
    span = {"start_layer": rank.pp * layers, "end_layer": (rank.pp + 1) * layers}
    more = {"index_head_dim": 128, "enable_memory_saver": False, "kv_cache_dim": 24}
    return pools.DSATokenToKVPool(16 * 64, 64, 16, torch.bfloat16, 8, layers, "cpu", **more, **span)


def draft(rank: Rank) -> Any:
    """The one layer of a draft model, which keeps its pages under the model's ids."""
    heads = max(1, 4 // rank.shape.tp)
    return pools.MHATokenToKVPool(64, PAGE, torch.bfloat16, heads, 16, 1, "cpu", False)


def hybrid(rank: Rank) -> Any:
    """Two layers of attention, and two with a state."""
    tp = rank.shape.tp
    shape = states.Mamba2StateShape(
        conv=[(32 // tp, 3)],
        temporal=(4 // tp, 4, 8),
        intermediate_size=16,
        conv_dim=32,
        ssm_state_size=8,
        num_heads=4,
        head_dim=4,
        state_size=8,
        conv_kernel=4,
        conv_shard_groups=[n for _, n in CHANNELS],
    )
    params = states.Mamba2CacheParams(shape=shape, layers=[0, 2])
    mamba = pools.MambaPool(size=15, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu")
    return pools.HybridLinearKVPool(
        64, torch.bfloat16, PAGE, max(1, 4 // tp), 16, [1, 3], "cpu", mamba_pool=mamba, start_layer=0
    )


def stages_of(rank: Rank) -> Any:
    """The pipeline group of a rank, over torch's groups."""
    tp, pp = rank.shape.tp, rank.shape.pp
    columns = [[column + tp * stage for stage in range(pp)] for column in range(tp)]
    group = [torch.distributed.new_group(column) for column in columns][rank.tp]

    def broadcast(value: Any, src: int) -> Any:
        box = [value]
        torch.distributed.broadcast_object_list(box, columns[rank.tp][src], group)
        return box[0]

    def gather(value: Any) -> list[Any]:
        box = [None] * pp
        torch.distributed.all_gather_object(box, value, group)
        return box

    return SimpleNamespace(world_size=pp, rank_in_group=rank.pp, broadcast_object=broadcast, all_gather_object=gather)


def places(side: Side, seed: int, prefix: int) -> dict[str, torch.Tensor]:
    """Where this rank keeps the request: pages after the prefix, the state."""
    drawn = torch.randperm(11, generator=torch.Generator().manual_seed(seed)) + 1
    pages = drawn[: PAGES - prefix]
    return {"kv": pages, "dsa": pages, "mamba": drawn[:1]}


def told(side: Side, at: dict[str, torch.Tensor]) -> list[Any]:
    """State indices as SGLang's schedulers hand them over."""
    return [[at["mamba"][0].numpy()] if kind == "mamba" else at[kind].numpy().astype(np.int32) for kind in side.types]


def until(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (found := condition()) is not None:
            return found
        time.sleep(0.002)
    raise AssertionError(f"waited 60 s for {what}")


def polled(part: Any, *wanted: Any) -> Any:
    return until(lambda: status if (status := part()) in wanted else None, f"{wanted}, last {part()}")


def prefill(rank: Rank, port: int, case: Case) -> str:
    if rank.number == 0:
        side_of = utils.get_kv_class(utils.TransferBackend("kvmover"), utils.KVClassType.BOOTSTRAP_SERVER)
        server = side_of("127.0.0.1", port)
        until(lambda: _answers(port) or None, "the bootstrap server")
        rank.kept = server
    torch.distributed.barrier()
    if case.ending == "refused once":
        _refuse_once()
    side = Side(rank, "prefill")
    at = places(side, rank.number, 0)
    copy = context.get_parallel().attn_cp_rank
    for plane in side.planes():
        plane.own.fill_(STALE)
        whole = plane.cut(plane.whole)
        plane.own[at[plane.by]] = whole[len(whole) - len(at[plane.by]) :] if not copy else STALE
    for number, aux in enumerate(side.aux):
        aux.view(torch.uint8)[5] = 10 + number if rank.pp == rank.shape.pp - 1 else STALE
    if case.ending == "decode leaves first":
        until(lambda: side.manager._given_up.get(ROOM), "the abort of decode")
    if case.ending == "refused once":
        refused = sender_of(side, port, case.asked(side))
        assert polled(refused.poll, KVPoll.Failed) == KVPoll.Failed
        _ended_on_both(rank, PREFILL_ENDED, GIVEN_BACK, _failed(refused))
        refused.clear()
    sender = sender_of(side, port, case.asked(side))
    # The first stage polls for all of them, as SGLang's scheduler does.
    poll = sender.poll_pp_consensus if rank.shape.pp > 1 and rank.pp == 0 else sender.poll
    if polled(poll, KVPoll.WaitingForInput, KVPoll.Failed) == KVPoll.Failed:
        return _ended_on_both(rank, PREFILL_ENDED, GIVEN_BACK, _failed(sender))
    if case.ending == "twice":
        again = sender_of(side, port, case.asked(side))
        assert polled(again.poll, KVPoll.Failed) == KVPoll.Failed
        assert _failed(again) == ROOM_TAKEN.format(room=ROOM)
    prefix = sender.pop_decode_prefix_len() // side.page
    todo = at["kv"].numpy().astype(np.int32)[prefix:]
    at = {**at, "dsa": at["dsa"][prefix:]}
    sender.init(len(todo), 5)
    if case.ending == "prefill dies":
        os._exit(0)
    if case.ending == "prefill dies and its writes do not":
        sender.send(todo[:3], None)
        until(lambda: side.manager._driver.snapshot().meter.routes.get("direct"), "a page to be written")
        os._exit(0)
    if case.ending == "another rank of decode fails":
        assert polled(poll, KVPoll.Failed) == KVPoll.Failed
        return _ended_on_both(rank, PREFILL_ENDED, GIVEN_BACK, _failed(sender))
    if case.ending == "prefill stalls":
        return _ended_on_both(rank, PREFILL_ENDED, GIVEN_BACK, repr(side.manager._driver.pace))
    if case.ending == "abort":
        sender.abort()
        return _ended_on_both(rank, PREFILL_ENDED, GIVEN_BACK, _failed(sender))
    for first, last in zip([0, *case.chunks], [*case.chunks, len(todo)], strict=True):
        sender.send(todo[first:last], told(side, at) if last == len(todo) else None)
    status = polled(poll, KVPoll.Success, KVPoll.Failed)
    reason = "" if status == KVPoll.Success else _ended_on_both(rank, PREFILL_ENDED, GIVEN_BACK, _failed(sender))
    torch.distributed.barrier()
    sender.clear()
    time.sleep(0.3 if rank.number == 0 else 0)  # the bootstrap server outlives what others ask of it
    return reason


def _refuse_once() -> None:
    """This process refuses the next decode rank that calls, and no other."""
    connect = TransferDriver.connect

    def refuse(driver: TransferDriver, card: bytes) -> None:
        TransferDriver.connect = connect
        raise PeerRefused("not for now")

    TransferDriver.connect = refuse


def sender_of(side: Side, port: int, req: Any) -> Any:
    """The sender that SGLang's queue makes for a request."""
    queue = object.__new__(senders.PrefillBootstrapQueue)
    queue.kv_manager, queue.bootstrap_port, queue.max_input_len = side.manager, port, 4096
    queue.max_total_num_tokens = 4096  # of 0.5.22 and before, as the next two of 0.5.21
    queue.tp_rank, queue.pp_rank = 0, 0
    queue.transfer_backend = utils.TransferBackend("kvmover")
    assert queue.create_sender(req, 4)
    return req.disagg_kv_sender


def publish(side: Side, req: Any, receiver: Any, at: dict[str, torch.Tensor], prefix: int) -> None:
    """SGLang's queue has pages for a request."""
    queue = object.__new__(queues.DecodePreallocQueue)
    queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(alloc=lambda: ROW)
    queue.transfer_queue, queue._num_published_destinations = SimpleNamespace(enable_staging=False), 0
    rows = (at["kv"][:, None] * side.page + torch.arange(side.page)).reshape(-1)
    tokens = len(req.origin_input_ids) - prefix * side.page
    decoding = queues.DecodeRequest(req=req, kv_receiver=receiver)
    if sends_inline():  # what `pop_preallocated` of 0.5.20 does inline
        receiver.send_metadata(
            at["kv"].numpy().astype(np.int32), ROW, told(side, at), decode_prefix_len=prefix * side.page
        )
        return
    queue._send_kv_metadata(decoding, rows[:tokens], side.page, told(side, at), decode_prefix_len=prefix * side.page)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _failed(part: Any) -> str:
    with pytest.raises(Exception) as caught:
        part.failure_exception()
    return caught.value.failure_reason


def _ended_on_both(rank: Rank, own: str, other: str, reason: str) -> str:
    """Neither half goes before the other has ended: what the process still had to say would be lost, and decode would
    hold its pages for a minute, in which a prefill that is gone may still write."""
    torch.distributed.barrier()
    (rank.root.parent / own).touch()
    until(lambda: (rank.root.parent / other).exists() or None, f"{other}; this half: {reason}")
    return reason


def decode(rank: Rank, port: int, case: Case) -> str:
    changed = {"num_draft_entries": 2} if case.ending == "decode of another model" else {}
    side, prefix = Side(rank, "decode", **changed), case.prefix
    for plane in side.planes():
        plane.own.fill_(POISON)
    address = f"127.0.0.1:{port}"
    until(lambda: (_answers(port) and side.manager.try_ensure_parallel_info(address)) or None, "the prefill")
    receiver = side.classes["receiver"](side.manager, address, ROOM)
    receiver.init(0)
    assert polled(receiver.poll, KVPoll.WaitingForInput, KVPoll.Failed) == KVPoll.WaitingForInput
    at = places(side, 50 + rank.number, prefix)
    if case.ending == "refused once":
        publish(side, case.asked(side), receiver, at, prefix)
        assert polled(receiver.poll, KVPoll.Failed) == KVPoll.Failed
        assert "for now" in _ended_on_both(rank, GIVEN_BACK, PREFILL_ENDED, _given_back(side, receiver))
        receiver = side.classes["receiver"](side.manager, address, ROOM)
        receiver.init(0)
    mistaken = case.ending == "decode means another prompt"
    publish(side, case.asked(side, first=int(mistaken)), receiver, at, prefix)
    if case.ending == "twice":
        again = side.classes["receiver"](side.manager, address, ROOM)
        again.init(0)
        assert polled(again.poll, KVPoll.Failed) == KVPoll.Failed
        assert _failed(again) == ROOM_TAKEN.format(room=ROOM)
    if case.ending in ("decode aborts", "decode leaves first"):
        receiver.abort()
    if case.ending == "another rank of decode fails":
        assert side.manager.is_moving(ROOM)
        return _ended_on_both(rank, GIVEN_BACK, PREFILL_ENDED, _given_back(side, receiver))
    status = polled(receiver.poll, KVPoll.Success, KVPoll.Failed)
    if status == KVPoll.Failed:
        assert side.manager.is_moving(ROOM) >= (case.ending == "prefill dies and its writes do not"), "nothing is held"
        reason = _given_back(side, receiver)
        assert "dies" not in case.ending or not receiver._socket_cache, "a socket to ranks that are gone is kept"
        return reason if "dies" in case.ending else _ended_on_both(rank, GIVEN_BACK, PREFILL_ENDED, reason)
    receiver.clear()
    for number, plane in enumerate(side.planes()):
        wanted = torch.full_like(plane.own, POISON)
        whole = plane.cut(plane.whole)
        wanted[at[plane.by]] = whole[len(whole) - len(at[plane.by]) :]
        if plane.by == "kv" and rank.shape.kind != "dsa" and case.spare:
            wanted[at["kv"][-1], -case.spare :] = POISON
        assert torch.equal(plane.own, wanted), (number, plane.by)
    for number, aux in enumerate(side.aux):
        rows = aux.view(torch.uint8)
        assert (rows[ROW] == 10 + number).all()
        assert not rows[ROW + 1 :].any()
    return ""


def _given_back(side: Side, receiver: Any) -> str:
    """Why a request failed. SGLang's own queue holds its pages until nothing can write to them.

    A queue whose patience is over at once: SGLang would give the pages back after its first look.
    """
    queue = object.__new__(queues.DecodeTransferQueue)
    released: list[bool] = []
    held = Environment.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
    queue.enable_deferred_kv_release, queue._deferred_releases, queue.deferred_kv_release_timeout = held, [], 0.0
    queue.enable_host_receive = queue.enable_staging = False
    queue.gloo_group, queue.tp_rank = torch.distributed.group.WORLD, 0
    queue.tree_cache = SimpleNamespace(unlock=lambda _lock: None)
    queue._poll_with_metadata_gate = lambda: [KVPoll.Failed]
    queue.scheduler = SimpleNamespace(
        metrics_reporter=SimpleNamespace(enable_metrics=False),
        output_streamer=SimpleNamespace(stream_output=lambda *_: None),
        enable_decode_hicache=False,
        enable_hisparse=False,
    )

    def release(*_: Any, **__: Any) -> None:
        released.append(side.manager.is_moving(ROOM))

    class Rooms:
        """The row of the metadata is cleared by its room in 0.5.22 and before."""

        def __setitem__(self, row: int, room: int) -> None:
            release()

    queue.metadata_buffers = SimpleNamespace(clear_slot=release, bootstrap_room=Rooms())
    queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda row: None)
    queue._release_request = queues.release_kv_cache = release  # the latter in 0.5.20
    reasons: list[str] = []
    fail = receiver.failure_exception

    def failure_exception() -> None:
        try:
            fail()
        except Exception as error:
            reasons.append(error.failure_reason)
            raise

    receiver.failure_exception = failure_exception
    request = queues.DecodeRequest(req=asked(range(PAGES)), kv_receiver=receiver, metadata_buffer_index=ROW)
    queue.queue = [request]
    assert queue.pop_transferred() == []
    assert receiver.abort_notified

    def resolved() -> bool | None:
        queue.resolve_deferred_releases()
        return True if released else None

    until(resolved, "SGLang to give the pages back")
    assert released == [False, False], "pages were given back while they may be written"
    assert side.manager.enter(ROOM) == ROOM
    return reasons[0]


def started(root: Path, src: Shape, dst: Shape, cp: int = 1, **more: Any) -> tuple[Running, Running]:
    """A prefill fleet and a decode fleet, both at work on one request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    case = Case(**more)
    serving = {"disaggregation_transfer_backend": "kvmover", "disaggregation_bootstrap_port": port, "host": "127.0.0.1"}
    from_ = {"disaggregation_mode": "prefill", "port": 1, **serving, **({"attn_cp_size": cp} if cp > 1 else {})}
    return (
        start(src, root / "p", prefill, port, case, **from_),
        start(dst, root / "d", decode, port, case, disaggregation_mode="decode", port=2, **serving),
    )


def pair(root: Path, src: Shape, dst: Shape, **more: Any) -> tuple[list[str], list[str]]:
    """Why each rank of both fleets failed, or ""."""
    sent, received = (finish(fleet) for fleet in started(root, src, dst, **more))
    return sent, received


@pytest.mark.parametrize(
    ("kind", "src", "dst"),
    [
        ("mha", (1, 2), (2, 1)),
        ("dsa", (1, 2), (1, 1)),
        ("mha", (1, 2), (1, 2)),
        ("mla", (2, 1), (1, 2)),
    ],
    ids=str,
)
def test_each_stage_sends_its_layers_and_each_stage_gets_its_own(
    kind: str, src: tuple[int, int], dst: tuple[int, int], tmp_path: Path
) -> None:
    """(tp, pp) of both sides. What goes beside the cache comes from the last stage."""
    sent, received = pair(tmp_path, *(Shape(kind=kind, tp=tp, pp=pp) for tp, pp in (src, dst)))
    assert not any(sent), sent
    assert not any(received), received


@pytest.mark.parametrize(("src", "dst"), [(2, 1)], ids=str)
def test_index_keys_land_beside_the_latent_they_belong_to(src: int, dst: int, tmp_path: Path) -> None:
    answers = pair(tmp_path, Shape(kind="dsa", tp=src), Shape(kind="dsa", tp=dst), prefix=2, chunks=(3,))
    assert answers == ([""] * src, [""] * dst)


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (4, 2)], ids=str)
def test_states_are_cut_by_head_and_each_projection_of_a_convolution_by_itself(
    src: int, dst: int, tmp_path: Path
) -> None:
    assert pair(tmp_path, Shape(kind="gdn", tp=src), Shape(kind="gdn", tp=dst)) == ([""] * src, [""] * dst)


def test_the_cache_of_a_draft_model_comes_with_the_models(tmp_path: Path) -> None:
    assert pair(tmp_path, Shape(kind="draft", tp=2), Shape(kind="draft"), prefix=1) == ([""] * 2, [""])


def test_of_context_parallel_copies_the_first_sends(tmp_path: Path) -> None:
    assert pair(tmp_path, Shape(kind="mla", tp=2), Shape(kind="mla", tp=1), cp=2) == ([""] * 2, [""])


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(("src", "dst"), [(1, 1), (2, 1), (1, 2), (2, 4)], ids=str)
def test_a_request_lands_whole_on_a_fleet_of_another_size(kind: str, src: int, dst: int, tmp_path: Path) -> None:
    assert pair(tmp_path, Shape(kind=kind, tp=src), Shape(kind=kind, tp=dst)) == ([""] * src, [""] * dst)


def test_pages_that_decode_has_already_are_not_sent(tmp_path: Path) -> None:
    assert pair(tmp_path, Shape(tp=2), Shape(tp=1), prefix=4) == ([""] * 2, [""])


def test_a_prefill_in_chunks_sends_all_of_them(tmp_path: Path) -> None:
    assert pair(tmp_path, Shape(tp=1), Shape(tp=2), prefix=1, chunks=(3, 5)) == ([""], [""] * 2)


def test_kvmovers_settings_reach_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would wait for 300 s."""
    monkeypatch.setenv("KVMOVER_MOVER_DEADLINE_S", "1.5")
    monkeypatch.setenv("KVMOVER_PROGRESS_OPEN_S", "0.002")
    monkeypatch.setenv("KVMOVER_PROGRESS_IDLE_S", "0.3")
    sent, received = pair(tmp_path, Shape(), Shape(), ending="prefill stalls")
    assert sent == [repr(Pace(open_s=0.002, idle_s=0.3))]
    assert received[0].startswith("deadline passed"), received


def test_ranks_whose_metrics_port_is_taken_serve_without_that_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("KVMOVER_METRICS_PORT", str(taken.getsockname()[1]))
        assert pair(tmp_path, Shape(), Shape()) == ([""], [""])


def test_an_abort_of_the_prefill_fails_the_request_on_decode_with_the_reason(tmp_path: Path) -> None:
    sent, received = pair(tmp_path, Shape(), Shape(), ending="abort")
    assert sent == ["Aborted by AbortReq."]
    assert received == ["aborted by the scheduler"]


def test_an_abort_of_decode_ends_the_request_on_both_sides(tmp_path: Path) -> None:
    sent, received = pair(tmp_path, Shape(), Shape(), ending="decode aborts")
    assert received == ["Aborted by AbortReq."]
    assert "abort" in sent[0].lower()


def test_a_decode_that_is_refused_tells_the_prefill_at_once(tmp_path: Path) -> None:
    """Nobody will ask for the pages: they are not kept until a deadline that SGLang sets to 300 s."""
    sent, received = pair(tmp_path, Shape(), Shape(), ending="decode of another model")
    assert "peer holds weights" in received[0]
    assert sent == ["decode aborted the request"]


def test_a_decode_that_was_refused_is_introduced_anew_for_its_next_request(tmp_path: Path) -> None:
    """What was the matter may be over: by then the prefill may have the same weights."""
    assert pair(tmp_path, Shape(), Shape(), ending="refused once") == ([""], [""])


@pytest.mark.parametrize(("kind", "src", "dst"), [("mha", 2, 1), ("dsa", 1, 1)], ids=str)
def test_kv_of_another_prompt_fails_on_both_halves_at_once_and_no_byte_of_it_lands(
    kind: str, src: int, dst: int, tmp_path: Path
) -> None:
    """Both name both prompts. SGLang would wait for 300 s."""
    shapes = Shape(kind=kind, tp=src), Shape(kind=kind, tp=dst)
    sent, received = pair(tmp_path, *shapes, ending="decode means another prompt", spare=1)
    tokens = PAGES * (64 if kind == "dsa" else PAGE) - 1
    said = re.compile(f"the KV is of {tokens} tokens ([0-9a-f]{{32}}), and {tokens} tokens ([0-9a-f]{{32}}) were ")
    for reason in (*sent, *received):
        found = said.match(reason)
        assert found, reason
        assert found[1] != found[2]


@pytest.mark.parametrize("kind", ["mha", "dsa", "gdn"])
def test_a_prompt_that_ends_within_a_page_lands(kind: str, tmp_path: Path) -> None:
    """Of caches that only SGLang knows, decode asks for the whole last page."""
    assert pair(tmp_path, Shape(kind=kind), Shape(kind=kind), prefix=2, spare=3) == ([""], [""])


def test_a_decode_that_leaves_before_the_prefill_has_the_request_tells_it(tmp_path: Path) -> None:
    """Both get the request at once: a busy prefill begins it later than its decode ends it."""
    sent, received = pair(tmp_path, Shape(), Shape(), ending="decode leaves first")
    assert received == ["Aborted by AbortReq."]
    assert sent == ["decode aborted the request"]


def test_a_second_request_in_a_room_is_turned_away_and_the_first_lands_as_if_it_were_not_there(tmp_path: Path) -> None:
    """Rooms are numbers that routers give. Of two requests with one number, both sides refuse the second."""
    assert pair(tmp_path, Shape(), Shape(), ending="twice") == ([""], [""])


def test_a_prefill_that_dies_fails_its_requests_on_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "1")
    _, received = started(tmp_path, Shape(), Shape(), ending="prefill dies")
    (reason,) = finish(received)
    assert "prefill" in reason or "lost" in reason.lower()


def test_a_failure_is_told_while_a_dead_prefill_may_still_write_and_its_pages_are_not_given_back_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "1")
    monkeypatch.setenv("KVMOVER_MOVER_ROUTE", "direct")
    monkeypatch.setenv("KVMOVER_MOVER_COSTS_CHUNK_BYTES", "4096")
    monkeypatch.setenv("KVMOVER_MOVER_LINGER_S", "6")
    _, received = started(tmp_path, Shape(), Shape(), ending="prefill dies and its writes do not")
    (reason,) = finish(received)
    assert "prefill" in reason or "lost" in reason.lower()


def test_a_request_that_failed_on_another_rank_is_given_up_and_its_pages_are_held_meanwhile(tmp_path: Path) -> None:
    """SGLang fails it on every rank, also where its pages are still being fetched."""
    sent, received = pair(tmp_path, Shape(), Shape(), ending="another rank of decode fails")
    assert sent == ["decode aborted the request"]
    assert received == ["the request failed on another rank"]


def test_a_decode_that_may_not_hold_pages_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
    serving = {"disaggregation_transfer_backend": "kvmover", "disaggregation_mode": "decode"}
    finish(start(Shape(), tmp_path, refused, {}, "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is off", **serving))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_cache_dtype_str": "nvfp4"}, "whose scales SGLang does not hand over"),
        ({"num_draft_entries": 2, "kv_item_lens": [256] * 6 + [128] * 2}, "the cache of a draft model"),
    ],
    ids=str,
)
def test_what_cannot_be_transferred_is_refused_before_anything_is_registered(
    changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    serving = {"disaggregation_transfer_backend": "kvmover", "disaggregation_mode": "decode"}
    finish(start(Shape(), tmp_path, refused, changed, reason, **serving))


def refused(rank: Rank, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception) as caught:
        Side(rank, "decode", **changed)
    assert reason in str(caught.value)
