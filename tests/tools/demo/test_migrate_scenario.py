"""The demo's running answers move between two fleets at any token, and outlive either fleet, killed at any moment."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover.config.settings import Settings
from kvmover.migrate import Migration, Party
from kvmover.tools.demo import migrations
from kvmover.tools.demo.crew import Crew, ask_all
from kvmover.tools.demo.migrations import Migrations
from kvmover.tools.demo.model import ContiguousCache
from kvmover.tools.demo.run import MOVER, DemoOptions, _stage, run
from kvmover.tools.demo.scenarios import choose
from tests.proofs import family, tries

CUTS = tries(plain=20, prove=20, night=200)
PROMPT = tuple(Random("prompt").choices(range(512), k=37))


@pytest.mark.timeout(100)
def test_answers_that_move_while_they_are_computed_are_those_of_one_process(crew: None):
    report = run(DemoOptions(scenarios=("migrate",), requests=2), lambda what, requests: None)
    assert report.passed
    assert all(request.wire.nbytes for request in report.requests)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Migrations]:
    (scenario,) = choose(("migrate",))
    with Crew(scenario.processes) as processes:
        yield Migrations(scenario, processes.members, tmp_path, 0, Settings(mover=MOVER))


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_an_answer_is_the_same_wherever_it_is_cut(stage: Migrations):
    """Cuts, and prompts with them, of chance: which page is cut where, and what is left for the last round."""
    random, moved = Random(18), 0
    for number in range(CUTS):
        prompt = tuple(random.choices(range(512), k=random.randint(1, 80)))
        request = stage.serve(number, prompt, 0)
        assert request.tokens_identical, request
        assert request.bytes_identical, request
        moved += request.wire.nbytes > 0
    assert moved == CUTS
    stage.close()


@pytest.mark.proof
@pytest.mark.timeout(200)
def test_an_answer_whose_source_is_killed_in_its_last_round_keeps_what_had_landed(stage: Migrations):
    """The rows of the rounds before landed, and are compared with the source's; those of the last one come anew."""
    cut, length = 4, stage.scenario.answer_tokens
    report = stage.outlived(0, PROMPT, length, cut)
    assert report.passed, report
    assert report.tokens_identical
    assert cut + 1 < report.source_tokens < length
    assert report.wire.nbytes >= (len(PROMPT) + cut) * stage.scenario.component.token_bytes


KILLS = [(side, ms) for side in ("source", "target") for ms in (0, 3, 10, 20, 40, 80, 120, 160, 200, 300)]
#: `make prove` kills where a round, the hand-over and the last tokens are under way.
PROVED = [(side, ms) for side in ("source", "target") for ms in (3, 40, 160)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("side", "after_ms"), family(KILLS, [("source", 40)], proved=PROVED))
def test_an_answer_goes_on_when_either_fleet_is_killed(stage: Migrations, side: str, after_ms: int):
    """By SIGKILL, all ranks of it: the other fleet has the request, and its tokens are those of one process."""
    assert stage.serve(0, PROMPT[:5], 0).tokens_identical  # both have met
    length = stage.scenario.answer_tokens
    pages = stage.src.take(len(PROMPT) + length), stage.dst.take(len(PROMPT) + length)
    first, _ = ask_all(stage.src.members, "prefill", PROMPT, pages[0])[0]
    source, target = (Party(engine.name, len(engine.members)) for engine in (stage.src, stage.dst))
    migration = Migration("killed", 1, source, target, len(PROMPT), json.dumps([first]).encode())
    for member in stage.dst.members:
        member.tell("arrive", migration, pages[1])
    for member in stage.src.members:
        member.tell("depart", migration, [first], length - 1, pages[0])
    time.sleep(after_ms / 1e3)
    dead, alive = (stage.src, stage.dst) if side == "source" else (stage.dst, stage.src)
    for member in dead.members:
        member.process.kill()
    shares = [member.answer() for member in alive.members]
    expected = stage.alone.generate(PROMPT, length, ContiguousCache())
    if not all(share.goes_on for share in shares):  # it was handed over, and known to be, before the target died
        assert side == "target"
        assert shares[0].answer == expected[: len(shares[0].answer)]
        return
    own = pages[alive is stage.dst]
    answer, landed = shares[0].answer, shares[0].tokens
    tokens = (*PROMPT, *answer[:-1])
    if landed < len(tokens):
        assert ask_all(alive.members, "catch_up", tokens, landed, own)[0] == answer[-1]
    rest, _ = ask_all(alive.members, "decode", answer[-1], len(tokens), length - len(answer), own)[0]
    assert [*answer, *rest] == expected


def test_answers_that_move_lie_on_the_demos_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seated = list[tuple[object, ...]]()

    def pair(*given: object) -> tuple[None, None]:
        seated.append(given)
        return None, None

    monkeypatch.setattr(migrations, "pair", pair)
    (scenario,) = choose(("migrate",))
    _stage(scenario, SimpleNamespace(members=[]), tmp_path, DemoOptions(device="cuda"))
    assert [given[-1] for given in seated] == ["cuda"]
