"""Seals under the simulator's schedules: lost, repeated, reordered and late notes, crashes and cuts change nothing."""

from __future__ import annotations

import pytest

from kvmover.transfer import core as assembly
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import Key, Keys, MessageAuth, Refusal
from tests.sim.scenario import PROFILES
from tests.sim.world import World

KEYS = Keys(Key(b"a secret of the tests"))
#: Where the message of a sealed note begins.
INSIDE = len(wire.SEALED) + 8 + 32


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mover has the key. The simulator, which looks into notes on their way, looks through their seals."""
    decode, split = wire.decode, wire.split

    def inside(payload: bytes) -> bytes:
        return payload[INSIDE:] if payload.startswith(wire.SEALED) else payload

    monkeypatch.setattr(wire, "decode", lambda payload: decode(inside(payload)))
    monkeypatch.setattr(wire, "split", lambda payload: split(inside(payload)))
    monkeypatch.setattr(assembly, "authentication", lambda _, name: MessageAuth(KEYS, name))


@pytest.mark.parametrize("profile", ["default", "hostile", "echoes"])
@pytest.mark.usefixtures("sealed")
def test_every_invariant_holds_and_only_repetitions_are_dropped(profile: str):
    refused: dict[str, int] = {}
    for seed in range(25):
        world = World(seed, profile).run()
        for seat in world.scene.seats.values():
            for reason, count in seat.mover.meter.unopened.items():
                refused[reason] = refused.get(reason, 0) + count
    repeated = {Refusal.REPEATED} if PROFILES[profile].duplicates else set()
    assert set(refused) == repeated
