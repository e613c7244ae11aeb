"""RoutingHints are what a router says of a request: how much of its prompt is cached, and whose it is. For the ledger.

The keys are the same in both engines, `kvmover_predicted_tokens` and `kvmover_tenant`: in SGLang they stand in
`custom_params` of the sampling parameters, in vLLM in `kv_transfer_params`. Nothing but accounts depends on them.
"""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec

from kvmover.cache.ledger import AccountGroup, Prediction, Predictor

log = logging.getLogger(__name__)

#: Tenants that are told apart: each is a time series of every metric of the ledger.
MOST_TENANTS = 64

#: Of all tenants beyond those.
OTHERS = "others"


class RoutingHints(msgspec.Struct, frozen=True):
    """What is read of a request's parameters, which clients write: values in any spelling of their types."""

    kvmover_predicted_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    kvmover_tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def prediction(self, prompt_tokens: int, cached_tokens: int) -> Prediction:
        """The router's word, of a longer prompt than there is all of it; else the `cached_tokens` of the first look.

        >>> hints = RoutingHints(kvmover_predicted_tokens=4096)
        >>> hints.prediction(100, 64), RoutingHints().prediction(100, 64).by
        (Prediction(tokens=100, by=<Predictor.ROUTER: 'router'>), <Predictor.INVENTORY: 'inventory'>)
        """
        if self.kvmover_predicted_tokens is None:
            return Prediction(cached_tokens, Predictor.INVENTORY)
        return Prediction(min(self.kvmover_predicted_tokens, prompt_tokens), Predictor.ROUTER)


def hints_of(params: object, request: str) -> RoutingHints:
    """The hints in a request's parameters. What makes no sense is said in the log and counts as not said."""
    if not params:
        return RoutingHints()
    try:
        return msgspec.convert(params, RoutingHints, strict=False)
    except msgspec.ValidationError as error:
        log.warning("the router's hints of %s: %s", request, error)
        return RoutingHints()


class TenantGroups:
    """The ledger's groups of one engine: its own, and one for each tenant that requests name, up to `MOST_TENANTS`."""

    def __init__(self, own: AccountGroup) -> None:
        self._own = own
        self._named: dict[str, AccountGroup] = {}

    def of(self, tenant: str) -> AccountGroup:
        """Whose account a request of this tenant is in; of one that names none, the engine's own."""
        if not tenant:
            return self._own
        if tenant not in self._named and len(self._named) >= MOST_TENANTS:
            tenant = OTHERS
        return self._named.setdefault(tenant, AccountGroup(tenant, self._own.model))
