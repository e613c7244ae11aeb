"""A decode step of SGLang's scheduling on kvmover's radix cache beside its own with the Rust core: thread CPU time.

    KVMOVER_PEERS=SITE_PACKAGES python -m perf.bench_decode [rounds]

`ROWS` requests decode together. Each step asks whether the next tokens fit and allocates them, by SGLang's own
functions, which evict in a pool that is full of other prompts; with tiers it also asks them to go on. Timed are the
whole of that, and what of it is inside the cache. Every pass is a process of its own, and the caches take turns.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from perf.bench_prefix import apart
from perf.bench_radix import RUST, Server, Stopwatch, _named, _publish
from perf.command_line import options
from perf.prefix_peers import load
from perf.record import Spread, write

ROUNDS = 3
ROWS, PROMPT_TOKENS, STEPS = 64, 2048, 512
PAGES = (64, 1)
#: Of other prompts in the pool: none, or all that is left of it, so that the steps evict.
FILLED = {"free": 0, "full": ROWS * STEPS}
CACHES = ("kvmover", "kvmover with tiers", RUST)


@dataclass(frozen=True, slots=True)
class Pass:
    """Microseconds a step: of all, and inside the cache."""

    step_us: float
    cache_us: float


class Decoding(Server):
    """Requests that decode together."""

    def __init__(self, name: str, page_tokens: int, filled: str) -> None:
        row = PROMPT_TOKENS + STEPS + page_tokens
        super().__init__("kvmover" if name.startswith("kvmover") else name, page_tokens, ROWS * row, ROWS + 1, 2 * row)
        if name == "kvmover with tiers":
            self.cache = _tiered(self.allocator, self.rows, page_tokens)
        self.tiers = name == "kvmover with tiers"
        self.reqs = [self._prefilled(number) for number in range(ROWS)]
        for number in range(FILLED[filled] // STEPS):
            self._finish(self._prefilled(ROWS + number, STEPS - 8))

    def step(self) -> None:
        """One token more of each."""
        if self.tiers:
            self.cache.check_hicache_events()
        lengths = self.torch.tensor([req.kv.kv_committed_len for req in self.reqs])
        page = self.page_tokens
        needed = int((lengths % page == 0).sum()) * page
        none = _named("speculative.spec_info").SpeculativeAlgorithm.NONE
        enough = self.allocator.check_decode_capacity(
            num_tokens=needed, tree_cache=self.cache, requests=self.reqs, spec_algorithm=none
        )
        assert enough
        _named("mem_cache.allocation").alloc_for_decode(self._decoding(lengths), 1)

    def _prefilled(self, number: int, tokens: int = PROMPT_TOKENS) -> Any:
        """A request of a prompt of its own, computed."""
        batches, sampling = _named("managers.schedule_batch"), _named("sampling.sampling_params")
        prompt = array("q", range(number << 16, (number << 16) + tokens))
        req = batches.Req(str(number), "", prompt, sampling.SamplingParams(max_new_tokens=STEPS))
        adder = self._adder()
        req.init_next_round_input(self.cache)
        adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        assert adder.can_run_list
        _named("mem_cache.allocation").alloc_for_extend(self._batch(req))
        req.output_ids.append(1 << 31)
        _named("mem_cache.common").checkpoint_kv_cache(req, self.cache)
        return req

    def _decoding(self, lengths: Any) -> Any:
        rows = self.torch.tensor([req.kv.req_pool_idx for req in self.reqs])
        return SimpleNamespace(
            reqs=self.reqs,
            device="cpu",
            tree_cache=self.cache,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            hisparse_coordinator=None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            req_pool_indices=rows,
            req_pool_indices_cpu=rows,
        )


def _tiered(allocator: Any, rows: Any, page_tokens: int) -> Any:
    """With a host below the device, and no storage: between two requests nothing is on its way."""
    import torch

    from kvmover.config import Settings
    from kvmover.engines.common import ParallelRank
    from kvmover.engines.sglang.radix_accounts import RadixAccounts
    from kvmover.engines.sglang.radix_tiers import TieredRadixCache
    from kvmover.engines.sglang.sglang_options import TierFlags
    from kvmover.engines.sglang.tier_pools import open_tiers

    size = allocator.size
    pool = _named("mem_cache.memory_pool").MHATokenToKVPool(size, page_tokens, torch.float32, 1, 2, 1, "cpu", False)
    allocator._kvcache = pool
    kinds = _named("mem_cache.unified_cache.component_type")
    params = _named("mem_cache.cache_init_params").CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page_tokens,
        tree_components=(kinds.ComponentType.FULL,),
    )
    place, flags = ParallelRank(0, 1), TierFlags(ratio=1.0)
    accounts = RadixAccounts("model", Settings(), place)
    return TieredRadixCache(params, flags, open_tiers(params, flags, place), accounts)


def _pass(name: str, page_tokens: int, filled: str) -> Pass:
    _publish()
    server = Decoding(name, page_tokens, filled)
    for _ in range(64):  # what was computed is on the host
        if server.tiers:
            server.cache.check_hicache_events()
    watch, clock = Stopwatch(server.cache), time.thread_time_ns
    if server.tiers:
        events = server.cache.check_hicache_events
        server.cache.check_hicache_events = watch._timed(events, "events")
    gc.collect()
    gc.freeze()
    began = clock()
    for _ in range(STEPS - 1):
        server.step()
    spent_us = (clock() - began) / 1e3
    return Pass(spent_us / (STEPS - 1), sum(watch.spent_ns.values()) / 1e3 / (STEPS - 1))


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("rounds", nargs="?", type=int, help=f"of each cache; {ROUNDS}, whose rows are kept")
    given: int | None = asked.parse_args().rounds
    if RUST not in load():
        sys.exit("there is no SGLang: KVMOVER_PEERS names an environment that has it")
    for name in ("managers.schedule_policy", "mem_cache.allocation", "server_args", "speculative.spec_info"):
        _named(name)
    rows: list[dict[str, object]] = []
    for page_tokens in PAGES:
        for filled in FILLED:
            passes: dict[str, list[Pass]] = {name: [] for name in CACHES}
            for _ in range(given or ROUNDS):
                for name in CACHES:
                    passes[name].append(apart(_pass, name, page_tokens, filled))
            steps = {name: Spread.of([each.step_us for each in got]) for name, got in passes.items()}
            for name, got in passes.items():
                cache_us = Spread.of([each.cache_us for each in got]).median
                row: dict[str, object] = {
                    "cache": name,
                    "page_tokens": page_tokens,
                    "pool": filled,
                    "requests": ROWS,
                    "step_us": round(steps[name].median, 1),
                    "low_us": round(steps[name].low, 1),
                    "high_us": round(steps[name].high, 1),
                    "cache_us": round(cache_us, 2),
                    "of_rust_core": round(steps[RUST].median / steps[name].median, 3),
                }
                print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                rows.append(row)
    if not given:
        print("wrote", write("decode", rows))


if __name__ == "__main__":
    main()
