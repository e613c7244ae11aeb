"""Other engines' memory as a page tier, through the kit that others can use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peer_rig import CONFIG, SharedNetwork, SharedTransport

from kvmover.cache.page_tiers import RemoteTier
from kvmover.cache.peers import PeerTerms, PeerTier
from kvmover.layout import Component, Fleet, Layout, Pool, PoolSpec
from kvmover.tools.tier_conformance import PAGE_TOKENS, PLACES, PageTierConformance
from kvmover.transfer import Place

#: A busy machine makes no engine silent.
PATIENT = replace(CONFIG, silence_s=8.0, ping_s=1.0)

COMPONENT = Component.attention(2, 2, 8, "bfloat16")


class RemoteEngine:
    """An engine that lends its rows, and asks the others of its network."""

    page_bytes = PAGE_TOKENS * 2 * 2 * 2 * 8 * 2

    def __init__(self, network: SharedNetwork, name: str, others: list[RemoteEngine]) -> None:
        layout = Layout.dense(
            "page layer kv head token dim", page=PLACES, layer=2, kv=2, head=2, token=PAGE_TOKENS, dim=8
        )
        self.pool = Pool(PoolSpec(COMPONENT, layout), (torch.zeros(PLACES * self.page_bytes, dtype=torch.uint8),))
        terms = PeerTerms(
            tuple(f"engine{number}" for number in range(3) if f"engine{number}" != name), ask_s=10.0, read_s=50.0
        )
        fleet = Fleet(page_tokens=PAGE_TOKENS)
        wire = SharedTransport(network, name)
        self.peers = PeerTier(wire, "model rev-1", Place(name, fleet, 0), [self.pool], terms, PATIENT)
        self.tier = RemoteTier(self.peers, PAGE_TOKENS, lambda: None)
        self.is_open = True
        for other in others:
            self.peers.connect(other.peers.card)
            other.peers.connect(self.peers.card)

    def fill(self, place: int, content: bytes) -> None:
        self.tier.freed([place])
        self._row(place)[:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def content(self, place: int) -> bytes:
        return self._row(place).numpy().tobytes()

    def _row(self, place: int) -> torch.Tensor:
        return self.pool.tensors[0][place * self.page_bytes : (place + 1) * self.page_bytes]

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.tier.close()


class TestRemoteTier(PageTierConformance):
    @pytest.fixture(autouse=True)
    def _network(self) -> None:
        self.network, self.opened = SharedNetwork(), list[RemoteEngine]()

    def open(self, folder: Path, name: str) -> RemoteEngine:
        engine = RemoteEngine(self.network, name, self.opened)
        self.opened.append(engine)
        return engine
