"""All further names of SGLang that the prefill/decode backend uses are imported here."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmover.engines.common import EngineUnsupported
from kvmover.engines.sglang.request_content import LoadedAdapters, RequestReader

if TYPE_CHECKING:
    import torch

_conn: Any = import_module("sglang.srt.disaggregation.common.conn")
_base: Any = import_module("sglang.srt.disaggregation.base.conn")
_utils: Any = import_module("sglang.srt.disaggregation.utils")
_network: Any = import_module("sglang.srt.utils.network")
_context: Any = import_module("sglang.srt.runtime_context")
_environ: Any = import_module("sglang.srt.environ")
_hooks: Any = import_module("sglang.srt.plugins.hook_registry")

web: Any = _conn.web
CommonKVManager: Any = _conn.CommonKVManager
CommonKVSender: Any = _conn.CommonKVSender
CommonKVReceiver: Any = _conn.CommonKVReceiver
CommonKVBootstrapServer: Any = _conn.CommonKVBootstrapServer
AbortNotification: Any = _conn.AbortNotification
NetworkAddress: Any = _network.NetworkAddress

PREFILL: Any = _utils.DisaggregationMode.PREFILL

#: States of a request, as the scheduler polls them.
BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS, FAILED = (
    getattr(_base.KVPoll, name) for name in ("Bootstrapping", "WaitingForInput", "Transferring", "Success", "Failed")
)


def waiting_timeout_s() -> float:
    """How long a decode rank waits for its KV (`SGLANG_DISAGGREGATION_WAITING_TIMEOUT`)."""
    return float(_environ.envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())


def given_timeout_s() -> float | None:
    """The same where the operator gave it, and did not leave it to SGLang."""
    return waiting_timeout_s() if _environ.envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.is_set() else None


def hold_failed_pages() -> None:
    """Have SGLang hold the pages of a failed request for as long as the manager of this process says, however long.

    By itself it gives them back after 30 s, whoever still writes to them, and where holding is off at once. Raises
    EngineUnsupported in that case, and where its hook does not take.
    """
    if not _environ.envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get():
        raise EngineUnsupported(
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is off: SGLang would give pages of a failed request to"
            " others while a prefill may still write to them"
        )
    _wrap("sglang.srt.disaggregation.decode.DecodeTransferQueue._defer_release", _without_deadline)


def tell_prompts(mode: Any) -> None:
    """Have SGLang tell each sender which prompt its request has, and each receiver that and how long its request is.

    Adapters are read as they are loaded, those of the start now. Raises EngineUnsupported where its hook does not take.
    """
    if mode is PREFILL:
        _wrap("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender", _with_prompt)
    else:
        _wrap("sglang.srt.disaggregation.decode.DecodePreallocQueue._send_kv_metadata", _with_length)
    if _context.get_lora().enable_lora:
        _wrap("sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter", _reading)
        for adapter in _context.get_lora().lora_paths or ():
            _adapters.load(adapter.lora_id, adapter.lora_path)


def _wrap(name: str, around: Callable[..., Any]) -> None:
    """Put `around` around a method of SGLang's, by its full name, once a process."""
    path, _, method = name.rpartition(".")
    module, _, owner = path.rpartition(".")
    of = getattr(import_module(module), owner)
    if not hasattr(getattr(of, method), "__wrapped__"):
        _hooks.HookRegistry.register(name, around, _hooks.HookType.AROUND)
        _hooks.HookRegistry.apply_hooks()
    if not hasattr(getattr(of, method), "__wrapped__"):
        raise EngineUnsupported(f"SGLang's hook at {name} does not take: its log says why")


def _folder_of(path: str) -> str:
    """Returns the folder of an adapter that an operator named by its path, or by its name at a hub."""
    if Path(path).is_dir():
        return path
    return str(import_module("sglang.srt.lora.lora_config").snapshot_download(path, local_files_only=True))


_adapters = LoadedAdapters(_folder_of)


def _reader() -> RequestReader:
    skipped = _environ.envs.SGLANG_MM_SKIP_COMPUTE_HASH.get()
    return RequestReader(_adapters, "SGLANG_MM_SKIP_COMPUTE_HASH is on: images have no hash" if skipped else "")


def _reading(load: Callable[[Any, Any], Any], manager: Any, adapter: Any) -> Any:
    """Read an adapter that is loaded at run time, whatever becomes of it."""
    _adapters.load(adapter.lora_id, adapter.lora_path)
    return load(manager, adapter)


def _with_prompt(create: Callable[..., bool], queue: Any, req: Any, *more: Any, **named: Any) -> bool:
    """A sender of ours begins when it knows the prompt; what SGLang makes for a request without KV is left alone."""
    created = create(queue, req, *more, **named)
    begin = getattr(req.disagg_kv_sender, "begin", None) if created else None
    if begin is not None:
        begin(_reader().content(req))
    return created


def _with_length(
    send: Callable[..., None], queue: Any, request: Any, kv_indices: Any, *more: Any, **named: Any
) -> None:
    """`kv_indices` [token]: of what decode lacks."""
    request.kv_receiver.tokens = (named.get("decode_prefix_len") or 0) + len(kv_indices)
    sampling = request.req.sampling_params
    request.kv_receiver.parameters = sampling.custom_params
    # The first of several, of no tokens, warms the prefix cache; those that a beam search returns are one request's.
    request.kv_receiver.answers = sampling.n if sampling.max_new_tokens and (sampling.beam_width or 1) == 1 else 1
    request.kv_receiver.content = _reader().content(request.req)
    send(queue, request, kv_indices, *more, **named)


def _without_deadline(hold: Callable[[Any, Any], None], queue: Any, request: Any) -> None:
    """Hold a request's pages without a time after which they are given back all the same."""
    queue.deferred_kv_release_timeout = math.inf
    hold(queue, request)


def foreign_prefill() -> Any:
    """What SGLang knows of a prefill that is not SGLang: it has ranks somewhere, and agrees to everything."""
    policy = _context.get_disagg().disaggregation_decode_allocation_policy
    return _conn.PrefillServerInfo(1, 1, 1, 1, None, None, True, decode_allocation_policy=policy)


def room_buffer() -> int:
    """Which buffer beside the cache has the rooms, from the end: the last, or the last but that of checksums."""
    return -2 if _context.get_disagg().disaggregation_enable_kv_checksum else -1


def bootstrap_url(manager: Any) -> str:
    """Where this prefill's bootstrap server is, as SGLang's ranks find it to register."""
    if manager.dist_init_addr:
        host = NetworkAddress.parse(manager.dist_init_addr).resolved().host
    else:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(manager.bootstrap_host, manager.bootstrap_host)
    return NetworkAddress(host, manager.bootstrap_port).to_url()


def put(url: str, **what: Any) -> Any:
    """An HTTP PUT, as SGLang's ranks register. Raises OSError."""
    return _conn.requests.put(url, **what)


def parallel() -> Any:
    """Sizes and ranks of this process."""
    return _context.get_parallel()


def of_all_stages(own: dict[str, int]) -> list[dict[str, int]]:
    """What the pipeline stages beside this rank give, first to last. All call this at the same time."""
    return parallel().pp_group.all_gather_object(own) if parallel().pp_size > 1 else [own]


def name_of_this_engine() -> str:
    """The same on all ranks that serve a request together, and on no others: address, port, data-parallel rank."""
    head = parallel().dist_init_addr or _network.get_local_ip_auto()
    return f"{head} {_context.get_serving().port} {parallel().attn_dp_rank}"


def is_latent(config: Any) -> bool:
    """Whether the model of a `ModelConfig` keeps a latent."""
    return config.attention_arch is import_module("sglang.srt.configs.model_config").AttentionArch.MLA


def mamba_projections(config: Any) -> tuple[tuple[int, int], ...]:
    """Units and heads of x, B and C, which lie in this order in a convolution of Mamba-2; () of other models.

    Their pools do not tell. Where there is one group of B and C every rank has it (`MambaMixer2`).
    """
    mamba = import_module("sglang.srt.configs.hybrid_arch").mamba2_config(config)
    groups = getattr(mamba, "n_groups", 0) or getattr(mamba, "mamba_n_groups", 0)
    if mamba is None or not groups:
        return ()
    shape = mamba.mamba2_cache_params.shape
    return ((shape.intermediate_size, shape.num_heads), *[(groups * shape.state_size, groups)] * 2)


def device(gpu_id: int) -> torch.device:
    """GPU `gpu_id`, or the device that SGLang runs on where that is none."""
    import torch

    kind = _context.get_device().device
    return torch.device(kind, gpu_id) if kind == "cuda" else torch.device(kind)
