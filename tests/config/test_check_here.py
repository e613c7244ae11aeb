"""`kvmover config` and `kvmover doctor` refuse settings that cannot work, and settings in code are held to the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmover import MoverConfig, cli
from kvmover.config import ConfigError, Settings, load
from kvmover.config.settings import Level, LoggingSettings, MetricsSettings
from kvmover.errors import LayoutError
from kvmover.tools.doctor.host_checks import configuration
from kvmover.tools.doctor.process_checks import Status
from kvmover.transfer.protocol.auth import Key

REFUSED = {
    "store.root = 'ftp://x'": "no store is at 'ftp://x': a location is a path, or begins with s3://",
    "security.shared_key_file = '/nonexistent/key'": "cannot read the key file /nonexistent/key",
    "logging.file = '/nonexistent/x.log'": "there is no directory /nonexistent",
    "record.run_log = '/nonexistent/run.jsonl'": "there is no directory /nonexistent",
    "metrics.address = 'not an address'": "address = 'not an address'; it is an IP address or a host's name",
    "mover.costs.chunk_bytes = '128MiB'": "an arena holds a chunk",
    "mover.ping_s = 50": "mover config has ping_s = 50.0 and silence_s = 10.0",
    "mover.lease_s = 100": "mover.lease_s = 100.0 and mover.silence_s = 10.0",
    "mover.resend_s = 500": "mover config has resend_s = 500.0 and deadline_s = 30.0",
    "mover.sms = 100000": "no GPU has more than 1024",
    "logging.level = 'LOUD'": "expected debug or info or warning or error",
}


@pytest.mark.parametrize(("line", "words"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_work_is_refused_by_both_commands(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvmover.toml"
    file.write_text(line)
    monkeypatch.setenv("KVMOVER_CONFIG", str(file))
    with pytest.raises(SystemExit) as end:
        cli.main(["config"])
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert words in printed.err
    assert printed.err.count("\n") == 1
    (finding,) = configuration()
    assert finding.status is Status.PROBLEM
    assert words in finding.detail


@pytest.mark.parametrize(("level", "due"), [("INFO", Level.INFO), ("Warning", Level.WARNING), ("debug", Level.DEBUG)])
def test_a_word_is_taken_in_capitals_too(level: str, due: Level) -> None:
    assert load(environ={"KVMOVER_LOGGING_LEVEL": level}).settings.logging.level is due


def test_a_store_is_a_path_or_a_service_that_is_known() -> None:
    for text in ("s3://bucket/x", "mooncake://host:1", "keeper:///run/kv.sock"):
        assert load(environ={"KVMOVER_STORE_ROOT": text}).settings.store.root == text
    assert load(environ={"KVMOVER_STORE_ROOT": "/srv/kv"}).settings.store.root == Path("/srv/kv")


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "fd00::7", "localhost", "decode-0.kv.svc.cluster.local"])
def test_an_address_is_one_of_ip_or_a_name(address: str) -> None:
    assert MetricsSettings(address=address).address == address


@pytest.mark.parametrize("address", ["1.2.3", "300.1.1.1", "a..b", "http://x", "x:24400", "-x", "a" * 64])
def test_what_is_neither_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="it is an IP address or a host's name"):
        MetricsSettings(address=address)


@pytest.mark.parametrize(
    "times", [{"ping_s": 50, "silence_s": 1}, {"resend_s": 500, "deadline_s": 1}, {"silence_s": 0.001}]
)
def test_times_in_code_are_held_to_their_order(times: dict[str, float]) -> None:
    with pytest.raises(LayoutError, match=r"mover config has \w+ = .* and \w+ = "):
        MoverConfig(**times)
    assert MoverConfig(ping_s=1, silence_s=1, resend_s=1, deadline_s=1).silence_s == 1


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        (b"<openssl rand -hex 32>", "a key in angle brackets is a placeholder"),
        (b"\0" * 32, "a key of 1 different bytes"),
        (b"abcab" * 8, "a key of 3 different bytes"),
        (b"0123456789", "a key of 10 bytes"),
    ],
)
def test_a_key_that_everybody_knows_is_none(secret: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=words):
        Key(secret)
    file = tmp_path / "key"
    file.write_bytes(secret + b"\n")
    settings = load(environ={"KVMOVER_SECURITY_SHARED_KEY_FILE": str(file)}).settings
    with pytest.raises(ConfigError, match=f"key file {file}: {words}"):
        settings.check_here()
    with pytest.raises(ConfigError, match=words):
        settings.mover_config()


def test_what_works_here_passes(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("3d2f8f1b6f0f4a8f9d0e7c6b5a493827\n")
    Settings().check_here()
    environ = {
        "KVMOVER_SECURITY_SHARED_KEY_FILE": str(key),
        "KVMOVER_LOGGING_FILE": str(tmp_path / "kv.log"),
        "KVMOVER_LOGGING_LEVEL": "INFO",
    }
    settings = load(environ=environ).settings
    settings.check_here()
    assert settings.logging == LoggingSettings(Level.INFO, file=tmp_path / "kv.log")
