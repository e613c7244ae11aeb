"""The log of a run: every end of a transfer and of a request is a line, and what a crash cuts off spoils no other."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kvmover
from kvmover.cache.ledger import Credit, Ledger
from kvmover.errors import KvmoverError
from kvmover.observe.runlog import Lines, Moved, Run, RunLog, read_lines
from kvmover.plan.cost import Route
from kvmover.transfer.result import Cause, Ending, Result
from tests.observe import rundata

LANDED = Ending("decode", 3, "receive", "r1", Result(None, 0.25, 4096, 16, 1, (Route.PACKED, Route.DIRECT), 2))
FAILED = Ending("prefill", 0, "send", "r2", Result("peer lost", 1.5, cause=Cause.PEER_LOST, quarantined=True, resent=2))


def log_of(path: Path, *endings: Ending) -> None:
    with RunLog(path, "decode", 3, rundata.Clock()) as log:
        for ending in endings:
            log.transfer(ending)


def test_what_was_told_is_read_back(tmp_path: Path) -> None:
    path, clock = tmp_path / "run.jsonl", rundata.Clock()
    with RunLog(path, "decode", 3, clock) as log:
        clock.now += 1
        log.transfer(LANDED)
        clock.now += 1
        log.transfer(FAILED)
        ledger = Ledger(sink=log.account)
        ledger.matched("r1", 100, 64, 5.0)
        ledger.admitted("r1", Credit(64))
        ledger.computed("r1", 36)
        over = ledger.finished("r1", 6.0)
    found, began = read_lines([path]), rundata.BEGAN_S
    assert found.runs == (Run(began, "decode", 3, kvmover.__version__),)
    routes = (Route.PACKED, Route.DIRECT)
    assert found.transfers == (
        Moved(began + 1, 0.25, "decode", 3, "receive", "r1", None, None, 4096, 16, 1, routes, 2),
        Moved(began + 2, 1.5, "prefill", 0, "send", "r2", Cause.PEER_LOST, "peer lost", resent=2, quarantined=True),
    )
    assert found.transfers[0].began_s == began + 0.75
    assert [line.account for line in found.accounts] == [over]
    assert found.cut == 0


def test_every_line_is_an_object_with_its_type_and_time(tmp_path: Path) -> None:
    rundata.write(tmp_path / "run.jsonl", 5)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["run"] + ["transfer", "transfer", "account"] * 5
    assert all(line["time_s"] >= rundata.BEGAN_S for line in lines)


def test_files_of_many_ranks_are_one_run_in_order_of_time(tmp_path: Path) -> None:
    for rank in range(3):
        rundata.write(tmp_path / f"{rank}", 10, rank)
    found = read_lines(tmp_path.iterdir())
    assert sorted(run.rank for run in found.runs) == [0, 1, 2]
    assert (len(found.transfers), len(found.accounts)) == (60, 30)
    assert [line.time_s for line in found.transfers] == sorted(line.time_s for line in found.transfers)


def test_a_line_that_was_cut_off_is_left_out_and_the_next_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log_of(path, LANDED, FAILED)
    whole = path.read_bytes()
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        kept = whole[:length].count(b"\n")
        before = read_lines([path])
        assert len(before.runs) + len(before.transfers) == kept
        assert before.cut == (whole[:length][-1:] not in (b"", b"\n"))
        log_of(path, LANDED)
        after = read_lines([path])
        complete = whole[length : length + 1] == b"\n"  # all but its end: that the next run has written
        assert len(after.runs) + len(after.transfers) == kept + 2 + (complete and before.cut)
        assert after.cut == before.cut - (complete and before.cut)


@pytest.mark.parametrize(
    "wrong",
    [b"{}", b"null", b"{", b'{"type":"feast","time_s":1}', b'{"type":"run","time_s":"now"}', b"\xff", b""],
)
def test_a_line_that_is_none_is_refused_with_its_number(tmp_path: Path, wrong: bytes) -> None:
    path = tmp_path / "run.jsonl"
    log_of(path, LANDED)
    good = path.read_bytes()
    for text in (good + wrong + b"\n", good + wrong + b"\n" + good.splitlines(keepends=True)[1]):
        path.write_bytes(text)
        with pytest.raises(KvmoverError, match="run.jsonl line 3 is no line of a run log"):
            read_lines([path])


def test_an_empty_log_and_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_lines([tmp_path / "empty"]) == Lines()
    with pytest.raises(KvmoverError, match="cannot read .*missing: No such file"):
        read_lines([tmp_path / "missing"])
    with pytest.raises(KvmoverError, match="cannot write .*: Is a directory"):
        RunLog(tmp_path, "e", 0)


def test_the_last_line_is_in_the_file_though_no_other_comes_and_the_clock_stands_still(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = RunLog(path, "decode", 0, rundata.Clock())
    for count in range(1, 4):
        log.transfer(LANDED)
        deadline = time.monotonic() + 20
        while len(read_lines([path]).transfers) < count:
            assert time.monotonic() < deadline, "it is kept until another line comes"
            time.sleep(0.001)
    log.close()
    log.close()
    log.transfer(LANDED)
    assert len(read_lines([path]).transfers) == 3


def test_what_was_told_before_a_flush_is_in_the_file_after_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(path, "decode", 0) as log:
        for count in range(1, 50):
            log.transfer(LANDED)
            log.flush()
            assert len(read_lines([path]).transfers) == count


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise KeyboardInterrupt"])
def test_a_process_that_ends_without_closing_its_log_has_lost_no_line(tmp_path: Path, end: str) -> None:
    told = f"""
from pathlib import Path
from kvmover.observe.runlog import RunLog
from kvmover.transfer.result import Ending, Result
log = RunLog(Path({str(tmp_path / "run.jsonl")!r}), "decode", 0)
for number in range(500):
    log.transfer(Ending("decode", 0, "receive", str(number), Result(None, 0.1)))
{end}
"""
    subprocess.run([sys.executable, "-c", told], check=False, stderr=subprocess.DEVNULL)
    assert [line.request for line in read_lines([tmp_path / "run.jsonl"]).transfers] == list(map(str, range(500)))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_whose_disk_is_full_ends_with_one_warning_and_fails_no_transfer(caplog: pytest.LogCaptureFixture) -> None:
    with RunLog(Path("/dev/full"), "decode", 0) as log:
        for _ in range(5):
            log.transfer(LANDED)
            log.flush()
    assert caplog.messages == ["the run log /dev/full ends here: No space left on device"]


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(path, "decode", 0) as log:
        threads = [threading.Thread(target=lambda: [log.transfer(LANDED) for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_lines([path]).transfers) == 800
