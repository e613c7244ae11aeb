"""Those who watch a mover: logs by request, spans and run logs say what became of real transfers, and harm none."""

from __future__ import annotations

import io
import json
import logging
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmover.cache.ledger import Credit, Ledger
from kvmover.cache.ledger.ledger_collector import LedgerCollector
from kvmover.config import load
from kvmover.errors import KvmoverError
from kvmover.observe import logs
from kvmover.observe.metrics import MoverCollector
from kvmover.observe.observers import Observers, Spans
from kvmover.observe.runlog import read_lines
from kvmover.transfer.result import Cause, Ending
from tests.observe import rundata
from tests.observe.toy_engines import Engines


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    yield
    logs.release()


# Endings


def test_a_watcher_is_told_of_each_transfer_at_either_end_once(engines: Engines) -> None:
    engines.move("r1")
    engines.fail("r2")
    told = [(e.engine, e.rank, e.verb, e.request, e.result.cause) for e in engines.endings]
    assert sorted(told[:2]) == [("decode", 0, "receive", "r1", None), ("prefill", 0, "send", "r1", None)]
    assert sorted(told[2:]) == [
        ("decode", 0, "receive", "r2", Cause.ABORTED),
        ("prefill", 0, "send", "r2", Cause.PEER_ABORTED),
    ]


def test_a_watcher_that_raises_is_logged_and_fails_nothing(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    def broken(ending: Ending) -> None:
        raise OSError(f"disk full at {ending.request}")

    after: list[Ending] = []
    for mover in (engines.src, engines.dst):
        mover.watch(broken)
        mover.watch(after.append)
    engines.move("r1")
    assert caplog.text.count("disk full at r1") == 2
    assert len(after) == 2


# Logs


def logged(engines: Engines, formatter: logging.Formatter) -> list[str]:
    """What handlers of the root logger would have had is not theirs."""
    stream, rooted = io.StringIO(), io.StringIO()
    above = logging.StreamHandler(rooted)
    logging.getLogger().addHandler(above)
    try:
        handler = logs.configure("info", formatter)
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(stream)
        for mover in (engines.src, engines.dst):
            mover.watch(logs.transfer)
        engines.move("r1")
        engines.fail(rundata.UGLY)
    finally:
        logging.getLogger().removeHandler(above)
    assert not rooted.getvalue()
    return stream.getvalue().splitlines()


def test_a_transfer_is_a_line_of_json_with_its_request(engines: Engines) -> None:
    lines = [json.loads(line) for line in logged(engines, logs.JsonFormatter())]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    mine = [line for line in lines if line["logger"] == "kvmover.transfers"]
    landed = next(line for line in mine if line["verb"] == "receive" and line["request"] == "r1")
    assert (landed["level"], landed["engine"], landed["rank"], landed["bytes"]) == ("info", "decode", 0, 16 * 128)
    assert landed["time"].endswith("+00:00")
    assert landed["message"].startswith("receive of r1 landed: 2 KiB in ")
    failed = next(line for line in mine if line["verb"] == "receive" and line["request"] == rundata.UGLY)
    assert (failed["level"], failed["cause"]) == ("warning", "aborted")
    assert failed["message"].endswith("nobody wants it")
    assert len(mine) == 4


def test_lines_of_text_say_the_same(engines: Engines) -> None:
    lines = logged(engines, logs.text_formatter())
    assert any(" INFO kvmover.transfers: receive of r1 landed: 2 KiB in " in line for line in lines)
    assert any(" WARNING kvmover.transfers: " in line and "nobody wants it" in line for line in lines)


@pytest.mark.parametrize("into", ["its own handler", "the log of an engine"])
def test_a_name_that_does_not_print_begins_no_line_of_its_own(into: str, caplog: pytest.LogCaptureFixture) -> None:
    name, host = "r\n2026-01-01 ERROR all is lost\x1b[2J", logging.getLogger("an engine")
    record = logging.LogRecord("kvmover.x", logging.WARNING, "", 1, "%s is 100%% lost", (name,), None)
    if into == "the log of an engine":
        logs.Guest(host, "kvmover").emit(record)
        line = caplog.records[-1].getMessage() if caplog.records else ""
    else:
        line = logs.text_formatter().format(record)
    assert line.isprintable()
    assert line.endswith(r"r\n2026-01-01 ERROR all is lost\x1b[2J is 100% lost")


def test_a_record_keeps_its_error_and_what_json_has_no_word_for() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("kvmover.x", logging.ERROR, "", 1, "it is %s", ("so",), sys.exc_info())
    record.path, record.request, record.message = Path("/a"), "r\n1", "overridden"
    line = json.loads(logs.JsonFormatter().format(record))
    assert (line["message"], line["path"], line["request"], line["level"]) == ("it is so", "/a", "r\n1", "error")
    assert line["error"].endswith("ValueError: broken")


def test_a_later_configuration_replaces_the_one_before_and_is_given_back(tmp_path: Path) -> None:
    own = logging.getLogger("kvmover")
    before = (list(own.handlers), own.level, own.propagate)
    first = logs.configure("debug", logs.text_formatter(), tmp_path / "first")
    second = logs.configure("warning", logs.text_formatter(), tmp_path / "second")
    logging.getLogger("kvmover.transfer").info("not said")
    logging.getLogger("kvmover.transfer").warning("said")
    assert first not in own.handlers
    assert second in own.handlers
    logs.release()
    assert (list(own.handlers), own.level, own.propagate) == before
    assert (tmp_path / "first").read_text() == ""
    assert (tmp_path / "second").read_text().endswith("said\n")
    with pytest.raises(KvmoverError, match="cannot write .*missing/log: No such file"):
        logs.configure("info", logs.text_formatter(), tmp_path / "missing" / "log")


# Spans


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Spans of a provider of this test alone: OpenTelemetry's global one can be set only once."""
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs its SDK")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter, provider = export.InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def test_a_transfer_is_a_span_with_the_time_it_took(engines: Engines, exported: Any) -> None:
    now = 1_800_000_000_000_000_000
    engines.dst.watch(Spans(clock=lambda: now).transfer)
    engines.move("r1")
    engines.fail("r2")
    landed, failed = exported.get_finished_spans()
    assert (landed.name, landed.end_time) == ("kvmover receive", now)
    seconds = (
        engines.endings[0].result.seconds if engines.endings[0].verb == "receive" else engines.endings[1].result.seconds
    )
    assert landed.start_time == now - int(seconds * 1e9)
    assert landed.attributes["kvmover.request"] == "r1"
    assert landed.attributes["kvmover.bytes"] == 16 * 128
    assert landed.status.is_unset
    assert failed.attributes["error.type"] == "aborted"
    assert (failed.status.is_ok, failed.status.description) == (False, "nobody wants it")


def test_a_span_hangs_below_the_engines_own(engines: Engines, exported: Any) -> None:
    from opentelemetry import trace

    parent = trace.SpanContext(trace_id=7, span_id=9, is_remote=True, trace_flags=trace.TraceFlags(1))
    context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    engines.dst.watch(Spans(lambda request: context if request == "r1" else None).transfer)
    engines.move("r1")
    (span,) = exported.get_finished_spans()
    assert (span.context.trace_id, span.parent.span_id) == (7, 9)


def test_without_opentelemetry_spans_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(KvmoverError, match=r"pip install '\.\[otel\]'"):
        Spans()


# An engine's log


@contextmanager
def engine_log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """An engine that has configured its own logger and no other, and what it writes."""
    host, written = logging.Logger("an engine", logging.INFO), io.StringIO()
    host.addHandler(logging.StreamHandler(written))
    host.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])  # pytest's own, which it takes back by itself
        yield host, written


def test_an_engine_that_configures_its_own_logger_alone_says_what_kvmover_does_and_who() -> None:
    own, settings = logging.getLogger("kvmover.somewhere"), load(environ={}).settings
    with engine_log() as (host, written):
        with Observers(settings, "decode", 0, logs.Guest(host, "kvmover rank 1 of TP2")):
            own.info("%d of %s", 3, "100 %d")
            own.debug("not at this level")
            try:
                raise ValueError("caught")
            except ValueError:
                own.exception("poll %s", "x")
        own.info("nobody is a guest any more")
    first, second, *trace = written.getvalue().splitlines()
    assert first == "INFO kvmover.somewhere kvmover rank 1 of TP2: 3 of 100 %d"
    assert second == "ERROR kvmover.somewhere kvmover rank 1 of TP2: poll x"
    assert trace[-1] == "ValueError: caught"
    assert logging.getLogger("kvmover").propagate


def test_where_somebody_has_configured_kvmovers_loggers_no_engine_says_anything(tmp_path: Path) -> None:
    own, handler = logging.getLogger("kvmover"), logging.StreamHandler(io.StringIO())
    configured = {"KVMOVER_LOGGING_LEVEL": "info", "KVMOVER_LOGGING_FILE": str(tmp_path / "log")}
    with engine_log() as (host, written):
        for logger in (own, logging.root):
            logger.addHandler(handler)
            with Observers(load(environ={}).settings, "decode", 0, logs.Guest(host, "kvmover")):
                own.warning("heard by somebody else")
            logger.removeHandler(handler)
        with Observers(load(environ=configured).settings, "decode", 0, logs.Guest(host, "kvmover")):
            own.warning("in the file")
    assert handler.stream.getvalue().splitlines() == ["heard by somebody else"] * 2
    assert "in the file" in (tmp_path / "log").read_text()
    assert written.getvalue() == ""


def test_an_engine_whose_log_is_the_root_says_it_once() -> None:
    guest = logs.Guest(logging.root, "kvmover prefill rank 0 of TP1")
    with engine_log() as (host, written):
        logging.root.addHandler(host.handlers[0])
        with Observers(load(environ={}).settings, "decode", 0, guest):
            logging.getLogger("kvmover").warning("lost a peer")
    assert written.getvalue() == "WARNING kvmover kvmover prefill rank 0 of TP1: lost a peer\n"


# All of it together


def test_a_configuration_begins_and_ends_all_that_it_asks_for(engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "kvmover.toml"
    file.write_text(
        f"[logging]\nlevel = 'info'\nformat = 'json'\nfile = '{tmp_path}/log'\n"
        f"[metrics]\nport = 0\n[record]\nrun_log = '{tmp_path}/run.jsonl'\n"
    )
    with Observers(load(file, environ={}).settings, "decode", 0) as observers:
        observers.watch(engines.dst)
        ledger = Ledger(sink=observers.account)
        port = observers.serve(MoverCollector([engines.dst]), LedgerCollector(ledger))
        engines.move("r1")
        ledger.matched("r1", 16, 0, 0.0)
        ledger.admitted("r1", Credit())
        ledger.computed("r1", 16)
        ledger.finished("r1", 1.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            scraped = answer.read().decode()
    assert 'kvmover_transfers_total{end="landed",engine="decode",rank="0",verb="receive"} 1.0' in scraped
    assert 'source="computed",tenant=""} 16.0' in scraped
    found = read_lines([tmp_path / "run.jsonl"])
    assert [(line.request, line.verb) for line in found.transfers] == [("r1", "receive")]
    assert [line.account.computed_tokens for line in found.accounts] == [16]
    (line,) = (json.loads(text) for text in (tmp_path / "log").read_text().splitlines())
    assert line["request"] == "r1"
    assert logging.getLogger("kvmover").propagate
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20)


def test_nothing_is_begun_that_is_not_asked_for(engines: Engines) -> None:
    before = list(engines.dst._core.watchers)
    with Observers(load(environ={}).settings, "decode", 0) as observers:
        observers.watch(engines.dst)
        assert observers.serve() is None
    assert engines.dst._core.watchers == before


def test_what_cannot_be_begun_leaves_nothing_begun(tmp_path: Path) -> None:
    environ = {"KVMOVER_LOGGING_LEVEL": "info", "KVMOVER_RECORD_RUN_LOG": str(tmp_path / "missing" / "run.jsonl")}
    with pytest.raises(KvmoverError, match="cannot write .*run.jsonl"):
        Observers(load(environ=environ).settings, "decode", 0)
    assert logging.getLogger("kvmover").propagate


def test_a_port_that_cannot_be_had_is_a_warning_that_names_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    settings = load(environ={"KVMOVER_METRICS_PORT": "0"}).settings
    with Observers(settings, "decode", 0) as first:
        port = first.serve()
        assert port is not None
        taken = load(environ={"KVMOVER_METRICS_PORT": str(port - 1)}).settings  # rank 1 has the one behind
        with Observers(taken, "decode", 1) as second:
            assert second.serve() is None
        last = load(environ={"KVMOVER_METRICS_PORT": "65535"}).settings
        with Observers(last, "decode", 1) as third:
            assert third.serve() is None
    remedy = "set another metrics.port (KVMOVER_METRICS_PORT), or 0 for any"
    assert [record.getMessage() for record in caplog.records] == [
        f"no metrics are served at 127.0.0.1:{port} (metrics.port = {port - 1} and rank 1): Address already in use;"
        f" {remedy}",
        "no metrics are served at 127.0.0.1:65536 (metrics.port = 65535 and rank 1): a port is at most 65535;"
        f" {remedy}",
    ]
