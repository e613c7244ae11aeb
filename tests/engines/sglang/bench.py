"""SGLang's own parts on a machine without a GPU: ranks as forked processes, its pools, and its cache controllers."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import sys
import threading
import traceback
import types
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.safetensors_files import tiny, write_checkpoint

# Ranks are forked from one process that has imported the engine: none of its threads may be needed after the fork.
torch.set_num_threads(1)

PAGE = 4


def _without_torchvision() -> None:
    """Package indexes serve torchvision for CUDA only; nothing of it is needed but names, while SGLang is imported."""
    transformers: Any = import_module("transformers.utils.import_utils")

    class StandIn(types.ModuleType):
        BICUBIC, BILINEAR, __version__ = 3, 2, "0.0"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {}) if name[:1].isupper() else StandIn(f"{self.__name__}.{name}")

        def __call__(self, *_: Any, **__: Any) -> None:
            return None

    parts = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops")
    for name in ("torchvision", *(f"torchvision.{part}" for part in parts)):
        module = StandIn(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
    # Of SGLang 0.5.21 and before, transformers refuses to register its processors of images without torchvision.
    transformers.DummyObject.__getattribute__ = type.__getattribute__
    transformers.DummyObject.register = lambda *_, **__: None


_without_torchvision()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    controllers: Any = import_module("sglang.srt.managers.cache_controller")
    hybrid: Any = import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
    assembler: Any = import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler")
    storage: Any = import_module("sglang.srt.mem_cache.hicache_storage")
    pools: Any = import_module("sglang.srt.mem_cache.memory_pool")
    hosts: Any = import_module("sglang.srt.mem_cache.pool_host")
    context: Any = import_module("sglang.srt.runtime_context")
    arguments: Any = import_module("sglang.srt.server_args")

_utils: Any = import_module("sglang.srt.mem_cache.utils")

#: SGLang's function of the hashes of a prompt's pages, which has another name in 0.5.19 and before.
hash_pages: Any = getattr(_utils, "get_storage_hash_str", None) or _utils.get_hash_str

# Pinning needs a GPU; the memory is the same.
import_module("sglang.srt.mem_cache.pool_host.common")._cuda_host_register = lambda *_, **__: None

MODEL = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,'
    ' "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 256,'
    ' "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}'
)


@dataclass(frozen=True)
class Shape:
    """A fleet, its host layout and its kind of attention: 4 heads of 16, or a latent of 24, in 4 layers."""

    layout: str = "page_first"
    kind: str = "mha"
    tp: int = 1
    pp: int = 1


@dataclass
class Rank:
    shape: Shape
    number: int
    root: Path
    group: Any
    kept: Any = None

    @property
    def tp(self) -> int:
        return self.number % self.shape.tp

    @property
    def pp(self) -> int:
        return self.number // self.shape.tp

    def options(self, **more: Any) -> dict[str, Any]:
        """What `--hicache-storage-backend-extra-config` holds."""
        plug = {"backend_name": "kvmover", "module_path": "kvmover.engines.sglang", "class_name": "KvmoverStore"}
        return {**plug, "interface_v1": 1, "root": str(self.root), "upkeep_s": 0.01, **more}

    def device_pool(self) -> Any:
        layers = 4 // self.shape.pp
        span = {"start_layer": self.pp * layers, "end_layer": (self.pp + 1) * layers}
        if self.shape.kind == "mla":
            return pools.MLATokenToKVPool(64, PAGE, torch.bfloat16, 16, 8, layers, "cpu", False, **span)
        heads = max(1, 4 // self.shape.tp)
        return pools.MHATokenToKVPool(64, PAGE, torch.bfloat16, heads, 16, layers, "cpu", False, **span)

    def host_pool(self, device_pool: Any) -> Any:
        asked = {"server_args": context.get_context().server_args, "use_mla": self.shape.kind == "mla"}  # until 0.5.21
        known = signature(assembler.build_kv_host_pool).parameters
        older = {name: value for name, value in asked.items() if name in known}
        host = assembler.build_kv_host_pool(kv_pool=device_pool, page_size=PAGE, **older)
        host.pin_memory = False  # torch pins by itself what the older interface passes around
        return host

    def controller(self, **more: Any) -> Any:
        """SGLang's controller with our class behind it, loaded by SGLang's factory."""
        device_pool = self.device_pool()
        host = self.host_pool(device_pool)
        allocator = SimpleNamespace(get_kvcache=lambda: device_pool)
        made = controllers.HiCacheController(
            allocator, host, PAGE, self.group, threading.Event(), io_backend="kernel", enable_storage_metrics=True
        )
        made.attach_storage_backend("dynamic", PAGE, "the model", self.options(**more))
        return made


@dataclass
class Running:
    """A fleet under way: a process a rank."""

    shape: Shape
    processes: list[Any]
    answers: Any


def start(shape: Shape, root: Path, body: Callable[..., Any], *given: Any, **arguments: Any) -> Running:
    """`body(rank, *given)` on every rank of a fleet, each in a process of its own. `arguments`: of SGLang's server."""
    fork = multiprocessing.get_context("fork")
    size = shape.tp * shape.pp
    queue_: Any = fork.Queue()
    root.mkdir(exist_ok=True)
    if not (root / "model").exists():
        write_checkpoint(root / "model", tiny())
    meeting = root / f"meeting-{uuid.uuid4().hex}"
    processes = [
        fork.Process(target=_rank, args=(queue_, shape, n, root, meeting, body, given, arguments), daemon=True)
        for n in range(size)
    ]
    for process in processes:
        process.start()
    return Running(shape, processes, queue_)


def finish(running: Running) -> list[Any]:
    """What the bodies returned, by rank; a rank that raised fails the test with its words."""
    size, done = len(running.processes), dict[int, Any]()
    with suppress(queue.Empty):
        while len(done) < size:
            number, answer, trouble = running.answers.get(timeout=120)
            if trouble:
                for process in running.processes:
                    process.kill()
                pytest.fail(f"rank {number} of {running.shape}:\n{trouble}", pytrace=False)
            done[number] = pickle.loads(answer)
    for process in running.processes:
        process.join(10)
        process.kill()
    assert len(done) == size, f"of {size} ranks of {running.shape} only {sorted(done)} answered"
    return [done[number] for number in range(size)]


def ranks(shape: Shape, root: Path, body: Callable[..., Any], *given: Any) -> list[Any]:
    """A fleet from beginning to end, with a host tier."""
    return finish(start(shape, root, body, *given, enable_hierarchical_cache=True, hicache_mem_layout=shape.layout))


def _rank(
    answers: Any,
    shape: Shape,
    number: int,
    root: Path,
    meeting: Path,
    body: Callable[..., Any],
    given: Sequence[Any],
    more: dict[str, Any],
) -> None:
    try:
        (root / "model").mkdir(exist_ok=True)
        (root / "model" / "config.json").write_text(MODEL)
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=number, world_size=shape.tp * shape.pp)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = arguments.ServerArgs(
                model_path=str(root / "model"),
                device="cpu",
                tp_size=shape.tp,
                pp_size=shape.pp,
                skip_tokenizer_init=True,
                **more,
            )
            publish(args, shape, number)
            rank = Rank(shape, number, root, torch.distributed.group.WORLD)
            answers.put((number, pickle.dumps(body(rank, *given)), ""))
    except BaseException:
        answers.put((number, None, traceback.format_exc()))


def publish(args: Any, shape: Shape, number: int) -> None:
    """Tell SGLang the settings of this process and its place, which 0.5.20 and before read from their groups."""
    if hasattr(context, "SpawnRanks"):
        context.publish(args, role="scheduler", ranks=context.SpawnRanks(world_rank=number))
        return
    context.publish(args, role="scheduler")
    pp, tp = divmod(number, shape.tp)
    place = {"tp_rank": tp, "tp_size": shape.tp, "pp_rank": pp, "pp_size": shape.pp}
    alone = {"attn_cp_rank": 0, "attn_cp_size": 1, "attn_tp_rank": tp, "attn_tp_size": shape.tp, "attn_dp_rank": 0}
    context.get_parallel()._overrides.update(place | alone)
    attention: Any = import_module("sglang.srt.layers.dp_attention")
    attention._ATTN_DP_SIZE, attention._ATTN_DP_RANK = 1, 0


def content(host: Any, seed: int) -> torch.Tensor:
    """Bytes that are nobody else's, in the shape of a host pool's buffer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (host.kv_buffer.nbytes,), generator=generator, dtype=torch.uint8)


def save(controller: Any, host_indices: torch.Tensor, tokens: list[int], keys: list[str]) -> int:
    """Pages of the host pool into storage, by the engine's backup thread; the tokens that it counts as stored."""
    controller.write_storage(host_indices, tokens, keys)
    return controller.ack_backup_queue.get(timeout=60).completed_tokens


def load(controller: Any, tokens: list[int]) -> tuple[int, torch.Tensor]:
    """A prefix from storage into host pages, by the engine's prefetch threads: tokens that hit, and where they are."""
    controller.prefetch("request", tokens)
    operation = controller.prefetch_hit_queue.get(timeout=60)
    operation.host_indices = controller.mem_pool_host.alloc(max(PAGE, operation.storage_hit_count))
    if not hasattr(controller, "ack_prefetch_queue"):
        return _loaded_at_once(controller, operation)
    controller.prefetch_buffer.put(operation)
    completed = 0
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=60)
        if ack.completed_req:
            return completed, operation.host_indices[:completed]
        completed = ack.completed_tokens


def _loaded_at_once(controller: Any, operation: Any) -> tuple[int, torch.Tensor]:
    """0.5.18 counts in the operation itself, tells nobody that it is through with it, and has its scheduler agree."""
    transfer, ended = controller._page_transfer, threading.Event()

    def transferred(one: Any) -> None:
        transfer(one)
        ended.set()

    controller._page_transfer = transferred
    controller.prefetch_buffer.put(operation)
    assert ended.wait(60)
    controller._page_transfer = transfer
    completed = torch.tensor(operation.completed_tokens)
    torch.distributed.all_reduce(completed, torch.distributed.ReduceOp.MIN)
    return int(completed), operation.host_indices[: int(completed)]


def keys_of(tokens: list[int]) -> list[str]:
    return hash_pages(tokens, None, page_size=PAGE)


def logical(host: Any, page: int) -> torch.Tensor:
    """A page of a host pool as bytes [layer, kv, head, token, row], whatever its layout: read by the engine itself."""
    flat = host.get_data_page(page * PAGE, flat=True)
    order = {
        "layer_first": "kv layer token head dim",
        "page_first": "kv token layer head dim",
        "page_first_direct": "kv layer token head dim",
        "page_head": "kv head token layer dim",
    }[host.layout].split()
    kv, heads = (2, host.head_num) if hasattr(host, "head_num") else (1, 1)
    extents = {"kv": kv, "layer": host.layer_num, "token": PAGE, "head": heads}
    shaped = flat.reshape([extents[axis] for axis in order[:-1]] + [-1])
    axes = [order.index(axis) for axis in ("layer", "kv", "head", "token", "dim")]
    return shaped.permute(axes).contiguous().view(torch.uint8)
