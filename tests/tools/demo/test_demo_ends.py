"""The demo refuses what it cannot do before it starts processes, and leaves nothing when it is ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover import cli, errors
from kvmover.config import ConfigError, load
from kvmover.config.settings import MetricsSettings, Settings
from kvmover.errors import KvmoverError, MissingLibrary
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.observe.runlog import read_lines
from kvmover.tools.demo import crew
from kvmover.tools.demo import run as demo
from kvmover.tools.demo.crew import Crew, CrewError, Member, ask
from kvmover.tools.demo.demo_report import RunReport, ScenarioReport
from kvmover.tools.demo.requests import TraceError
from kvmover.tools.demo.run import MOVER, QUIET, DemoOptions, run, run_demo
from kvmover.tools.demo.scenarios import choose
from tests.proofs import family

WITHIN_S = 60.0
UNEVEN = DemoOptions(scenarios=("uneven",), requests=2)
LINE = {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [7, 8]}


@pytest.fixture
def no_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise AssertionError(f"{size} processes were started")

    monkeypatch.setattr(demo, "Crew", refuse)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read .*/trace.jsonl: No such file or directory"),
        (b"", "trace.jsonl holds no request"),
        (b"\n\n", "trace.jsonl holds no request"),
        (b"\x00\xff\xfe" * 500, "trace.jsonl line 1: "),
        (b"{}\n", "trace.jsonl line 1: "),
    ],
    ids=["there is none", "empty", "empty lines", "binary", "another one"],
)
def test_a_trace_is_read_before_any_process_is_started(
    no_crew: None, tmp_path: Path, content: bytes | None, reason: str
):
    trace = tmp_path / "trace.jsonl"
    if content is not None:
        trace.write_bytes(content)
    with pytest.raises(KvmoverError, match=reason) as refused:
        run(replace(UNEVEN, trace=trace), lambda what, requests: None)
    assert len(str(refused.value)) < 400


def test_a_folder_is_no_trace(no_crew: None, tmp_path: Path):
    with pytest.raises(KvmoverError, match="cannot read .*: Is a directory"):
        run(replace(UNEVEN, trace=tmp_path), lambda what, requests: None)


def test_a_store_that_is_not_there_is_refused_before_any_process_is_started(no_crew: None, tmp_path: Path):
    with pytest.raises(KvmoverError, match="--store .*/none is not a directory"):
        run(DemoOptions(scenarios=("storage",), store=str(tmp_path / "none")), lambda what, requests: None)


class _Broken:
    """A seat that cannot be taken."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.scenario, self.engine, self.rank = error, choose(("uneven",))[0], "decode", 3

    def sit(self) -> None:
        raise self.error


def test_a_rank_that_fails_is_named_by_scenario_engine_and_number():
    with Crew(1) as one:
        for error, told in (
            (KvmoverError("the disk is full"), "failed in `seat`: the disk is full"),
            (ValueError("a bug"), "failed in `seat`: Traceback.*ValueError: a bug"),
            (SystemExit(7), "ended in `seat` with exit code 7"),
        ):
            with pytest.raises(CrewError, match=f"(?s)scenario uneven: rank 3 of decode {told}"):
                ask(one.members, "seat", [(_Broken(error),)])


def test_a_rank_that_is_silent_is_named_with_what_it_was_told(monkeypatch: pytest.MonkeyPatch):
    near, _far = multiprocessing.Pipe()
    monkeypatch.setattr(crew, "ANSWER_S", 0.01)
    member = Member(multiprocessing.current_process(), near)  # pyright: ignore[reportArgumentType]
    member.tell("seat", _Broken(ValueError()))
    member.tell("decode", 1)
    with pytest.raises(CrewError, match="scenario uneven: rank 3 of decode did not answer `decode` within 0 s"):
        member.answer()


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1.5, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_is_refused(no_crew: None, tmp_path: Path, scale: float):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(LINE))
    with pytest.raises(TraceError, match="factor"):
        run(replace(UNEVEN, trace=trace, scale=scale), lambda what, requests: None)
    with pytest.raises(TraceError, match=r"--scale .* has no meaning without --trace"):
        run(replace(UNEVEN, scale=scale), lambda what, requests: None)


def test_a_prompt_that_fits_no_pool_is_named_with_its_length(no_crew: None, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(LINE | {"input_length": 51200, "hash_ids": list(range(100))}))
    with pytest.raises(TraceError, match=r"request 0: 51,200 tokens at --scale 1.0, and the demo's pools hold 16,376"):
        run(replace(UNEVEN, trace=trace, scale=1.0), lambda what, requests: None)


def test_more_ranks_than_ports_are_refused(no_crew: None):
    settings = Settings(mover=MOVER, metrics=MetricsSettings(port=65533))
    with pytest.raises(ConfigError, match=r"metrics.port = 65533 leaves no ports for 5 ranks"):
        run(replace(UNEVEN, settings=settings), lambda what, requests: None)


def test_a_run_without_requests_shows_nothing_and_fails():
    report = RunReport([ScenarioReport("uneven", "a title", [])], 1.0, "1.5.1")
    assert not report.passed
    assert not report.as_data()["tokens_identical"]
    assert report.sentence() == "FAILED: there was no request to serve"


def test_without_torch_there_is_one_sentence_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    said = f"needs torch, which is not installed: {errors.how_to_install('torch')}"
    with pytest.raises(SystemExit) as end:
        cli.main(["demo"])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"kvmover: the demo {said}\n"
    component = Component.attention(2, 2, 8, "uint8")
    with pytest.raises(MissingLibrary) as refused:
        Pool.zeros(PoolSpec.dense(component, Fleet().shard(component, 0, 1), 2, 64, "NHD"))
    assert str(refused.value) == f"a pool {said}"


def test_the_configuration_is_read_over_what_the_demo_would_do_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given: list[Settings] = []

    def ran(options: DemoOptions, *_: object) -> RunReport:
        given.append(options.settings)
        return RunReport([], 1.0, "1.5.1")

    monkeypatch.setattr(demo, "run", ran)
    monkeypatch.setenv("KVMOVER_MOVER_INTEGRITY", "digest")
    monkeypatch.setenv("KVMOVER_METRICS_PORT", "24400")
    monkeypatch.setenv("KVMOVER_RECORD_RUN_LOG", str(tmp_path / "run.jsonl"))
    run_demo(UNEVEN)
    assert given == [load(defaults=Settings(mover=MOVER, logging=QUIET)).settings]
    assert (given[0].mover.arena_bytes, given[0].mover.integrity) == (8 << 20, "digest")
    said = capsys.readouterr().err
    assert "kvmover top 127.0.0.1:24400-24404" in said
    assert f"kvmover report {tmp_path / 'run.jsonl'}\n" in said


@pytest.mark.timeout(100)
def test_a_run_is_watched_while_it_runs_and_traced_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal is shown frames
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(demo, "_FRAME_S", 0.05)
    trace = tmp_path / "run.json"
    assert run_demo(replace(UNEVEN, report=trace, watch=True, as_json=True)) == 0
    said = capsys.readouterr()
    assert "kvmover top  127.0.0.1:244" in said.err
    assert "prefill 2" in said.err  # a rank's row
    (scenario,) = json.loads(said.out)["scenarios"]
    lines = read_lines([tmp_path / "run.jsonl"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(each["ph"] == "X" and each["cat"] != "request" for each in events) == len(lines.transfers)
    assert sorted(tmp_path.iterdir()) == [trace, tmp_path / "run.jsonl"]
    landed = {(each.engine, each.rank, each.request) for each in lines.transfers if each.reason is None}
    assert landed == {
        (engine, rank, f"uneven-{number}")
        for engine, ranks in (("prefill", 3), ("decode", 2))
        for rank in range(ranks)
        for number in range(2)
    }
    hits = [each.account.device_tokens for each in lines.accounts]
    assert hits == [request["hit_tokens"] for request in scenario["requests"]]


@pytest.mark.parametrize(
    ("name", "beside", "reason"),
    [
        ("run.json", b'{"timestamp": 0}', "run.jsonl line 1 is no line of a run log"),
        ("run.jsonl", None, "--report .*/run.jsonl: a trace is JSON"),
        ("run.pdf", None, "--report .*/run.pdf: a trace is JSON; name a file that ends in .json"),
        ("nowhere/run.json", None, "there is no folder .*/nowhere"),
    ],
    ids=["a trace of the user's", "the log's own name", "a picture", "no folder"],
)
def test_a_report_is_written_over_nothing_but_an_older_one(
    no_crew: None, tmp_path: Path, name: str, beside: bytes | None, reason: str
):
    log = tmp_path / "run.jsonl"
    if beside is not None:
        log.write_bytes(beside + b"\n")
    with pytest.raises(KvmoverError, match=reason):
        run_demo(replace(UNEVEN, report=tmp_path / name))
    assert (log.read_bytes() if log.exists() else None) == (beside and beside + b"\n")


def test_ports_for_all_ranks_are_neighbours_that_nobody_listens_on(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = listening.getsockname()[1]
        monkeypatch.setattr(demo, "FIRST_METRICS_PORT", taken - 2)
        first = demo._free_ports("127.0.0.1", 5)
    assert taken not in range(first, first + 5)


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo in a session of its own, when its processes have begun."""
    # A shell has those that it starts in the background ignore Ctrl-C, and they hand that down.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heeds}; from kvmover.cli import main; main()"
    command = [sys.executable, "-c", code, "demo", "--scenario", "gqa"]
    command += ["--watch", "--report", str(folder / "run.json")]
    environ = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )
    try:
        deadline = time.monotonic() + WITHIN_S
        while len(children(process.pid)) < 4:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        for pid in [*children(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.timeout(100)
@pytest.mark.parametrize("number", family([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]), ids=["ctrl-c", "sigterm"])
def test_a_demo_that_is_ended_leaves_no_process_no_file_and_no_traceback(number: signal.Signals, tmp_path: Path):
    with started(tmp_path) as process:
        before = children(process.pid)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: to all of them
        else:
            os.kill(process.pid, number)
        _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    deadline = time.monotonic() + WITHIN_S
    while any(map(is_there, before)):  # multiprocessing's own watches a pipe of ours, and sees it closed a moment later
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
