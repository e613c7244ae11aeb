"""RoutingHints are a router's words about a request: the number of cached tokens it expects, and the tenant.

The keys are the same in both engines, `kvmover_predicted_tokens` and `kvmover_tenant`: in SGLang in `custom_params` of
the sampling parameters, in vLLM in `kv_transfer_params`. Only the ledger's accounts depend on them.
"""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec

from kvmover.cache.ledger import AccountGroup, Prediction, Predictor
from kvmover.prepared import prepared

log = logging.getLogger(__name__)

#: The most tenants with an account of their own: each is a time series of every metric of the ledger.
MOST_TENANTS = 64

#: The account of all further tenants.
OTHERS = "others"


@prepared
class RoutingHints(msgspec.Struct, frozen=True):
    """The hints among a request's parameters. Clients write them, so values are converted from any spelling."""

    kvmover_predicted_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    kvmover_tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def prediction(self, prompt_tokens: int, cached_tokens: int) -> Prediction:
        """Returns the router's prediction, cut to the prompt's length; without one, the `cached_tokens` of the first
        look-up.

        >>> hints = RoutingHints(kvmover_predicted_tokens=4096)
        >>> hints.prediction(100, 64), RoutingHints().prediction(100, 64).by
        (Prediction(tokens=100, by=<Predictor.ROUTER: 'router'>), <Predictor.INVENTORY: 'inventory'>)
        """
        if self.kvmover_predicted_tokens is None:
            return Prediction(cached_tokens, Predictor.INVENTORY)
        return Prediction(min(self.kvmover_predicted_tokens, prompt_tokens), Predictor.ROUTER)


def hints_of(params: object, request: str) -> RoutingHints:
    """Returns the hints in a request's parameters. Malformed ones are logged and ignored."""
    if not params:
        return RoutingHints()
    try:
        return msgspec.convert(params, RoutingHints, strict=False)
    except msgspec.ValidationError as error:
        log.warning("the router's hints of %s: %s", request, error)
        return RoutingHints()


class TenantGroups:
    """The ledger's groups of one engine: its own, and one for each tenant named by requests, up to `MOST_TENANTS`."""

    def __init__(self, own: AccountGroup) -> None:
        self._own = own
        self._named: dict[str, AccountGroup] = {}

    def of(self, tenant: str) -> AccountGroup:
        """Returns the account group of a tenant; the engine's own for ""."""
        if not tenant:
            return self._own
        if tenant not in self._named and len(self._named) >= MOST_TENANTS:
            tenant = OTHERS
        return self._named.setdefault(tenant, AccountGroup(tenant, self._own.model))
