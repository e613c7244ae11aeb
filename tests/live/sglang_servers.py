"""SGLang servers: the command lines of a plain one, of prefill and decode through kvmover, and of SGLang's routers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.live.server import ENVIRONMENTS, Command, Ground, Server, free_port

#: Lets SGLang's wheel for CUDA run on a CPU. Of these processes alone: the environment's other users do not see it.
_FIXTURE = Path(__file__).parent / "fixtures" / "sglang"

#: With what recurrent layers compute, which both engines share.
_FIXTURES = (_FIXTURE, _FIXTURE.parent / "vllm")

_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([*map(str, _FIXTURES), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    "PYTHONWARNINGS": "ignore",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_LOCAL_IP_NIC": "lo",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "1",
    "TORCH_EXTENSIONS_DIR": str(ENVIRONMENTS / "sglang" / "cache"),
}

_GROUND = Ground(
    "sglang",
    (
        *("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"),
        *("sglang.srt.managers.detokenizer_manager", "sglang.srt.models.registry", "kvmover.engines.sglang.pd"),
    ),
    _ENVIRONMENT,
)

#: Nothing is imported yet.
_BARE = Ground("sglang", (), {})

#: A CPU that others want too, a context that every prompt of the tests fits in, and room for some hundred pages.
_MODEL = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--skip-server-warmup", "--sleep-on-idle", "--enable-metrics"),
    *("--context-length", "2048", "--max-total-tokens", "32768"),
)

#: What `--disaggregation-mode` is followed by. Retracted requests are kept without pinned memory.
PREFILL = ("prefill",)
DECODE = ("decode", "--disaggregation-decode-retraction-backup", "cpu_tensor")
#: A decode that keeps prefixes, and asks for what is behind them.
DECODE_WITH_PREFIXES = (*DECODE, "--disaggregation-decode-enable-radix-cache")


def sglang(
    name: str,
    model: Path,
    *more: str,
    mode: tuple[str, ...] = (),
    tp: int = 1,
    pp: int = 1,
    page_tokens: int = 16,
    dtype: str = "float32",
    environment: Mapping[str, str] | None = None,
    backend: str = "kvmover",
) -> Command:
    """A server of `model`; `mode`: one half of a request, whose KV moves through `backend`, or by itself."""
    port = free_port()
    arguments = ["--model-path", str(model), "--served-model-name", "m"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, *_MODEL]
    arguments += ["--nccl-port", str(free_port())]  # SGLang's own choice may be another server's, not yet bound
    arguments += ["--tp-size", str(tp), "--pp-size", str(pp), "--page-size", str(page_tokens), *more]
    bootstrap_port = 0
    # One entry a rank, or SGLang wants a NUMA node for each; what would bind threads to cores is not there.
    own = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp * pp), **(environment or {})}
    if mode:
        bootstrap_port = free_port()
        own |= {"KVMOVER_METRICS_PORT": str(free_port())} if backend == "kvmover" else {"WITHOUT_GPU_VRAM": "host"}
        arguments += ["--disaggregation-transfer-backend", backend, "--disaggregation-mode", *mode]
        arguments += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    return Command(name, _GROUND, "sglang.launch_server", arguments, port, own, bootstrap_port)


def of_tree(command: Command, tree: Path) -> Command:
    """The same server with the kvmover of another tree.

    The installed entry point names the plug-in's module of today; an older tree has it under another name.
    """
    plugin = tree / "kvmover" / "engines" / "sglang" / "sglang_plugin.py"
    if not plugin.exists():
        plugin.write_text("from kvmover.engines.sglang.plugin import register as register\n")
    own = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([*map(str, _FIXTURES), str(tree)])}
    return replace(command, ground=Ground("sglang", (*_GROUND.modules, "kvmover"), own))


def hicache(root: Path | str, layout: str, **options: Any) -> tuple[str, ...]:
    """Pages go through host memory of this layout to kvmover's page store at `root`, and come back from there."""
    store = {"backend_name": "kvmover", "module_path": "kvmover.engines.sglang", "class_name": "KvmoverStore"}
    config = {**store, "interface_v1": 1, "root": str(root), "prefetch_threshold": 16, **options}
    return (
        *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct"),
        *("--hicache-mem-layout", layout, "--hicache-write-policy", "write_through"),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
    )


def linker(root: Path | str, **options: Any) -> tuple[str, ...]:
    """Pages go from the cache to kvmover's page store at `root`, and back, past the host's memory."""
    config = {"linker": "KvmoverLinker", "linker_module_path": "kvmover.engines.sglang"}
    return (
        *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"),
        *(
            "--unified-cache-external-linker-config",
            json.dumps({**config, "linker_extra_config": {"root": str(root), **options}}),
        ),
    )


def router(name: str, prefill: Server, decode: Server, *more: str) -> Command:
    """SGLang's own router in front of a prefill and a decode server; `--mini-lb` is the toy among them."""
    port = free_port()
    arguments = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--prefill", prefill.url, str(prefill.command.bootstrap_port), "--decode", decode.url]
    arguments += ["--policy", "random", "--prometheus-port", str(free_port()), *more]
    return Command(name, _BARE, "sglang_router.launch_router", arguments, port)
