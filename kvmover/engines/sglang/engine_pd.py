"""The further SGLang names that the prefill/decode backend uses are imported here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvmover.engines.common import EngineUnsupported
from kvmover.engines.sglang.pd_cache import MOST_HEADS
from kvmover.engines.sglang.sglang_content import LoadedAdapters, RequestReader
from kvmover.engines.sglang.sglang_contract import (
    PD,
    SGLANG,
    allocation_policy,
    hold_failure,
    holds_every_failure,
    known_settings,
    sends_checksums,
    sends_inline,
)

if TYPE_CHECKING:
    import torch

SGLANG.require(PD)

_conn: Any = SGLANG.find("sglang.srt.disaggregation.common.conn")
_base: Any = SGLANG.find("sglang.srt.disaggregation.base.conn")
_utils: Any = SGLANG.find("sglang.srt.disaggregation.utils")
_network: Any = SGLANG.find("sglang.srt.utils.network")
_context: Any = SGLANG.find("sglang.srt.runtime_context")
_environ: Any = SGLANG.find("sglang.srt.environ")
_hooks: Any = SGLANG.find("sglang.srt.plugins.hook_registry")

web: Any = _conn.web
CommonKVManager: Any = _conn.CommonKVManager
CommonKVSender: Any = _conn.CommonKVSender
CommonKVReceiver: Any = _conn.CommonKVReceiver
CommonKVBootstrapServer: Any = _conn.CommonKVBootstrapServer
ensure_abort_notified: Any = SGLANG.find("sglang.srt.disaggregation.common.conn:CommonKVReceiver.ensure_abort_notified")
SocketError: Any = SGLANG.find("zmq").ZMQError
NetworkAddress: Any = _network.NetworkAddress

PREFILL: Any = _utils.DisaggregationMode.PREFILL

#: States of a request that the scheduler polls.
BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS, FAILED = (
    getattr(_base.KVPoll, name) for name in ("Bootstrapping", "WaitingForInput", "Transferring", "Success", "Failed")
)


def waiting_timeout_s() -> float:
    """Returns the time a decode rank waits for its KV, s (`SGLANG_DISAGGREGATION_WAITING_TIMEOUT`)."""
    return float(_environ.envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())


def given_timeout_s() -> float | None:
    """Returns `waiting_timeout_s` if the operator set it; None for SGLang's default."""
    return waiting_timeout_s() if _environ.envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.is_set() else None


def hold_failed_pages() -> None:
    """Have SGLang hold the pages of a failed request until this process's manager releases them.

    SGLang alone frees them after 30 s, even while a prefill writes to them, and at once if holding is off. Raises
    EngineUnsupported if holding is off, or if SGLang's hook does not take.
    """
    held = _environ.envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE
    if not held.get() and (held.is_set() or holds_every_failure()):
        raise EngineUnsupported(
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is off: SGLang would give pages of a failed request to"
            " others while a prefill may still write to them"
        )
    _wrap("sglang.srt.disaggregation.decode:DecodeTransferQueue._defer_release", _without_deadline)
    if not holds_every_failure():
        name = "sglang.srt.disaggregation.decode:DecodeTransferQueue._clean_hicache_prefetch_resources"
        _wrap(name, hold_failure)


def tell_prompts(mode: Any) -> None:
    """Have SGLang give each sender its request's prompt, and each receiver the prompt and the request's length.

    LoRA adapters are read as SGLang loads them, those of its start now. Raises EngineUnsupported if a hook does not
    take.
    """
    if mode is PREFILL:
        _wrap("sglang.srt.disaggregation.prefill:PrefillBootstrapQueue.create_sender", _with_prompt)
    elif sends_inline():
        _wrap("sglang.srt.disaggregation.decode:DecodeRequest.__init__", _with_receiver)
    else:
        _wrap("sglang.srt.disaggregation.decode:DecodePreallocQueue._send_kv_metadata", _with_length)
    if _context.get_lora().enable_lora:
        _wrap("sglang.srt.lora.lora_manager:LoRAManager.load_lora_adapter", _reading)
        for adapter in _context.get_lora().lora_paths or ():
            _adapters.load(adapter.lora_id, adapter.lora_path)


def meet_newer_prefills() -> None:
    """Have SGLang take the description of a prefill of a later release, which has settings without a field here.

    A setting that is on stays, so that SGLang refuses it. Raises EngineUnsupported if a hook does not take.
    """
    _wrap("sglang.srt.disaggregation.common.conn:PrefillServerInfo.__init__", _of_known_fields)


def _of_known_fields(init: Callable[..., None], info: Any, *given: Any, **named: Any) -> None:
    init(info, *given, **known_settings(type(info), named))


def _wrap(name: str, around: Callable[..., Any]) -> None:
    """Wrap a method of SGLang, by its name in the contract, in `around`, once a process.

    Raises EngineUnsupported if the release lacks it, or if SGLang's hook does not take.
    """
    if not hasattr(SGLANG.find(name), "__wrapped__"):
        _hooks.HookRegistry.register(name.replace(":", "."), around, _hooks.HookType.AROUND)
        _hooks.HookRegistry.apply_hooks()
    if not hasattr(SGLANG.find(name), "__wrapped__"):
        raise EngineUnsupported(f"SGLang's hook at {name} does not take: its log says why")


def _folder_of(path: str) -> str:
    """Returns the local folder of an adapter that an operator named by its path or its hub name."""
    if Path(path).is_dir():
        return path
    return str(SGLANG.find("sglang.srt.lora.lora_config").snapshot_download(path, local_files_only=True))


_adapters = LoadedAdapters(_folder_of)


def _reader() -> RequestReader:
    skipped = _environ.envs.SGLANG_MM_SKIP_COMPUTE_HASH.get()
    return RequestReader(_adapters, "SGLANG_MM_SKIP_COMPUTE_HASH is on: images have no hash" if skipped else "")


def _reading(load: Callable[[Any, Any], Any], manager: Any, adapter: Any) -> Any:
    """Read an adapter before SGLang loads it at run time, even if that load fails."""
    _adapters.load(adapter.lora_id, adapter.lora_path)
    return load(manager, adapter)


def _with_prompt(create: Callable[..., bool], queue: Any, req: Any, *more: Any, **named: Any) -> bool:
    """Begin kvmover's sender with its prompt; SGLang's sender for a request without KV is left alone."""
    created = create(queue, req, *more, **named)
    begin = getattr(req.disagg_kv_sender, "begin", None) if created else None
    if begin is not None:
        begin(_reader().content(req))
    return created


def _with_length(
    send: Callable[..., None], queue: Any, request: Any, kv_indices: Any, *more: Any, **named: Any
) -> None:
    """Set the receiver's length, prompt and parameters before SGLang sends.

    `kv_indices` [token]: of the tokens that decode lacks.
    """
    _tell(request.kv_receiver, request.req)
    request.kv_receiver.tokens = (named.get("decode_prefix_len") or 0) + len(kv_indices)
    send(queue, request, kv_indices, *more, **named)


def _with_receiver(init: Callable[..., None], request: Any, *given: Any, **named: Any) -> None:
    """Set the same as a request gets its receiver: its length is that of its prompt."""
    init(request, *given, **named)
    _tell(request.kv_receiver, request.req)
    request.kv_receiver.tokens = request.kv_receiver.content.tokens


def _tell(receiver: Any, req: Any) -> None:
    sampling = req.sampling_params
    receiver.parameters = sampling.custom_params
    # The first of several requests, without tokens, warms the prefix cache; a beam search is a single request.
    receiver.answers = sampling.n if sampling.max_new_tokens and (sampling.beam_width or 1) == 1 else 1
    receiver.content = _reader().content(req)


def _without_deadline(hold: Callable[[Any, Any], None], queue: Any, request: Any) -> None:
    """Hold a request's pages without SGLang's deadline."""
    queue.deferred_kv_release_timeout = math.inf
    hold(queue, request)


def aborted_room(received: list[bytes]) -> int | None:
    """Returns the room that a decode rank gave up, if that is what the frames say."""
    match received:
        case [b"ABORT", room, *_] if room.isdigit():
            return int(room)
        case _:
            return None


def raise_failure(end: Any) -> NoReturn:
    """Conclude a sender or receiver as failed, and forget its request. Raises KVTransferError with the reason."""
    end.conclude_state = FAILED
    end.clear()
    with end.kv_mgr.failure_lock:
        reason = end.kv_mgr.failure_records.pop(end.bootstrap_room, None)
    raise _conn.KVTransferError(
        end.bootstrap_room, reason or "the request failed on another rank", is_from_another_rank=reason is None
    )


def foreign_prefill() -> Any:
    """Returns SGLang's description of a prefill of another make: a single rank whose settings match every decode."""
    return _conn.PrefillServerInfo(1, 1, 1, 1, None, None, True, **allocation_policy(_context.get_disagg()))


def room_buffer() -> int:
    """Returns the index from the end of the metadata buffer with the rooms: -1, or -2 if checksums follow it."""
    return -2 if sends_checksums(_context.get_disagg()) else -1


def bootstrap_url(manager: Any) -> str:
    """Returns the URL of this prefill's bootstrap server, found as SGLang's ranks find it to register."""
    if manager.dist_init_addr:
        host = NetworkAddress.parse(manager.dist_init_addr).resolved().host
    else:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(manager.bootstrap_host, manager.bootstrap_host)
    return NetworkAddress(host, manager.bootstrap_port).to_url()


def put(url: str, **what: Any) -> Any:
    """Send an HTTP PUT as SGLang's ranks do to register. Raises OSError if it fails."""
    return _conn.requests.put(url, **what)


def parallel() -> Any:
    """Returns the parallel sizes and ranks of this process."""
    return _context.get_parallel()


def of_all_stages(own: dict[str, int]) -> list[dict[str, int]]:
    """Returns the dict `own` of each pipeline stage, first to last. All stages call this at the same time."""
    return parallel().pp_group.all_gather_object(own) if parallel().pp_size > 1 else [own]


def name_of_this_engine() -> str:
    """Returns a name shared by exactly the ranks that serve a request together: address, port, data-parallel rank."""
    head = parallel().dist_init_addr or _network.get_local_ip_auto()
    return f"{head} {_context.get_serving().port} {parallel().attn_dp_rank}"


def is_latent(config: Any) -> bool:
    """Returns True if the model of a `ModelConfig` caches a latent."""
    return config.attention_arch is SGLANG.find("sglang.srt.configs.model_config").AttentionArch.MLA


def mamba_projections(config: Any) -> tuple[tuple[int, int], ...]:
    """Returns units and heads of the parts of a convolution, in their order; () for models that are not known.

    They are x, B and C of Mamba-2, and the one part of a short convolution (LFM2).

    SGLang's pools do not tell them. A single group of B and C is held by every rank (`MambaMixer2`).
    """
    mamba = SGLANG.find("sglang.srt.configs.hybrid_arch").mamba2_config(config)
    if getattr(mamba, "conv_L_cache", 0):
        return ((mamba.hidden_size, math.gcd(mamba.hidden_size, MOST_HEADS)),)
    groups = getattr(mamba, "n_groups", 0) or getattr(mamba, "mamba_n_groups", 0)
    if mamba is None or not groups:
        return ()
    shape = mamba.mamba2_cache_params.shape
    return ((shape.intermediate_size, shape.num_heads), *[(groups * shape.state_size, groups)] * 2)


def device(gpu_id: int) -> torch.device:
    """Returns GPU `gpu_id`; without CUDA, SGLang's device."""
    import torch

    kind = _context.get_device().device
    return torch.device(kind, gpu_id) if kind == "cuda" else torch.device(kind)
