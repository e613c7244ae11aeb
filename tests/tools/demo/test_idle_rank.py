"""A rank that serves no request answers its peers: where engines take turns, one waits longer than it may be silent."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.config.settings import Settings
from kvmover.tools.demo.crew import Crew, ask, ask_all
from kvmover.tools.demo.demo_engine import Asked, Engine, serve
from kvmover.tools.demo.model import Alone, ModelShard, Transformer
from kvmover.tools.demo.run import MOVER
from kvmover.tools.demo.scenarios import choose

SILENCE_S = 1.0


@pytest.mark.proof
@pytest.mark.timeout(120)
def test_an_engine_that_waits_for_its_turn_is_not_taken_for_dead(tmp_path: Path):
    (scenario,) = choose(("rolling",))
    settings = Settings(mover=replace(MOVER, silence_s=SILENCE_S, ping_s=0.2))
    alone = Transformer(scenario.model, ModelShard.of_rank(scenario.model, 1, 1, 0, 0), Alone())
    prompt = tuple(random.Random(7).randrange(scenario.model.vocab) for _ in range(70))
    size = scenario.src.fleet.size
    with Crew(2 * size + scenario.dst.fleet.size) as crew:
        busy = Engine("busy", crew.members[:size], scenario.src)
        waiting = Engine("waiting", crew.members[size : 2 * size], scenario.src)
        decode = Engine("decode", crew.members[2 * size :], scenario.dst)
        engines = busy, waiting, decode
        seats = [seat for engine in engines for seat in engine.seats(scenario, tmp_path, settings, "cpu", 0)]
        ask(crew.members, "seat", [(seat,) for seat in seats])
        for prefill in busy, waiting:
            ask_all(decode.members, "connect", ask_all(prefill.members, "card"))
        until, served = time.monotonic() + 3 * SILENCE_S, 0
        while time.monotonic() < until:
            assert serve(scenario, busy, decode, alone, Asked(f"busy-{served}", prompt, 2)).bytes_identical
            served += 1
        report = serve(scenario, waiting, decode, alone, Asked("its-turn", prompt[::-1], 2))
        ask_all(crew.members, "close")
    assert report.answer == report.expected
    assert report.bytes_identical
