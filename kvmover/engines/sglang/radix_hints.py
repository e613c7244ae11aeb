"""RadixHints carry out an orchestrator's hints with SGLang's requests.

Hints are `kv_hints` of `/generate`, or `kvmover_hints` and `remote_kv_source` in `custom_params`. Every rank gets the
same requests in the same order and acts alike; only clocks differ. So when a request comes, the ranks agree on the pins
that are over, and end them. Without new requests no pool needs room, so pins stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmover.cache.hints import HintAction, HintAnswer, HintDesk, HintedTiers, PinLimits, Pins
from kvmover.cache.peers import PeerMiss
from kvmover.cache.prefix import PrefixTree
from kvmover.cache.tiers import Consensus, Grouped, LocalConsensus
from kvmover.engines.common import HintedRequests, ParallelRank, outcome_of, pin_limits
from kvmover.engines.sglang.radix_keys import RadixKeys

if TYPE_CHECKING:
    import torch.distributed as dist

    from kvmover.config.settings import HintSettings
    from kvmover.engines.sglang.radix_accounts import RadixAccounts


@dataclass(frozen=True, slots=True)
class HintTerms:
    """The limits of pins, and the ranks' agreement.

    `consensus`: of all ranks that are called alike; None if stages run apart, where pins are off.
    """

    limits: PinLimits = field(default_factory=PinLimits)
    consensus: Consensus | None = field(default_factory=LocalConsensus)

    @classmethod
    def of(cls, settings: HintSettings, place: ParallelRank, group: dist.ProcessGroup | None) -> HintTerms:
        """Returns the terms of a rank at `place`. `group`: of all ranks; None for a single rank."""
        if place.pp_size > 1:
            return cls(pin_limits(settings), None)
        return cls(pin_limits(settings), LocalConsensus() if group is None else Grouped(group))


class RadixHints:
    """The hints of one rank's cache. `pages`: of the pool, by the tree's component."""

    def __init__(
        self,
        tree: PrefixTree,
        keys: RadixKeys,
        pages: Mapping[str, int],
        terms: HintTerms,
        accounts: RadixAccounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page_tokens, self._keys, self._clock = tree.config.page_tokens, keys, clock
        self._consensus = terms.consensus
        self.pins = Pins(tree, pages, terms.limits if terms.consensus is not None else PinLimits(share=0.0))
        self._desk = HintDesk(tree, self.pins)
        self._accounts = accounts
        #: By open request: the pages that it takes, its answer included.
        self._needs: dict[str, int] = {}
        #: True if pages are read from other engines.
        self.fetches = False
        self._requests = HintedRequests[Any](self._carry_out, self._told, lambda: self.fetches)

    def reach(self, tiers: HintedTiers) -> None:
        """Carry out hints on the `tiers` below the device too."""
        self._desk.tiers = tiers

    def source(self, rid: str) -> str | None:
        """Returns the address of the engine to read a request's prompt from, if a hint names one."""
        return self._requests.source(rid)

    def brought(self, rid: str, outcome: int | PeerMiss) -> None:
        """Answer a request's fetch: the tokens that its source brought, or why none."""
        self._requests.brought(rid, outcome)

    def came(self, req: Any) -> None:
        """Carry out the hints of a request that waits, at its first look-up; SGLang may look it up at every step."""
        if req.rid in self._requests:
            return
        tokens = len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)
        pages = self._needs[req.rid] = -(-tokens // self._page_tokens) + 1
        if len(self.pins):
            self._let_go(pages)
        self._requests.came(req.rid, req, req.kv_hints, req.sampling_params.custom_params)

    def answered(self, req: Any) -> None:
        """Carry out the hints due at the end of a request; the tree has its pages now."""
        self._needs.pop(req.rid, None)
        self._requests.ended(req.rid, req)

    def aborted(self, rid: str) -> None:
        """End a request without an answer, waiting or running."""
        self._needs.pop(rid, None)
        self._requests.aborted(rid, None)

    def _let_go(self, pages: int) -> None:
        """End pins whose time is over on all ranks, and pins beside which a request of `pages` could never run."""
        assert self._consensus is not None
        agreed = self._consensus.minimum(np.array(self.pins.over(self._clock()), np.int64))
        if agreed is not None:
            self.pins.end(agreed.tolist())
        self.pins.give_way(pages)

    def _carry_out(self, req: Any, action: HintAction) -> HintAnswer:
        """Carry out a hint on the prefix that it names, or else on the request's prompt, at its end with the answer."""
        tokens: Any = action.hint.token_ids
        if tokens is None:
            tokens = req.origin_input_ids if action.is_due_at_once else req.full_untruncated_fill_ids
        key = self._keys.of_request(req, tokens)
        return self._desk.carry_out(action, key, self._clock(), max(self._needs.values(), default=0))

    def _told(self, req: Any, kind: str, answer: HintAnswer) -> None:
        if self._accounts is not None:
            params = None if req is None else req.sampling_params.custom_params
            self._accounts.hinted(kind, outcome_of(answer), params)
