"""Prefill and decode ranks by SGLang's own classes and bootstrap server, with kvmover's transfer under them."""

from __future__ import annotations

import os
import socket
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench import PAGE, Rank, Running, Shape, finish, start

from kvmover.engines.sglang import plugin

plugins: Any = import_module("sglang.srt.plugins.hook_registry")
plugin.register()
plugins.HookRegistry.apply_hooks()
utils: Any = import_module("sglang.srt.disaggregation.utils")
KVPoll: Any = import_module("sglang.srt.disaggregation.base.conn").KVPoll
context: Any = import_module("sglang.srt.runtime_context")

ROOM, PAGES, ROW = 4711, 9, 3
POISON = 0x6B


def test_the_backend_is_a_choice_beside_the_built_in_ones() -> None:
    kinds = utils.KVClassType
    ours = utils.TransferBackend("kvmover")
    named = {kind: utils.get_kv_class(ours, kind).__name__ for kind in kinds if kind is not kinds.KVARGS}
    assert sorted(named.values()) == ["KvmoverBootstrapServer", "KvmoverManager", "KvmoverReceiver", "KvmoverSender"]
    assert utils.get_kv_class(ours, kinds.KVARGS).__name__ == "KVArgs"
    assert utils.get_kv_class(utils.TransferBackend("nixl"), kinds.SENDER).__name__ == "NixlKVSender"


class Side:
    """One rank of a prefill or a decode: a pool, metadata rows, and the classes that SGLang would make."""

    def __init__(self, rank: Rank, mode: str, **changed: Any) -> None:
        self.pool = rank.device_pool()
        self.aux = torch.zeros(8, 48, dtype=torch.uint8), torch.zeros(8, 16, dtype=torch.float32)
        ours = utils.TransferBackend("kvmover")
        self.classes = {kind.value: utils.get_kv_class(ours, kind) for kind in utils.KVClassType}
        args = self.classes["kvargs"]()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank.tp, 0, 0, 0
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        args.kv_layer_ids, args.kv_cache_dtype_str = list(range(4)), "bfloat16"
        args.aux_data_ptrs = [tensor.data_ptr() for tensor in self.aux]
        args.aux_data_lens = [tensor.nbytes for tensor in self.aux]
        args.aux_item_lens = [tensor[0].nbytes for tensor in self.aux]
        args.state_types, args.state_item_lens, args.page_size = [], [], PAGE
        vars(args).update(changed)
        context.get_parallel().override_permanently(pp_group=SimpleNamespace(world_size=1))
        kind = utils.DisaggregationMode(mode)
        self.manager = self.classes["manager"](args, kind, context.get_context().server_args, rank.shape.kind == "mla")

    @property
    def planes(self) -> list[torch.Tensor]:
        """[page, token, head, dim] of each layer and K/V, as bytes."""
        latent = hasattr(self.pool, "kv_buffer")
        buffers = self.pool.kv_buffer if latent else [*self.pool.k_buffer, *self.pool.v_buffer]
        return [buffer.view(torch.uint8).reshape(-1, PAGE, buffer.shape[1], buffer.shape[2] * 2) for buffer in buffers]


def true_plane(number: int, kind: str) -> torch.Tensor:
    """What the whole model holds of a layer and K/V for the request: [page, token, head, bytes]."""
    generator = torch.Generator().manual_seed(number)
    shape = (PAGES, PAGE, 1, 48) if kind == "mla" else (PAGES, PAGE, 4, 32)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def heads_of(rank: Rank) -> slice:
    if rank.shape.kind == "mla":
        return slice(0, 1)
    first = rank.tp * 4 // rank.shape.tp
    return slice(first, first + max(1, 4 // rank.shape.tp))


def until(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (found := condition()) is not None:
            return found
        time.sleep(0.002)
    raise AssertionError(f"waited 60 s for {what}")


def polled(part: Any, *wanted: Any) -> Any:
    return until(lambda: status if (status := part.poll()) in wanted else None, f"{wanted}, last {part.poll()}")


def prefill(rank: Rank, port: int, chunks: list[int], ending: str) -> str:
    if rank.number == 0:
        side_of = utils.get_kv_class(utils.TransferBackend("kvmover"), utils.KVClassType.BOOTSTRAP_SERVER)
        server = side_of("127.0.0.1", port)
        until(lambda: _answers(port) or None, "the bootstrap server")
        rank.kept = server
    torch.distributed.barrier()
    side = Side(rank, "prefill")
    pages = torch.randperm(15, generator=torch.Generator().manual_seed(rank.number))[:PAGES] + 1
    for number, plane in enumerate(side.planes):
        plane[pages] = true_plane(number, rank.shape.kind)[:, :, heads_of(rank)]
    for number, aux in enumerate(side.aux):
        aux.view(torch.uint8)[5] = 10 + number
    sender = side.classes["sender"](side.manager, f"127.0.0.1:{port}", ROOM)
    if polled(sender, KVPoll.WaitingForInput, KVPoll.Failed) == KVPoll.Failed:
        return _failed(sender)
    prefix = sender.pop_decode_prefix_len() // PAGE
    todo = pages.numpy().astype(np.int32)[prefix:]
    sender.init(len(todo), 5)
    if ending == "prefill dies":
        os._exit(0)
    if ending == "abort":
        sender.abort()
        time.sleep(1)  # for decode to hear of it
        return _failed(sender)
    for first, last in zip([0, *chunks], [*chunks, len(todo)], strict=True):
        sender.send(todo[first:last], None)
    status = polled(sender, KVPoll.Success, KVPoll.Failed)
    told = "" if status == KVPoll.Success else _failed(sender)
    sender.clear()
    torch.distributed.barrier()
    time.sleep(0.3 if rank.number == 0 else 0)  # the bootstrap server outlives what others ask of it
    return told


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _failed(part: Any) -> str:
    with pytest.raises(Exception) as caught:
        part.failure_exception()
    return caught.value.failure_reason


def decode(rank: Rank, port: int, prefix: int, ending: str) -> str:
    side = Side(rank, "decode")
    for plane in side.planes:
        plane.fill_(POISON)
    address = f"127.0.0.1:{port}"
    until(lambda: (_answers(port) and side.manager.try_ensure_parallel_info(address)) or None, "the prefill")
    receiver = side.classes["receiver"](side.manager, address, ROOM)
    receiver.init(0)
    assert polled(receiver, KVPoll.WaitingForInput, KVPoll.Failed) == KVPoll.WaitingForInput
    pages = torch.randperm(15, generator=torch.Generator().manual_seed(50 + rank.number))[: PAGES - prefix] + 1
    receiver.send_metadata(pages.numpy().astype(np.int32), ROW, decode_prefix_len=prefix * PAGE)
    if ending == "decode aborts":
        receiver.abort()
    status = polled(receiver, KVPoll.Success, KVPoll.Failed)
    if status == KVPoll.Failed:
        assert not side.manager.is_moving(ROOM)
        return _failed(receiver)
    receiver.clear()
    for number, plane in enumerate(side.planes):
        wanted = torch.full_like(plane, POISON)
        wanted[pages] = true_plane(number, rank.shape.kind)[prefix:, :, heads_of(rank)]
        assert torch.equal(plane, wanted), number
    for number, aux in enumerate(side.aux):
        rows = aux.view(torch.uint8)
        assert (rows[ROW] == 10 + number).all()
        assert not rows[ROW + 1 :].any()
    return ""


def started(
    root: Path, src: Shape, dst: Shape, prefix: int = 0, chunks: tuple[int, ...] = (), ending: str = ""
) -> tuple[Running, Running]:
    """A prefill fleet and a decode fleet, both at work on one request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serving = {"disaggregation_transfer_backend": "kvmover", "disaggregation_bootstrap_port": port, "host": "127.0.0.1"}
    return (
        start(src, root / "p", prefill, port, list(chunks), ending, disaggregation_mode="prefill", port=1, **serving),
        start(dst, root / "d", decode, port, prefix, ending, disaggregation_mode="decode", port=2, **serving),
    )


def pair(root: Path, src: Shape, dst: Shape, **more: Any) -> tuple[list[str], list[str]]:
    """Why each rank of both fleets failed, or ""."""
    sent, received = (finish(fleet) for fleet in started(root, src, dst, **more))
    return sent, received


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(("src", "dst"), [(1, 1), (2, 1), (1, 2), (2, 4)], ids=str)
def test_a_request_lands_whole_on_a_fleet_of_another_size(kind: str, src: int, dst: int, tmp_path: Path) -> None:
    assert pair(tmp_path, Shape(kind=kind, tp=src), Shape(kind=kind, tp=dst)) == ([""] * src, [""] * dst)


def test_pages_that_decode_has_already_are_not_sent(tmp_path: Path) -> None:
    assert pair(tmp_path, Shape(tp=2), Shape(tp=1), prefix=4) == ([""] * 2, [""])


def test_a_prefill_in_chunks_sends_all_of_them(tmp_path: Path) -> None:
    assert pair(tmp_path, Shape(tp=1), Shape(tp=2), prefix=1, chunks=(3, 5)) == ([""], [""] * 2)


def test_an_abort_of_the_prefill_fails_the_request_on_decode_with_the_reason(tmp_path: Path) -> None:
    sent, received = pair(tmp_path, Shape(), Shape(), ending="abort")
    assert sent == ["Aborted by AbortReq."]
    assert received == ["aborted by the scheduler"]


def test_an_abort_of_decode_ends_the_request_on_both_sides(tmp_path: Path) -> None:
    sent, received = pair(tmp_path, Shape(), Shape(), ending="decode aborts")
    assert received == ["Aborted by AbortReq."]
    assert "abort" in sent[0].lower()


def test_a_prefill_that_dies_fails_its_requests_on_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "1")
    _, received = started(tmp_path, Shape(), Shape(), ending="prefill dies")
    (reason,) = finish(received)
    assert "prefill" in reason or "lost" in reason.lower()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"state_types": ["mamba"]}, "caches beside attention (mamba)"),
        ({"num_draft_entries": 2}, "the cache of a draft model"),
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
