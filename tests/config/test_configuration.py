"""The configuration: what is given is what is set, and what cannot be is refused by name before anything begins."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover import cli
from kvmover.config import ConfigError, Loaded, Option, SettingKey, Settings, keys, load
from kvmover.config.load import as_data, as_toml, plain, toml
from kvmover.config.settings import TEXTS, sections, value_of
from kvmover.plan.cost import Route
from kvmover.store import Policy
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.protocol.wire import Verb
from perf import config_page

#: For every setting a value that is not its default, as the environment would say it.
OTHERS = {
    "mover.arena_bytes": "512",
    "mover.route": "direct",
    "mover.revocation": "proven",
    "mover.verb": "pull",
    "mover.replicas": "elect",
    "mover.integrity": "digest",
    "mover.identity": "trust",
    "mover.sandbox_bytes": "256 KiB",
    "mover.sms": "none",
    "mover.exports": "pools",
    "mover.engine": "ring",
    "mover.lossy": "0.0625",
    "mover.costs.posting": "inline",
    "mover.backoff.jitter": "0.125",
    "mover.backoff.most_s": "31.5",
    "progress.shortest_s": "0.0000625",
    "progress.open_s": "0.015",
    "progress.idle_s": "0.5",
    "exchange.allow": "10.0.0.0/8, fd00::/8, prefill-0.kv",
    "store.eviction": "hazard",
    "store.root": "/srv/kv pages",
    "peers.address": "10.0.0.7:8400",
    "peers.engines": "10.0.0.7:8400, [fd00::8]:8400",
    "hints.pin_share": "0.125",
    "logging.level": "debug",
    "logging.format": "json",
    "logging.file": '/var/log/kv\\mover "1".log',
    "metrics.address": "",
    "record.run_log": "run.jsonl",
    "record.spans": "true",
    "security.shared_key_file": "/run/secrets/kv",
    "security.accepted_key_files": "/run/secrets/old:/run/secrets/older",
}


#: What a setting makes no sense without.
NEEDS = {
    "security.accepted_key_files": {"KVMOVER_SECURITY_SHARED_KEY_FILE": "/k"},
    "peers.engines": {"KVMOVER_PEERS_ADDRESS": "10.0.0.7:8400"},
    "peers.directory": {"KVMOVER_PEERS_ADDRESS": "10.0.0.7:8400"},
}


def other(key: SettingKey) -> str:
    return OTHERS.get(key.name) or OTHERS.get(key.name, "8")


def everything() -> Loaded:
    return load(environ={key.variable: other(key) for key in keys()})


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvmover.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_what_the_parts_do_without_a_configuration() -> None:
    loaded = load(environ={})
    assert loaded == Loaded(Settings(), {})
    assert loaded.settings.mover_config() == MoverConfig()
    plain_policy = Policy()
    assert all(
        getattr(loaded.settings.store, f.name) == getattr(plain_policy, f.name) for f in dataclasses.fields(Policy)
    )


@pytest.mark.parametrize("key", keys(), ids=lambda key: key.name)
def test_every_setting_is_taken_from_its_variable_and_from_a_file(key: SettingKey, tmp_path: Path) -> None:
    default = value_of(Settings(), key)
    found = load(environ={key.variable: other(key), **NEEDS.get(key.name, {})})
    value = value_of(found.settings, key)
    assert value != default
    assert found.origins[key.name] == key.variable
    path = written(tmp_path, as_toml(found))
    again = load(path, environ={})
    assert again.settings == found.settings
    assert again.origins[key.name] == str(path)


def test_what_is_printed_is_read_back_the_same_whatever_is_set(tmp_path: Path) -> None:
    loaded = everything()
    text = as_toml(loaded)
    assert load(written(tmp_path, text), environ={}).settings == loaded.settings
    assert set(tomllib.loads(text)) == {key.path[0] for key in keys()}
    assert json.loads(json.dumps(as_data(loaded)))["mover.verb"] == {"value": "pull", "from": "KVMOVER_MOVER_VERB"}


def test_defaults_are_printed_as_comments_so_that_what_is_printed_pins_what_was_given_alone(tmp_path: Path) -> None:
    """An adapter's own defaults lie under the file, and a later release's are its own: neither is to be overridden."""
    text = as_toml(load(environ={"KVMOVER_MOVER_SMS": "none"}))
    patient = Settings(mover=MoverConfig(deadline_s=120.0, sms=4))
    found = load(written(tmp_path, text), environ={}, defaults=patient)
    assert found.settings == dataclasses.replace(patient, mover=MoverConfig(deadline_s=120.0, sms=None))
    assert list(found.origins) == ["mover.sms"]
    spoken = re.sub("^# ", "", text, flags=re.M)
    assert load(written(tmp_path, spoken), environ={}).origins.keys() == {key.name for key in keys()}
    assert load(written(tmp_path, spoken), environ={}).settings == load(written(tmp_path, text), environ={}).settings


@given(st.text())
def test_any_text_is_printed_as_toml_that_says_the_same(text: str) -> None:
    if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text):
        return
    assert tomllib.loads(f"x = {toml(text)}")["x"] == text


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[mover]\ndeadline_s = 3\nverb = 'pull'\n[mover.costs]\nwire_rate = 25e3\n")
    found = load(environ={"KVMOVER_CONFIG": str(path), "KVMOVER_MOVER_DEADLINE_S": "4"})
    assert (found.settings.mover.deadline_s, found.settings.mover.verb) == (4.0, "pull")
    assert found.settings.mover.costs == dataclasses.replace(MoverConfig().costs, wire_rate=25e3)
    assert found.origins == {
        "mover.deadline_s": "KVMOVER_MOVER_DEADLINE_S",
        "mover.verb": str(path),
        "mover.costs.wire_rate": str(path),
    }


def test_an_option_wins_over_the_environment_and_the_file_over_the_defaults_of_an_adapter(tmp_path: Path) -> None:
    path = written(tmp_path, "[mover]\nchunk_layers = 3\n")
    patient = Settings(mover=MoverConfig(deadline_s=120.0, chunk_layers=9, verb=Verb.PULL, ping_s=2.0))
    found = load(
        path,
        environ={"KVMOVER_MOVER_DEADLINE_S": "4", "KVMOVER_MOVER_VERB": "push", "KVMOVER_MOVER_ROUTE": "packed"},
        defaults=patient,
        options={"mover.deadline_s": Option(5, "deadline_s in JSON"), "mover.route": Option("none", "route in JSON")},
    )
    mover = found.settings.mover
    assert (mover.deadline_s, mover.chunk_layers, mover.verb, mover.route, mover.ping_s) == (5.0, 3, "push", None, 2.0)
    assert found.origins == {
        "mover.deadline_s": "deadline_s in JSON",
        "mover.chunk_layers": str(path),
        "mover.verb": "KVMOVER_MOVER_VERB",
        "mover.route": "route in JSON",
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("5", "here: mover.deadline_s = '5': expected number"),
        (-1, "here: mover config has deadline_s = -1.0; it must be positive"),
        ([5], "here: mover.deadline_s = [5]: expected number"),
        ("none", "here: mover.deadline_s = 'none': expected number"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_where_it_was_given(value: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(environ={}, options={"mover.deadline_s": Option(value, "here")})
    assert str(refused.value) == said


def test_a_path_given_goes_before_the_one_in_the_environment(tmp_path: Path) -> None:
    path = written(tmp_path, "[mover]\nroute = 'direct'\n")
    found = load(path, environ={"KVMOVER_CONFIG": str(tmp_path / "missing.toml")})
    assert found.settings.mover.route is Route.DIRECT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mover]\narena_byte = 1", "unknown key mover.arena_byte; did you mean mover.arena_bytes?"),
        ("[moover]\narena_bytes = 1", "unknown key moover; did you mean mover?"),
        ("arena_bytes = 1", "unknown key arena_bytes; did you mean mover.arena_bytes?"),
        ("[zzz.qqq]\nxxx = 1", "unknown key zzz; `kvmover config` prints all there are"),
        ("[mover.backoff]\nfirst = 1", "unknown key mover.backoff.first; did you mean mover.backoff.first_s?"),
        ("[mover]\nkeys = 'k'", "unknown key mover.keys"),
        ("mover = 1", "mover = 1, but mover is a section"),
        ("[mover]\ndeadline_s = '5'", "mover.deadline_s = '5': expected number"),
        ("[mover]\ndeadline_s = nan", "mover.deadline_s = nan: expected a finite number"),
        ("[mover]\ndeadline_s = 'none'", "mover.deadline_s = 'none': expected number"),
        ("[mover]\ndeadline_s = {a = 1}", "mover.deadline_s = {'a': 1}: expected number"),
        ("[mover]\ndeadline_s = 0", "mover config has deadline_s = 0.0; it must be positive"),
        ("[mover]\narena_bytes = 1.5", "mover.arena_bytes = 1.5: expected integer"),
        ("[mover]\narena_bytes = '64mb'", "'64mb': expected a whole number of bytes, in B, KiB, MiB, GiB, TiB, or kB"),
        ("[mover]\narena_bytes = '1.0001KiB'", "expected a whole number of bytes"),
        ("[mover]\nverb = 'shove'", "mover.verb = 'shove': expected push or pull"),
        ("[mover]\nsms = true", "mover.sms = True: expected integer or none"),
        ("[mover.backoff]\njitter = 1", "jitter = 1.0: must be in [0, 1)"),
        ("[mover.costs]\nwire_rate = 0", "wire_rate = 0.0"),
        ("[progress]\nopen_s = 1", "idle_s = 0.02; they must not shrink"),
        ("[store]\nquota_bytes = 0", "policy has quota_bytes = 0; it must be at least 1"),
        ("[store]\nroot = ''", "store.root = '': expected path or text or none"),
        ("[metrics]\nport = 65536", "port = 65536"),
        ("[security]\naccepted_key_files = ['/a']", "accepted_key_files without shared_key_file"),
        ("[security]\naccepted_key_files = [1]", "expected list of paths"),
        ("[peers]\nengines = ['a:1']", "peers has engines and no address"),
        ("[peers]\nengines = 'a:1'\naddress = 'b:70000'", "an engine at 'b:70000'; an address is host:port"),
        ("[peers]\nengines = ['a:1', 'a:1']\naddress = 'b:7'", "of which one is there twice"),
        ("[peers]\nengines = [1]", "expected list of texts"),
        ("[peers]\nask_s = 0", "peers has ask_s = 0.0; it must be a time above 0"),
        ("[mover\n", "kvmover.toml: "),
        ("\udcff", "kvmover.toml: "),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_its_name_the_key_and_the_value(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "kvmover.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        load(path, environ={})
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KVMOVER_MOVER_DEADLNE_S", "5", "did you mean KVMOVER_MOVER_DEADLINE_S?"),
        ("KVMOVER_MOVER_DEADLINE_S", "soon", "KVMOVER_MOVER_DEADLINE_S: mover.deadline_s = 'soon': expected number"),
        ("KVMOVER_MOVER_DEADLINE_S", "-1", "KVMOVER_MOVER_DEADLINE_S: mover config has deadline_s = -1.0"),
        ("KVMOVER_RECORD_SPANS", "yes", "record.spans = 'yes': expected true or false"),
        ("KVMOVER_METRICS_PORT", "http", "metrics.port = 'http': expected integer or none"),
    ],
)
def test_a_variable_that_cannot_be_is_refused_by_its_name(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(environ={variable: value})
    assert said in str(refused.value)


def test_variables_of_others_are_left_alone() -> None:
    assert not load(environ={"KVMOVER_SCHEDULES": "3", "KVMOVERS_MOVER_X": "1", "HOME": "/"}).origins


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration .*missing.toml: No such file"):
        load(tmp_path / "missing.toml", environ={})


# Keys

SECRET = "correct horse battery staple"


def test_keys_are_read_from_their_files_and_printed_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text(f"{SECRET}\n")
    old.write_text(f"  {SECRET} of old\n\n")
    environ = {
        "KVMOVER_SECURITY_SHARED_KEY_FILE": str(new),
        "KVMOVER_SECURITY_ACCEPTED_KEY_FILES": str(old),
    }
    loaded = load(environ=environ)
    config = loaded.settings.mover_config()
    assert config.keys is not None
    assert config.keys.wrote(config.keys.write(b"x"), b"x")
    assert len(config.keys.accepted) == 1
    everything_said = [repr(config), str(config), repr(loaded), as_toml(loaded), json.dumps(as_data(loaded))]
    assert not any(SECRET in said or SECRET.encode().hex() in said for said in everything_said)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read the key file"), (b"short", "a key of 5 bytes"), (bytes(5000), "longer than 4096 bytes")],
)
def test_a_key_file_that_is_none_is_refused_without_its_content(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    settings = load(environ={"KVMOVER_SECURITY_SHARED_KEY_FILE": str(path)}).settings
    with pytest.raises(ConfigError) as refused:
        settings.mover_config()
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert "short" not in str(refused.value)


# The page and the command


def test_every_key_has_a_text_and_every_text_a_key() -> None:
    assert list(TEXTS) == [key.name for key in keys()]
    assert all(text.endswith(".") for text in TEXTS.values())
    assert len({key.variable for key in keys()}) == len(keys())
    assert not sections() & {key.name for key in keys()}


def test_the_page_is_what_the_settings_say() -> None:
    assert config_page.PAGE.read_text() == config_page.page(), "run: python -m perf.config_page"


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["config", *arguments])
    return int(end.value.code or 0)


def test_the_command_prints_all_settings_and_where_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "[store]\nquota_bytes = '2 GiB'\n")
    monkeypatch.setenv("KVMOVER_MOVER_VERB", "pull")
    assert command("--config", str(path)) == 0
    out = capsys.readouterr().out
    assert f"quota_bytes = {2 << 30}  # {path}\n" in out
    assert 'verb = "pull"  # KVMOVER_MOVER_VERB\n' in out
    assert command("--config", str(path), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert {name: each["value"] for name, each in data.items()} == {
        key.name: plain(value_of(load(path).settings, key)) for key in keys()
    }


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "[store]\nquota = 1\n")
    assert command("--config", str(path)) == 2
    assert capsys.readouterr().err == f"kvmover: {path}: unknown key store.quota; did you mean store.quota_bytes?\n"


def test_reading_a_configuration_loads_the_values_of_its_sections_and_none_of_the_parts_behind_them() -> None:
    """Every process of an engine reads one: it has no use for torch, nor for a store, a tree or tiers it never opens.

    Besides the configuration and errors that leaves what a MoverConfig is made of, of the store its policy,
    and layouts and plans, which the words of the wire are made of, of the transport its interface, for which the C core
    counts runs, and of the kernels the names of engines.
    """
    code = "import sys, kvmover.config\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert not {name.split(".")[0] for name in loaded} & {"torch", "triton", "nixl", "cupy"}
    ours = [name for name in loaded if name.startswith("kvmover.")]
    parts = {"config", "errors", "faces", "fields", "foreign_text", "layout", "plan", "store", "transfer"}
    parts |= {"_core", "c_core", "kernels", "prepared", "shared_memory", "transport", "vocabulary"}
    assert {name.split(".")[1] for name in ours} == parts
    assert [name for name in ours if name.startswith("kvmover.kernels.")] == ["kvmover.kernels.copy_engine"]
    assert [name for name in ours if name.startswith("kvmover.store.")] == [
        "kvmover.store.store_policy",
        "kvmover.store.location",
    ]
    assert [name for name in ours if name.startswith("kvmover.transport.")] == ["kvmover.transport.base"]
    assert {"kvmover.transfer.mover", "kvmover.transfer.threads.progress"}.isdisjoint(ours)
