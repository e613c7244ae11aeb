"""What `--radix-cache-backend kvmover` makes for one rank, and what it refuses before anything is served."""

from __future__ import annotations

from typing import Any

from kvmover.config import load
from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.engines.sglang import engine, engine_radix
from kvmover.engines.sglang.radix_accounts import RadixAccounts
from kvmover.engines.sglang.radix_cache import KvmoverRadixCache


def build(context: Any) -> Any:
    """SGLang's factory of this backend. Raises EngineUnsupported for what needs SGLang's own tree."""
    if context.disable_radix_cache:
        return engine_radix.default_radix_cache(context)
    refuse(context)
    return KvmoverRadixCache(context.params, accounts_of(context.params))


def refuse(context: Any) -> None:
    """Raise EngineUnsupported where a `TreeCacheBuildContext` is of what only SGLang's own tree keeps."""
    asked = engine_radix.asked_beside()
    if asked:
        raise EngineUnsupported(f"{asked} goes with SGLang's own radix cache: leave out --radix-cache-backend kvmover")
    odd = engine_radix.odd_states(context) if context.is_hybrid_ssm else ""
    if odd:
        raise EngineUnsupported(f"kvmover's radix cache keeps states in slots of SGLang's pool, and not {odd}")
    odd = engine_radix.odd_windows(context) if context.is_hybrid_swa else ""
    if odd:
        raise EngineUnsupported(f"kvmover's radix cache keeps windows in pages, and not {odd}")
    params = context.params
    allocator = params.token_to_kv_pool_allocator
    known = {engine_radix.HYBRID_ALLOCATOR} if context.is_hybrid_swa else engine_radix.ALLOCATORS
    if type(allocator).__name__ not in known or allocator.page_size != params.page_size:
        raise EngineUnsupported(
            f"kvmover's radix cache works with {', '.join(sorted(known))} of its own page size,"
            f" not with {type(allocator).__name__} of {allocator.page_size} tokens for {params.page_size}"
        )


def accounts_of(params: Any) -> RadixAccounts | None:
    """A ledger where the settings of this process let it be seen: a prefill or decode has its own metrics there."""
    settings = load().settings
    if (settings.record.run_log is None and settings.metrics.port is None) or engine_radix.disaggregated():
        return None
    tp, tp_size = engine_radix.rank()
    return RadixAccounts(engine.served_name(), settings, ParallelRank(tp, tp_size, params.pp_rank, params.pp_size))
