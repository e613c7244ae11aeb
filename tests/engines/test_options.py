"""What goes before what: an option in an engine's JSON, the environment, the file, what is so where nobody says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmover.config import ConfigError, Settings, keys
from kvmover.config.load import toml
from kvmover.config.settings import value_of
from kvmover.engines.sglang import sglang_options as sglang
from kvmover.engines.vllm import vllm_options as vllm
from kvmover.plan.cost import Route
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.protocol.content import IdentityCheck
from kvmover.transfer.protocol.wire import Verb

KEY = {key.name: key for key in keys()}


@dataclass(frozen=True)
class Row:
    """An option, the setting that it stands for, and values: where nobody says, configured, and in JSON."""

    option: str
    setting: str
    unset: object
    configured: object
    given: object

    @property
    def typed(self) -> object:
        """What is given, as the settings hold it: JSON has text for paths and choices."""
        return type(self.configured)(self.given) if isinstance(self.given, str) else self.given


STORE = [
    Row("weights", "exchange.weights", None, "rev-1", "rev-2"),
    Row("root", "store.root", None, Path("/configured"), "/given"),
    Row("quota_bytes", "store.quota_bytes", None, 1000, 2000),
    Row("ttl_s", "store.ttl_s", None, 60.0, 70.0),
    Row("upkeep_s", "store.upkeep_s", 5.0, 6.0, 7.0),
    Row("flush_s", "store.flush_s", 30.0, 31.0, 32.0),
]
MOVER = [
    Row("layer_wise", "mover.chunk_layers", 0, 4, 2),
    Row("deadline_s", "mover.deadline_s", 120.0, 7.0, 9.0),
    Row("arena_bytes", "mover.arena_bytes", MoverConfig().arena_bytes, 1 << 20, 1 << 21),
    Row("chunk_bytes", "mover.costs.chunk_bytes", MoverConfig().costs.chunk_bytes, 4096, 8192),
    Row("verb", "mover.verb", Verb.PULL, Verb.PUSH, "pull"),
    Row("route", "mover.route", None, Route.PACKED, "direct"),
    Row("identity", "mover.identity", IdentityCheck.CHECKED, IdentityCheck.TRUST, "checked"),
]
ADAPTERS = {"vllm": (vllm.parse, vllm.KEYS, [*STORE, *MOVER]), "sglang": (sglang.parse, sglang.STORE_KEYS, STORE)}
CASES = [
    pytest.param(parse, row, id=f"{name}-{row.option}") for name, (parse, _, rows) in ADAPTERS.items() for row in rows
]

Parse = Callable[[Mapping[str, Any]], tuple[Any, Settings]]


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_option_that_stands_for_a_setting_has_its_row(name: str) -> None:
    _, stands_for, rows = ADAPTERS[name]
    assert {row.option: row.setting for row in rows} == dict(stands_for)


@pytest.mark.parametrize(("parse", "row"), CASES)
def test_an_option_goes_before_the_environment_that_before_the_file_and_all_before_the_default(
    parse: Parse, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, file = KEY[row.setting], tmp_path / "kvmover.toml"

    def found(**said: object) -> object:
        beside = {} if row.option == "root" or parse is vllm.parse else {"root": "/kv"}
        return value_of(parse({**beside, **said})[1], key)

    if (parse, row.option) != (sglang.parse, "root"):  # which SGLang's store cannot do without
        assert found() == found(**{row.option: None}) == row.unset
    assert found(**{row.option: row.given}) == row.typed
    file.write_text(f"[{'.'.join(key.path[:-1])}]\n{key.path[-1]} = {toml(row.typed)}\n")
    monkeypatch.setenv("KVMOVER_CONFIG", str(file))
    assert found() == row.typed
    monkeypatch.setenv(key.variable, str(row.configured))
    assert found() == found(**{row.option: None}) == row.configured != row.typed
    assert found(**{row.option: row.given}) == row.typed
    if key.optional and row.option != "root":
        assert found(**{row.option: "none"}) is None


@pytest.mark.parametrize(("parse", "row"), CASES)
def test_an_option_that_cannot_be_is_named_with_where_it_was_given(parse: Parse, row: Row) -> None:
    with pytest.raises(ConfigError, match=f"^{row.option} in the options of kvmover's .*{row.setting.split('.')[-1]}"):
        parse({"root": "/kv"} | {row.option: [1]})


@pytest.mark.parametrize("parse", [sglang.parse, vllm.parse])
@pytest.mark.parametrize("location", ["s3://bucket/prefix", "mooncake://host:50051/chat?donate=8GiB"])
def test_a_store_that_is_no_directory_is_reached_by_the_same_option(parse: Parse, location: str) -> None:
    assert parse({"root": location})[1].store.location() == location


def test_a_configured_store_is_left_alone_by_an_engine_that_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOVER_STORE_ROOT", "/kv")
    assert vllm.parse({"root": "none"})[1].store.root is None
    with pytest.raises(ConfigError, match="no directory of page stores is given"):
        sglang.parse({"root": "none"})


@pytest.mark.parametrize(
    ("configured", "given_s", "deadline_s"),
    [
        (None, None, 300.0),
        ("7", None, 7.0),
        ("900", None, 900.0),
        (None, 600.0, 600.0),
        ("7", 600.0, 7.0),
        ("900", 600.0, 600.0),
    ],
)
def test_a_transfer_in_sglang_has_the_shorter_of_the_times_that_were_given(
    configured: str | None, given_s: float | None, deadline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own timeout is 300 s where nobody gives another; that is no promise to anybody."""
    if configured is not None:
        monkeypatch.setenv("KVMOVER_MOVER_DEADLINE_S", configured)
    monkeypatch.setenv("KVMOVER_MOVER_VERB", "pull")
    mover = sglang.transfer_settings(given_s or 300.0, given_s).mover
    assert (mover.deadline_s, mover.verb) == (deadline_s, Verb.PULL)


@pytest.mark.parametrize("parse", [sglang.parse, vllm.parse, vllm.parse_tier, vllm.parse_peer_tier])
def test_an_unknown_option_is_refused_with_the_nearest_one(parse: Parse) -> None:
    with pytest.raises(ConfigError, match=r"kvmover's .*: there is no 'weightz'; did you mean weights\?"):
        parse({"weightz": "llama"})
    with pytest.raises(ConfigError, match=r"there is no 'qqqq'$"):
        parse({"qqqq": 1})


def test_an_option_of_vllms_connector_that_is_misspelt_is_told_by_settings_too() -> None:
    with pytest.raises(ConfigError, match=r"there is no 'deadlines_s'; did you mean deadline_s\?"):
        vllm.parse({"deadlines_s": 3})


@pytest.mark.parametrize("port", [99999, -1, 65536, "8400"])
def test_a_port_that_cannot_be_is_named_with_its_option(port: object) -> None:
    with pytest.raises(ConfigError, match=f"vLLM connector: port = {port!r}: "):
        vllm.parse({"port": port})


HINTED = {"router_capabilities": ["router_hint"], "control_advertise_host": "10.0.0.7", "control_ports": ["8400", 8401]}


@pytest.mark.parametrize(
    ("said", "rank", "address"),
    [
        (HINTED, 0, "10.0.0.7:8400"),
        (HINTED, 1, "10.0.0.7:8401"),
        ({**HINTED, "address": "10.0.0.7:8400"}, 0, "10.0.0.7:8400"),
        ({**HINTED, "control_advertise_host": "2001:DB8:0::1"}, 0, "[2001:db8::1]:8400"),
        ({"address": "Chat-0:1"}, 3, "chat-0:1"),
    ],
    ids=["the first rank", "the second", "both say the same", "IPv6", "no router"],
)
def test_a_tier_of_peers_serves_at_the_address_that_dynamos_worker_tells_its_router(
    said: dict[str, Any], rank: int, address: str
) -> None:
    assert vllm.parse_peer_tier(said, rank)[1].peers.address == address


@pytest.mark.parametrize(
    "said",
    [
        {**HINTED, "control_ports": ["8400"]},
        {**HINTED, "control_advertise_host": ""},
        {**HINTED, "control_ports": ["8400", "port"]},
        {**HINTED, "address": "10.0.0.8:8401"},
        {**HINTED, "router_capabilities": ["teleport"]},
    ],
    ids=["no port for the rank", "no host", "no number", "another address", "another capability"],
)
def test_an_address_that_a_router_would_not_find_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        vllm.parse_peer_tier(said, 1)
