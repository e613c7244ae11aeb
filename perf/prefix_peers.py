"""Peers' prefix caches under one interface: SGLang's Rust core and Python trees, and vLLM's KVCacheManager.

`KVMOVER_PEERS` names the site-packages folder of an environment that has them (perf/README.md says how to make one); it
is searched after our own, and nothing of theirs is kept here. Imports take seconds: once, before any timing.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
import warnings
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from perf.prefix_ours import Lap, Maker


def load() -> dict[str, Maker]:
    """Makers `(page_tokens, capacity_tokens) -> Contender` by name; empty when nobody named any peers."""
    folder = os.environ.get("KVMOVER_PEERS")
    if not folder:
        return {}
    sys.path.append(folder)
    found: dict[str, Maker] = {}
    for name, importer in (("sglang", _import_sglang), ("vllm", _import_vllm)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importer()
        except ImportError as error:
            print(f"no {name}: {error}")
            continue
        if name == "sglang":
            found |= {
                "sglang rust core": lambda page, capacity: Sglang(page, capacity, "rust"),
                "sglang rust core list": lambda page, capacity: SglangList(page, capacity, "rust"),
                "sglang rust gathering": lambda page, capacity: SglangGathering(page, capacity, "rust"),
                "sglang python core": lambda page, capacity: Sglang(page, capacity, "python"),
                "sglang radix cache": lambda page, capacity: Sglang(page, capacity, "legacy"),
                "sglang rust core events": lambda page, capacity: SglangEvents(page, capacity, "rust"),
                "kvmover in sglang": lambda page, capacity: Sglang(page, capacity, "kvmover"),
                "kvmover in sglang gathering": lambda page, capacity: SglangGathering(page, capacity, "kvmover"),
                "kvmover in sglang events": lambda page, capacity: SglangEvents(page, capacity, "kvmover"),
                "sglang rust core windows": lambda page, capacity: SglangWindows(page, capacity, "rust"),
                "kvmover in sglang windows": lambda page, capacity: SglangWindows(page, capacity, "kvmover"),
            }
        else:
            found["vllm"] = Vllm
    return found


def _import_sglang() -> None:
    import torch

    torch.set_num_threads(1)
    with _without_torchvision():
        for name in ("radix_cache", "unified_radix_cache"):
            import_module(f"sglang.srt.mem_cache.{name}")


def _import_vllm() -> None:
    import_module("vllm.v1.core.kv_cache_manager")


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """The torchvision of package indexes is a CUDA build and does not load beside a CPU torch: a stand-in does."""
    import_module("transformers.utils.import_utils")

    class StandIn(types.ModuleType):
        BICUBIC, BILINEAR, __version__ = 3, 2, "0.0"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {}) if name[:1].isupper() else StandIn(f"{self.__name__}.{name}")

        def __call__(self, *_: Any, **__: Any) -> None:
            return None

    tails = ("", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional", ".io", ".ops")
    names = [f"torchvision{tail}" for tail in tails]
    for name in names:
        module = StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
    yield


class _Counting:
    """An allocator that only counts tokens: what the tree asks of SGLang's."""

    device = "cpu"

    def __init__(self, page_tokens: int, tokens: int) -> None:
        self.page_size, self.tokens, self.size_full = page_tokens, tokens, tokens

    def available_size(self) -> int:
        return self.tokens

    def free(self, indices: Any) -> None:
        self.tokens += len(indices)

    def free_segment(self, indices: Any, start_pos: int = 0) -> None:
        self.tokens += len(indices)

    free_full_segment = free_segment

    def free_page_ids(self, page_ids: Any) -> None:
        self.tokens += len(page_ids) * self.page_size


#: SGLang's two cores of `UnifiedRadixCache`.
_CORES = ("rust", "python")


def _ours() -> Any:
    """kvmover's cache behind SGLang's interface."""
    return import_module("kvmover.engines.sglang.radix_cache").KvmoverRadixCache


class Sglang:
    """`UnifiedRadixCache` with the full component and one of its two cores, the older `RadixCache`, or ours instead.

    The indices that a request would have allocated are a slice of one tensor: allocation and their gathering are free.
    """

    #: Whether KV events are made: what `CacheInitParams` calls `enable_kv_cache_events`.
    events = False
    #: The tokens of a sliding window that some layers have; 0: none has one.
    window_tokens = 0

    def __init__(self, page_tokens: int, capacity_tokens: int, core: str) -> None:
        import torch

        base, legacy, unified, params_of, kinds = (
            import_module(f"sglang.srt.mem_cache.{name}")
            for name in (
                "base_prefix_cache",
                "radix_cache",
                "unified_radix_cache",
                "cache_init_params",
                "unified_cache.component_type",
            )
        )
        self.page_tokens = page_tokens
        self.allocator: Any = self.pools(page_tokens, capacity_tokens)
        self.legacy = core == "legacy"
        full, self.swa = kinds.ComponentType.FULL, kinds.ComponentType.SWA
        components = (full, self.swa) if self.window_tokens else (full,)
        more: dict[str, Any] = {"tree_components": components, "tree_core_backend": core} if core in _CORES else {}
        params = params_of.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_tokens,
            sliding_window_size=self.window_tokens or None,
            enable_kv_cache_events=self.events,
            **more,
        )
        makers = {"legacy": legacy.RadixCache} | dict.fromkeys(_CORES, unified.UnifiedRadixCache)
        self.tree: Any = (makers.get(core) or _ours())(params)
        self.base, self.key = base, legacy.RadixKey
        self.rows = torch.arange(200_000, dtype=torch.int64)

    def prepare(self, tokens: Any) -> Any:
        return array("q", tokens.astype("int64").tobytes())

    def pools(self, page_tokens: int, capacity_tokens: int) -> Any:
        """The allocator of so many tokens."""
        return _Counting(page_tokens, capacity_tokens)

    def held(self, prompt: Any) -> array[int]:
        """The prompt as its keys have it: SGLang's scheduler holds it so."""
        return prompt

    def serve(self, prompt: Any, lap: Lap) -> int:
        tree, base = self.tree, self.base
        lap("start")
        key = self.key(self.held(prompt))
        match = tree.match_prefix(base.MatchPrefixParams(key=key))
        hit = match.device_prefix_len
        self.gather(match)
        lap("match")
        lock = tree.inc_lock_ref(match.last_device_node) if self.legacy else tree.lock(match.last_device_node)
        lap("lock")
        needed = len(prompt) - hit
        if self.allocator.tokens < needed:
            tree.evict(base.EvictParams(num_tokens=needed - self.allocator.tokens))
        self.allocator.tokens -= needed
        lap("evict")
        whole = len(prompt) - len(prompt) % self.page_tokens
        row = self.rows[:whole]
        tree.insert(base.InsertParams(key=key, value=row, prev_prefix_len=hit))
        self.allocator.tokens += len(prompt) - whole
        lap("insert")
        if self.legacy:
            tree.dec_lock_ref(match.last_device_node)
        else:
            tree.unlock(lock)
        lap("unlock")
        self.tell(lap)
        return hit

    def tell(self, lap: Lap) -> None:
        """Nobody listens to KV events."""

    def gather(self, match: Any) -> None:
        """A match names a node, and not yet the indices that the request needs."""


class SglangList(Sglang):
    """The same for an engine that holds tokens as a list of numbers: made once a request what its keys have."""

    def prepare(self, tokens: Any) -> Any:
        return tokens.tolist()

    def held(self, prompt: Any) -> array[int]:
        return array("q", prompt)


class SglangGathering(Sglang):
    """The same, with the indices of the matched prefix gathered, as a scheduler does before it can use them."""

    def gather(self, match: Any) -> None:
        self.tree.path_device_indices(match.last_device_node)


class SglangEvents(Sglang):
    """The same with KV events, taken after every request and encoded as one batch, as SGLang's publishers do."""

    events = True

    def __init__(self, page_tokens: int, capacity_tokens: int, core: str) -> None:
        super().__init__(page_tokens, capacity_tokens, core)
        import msgspec

        self.batch = import_module("sglang.srt.disaggregation.kv_events").KVEventBatch
        self.encoder = msgspec.msgpack.Encoder()

    def tell(self, lap: Lap) -> None:
        self.encoder.encode(self.batch(ts=0.0, events=self.tree.take_events()))
        lap("events")


class SglangWindows(Sglang):
    """The same where half of the layers see the last 4096 tokens. Windows have a quarter of the capacity.

    SGLang's own allocator alone knows which tokens have a window page: it runs here, and its time counts.
    """

    window_tokens = 4096

    def pools(self, page_tokens: int, capacity_tokens: int) -> Any:
        """SGLang's allocator over pools of a byte a token and layer."""
        import torch

        kind = import_module("sglang.srt.mem_cache.allocator.swa").SWATokenToKVPoolAllocator
        of_pool = import_module("sglang.srt.mem_cache.swa_memory_pool").SWAKVPool
        sizes = (capacity_tokens, capacity_tokens // 4, page_tokens, torch.int8)
        pool = of_pool(*sizes, 1, 1, [0], [1], "cpu", enable_memory_saver=False)
        return kind(*sizes, "cpu", pool, need_sort=False)

    def serve(self, prompt: Any, lap: Lap) -> int:
        import torch

        tree, base, allocator = self.tree, self.base, self.allocator
        lap("start")
        key = self.key(self.held(prompt))
        match = tree.match_prefix(base.MatchPrefixParams(key=key))
        hit, row = match.device_prefix_len, tree.path_device_indices(match.last_device_node)
        lap("match")
        lock = tree.lock(match.last_device_node)
        lap("lock")
        end = len(prompt) - len(prompt) % self.page_tokens
        live = max(hit, end - self.window_tokens)
        short = end - hit - allocator.full_available_size(), end - live - allocator.swa_available_size()
        if max(short) > 0:
            tree.evict(base.EvictParams(num_tokens=max(0, short[0]), swa_num_tokens=max(0, short[1])))
        lap("evict")
        fresh, windows = allocator.full_attn_allocator.alloc(end - hit), allocator.swa_attn_allocator.alloc(end - live)
        allocator.set_full_to_swa_mapping(fresh[live - hit :], windows)
        lap("alloc")
        kept = base.InsertParams(key=key, value=torch.cat([row, fresh]), prev_prefix_len=hit)
        kept.set_evicted_seqlen(self.swa, live)
        tree.insert(kept)
        lap("insert")
        tree.unlock(lock)
        lap("unlock")
        return hit


class Vllm:
    """`KVCacheManager` with one group of full attention. Hashing is timed as an operation of its own."""

    def __init__(self, page_tokens: int, capacity_tokens: int) -> None:
        import torch

        sampling, hashing, manager, utils, interface, request = (
            import_module(f"vllm.{name}")
            for name in (
                "sampling_params",
                "utils.hashing",
                "v1.core.kv_cache_manager",
                "v1.core.kv_cache_utils",
                "v1.kv_cache_interface",
                "v1.request",
            )
        )
        utils.init_none_hash(hashing.sha256)
        self.hasher = utils.get_request_block_hasher(page_tokens, hashing.sha256)
        spec = interface.FullAttentionSpec(block_size=page_tokens, num_kv_heads=1, head_size=1, dtype=torch.float16)
        config = interface.KVCacheConfig(
            num_blocks=capacity_tokens // page_tokens + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = manager.KVCacheManager(
            config, max_model_len=200_000, scheduler_block_size=page_tokens, hash_block_size=page_tokens
        )
        self.request, self.sampling, self.serial = request.Request, sampling.SamplingParams(max_tokens=1), 0

    def prepare(self, tokens: Any) -> list[int]:
        return tokens.tolist()

    def serve(self, prompt: list[int], lap: Lap) -> int:
        self.serial += 1
        lap("start")
        request = self.request(
            request_id=str(self.serial),
            prompt_token_ids=prompt,
            sampling_params=self.sampling,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        lap("hash")
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        lap("match")
        got = self.manager.allocate_slots(request, len(prompt) - hit, hit, blocks)
        assert got is not None, "out of blocks"
        lap("insert")
        request.num_computed_tokens = len(prompt)
        self.manager.free(request)
        lap("unlock")
        return hit
