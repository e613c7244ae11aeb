"""What vLLM's own connector over NIXL answers to the mistakes that kvmover refuses. No answer fails this."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.checkpoints import in_files
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import ADAPTERS, DROPPED, OTHER_KEY, has_none, not_mixed_up, theirs
from tests.live.server import Command, free_port
from tests.live.vllm_client import warm
from tests.live.vllm_partners import (
    MISTAKES,
    RESETS,
    Halves,
    alone,
    decodes_of_other_models,
    forget,
    of_adapters,
    one_for_another,
    with_adapters,
)
from tests.live.vllm_servers import nixl_connector, vllm

_WITHIN_S = 20.0
_ENGINE = "vllm", "NixlConnector"


def _environment() -> dict[str, str]:
    return {**RESETS, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


def _half(name: str, folder: Path, *more: str) -> Command:
    return vllm(f"vllm-partners-nixl-{name}", folder, *more, kv=nixl_connector(), environment=_environment())


@pytest.fixture(scope="module")
def adapters(model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """The arguments of servers of two adapters, of which one name is another at decode."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: with_adapters(folder / name, third, model) for name, third in (("A", "A"), ("B", "B"))}


@pytest.fixture
def halves(servers: Servers, model: ModelMaker, adapters: dict[str, tuple[str, ...]]) -> Halves:
    """Servers that were never part of a mistake before, or answered all that came behind the last one."""
    if not servers.running:
        weights = model("qwen3", "vllm")
        servers.start(
            _half("prefill", weights, *adapters["A"]),
            _half("decode", weights, *adapters["B"]),
            _half("elsewhere", weights, *adapters["A"]),
            vllm("vllm-partners-plain", weights, *adapters["B"]),
        )
        warm(*servers.running)
    return Halves(*servers.running[:3])


@pytest.mark.parametrize("what", [*MISTAKES, *ADAPTERS])
def test_kv_of_another_request(halves: Halves, servers: Servers, what: str) -> None:
    requests, way = MISTAKES[what] if what in MISTAKES else (lambda _: of_adapters(what), one_for_another)
    made = requests(70 + len(what))
    asked = [other for _, other in made]
    wanted, got = alone(servers.running[3], asked), way(halves, made, _WITHIN_S)
    if not theirs(*_ENGINE, what, wanted, got, lambda: alone(halves.decode, asked, _WITHIN_S), _WITHIN_S):
        servers.stop()


def test_halves_of_other_models(servers: Servers, model: ModelMaker, tmp_path: Path) -> None:
    servers.stop()
    source, folder = model("qwen3", "vllm"), tmp_path / "model"
    in_files(source, folder, 1)
    (first,) = servers.start(_half("old", folder))
    others = decodes_of_other_models(
        "vllm-partners-nixl", folder, model, kv=nixl_connector(), environment=_environment()
    )
    for number, (what, command) in enumerate(others.items()):
        (decode,) = servers.start(command)
        warm(first, decode)
        made = not_mixed_up(93 + number)
        asked = [each for each, _ in made]
        wanted = alone(decode, asked)
        forget(decode)
        got = one_for_another(Halves(first, decode, first), made, _WITHIN_S)
        theirs(*_ENGINE, what, wanted, got, lambda: alone(decode, asked, _WITHIN_S), _WITHIN_S)  # noqa: B023
        servers.stop([decode])
        if first.ended():
            servers.stop([first])
            (first,) = servers.start(_half("again", source))


def test_mistakes_that_it_has_nothing_for() -> None:
    has_none(*_ENGINE, [OTHER_KEY], "it has no keys")
    has_none(*_ENGINE, [DROPPED], "its parameters name no prompt")
