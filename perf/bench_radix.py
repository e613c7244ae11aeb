"""SGLang's scheduling on kvmover's radix cache beside its own with the Rust core: thread CPU time inside the cache.

    KVMOVER_TRACES=FOLDER KVMOVER_PEERS=SITE_PACKAGES python -m perf.bench_radix [requests]

The first requests of the trace go through SGLang's own admission, allocation, checkpoints and release one after the
other, in chunks of `CHUNK_TOKENS` tokens, with pools and rows of requests that are SGLang's. What is timed are the
calls that these make of the cache, as they make them; ours has its ledger on. Every pass is a process of its own, and
the caches take turns. Target: half of the time of the Rust core.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvmover.tools.replay import ReplayRequest, read_trace
from perf.bench_prefix import apart
from perf.command_line import options
from perf.prefix_peers import load
from perf.record import Spread, write

ROUNDS = 3
CHUNK_TOKENS = 8192
PAGES = (64, 1)
CAPACITIES = {"3M": 3_000_000}
#: The first of the trace: the pool is full after some 250.
REQUESTS = 800
#: The longest prompt of the trace with its answer.
ROW_TOKENS = 140_000

#: Methods of a cache that SGLang's scheduling calls, and what they are for.
CALLS = {
    "match_prefix": "match",
    "lock": "lock",
    "unlock": "lock",
    "prefix_device_indices": "gather",
    "evict": "evict",
    "evict_for_alloc": "evict",
    "checkpoint": "keep",
    "maybe_hand_to_session": "account",
    "on_release": "account",
    "evictable_size": "sizes",
    "full_evictable_size": "sizes",
    "protected_size": "sizes",
}

MODEL = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,'
    ' "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 256,'
    ' "max_position_embeddings": 200000, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}'
)


def _named(name: str) -> Any:
    return import_module(f"sglang.srt.{name}")


class Stopwatch:
    """Time inside a cache, by what its calls are for. Calls that it makes of itself are part of the outer one."""

    def __init__(self, cache: Any) -> None:
        self.spent_ns: Counter[str] = Counter()
        self._inside = False
        for name, purpose in CALLS.items():
            setattr(cache, name, self._timed(getattr(cache, name), purpose))

    def _timed(self, call: Callable[..., Any], purpose: str) -> Callable[..., Any]:
        clock = time.thread_time_ns

        def timed(*given: Any, **named: Any) -> Any:
            if self._inside:
                return call(*given, **named)
            self._inside = True
            began = clock()
            try:
                return call(*given, **named)
            finally:
                self.spent_ns[purpose] += clock() - began
                self._inside = False

        return timed


class Server:
    """One cache with pools of SGLang's, and its scheduling of one request at a time."""

    def __init__(
        self, name: str, page_tokens: int, capacity_tokens: int, rows: int = 4, row_tokens: int = ROW_TOKENS
    ) -> None:
        import torch

        self.torch, self.page_tokens = torch, page_tokens
        allocator = (
            _named("mem_cache.allocator.token").TokenToKVPoolAllocator(
                capacity_tokens, torch.float32, "cpu", None, False
            )
            if page_tokens == 1
            else _named("mem_cache.allocator.paged").PagedTokenToKVPoolAllocator(
                capacity_tokens, page_tokens, torch.float32, "cpu", None, False
            )
        )
        self.rows = _named("mem_cache.memory_pool").ReqToTokenPool(rows, row_tokens, "cpu", False)
        self.cache: Any = _cache(name, page_tokens, allocator, self.rows)
        self.allocator = allocator
        self.steps = self.hits = 0

    def serve(self, number: int, request: ReplayRequest) -> None:
        """Admit, compute in chunks, answer and release one request."""
        batches, cache = _named("managers.schedule_batch"), self.cache
        sampling = _named("sampling.sampling_params").SamplingParams(max_new_tokens=request.output_length)
        prompt = array("q", request.tokens().astype("int64").tobytes())
        req = batches.Req(str(number), "", prompt, sampling)
        adder = self._adder()
        req.init_next_round_input(cache)
        self.hits += req.prefix_len
        adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        while True:
            if not adder.can_run_list:
                raise RuntimeError(f"request {number} of {len(prompt)} tokens was not admitted")
            self.steps += 1
            _named("mem_cache.allocation").alloc_for_extend(self._batch(req))
            chunked = req.extend_end < len(prompt)
            if not chunked:
                # No other prompt goes on as this answer does.
                req.output_ids.extend(range(1 << 31, (1 << 31) + request.output_length))
            _named("mem_cache.common").checkpoint_kv_cache(req, cache)
            if not chunked:
                break
            adder = self._adder()
            req.init_next_round_input()
            adder.add_chunked_req(req)
        self._finish(req)

    def _finish(self, req: Any) -> None:
        """All of the answer but its last token has KV, as after decoding; then the request is released."""
        req.refresh_fill_ids()
        req.extend_end = len(req.full_untruncated_fill_ids) - 1
        if req.extend_end > req.prefix_len:
            _named("mem_cache.allocation").alloc_for_extend(self._batch(req))
        req.finished_reason = _named("managers.schedule_batch").FINISH_LENGTH(length=len(req.output_ids))
        req.finished_len = len(req.output_ids)
        _named("mem_cache.common").release_kv_cache(req, self.cache, checkpoint=True)

    def _adder(self) -> Any:
        adder: Any = _named("managers.schedule_policy").PrefillAdder
        return adder(self.page_tokens, self.cache, self.allocator, None, 0.7, 1 << 30, CHUNK_TOKENS)

    def _batch(self, req: Any) -> Any:
        """What allocation reads of SGLang's batch, of one request."""
        length = self.torch.tensor([req.extend_end])
        row = self.torch.tensor([req.kv.req_pool_idx or 0])
        return SimpleNamespace(
            reqs=[req],
            device="cpu",
            tree_cache=self.cache,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            hisparse_coordinator=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            prefix_lens=[req.prefix_len],
            extend_lens=[req.extend_end - req.prefix_len],
            extend_num_tokens=req.extend_end - req.prefix_len,
            seq_lens=length,
            seq_lens_cpu=length,
            req_pool_indices=row,
            req_pool_indices_cpu=row,
        )


def _cache(name: str, page_tokens: int, allocator: Any, rows: Any) -> Any:
    kinds = _named("mem_cache.unified_cache.component_type")
    core = {} if name == "kvmover" else {"tree_core_backend": name.split()[1]}
    params = _named("mem_cache.cache_init_params").CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page_tokens,
        tree_components=(kinds.ComponentType.FULL,),
        **core,
    )
    if core:
        return _named("mem_cache.unified_radix_cache").UnifiedRadixCache(params)
    from kvmover.config import Settings
    from kvmover.engines.common import ParallelRank
    from kvmover.engines.sglang.radix_accounts import RadixAccounts
    from kvmover.engines.sglang.radix_cache import KvmoverRadixCache

    return KvmoverRadixCache(params, RadixAccounts("model", Settings(), ParallelRank(0, 1)))


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the trace on one cache: microseconds inside it, by what its calls are for."""

    spent_us: dict[str, float]
    steps: int
    hits: int

    @property
    def total_us(self) -> float:
        """Of all calls."""
        return sum(self.spent_us.values())


CACHES = ("kvmover", "sglang rust core")
RUST = "sglang rust core"


def _pass(name: str, requests: list[ReplayRequest], page_tokens: int, capacity: int) -> Pass:
    _publish()
    server = Server(name, page_tokens, capacity)
    watch = Stopwatch(server.cache)
    gc.collect()
    gc.freeze()
    for number, request in enumerate(requests):
        server.serve(number, request)
    return Pass({what: ns / 1e3 for what, ns in watch.spent_ns.items()}, server.steps, server.hits)


def _publish() -> None:
    """The settings that SGLang's functions ask for, of a server without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(MODEL)
        args = _named("server_args").ServerArgs(
            model_path=folder, device="cpu", attention_backend="torch_native", skip_tokenizer_init=True
        )
        context = _named("runtime_context")
        context.publish(args, role="scheduler", ranks=context.SpawnRanks(world_rank=0))


def _rows(requests: list[ReplayRequest]) -> Iterator[dict[str, object]]:
    prompts = sum(request.input_length for request in requests)
    for page_tokens in PAGES:
        for label, capacity in CAPACITIES.items():
            passes: dict[str, list[Pass]] = {name: [] for name in CACHES}
            for _ in range(ROUNDS):
                for name in CACHES:
                    passes[name].append(apart(_pass, name, requests, page_tokens, capacity))
            totals = {name: Spread.of([each.total_us / len(requests) for each in got]) for name, got in passes.items()}
            for name, got in passes.items():
                middle = sorted(got, key=lambda each: each.total_us)[len(got) // 2]
                row: dict[str, object] = {
                    "cache": name,
                    "page_tokens": page_tokens,
                    "capacity": label,
                    "requests": len(requests),
                    "request_us": round(totals[name].median, 1),
                    "low_us": round(totals[name].low, 1),
                    "high_us": round(totals[name].high, 1),
                    "of_rust_core": round(totals[RUST].median / totals[name].median, 3),
                    "step_us": round(totals[name].median * len(requests) / middle.steps, 1),
                    "hit_rate": round(middle.hits / prompts, 5),
                }
                for what in dict.fromkeys(CALLS.values()):
                    row[f"{what}_us"] = round(middle.spent_us.get(what, 0.0) / len(requests), 2)
                print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                yield row


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("requests", nargs="?", type=int, help=f"of the trace; {REQUESTS}, whose rows are kept")
    given: int | None = asked.parse_args().requests
    path = Path(os.environ.get("KVMOVER_TRACES", "traces")) / "mooncake_conversation_trace.jsonl"
    if not path.exists():
        sys.exit(f"there is no {path}: KVMOVER_TRACES names the folder of the trace")
    if RUST not in load():
        sys.exit("there is no SGLang: KVMOVER_PEERS names an environment that has it")
    for name in ("managers.schedule_policy", "mem_cache.allocation", "server_args"):
        _named(name)
    requests = list(read_trace(path))[: given or REQUESTS]
    if given:
        for _ in _rows(requests):
            pass
        return
    print("wrote", write("radix", list(_rows(requests))))


if __name__ == "__main__":
    main()
