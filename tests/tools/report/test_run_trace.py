"""The trace of a run: what the log says is where the trace has it, in the format that Perfetto opens."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvmover import cli
from kvmover.cache.ledger import Account, AccountGroup, AttemptPhase
from kvmover.errors import KvmoverError
from kvmover.observe.runlog import Accounted, LineReader, Moved, RunLog, read_lines
from kvmover.tools.report.run_summary import report_run
from kvmover.tools.report.run_trace import TraceEvents, write_trace
from tests.observe import rundata
from tests.observe.toy_engines import Engines

Event = dict[str, Any]

#: What the Trace Event Format asks of each phase that we write, beside `ph`, `name`, `pid` and `args`.
FIELDS = {"M": {"tid"}, "X": {"tid", "ts", "dur", "cat"}, "i": {"tid", "ts", "s"}, "C": {"tid", "ts"}}


def traced(*logs: Path) -> list[Event]:
    out = logs[0].with_suffix(".json")
    write_trace(LineReader(logs), out)
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told.keys() == {"displayTimeUnit", "traceEvents"}
    return told["traceEvents"]


def names(events: list[Event], kind: str) -> dict[int, str]:
    key = {"process_name": "pid", "thread_name": "tid"}[kind]
    return {each[key]: each["args"]["name"] for each in events if each["name"] == kind}


def slices(events: list[Event], *categories: str) -> list[Event]:
    return [each for each in events if each["ph"] == "X" and each["cat"] in categories]


def test_slices_of_real_transfers_have_the_times_of_the_log(engines: Engines, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with RunLog(log, "decode", 0) as written:
        for mover in (engines.src, engines.dst):
            mover.watch(written.transfer)
        engines.move("r1")
        engines.fail("r2")
        engines.move(rundata.UGLY)
    lines, events = read_lines([log]).transfers, traced(log)
    ranks = names(events, "process_name")
    found = {(ranks[each["pid"]], each["cat"], each["name"]): each for each in slices(events, "send", "receive")}
    assert len(found) == len(lines) == 6
    for line in lines:
        drawn = found[f"{line.engine} {line.rank}", line.verb, line.request]
        assert drawn["dur"] == pytest.approx(line.seconds * 1e6, abs=0.5)
        assert drawn["ts"] + drawn["dur"] == pytest.approx(line.time_s * 1e6, abs=0.5)
        assert drawn["ts"] == pytest.approx(line.began_s * 1e6, abs=1.5)
        assert drawn["args"].get("nbytes", 0) == line.nbytes
        assert drawn["args"].get("spent_s", {}) == line.spent_s
        assert drawn["args"].get("reason") == line.reason
    failed = {(ranks[each["pid"]], each["name"]): each for each in events if each["name"].startswith("failed")}
    assert failed.keys() == {("decode 0", "failed: aborted"), ("prefill 0", "failed: peer_aborted")}
    for line in (line for line in lines if not line.landed):
        instant = failed[f"{line.engine} {line.rank}", f"failed: {line.cause}"]
        assert (instant["ph"], instant["s"], instant["ts"]) == ("i", "p", round(line.time_s * 1e6))
        assert instant["args"] == {"request": "r2", "reason": line.reason}
    counted = {ranks[each["pid"]]: each["args"] for each in events if each["ph"] == "C"}  # the last of each
    nbytes = sum(line.nbytes for line in lines if line.landed and line.verb == "receive")
    assert counted == {"prefill 0": {"send": nbytes}, "decode 0": {"receive": nbytes}}
    assert nbytes > 0


def test_every_event_has_the_fields_that_the_format_asks_for(tmp_path: Path) -> None:
    rundata.write(tmp_path / "run.jsonl")
    for event in traced(tmp_path / "run.jsonl"):
        assert event.keys() == {"ph", "name", "pid", "args"} | FIELDS[event["ph"]]
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts", "dur") if key in event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())


def test_ranks_are_processes_by_name_and_no_two_rows_have_one_number(tmp_path: Path) -> None:
    for rank in range(3):
        rundata.write(tmp_path / f"{rank}.jsonl", 20, rank, seed=rank)
    events = traced(*sorted(tmp_path.iterdir()))
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    assert Counter(processes.values()) == Counter(
        [*(f"{engine} {rank}" for engine in ("prefill", "decode") for rank in range(3)), "requests"]
    )
    assert not processes.keys() & threads.keys()
    named: set[int] = set()
    for event in events:  # a name is there before it is used
        if event["ph"] == "M":
            named.add(event["tid"])
        assert {event["pid"], event["tid"]} <= named
    assert Counter(each["cat"] for each in slices(events, "send", "receive", "request")) == Counter(
        send=60, receive=60, request=60
    )


def test_a_request_has_a_slice_with_its_account_and_retries_do_not_count_its_prompt_again() -> None:
    trace = TraceEvents()

    def attempt(number: int) -> list[Event]:
        tokens = (100, 60, 40, 0, 0, 0, 10, 50)
        account = Account(7, AccountGroup("gold", "m"), number, AttemptPhase.RETRACTED, 5.0, 5.5, *tokens)
        return trace.events_of(Accounted(1000.0, account))

    first = attempt(1)
    (drawn,) = slices(first, "request")
    assert (drawn["name"], drawn["ts"], drawn["dur"]) == ("7", 999_500_000, 500_000)
    assert drawn["args"]["group"] == {"tenant": "gold", "model": "m"}
    sums = {"device": 40, "host": 0, "storage": 0, "peer": 0, "computed": 10, "abandoned": 50}
    assert [each["args"] for each in first if each["ph"] == "C"] == [sums]
    assert [each["ph"] for each in attempt(2)] == ["M", "X"]


moved = st.builds(
    lambda end_s, seconds, verb: Moved(end_s, seconds, "e", 0, verb, "r"),
    st.floats(0, 10) | st.integers(0, 10).map(float),
    st.just(0.0) | st.floats(1e-7, 5) | st.integers(0, 5).map(float),
    st.sampled_from(["send", "receive"]),
)


def drawn(lines: list[Moved]) -> list[Event]:
    trace = TraceEvents()
    return slices([event for line in lines for event in trace.events_of(line)], "send", "receive")


def spans_by(lines: list[Event], key: str) -> dict[object, list[tuple[int, int]]]:
    found: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
    for each in lines:
        found[each[key]].append((each["ts"], each["ts"] + each["dur"]))
    return {name: sorted(spans) for name, spans in found.items()}


@given(st.lists(moved, max_size=40))
def test_slices_of_a_thread_do_not_overlap_whatever_order_they_ended_in(lines: list[Moved]) -> None:
    for spans in spans_by(drawn(lines), "tid").values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


@given(st.lists(moved, max_size=40))
def test_there_are_as_many_threads_as_transfers_at_a_time(lines: list[Moved]) -> None:
    events = drawn(sorted(lines, key=lambda line: line.time_s))
    for verb, spans in spans_by(events, "cat").items():
        whole = [span for span in spans if span[0] < span[1]]
        if len(whole) == len(spans):
            most = max(sum(start <= at < stop for start, stop in whole) for at, _ in whole)
            assert len({each["tid"] for each in events if each["cat"] == verb}) == most


def test_the_command_writes_the_trace_beside_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "run.jsonl", tmp_path / "out.json"
    rundata.write(log, 10)
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(log), "--trace", str(out)])
    assert not end.value.code
    said = capsys.readouterr().out
    assert said.startswith("run of 2026-11-2")
    assert said.endswith(f"wrote {out}, for ui.perfetto.dev or chrome://tracing\n")
    assert json.loads(out.read_text())["traceEvents"] == traced(log)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"timestamp": 0}\n', "run.jsonl line 1 is no line of a run log"),
        (b'{"type":"run","time_s":1,"engine":"e","rank":0,"kvmover":"0"}\n{"type":"trans', "nothing to report"),
        (None, "cannot read .*run.jsonl: No such file"),
    ],
    ids=["foreign", "truncated", "absent"],
)
def test_a_bad_log_is_one_line_and_leaves_the_trace_that_was_there(
    content: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "run.jsonl", tmp_path / "out.json"
    out.write_bytes(b"older")
    if content is not None:
        log.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(log), "--trace", str(out)])
    said = capsys.readouterr()
    assert (end.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert re.search(reason, said.err)
    assert out.read_bytes() == b"older"
    assert {each.name for each in tmp_path.iterdir()} <= {"run.jsonl", "out.json"}


def test_a_trace_that_cannot_be_written_is_refused_and_so_is_one_in_the_place_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    rundata.write(log, 3)
    whole = log.read_bytes()
    for out, reason in (
        (tmp_path / "missing" / "out.json", "cannot write .*missing/out.json: No such file"),
        (log / "out.json", "cannot write .*run.jsonl/out.json: Not a directory"),
        (tmp_path / "missing" / ".." / "run.jsonl", "is a run log that is read"),
        (tmp_path / "out.pdf", "--trace .*/out.pdf: a trace is JSON"),
    ):
        with pytest.raises(KvmoverError, match=reason):
            report_run([log], out, 20, Console(file=io.StringIO()))
    assert [each.name for each in tmp_path.iterdir()] == ["run.jsonl"]
    assert log.read_bytes() == whole


def test_a_long_log_is_summed_up_and_traced_without_being_held(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    rundata.write(log, 50)
    begun, *lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(begun + b"".join(lines) * 100)
    read_lines([log])  # what is made once
    tracemalloc.start()
    try:
        report_run([log], tmp_path / "out.json", 20, Console(file=io.StringIO()))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < log.stat().st_size / 4
