"""Dynamo's processes: its frontend, and workers of vLLM and SGLang that find it by files of a folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.live.release import Release, laid, over
from tests.live.server import ENVIRONMENTS, ROOT, Command, Ground, free_port
from tests.live.sglang_servers import sglang
from tests.live.vllm_servers import vllm

#: What Dynamo's extras pin: `vllm` this NIXL too, `sglang` NIXL 1.5.0.
VLLM, SGLANG, NIXL = Release("vllm", "0.31.0"), Release("sglang", "0.5.21"), "1.4.1"

_EXAMPLES = ROOT / "docs" / "examples" / "orchestrators"


@dataclass(frozen=True, slots=True)
class Dynamo:
    """Processes that find each other in `folder`, without etcd or NATS. All of them keep their transfers in `log`."""

    folder: Path
    log: Path

    def frontend(self, name: str) -> Command:
        """Returns the command of the HTTP server that clients ask."""
        port = free_port()
        arguments = ["--http-host", "127.0.0.1", "--http-port", str(port)]
        command = Command(name, Ground("vllm", (), {}), "dynamo.frontend", arguments, port, self._environment(0))
        return over(command, laid("orchestrator.sh", "dynamo"))

    def vllm(self, name: str, model: Path, mode: str, kv: Mapping[str, Any], *folders: str, **how: Any) -> Command:
        """Returns the command of a vLLM worker. `folders` come before Dynamo's own."""
        served = over(self.plain_vllm(name, model, kv=kv, **how), *folders)
        path, *rest = served.arguments[1:]
        arguments = ["--model", path, *_without(rest, "--host", "--port"), "--disaggregation-mode", mode]
        # Dynamo asks for an address that others reach before it lets NixlConnector start.
        own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", **served.environment}
        return self._worker(replace(served, module="dynamo.vllm", arguments=arguments, environment=own))

    def plain_vllm(self, name: str, model: Path, **how: Any) -> Command:
        """Returns the command of a server of the same release without Dynamo."""
        # Dynamo imports processors of images, whose torchvision is a CUDA build.
        folders = laid("orchestrator.sh", "dynamo"), str(ENVIRONMENTS / "vllm" / "apart"), str(ROOT / ".nixl" / NIXL)
        return over(VLLM.of(vllm(name, model, **how)), *folders)

    def sglang(
        self, name: str, model: Path, mode: tuple[str, ...], *folders: str, module: str = "dynamo_sglang"
    ) -> Command:
        """Returns the command of an SGLang worker, by default through the module of the docs."""
        return self._worker(replace(over(self.plain_sglang(name, model, mode=mode), *folders), module=module))

    def plain_sglang(self, name: str, model: Path, **how: Any) -> Command:
        """Returns the command of a server of the same release without Dynamo."""
        served = over(SGLANG.of(sglang(name, model, **how)), str(_EXAMPLES), laid("orchestrator.sh", "dynamo"))
        # The paged allocator of this release is a kernel of Triton's.
        environment = {**served.ground.environment, "TRITON_INTERPRET": "1"}
        return replace(served, ground=replace(served.ground, environment=environment))

    def _worker(self, command: Command) -> Command:
        """Returns it with Dynamo's environment; the command's port is Dynamo's own, for health and metrics."""
        return replace(command, environment={**command.environment, **self._environment(command.port)})

    def _environment(self, system_port: int) -> dict[str, str]:
        own = {"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": str(system_port)} if system_port else {}
        return {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.folder),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_LOGGING_DISABLE_ANSI_COLORS": "1",
            "KVMOVER_RECORD_RUN_LOG": str(self.log),
            **own,
        }


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """Returns the arguments without these options and the value of each."""
    kept, given = list[str](), iter(arguments)
    for word in given:
        if word in options:
            next(given)
        else:
            kept.append(word)
    return kept


def patched(folder: Path, engine: str) -> str:
    """Copies Dynamo's worker of an engine into `folder`, with the diff of the docs. Returns that for PYTHONPATH."""
    home, worker = Path(laid("orchestrator.sh", "dynamo")), Path("dynamo") / engine
    shutil.copytree(home / worker, folder / worker)
    diff = ["git", "apply", f"--include={worker}/*", str(_EXAMPLES / "dynamo-1.6.1.diff")]
    subprocess.run(diff, cwd=folder, check=True)
    return str(folder)
