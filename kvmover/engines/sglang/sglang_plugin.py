"""SGLang's plug-in entry point registers kvmover as a transfer backend, a radix cache and a publisher of KV events.

SGLang knows its transfer backends (`--disaggregation-transfer-backend`) by an Enum and a chain of ifs: hooks
replace both before other imports, and built-in backends stay. Radix caches (`--radix-cache-backend`) and publishers
(`--kv-events-config`) have registries.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from kvmover.cache.prefix import HAZARD
from kvmover.config import load
from kvmover.engines.common import UnknownWeights, digest_of_adapter
from kvmover.engines.sglang.answer_rooms import in_own_room, of_several
from kvmover.engines.sglang.sglang_contract import CHOICES, SGLANG

log = logging.getLogger(__name__)

NAME = "kvmover"

_UTILS, _HOOKS = "sglang.srt.disaggregation.utils", "sglang.srt.plugins.hook_registry"

#: SGLang's name for an adapter of `--lora-paths`.
_ADAPTER_ID = "sglang.srt.lora.lora_registry.LoRARef.deterministic_id"

#: The sender of requests to SGLang's schedulers.
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

#: SGLang's names of the parts of a backend, with their module and class here.
_CLASSES = {
    "manager": ("pd", "KvmoverManager"),
    "sender": ("pd_sender", "KvmoverSender"),
    "receiver": ("pd", "KvmoverReceiver"),
    "bootstrap_server": ("pd_bootstrap", "KvmoverBootstrapServer"),
}


def register() -> None:
    """Register all choices and hooks, in each process of SGLang: what is chosen is refused when it is made.

    Raises nothing, also in a release without these registries, since most of these servers were not asked for kvmover.
    """
    if lacking := SGLANG.lacking(CHOICES):
        log.warning("kvmover cannot be chosen: sglang %s lacks %s", SGLANG.installed(), ", ".join(lacking))
        return
    register_weight_updates()
    hooks: Any = SGLANG.find(_HOOKS)
    backends: Any = SGLANG.find(_UTILS).TransferBackend
    SGLANG.find("sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices")([NAME])
    members = {member.name: member.value for member in backends} | {NAME.upper(): NAME}
    hooks.HookRegistry.register(
        f"{_UTILS}.TransferBackend", Enum("TransferBackend", members, module=__name__), hooks.HookType.REPLACE
    )
    hooks.HookRegistry.register(f"{_UTILS}.get_kv_class", class_of, hooks.HookType.AROUND)
    hooks.HookRegistry.register(_ADAPTER_ID, adapter_id, hooks.HookType.AROUND)
    hooks.HookRegistry.register(f"{_TOKENIZER}._handle_batch_request", several_answers, hooks.HookType.AROUND)
    hooks.HookRegistry.register(f"{_TOKENIZER}._send_one_request", in_own_room, hooks.HookType.AROUND)
    register_radix_cache()
    register_event_publisher()


def adapter_id(known: Callable[[str, str], str], lora_name: str, lora_path: str) -> str:
    """Returns an adapter's id, by which caches and stores key KV: with a digest of its files, if they are local.

    Other files at the same path get another id after a restart. An adapter at a hub has SGLang's own id.
    """
    try:
        return known(lora_name, f"{lora_path}\0{digest_of_adapter(Path(lora_path))}")
    except UnknownWeights:
        return known(lora_name, lora_path)


def several_answers(handle: Callable[..., Any], manager: Any, obj: Any, *more: Any) -> Any:
    """Give each request of a prompt with several answers a room of its own, if kvmover is the transfer backend."""
    backend = SGLANG.find("sglang.srt.runtime_context").get_disagg().disaggregation_transfer_backend
    return of_several(handle, manager, obj, *more) if backend == NAME else handle(manager, obj, *more)


def register_radix_cache() -> None:
    """Enter the radix cache in SGLang's registry, and its policies among the choices, once per process."""
    registry: Any = SGLANG.find("sglang.srt.mem_cache.registry")
    if NAME not in registry.registered_radix_cache_backends():
        registry.register_radix_cache_backend(NAME, radix_cache)
        SGLANG.find("sglang.srt.arg_groups.choices:add_radix_eviction_policy_choices")([HAZARD.name])


def register_event_publisher() -> None:
    """Enter the publisher in SGLang's registry, once per process: `kvmover`, and `kvmover-arrays` for llm-d."""
    factory: Any = SGLANG.find("sglang.srt.disaggregation.kv_events").EventPublisherFactory
    if NAME not in factory._registry:
        factory.register_publisher(NAME, event_publisher)
        factory.register_publisher(f"{NAME}-arrays", array_event_publisher)


def register_weight_updates() -> None:
    """Hook the weight updates in processes that have imported SGLang's scheduler, without importing it elsewhere."""
    hooks: Any = SGLANG.find(_HOOKS)
    if "sglang.srt.managers.scheduler" in sys.modules:
        updates = _module("sglang_weight_updates")
        for name, around in updates.UpdateHooks.of(updates.UPDATES, SGLANG.has).items():
            hooks.HookRegistry.register(name, around, hooks.HookType.AROUND)


def event_publisher(**options: Any) -> Any:
    """Returns the publisher of one cache's KV events, imported on this call."""
    return _module("event_publisher").KvmoverEventPublisher(**options)


def array_event_publisher(**options: Any) -> Any:
    """Returns the same publisher, of events as arrays."""
    return _module("event_publisher").KvmoverArrayEventPublisher(**options)


def radix_cache(context: Any) -> Any:
    """Returns the prefix cache of one rank, with tiers if SGLang is asked for them, imported on this call.

    Raises EngineUnsupported for caches and features that only SGLang's own tree has.
    """
    engine = _module("engine_radix")
    if context.disable_radix_cache:
        return engine.default_radix_cache(context)
    engine.refuse(context)
    if context.enable_hierarchical_cache:
        return _module("radix_tiers").open_radix_cache(context)
    settings = load().settings
    _module("tier_peers").refuse_unasked(settings, "no --enable-hierarchical-cache")
    accounts = _module("radix_accounts").accounts_of()
    place = engine.place()
    group = engine.fleet_group(place, context.params) if place.pp_size == 1 else None
    terms = _module("radix_hints").HintTerms.of(settings.hints, place, group)
    return _module("radix_cache").KvmoverRadixCache(context.params, accounts, terms=terms)


def class_of(known: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Returns kvmover's class for its own backend, and SGLang's for all others."""
    if transfer_backend.value != NAME or class_type.value not in _CLASSES:
        return known(transfer_backend, class_type)
    module, name = _CLASSES[class_type.value]
    return getattr(_module(module), name)


def _module(name: str) -> Any:
    """Returns a module beside this that imports SGLang."""
    return import_module(f"kvmover.engines.sglang.{name}")
