"""ServedModel holds what vLLM gives a connector in its scheduler but not a tier: the caches, and requests' tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from kvmover.cache.hints import HintAnswer
from kvmover.config import Settings
from kvmover.engines.common import (
    EngineUnsupported,
    ServedWeights,
    UnknownWeights,
    WeightSource,
    digest_of_sources,
    exchanged,
    identified,
    odd_ones,
)
from kvmover.engines.vllm import vllm_api
from kvmover.layout import Component

#: The class name of the tier that reads from other engines.
PEER_TIER = "KvmoverPeerTier"

_ALONE = f"leave out {PEER_TIER}"


class ServedModel:
    """The model of the scheduler's connector: its caches, and its requests by name while they live.

    `being_made` is the model of the connector whose tiers are being made.
    """

    being_made: ClassVar[ServedModel | None] = None

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config, self._caches = vllm_config, kv_cache_config
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        #: Counts the answers to hints that a tier carries out, in the connector's ledger.
        self.hinted: Callable[[Any, str, HintAnswer], None] = lambda request, kind, answer: None

    def __enter__(self) -> ServedModel:
        ServedModel.being_made = self
        return self

    def __exit__(self, *_: object) -> None:
        ServedModel.being_made = None

    def weight_sources(self) -> list[WeightSource]:
        """Returns the places of the weights."""
        return vllm_api.weight_sources(self._config)

    def seen(self, request: Any) -> None:
        """Note a request that the connector was asked for."""
        self._requests[request.request_id] = request

    def request(self, name: str) -> Any | None:
        """Returns a request by name, or None."""
        return self._requests.get(name)

    def component(self) -> Component:
        """Returns the one cache in the form common to all engines. Raises EngineUnsupported for caches that peers do
        not share.
        """
        (group, *others) = self._caches.kv_cache_groups
        (known, *_) = vllm_api.groups_of(self._caches, self._config)
        spec, names = group.kv_cache_spec, list(group.layer_names)
        parallel = self._config.parallel_config
        odd = {
            "several cache groups": bool(others),
            f"caches of kind {known.kind}": known.window is not None or not known.sides or bool(known.formats),
            "layers out of order": [layer_number(name) for name in names] != list(range(len(names))),
            "pipeline stages": parallel.pipeline_parallel_size > 1,
            "context parallelism": parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1,
        }
        asked = odd_ones(odd)
        if asked:
            raise EngineUnsupported(f"peers do not share {asked}: {_ALONE}")
        heads = self._config.model_config.get_total_num_kv_heads() if known.sides == 2 else 1
        width = spec.head_size * known.sides
        dtype = str(spec.dtype).removeprefix("torch.")
        found = exchanged(Component("rows", len(names), 1, heads, width, dtype), known.sides)
        if found is None:
            raise EngineUnsupported(f"peers do not share rows of {dtype}: {_ALONE}")
        return found


def weights_of_tier(model: str, called: str, settings: Settings) -> ServedWeights:
    """Returns the weights of a tier's chunks. vLLM calls the model `model`, people call it `called`.

    vLLM's own connector gives a tier neither revision nor load format: a folder is read as it is then, and a hub's
    model cannot be identified. Raises ConfigError if there is no identity.
    """
    served = ServedModel.being_made

    def compute() -> str:
        if served is not None:
            return digest_of_sources(served.weight_sources())
        if not Path(model).expanduser().is_dir():
            raise UnknownWeights(f"vLLM's OffloadingConnector tells a tier no revision of {model}")
        return WeightSource(model).digest()

    return identified(called, settings.exchange, compute)


def layer_number(name: str) -> int:
    """Returns the first number in vLLM's name of a layer, 3 of `model.layers.3.self_attn.attn`, or -1."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)
