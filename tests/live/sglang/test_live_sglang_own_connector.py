"""What SGLang's own backend over NIXL answers to the mistakes that kvmover refuses. No answer fails this."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.checkpoints import in_files
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import ADAPTERS, OTHER_KEY, has_none, not_mixed_up, theirs
from tests.live.server import Command, Server
from tests.live.sglang_client import warm
from tests.live.sglang_partners import (
    MISTAKES,
    PATIENCE,
    Halves,
    Lab,
    decodes_of_other_models,
    meant,
    of_adapters,
    one_for_another,
    with_adapters,
)
from tests.live.sglang_servers import DECODE, DECODE_WITH_PREFIXES, PREFILL, sglang

#: Each half gives up after 10 s, and then waits for what it has begun.
_WITHIN_S = 20.0


def _half(name: str, folder: Path, mode: tuple[str, ...], *more: str) -> Command:
    return sglang(f"sglang-partners-nixl-{name}", folder, *more, mode=mode, environment=PATIENCE, backend="nixl")


@pytest.fixture(scope="module")
def adapters(model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """The arguments of servers of two adapters, of which one name is another at decode."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: with_adapters(folder / name, third, model) for name, third in (("A", "A"), ("B", "B"))}


@pytest.fixture
def lab(servers: Servers, model: ModelMaker, adapters: dict[str, tuple[str, ...]]) -> Lab:
    """Servers that were never part of a mistake before, or answered all that came behind the last one."""
    if not servers.running:
        weights = model("llama", "sglang")
        servers.start(
            _half("prefill", weights, PREFILL, *adapters["A"]),
            _half("decode", weights, DECODE_WITH_PREFIXES, *adapters["B"]),
            _half("elsewhere", weights, PREFILL, *adapters["A"]),
            sglang("sglang-partners-plain", weights, *adapters["B"]),
        )
        warm(servers.running[3])
    return Lab(servers.running[3], Halves(*servers.running[:3]))


@pytest.mark.parametrize("what", [*MISTAKES, *ADAPTERS])
def test_kv_of_another_request(lab: Lab, servers: Servers, what: str) -> None:
    requests, way = MISTAKES[what] if what in MISTAKES else (lambda _: of_adapters(what), one_for_another)
    made = requests(70 + len(what))
    asked = [other for _, other in made]
    got = way(lab.halves, made, _WITHIN_S)
    if not theirs(
        "sglang", "nixl", what, lab.alone(asked), got, lambda: lab.through(meant(asked), _WITHIN_S), _WITHIN_S
    ):
        servers.stop()


def test_halves_of_other_models(plain: Server, servers: Servers, model: ModelMaker, tmp_path: Path) -> None:
    servers.stop()
    source, folder = model("llama", "sglang"), tmp_path / "model"
    in_files(source, folder, 1)
    first, same = servers.start(_half("old", folder, PREFILL), _half("same", source, DECODE))
    others = decodes_of_other_models("sglang-partners-nixl", folder, model, backend="nixl")
    warm(plain.ready())
    for number, (what, command) in enumerate(others.items()):
        (decode,) = servers.start(command)
        right = Lab(plain, Halves(first, same, first))
        made = not_mixed_up(93 + number)
        asked = [each for each, _ in made]
        got = one_for_another(Halves(first, decode, first), made, _WITHIN_S)
        wanted = right.alone(asked)
        servers.stop([decode])
        if not theirs(
            "sglang", "nixl", what, wanted, got, lambda asked=asked, lab=right: lab.through(asked, _WITHIN_S), _WITHIN_S
        ):
            servers.stop([first, same])
            first, same = servers.start(_half("again", source, PREFILL), same.command)


def test_mistakes_that_it_has_nothing_for() -> None:
    has_none("sglang", "nixl", [OTHER_KEY], "it has no keys")
