"""vLLM servers: the command lines of a plain one and of those that move KV through kvmover or vLLM's own connector."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.live.server import ENVIRONMENTS, Command, Ground, Server, free_port

#: A context that every prompt of the tests fits in, and room for some hundred blocks.
_MODEL = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "300000000")

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(ENVIRONMENTS / "vllm" / "cache"),
}

_GROUND = Ground(
    "vllm",
    (
        *("vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core"),
        *("vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker", "kvmover.engines.vllm.connector"),
    ),
    ENVIRONMENT,
)

#: Nothing is imported yet.
_BARE = Ground("vllm", (), ENVIRONMENT)

#: vLLM's second model runner, the default on a GPU: its kernels are Triton's, and run in the interpreter.
V2_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

#: Asynchronous scheduling, the default on a GPU as well.
ASYNC_SCHEDULING = {"WITHOUT_GPU_ASYNC_SCHEDULING": "1"}

#: vLLM's own offloading to memory of the host.
OFFLOADING = {"WITHOUT_GPU_OFFLOADING": "1"}

#: A cache that other processes of the host map, as they do one on a GPU.
SHARED_CACHE = {"WITHOUT_GPU_SHARED_CACHE": "1"}

#: Time after which a transfer that nobody ends is given up.
DEADLINE_S = 20


def kvmover(role: str = "kv_both", policy: str = "recompute", **options: Any) -> dict[str, Any]:
    """`--kv-transfer-config` for kvmover's connector."""
    return {
        "kv_connector": "KvmoverConnector",
        "kv_connector_module_path": "kvmover.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"deadline_s": DEADLINE_S, **options},
    }


def tiered(root: Path, **offloading: Any) -> dict[str, Any]:
    """`--kv-transfer-config` for vLLM's own offloading to 64 MB of the host's memory, with a page store behind it.

    `offloading`: further options of vLLM's.
    """
    tier = {"type": "KvmoverTier", "module_path": "kvmover.engines.vllm", "root": str(root), "upkeep_s": 1}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier],
            **offloading,
        },
    }


def sharing(own: str, engines: Sequence[str], *tiers: Mapping[str, Any], **offloading: Any) -> dict[str, Any]:
    """`--kv-transfer-config` for vLLM's own offloading, whose memory is lent to `engines`, and theirs is read.

    `tiers` are asked after them.
    """
    peers = {"type": "KvmoverPeerTier", "module_path": "kvmover.engines.vllm", "address": own, "engines": [*engines]}
    return {
        **ACCOUNTED,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 64 << 20,
            "canonical_layout": True,
            "eviction_policy": "LendingPolicy",
            "cache_policy_module_path": "kvmover.engines.vllm",
            "secondary_tiers": [peers, *tiers],
            **offloading,
        },
    }


#: For `--kv-transfer-config`: vLLM's own offloading with kvmover's ledger beside it.
ACCOUNTED = {"kv_connector": "KvmoverOffloadingConnector", "kv_connector_module_path": "kvmover.engines.vllm"}


#: A server that is stopped ends what it has begun, and removes the memory that its processes share.
DRAINED = ("--shutdown-timeout", "20")


def nixl_connector() -> dict[str, Any]:
    """`--kv-transfer-config` for vLLM's own connector over NIXL, its buffers on the host."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }


def vllm(
    name: str,
    model: Path,
    *more: str,
    kv: Mapping[str, Any] | None = None,
    tp: int = 1,
    pp: int = 1,
    block_tokens: int = 16,
    dtype: str = "float32",
    environment: Mapping[str, str] | None = None,
) -> Command:
    """A server of `model`. `kv`: its `--kv-transfer-config`; without one it is plain."""
    port = free_port()
    arguments = ["serve", str(model), "--served-model-name", "m"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, *_MODEL, "--enforce-eager"]
    arguments += ["--compilation-config", '{"custom_ops":["none"]}', "--no-enable-log-requests"]
    arguments += ["--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp)]
    arguments += ["--worker-cls", "vllm_without_gpu.pipeline.StageWorker"] if pp > 1 else []
    arguments += ["--block-size", str(block_tokens), *more]
    if kv is not None:
        # As in every recipe: a server that comes back has the name that it had.
        arguments += ["--kv-transfer-config", json.dumps({"engine_id": name, **kv})]
    own = environment or {}
    # Triton asks for its interpreter when it is imported.
    ground = _BARE if "TRITON_INTERPRET" in own else _GROUND
    return Command(name, ground, "vllm.entrypoints.cli.main", arguments, port, own)


def router(name: str, prefill: Server, decode: Server) -> Command:
    """vLLM's own router in front of a prefill and a decode server."""
    port = free_port()
    arguments = ["--vllm-pd-disaggregation", "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--prefill", prefill.url, "--decode", decode.url, "--policy", "round_robin"]
    arguments += ["--prometheus-port", str(free_port())]
    return Command(name, _BARE, "vllm_router.launch_router", arguments, port)


def vllm_bench(name: str, server: Server, tokenizer: Path, requests: int, folder: Path) -> Command:
    """vLLM's own load of random prompts on a server, which ends by itself; what it measured is in `folder`, as JSON."""
    arguments = ["bench", "serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"]
    arguments += ["--model", "m", "--tokenizer", str(tokenizer), "--dataset-name", "random"]
    arguments += ["--random-input-len", "200", "--random-output-len", "8", "--random-range-ratio", "0.9"]
    arguments += ["--num-prompts", str(requests), "--request-rate", "8", "--ignore-eos", "--temperature", "0"]
    arguments += ["--save-result", "--result-dir", str(folder), "--disable-tqdm"]
    return Command(name, _GROUND, "vllm.entrypoints.cli.main", arguments, 0)
