"""ServedModel is what vLLM tells the connector in its scheduler, and not a tier: the caches, and requests' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

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
from kvmover.engines.vllm import engine
from kvmover.layout import Component

#: The tier that reads from other engines, by its class.
PEER_TIER = "KvmoverPeerTier"

_ALONE = f"leave out {PEER_TIER}"


class ServedModel:
    """What the scheduler's connector knows and a tier must: the caches, and requests by their names, while they live.

    `being_made`: of the connector whose tiers are made at this moment.
    """

    being_made: ClassVar[ServedModel | None] = None

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config, self._caches = vllm_config, kv_cache_config
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def __enter__(self) -> ServedModel:
        ServedModel.being_made = self
        return self

    def __exit__(self, *_: object) -> None:
        ServedModel.being_made = None

    def weight_sources(self) -> list[WeightSource]:
        """Returns the place that the weights come from."""
        return engine.weight_sources(self._config)

    def seen(self, request: Any) -> None:
        """The connector is asked for a request."""
        self._requests[request.request_id] = request

    def request(self, name: str) -> Any | None:
        """A request that was seen."""
        return self._requests.get(name)

    def component(self) -> Component:
        """The one cache, as engines of any make describe it. Raises EngineUnsupported for what peers do not share."""
        (group, *others) = self._caches.kv_cache_groups
        (known, *_) = engine.groups_of(self._caches, self._config)
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
    """Returns the weights that a tier has chunks of, where vLLM calls the model `model` and people call it `called`.

    vLLM's own connector tells a tier no revision and no form in which weights are loaded: a folder is taken for what it
    holds then, and of a hub's model nobody can tell. Raises ConfigError where nothing is known.
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
    """Of a layer's name in vLLM, the first number: 3 of `model.layers.3.self_attn.attn`. Without one, -1."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)
