"""The summary of a run: the requests that were slow or failed by name, and numbers that are those of the log."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvmover import cli
from kvmover.cache.ledger import (
    Account,
    AccountGroup,
    AttemptPhase,
    Credit,
    Ledger,
    Loss,
    Prediction,
    Predictor,
)
from kvmover.errors import KvmoverError
from kvmover.observe.formats import bytes_in_words, seconds_in_words
from kvmover.observe.runlog import Accounted, AnyLine, Lines, Moved, RunLog, read_lines
from kvmover.plan.cost import Route
from kvmover.tools.report.run_summary import Summary, print_summary, quantile, report_run, route_of
from kvmover.transfer.meter import Stage
from kvmover.transfer.result import Cause
from tests.observe import rundata
from tests.observe.toy_engines import Engines

TITLES = (
    "Slowest requests",
    "Failed requests",
    "Where the time went",
    "Parts of the way",
    "Prompt tokens",
    "Hits that",
)


def reported(*logs: Path, most: int = 20, width: int = 200) -> str:
    out = io.StringIO()
    report_run(logs, None, most, Console(file=out, width=width, highlight=False, markup=False))
    return out.getvalue()


def printed(*lines: AnyLine) -> str:
    out, summary = io.StringIO(), Summary(20)
    for _ in summary.counted(lines):
        continue
    print_summary(summary, 0, Console(file=out, width=200, highlight=False, markup=False))
    return out.getvalue()


def table(text: str, title: str) -> list[list[str]]:
    """Cells of the rows below a title, without the heading: they are two spaces apart."""
    (block,) = [block for block in text.split("\n\n") if block.startswith(title)]
    return [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in block.splitlines()[2:]]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("run")
    for rank, requests in ((0, 120), (1, 40)):
        rundata.write(folder / f"{rank}.jsonl", requests, rank, seed=rank)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def lines(logs: list[Path]) -> Lines:
    return read_lines(logs)


def test_a_real_transfer_that_failed_is_named_with_its_reason_and_one_that_landed_is_among_the_slowest(
    engines: Engines, tmp_path: Path
) -> None:
    with RunLog(tmp_path / "run.jsonl", "decode", 0) as log:
        for mover in (engines.src, engines.dst):
            mover.watch(log.transfer)
        engines.move("moved-1")
        engines.fail("failed-1")
        engines.fail("failed-2")
    text = reported(tmp_path / "run.jsonl")
    assert "2 transfers landed, 4 failed" in text
    received = next(line for line in read_lines([tmp_path / "run.jsonl"]).transfers if line.verb == "receive")
    (slow,) = table(text, "Slowest requests")
    assert slow[:2] == ["moved-1", "decode 0"]
    assert slow[4] == seconds_in_words(received.seconds)
    failed = table(text, "Failed requests")
    assert [row[0] for row in failed] == ["failed-2", "failed-1"]
    assert all("nobody wants it" in row[-1] for row in failed)
    assert sorted(text.split("failed by cause: ")[1].split("\n")[0].split(", ")) == ["2 aborted", "2 peer_aborted"]


def test_each_question_has_its_table(logs: list[Path]) -> None:
    text = reported(*logs)
    assert [title for title in TITLES if f"\n\n{title}" in text] == list(TITLES[:-1])


def test_the_slowest_and_the_failed_requests_are_named_one_by_one(logs: list[Path], lines: Lines) -> None:
    text = reported(*logs, most=5)
    received = sorted(
        (line for line in lines.transfers if line.verb == "receive" and line.landed), key=lambda line: -line.seconds
    )
    rows = [row[:2] for row in table(text, "Slowest requests")]
    assert rows == [[line.request, f"{line.engine} {line.rank}"] for line in received[:5]]
    failed = [line for line in lines.transfers if not line.landed and line.verb == "receive"]
    rows = [(row[0], row[-1]) for row in table(text, "Failed requests")]
    assert rows == [(line.request, line.reason) for line in failed[:-6:-1]]
    assert f"transfers failed by cause: {2 * len(failed)} aborted" in text


def test_a_request_that_failed_for_two_reasons_has_a_row_for_each_with_how_many_transfers_did() -> None:
    lines = [
        Moved(1000.0 + rank, 0.5, "decode", rank, "receive", "r", cause, reason)
        for rank, (cause, reason) in enumerate(
            [(Cause.DEADLINE, "5 s are over"), (Cause.PEER_LOST, "rank 3 is gone"), (Cause.DEADLINE, "5 s are over")]
        )
    ]
    rows = table(printed(*lines), "Failed requests")
    assert rows == [
        ["r", "2", "decode 0 receive", "500 ms", "500 ms", "deadline", "5 s are over"],
        ["r", "1", "decode 1 receive", "1.5 s", "500 ms", "peer_lost", "rank 3 is gone"],
    ]


def test_the_sums_of_the_first_lines_are_those_of_the_log(logs: list[Path], lines: Lines) -> None:
    landed = [line for line in lines.transfers if line.landed]
    received = [line for line in landed if line.verb == "receive"]
    p50, p99 = (seconds_in_words(quantile([line.seconds for line in received], share)) for share in (0.5, 0.99))
    first, second, *_ = reported(*logs).splitlines()
    assert first.endswith("2 ranks logged")
    nbytes = bytes_in_words(sum(line.nbytes for line in received))
    assert second == f"{len(landed)} transfers landed, 32 failed; {nbytes} received, p50 {p50}, p99 {p99}"


def test_the_time_of_receives_goes_to_their_routes_and_to_causes_of_failure(logs: list[Path], lines: Lines) -> None:
    rows = {row[0]: row[1] for row in table(reported(*logs), "Where the time went")}
    seconds: Counter[str] = Counter()
    for line in lines.transfers:
        if line.verb == "receive":
            seconds[route_of(line) if line.landed else f"failed: {line.cause}"] += line.seconds
    assert rows == {way: f"{each:.3f}" for way, each in seconds.items()}
    assert rows.keys() == {"direct", "packed", "failed: aborted"}


def test_the_parts_of_the_way_have_their_share_of_all_parts(logs: list[Path], lines: Lines) -> None:
    rows = {row[0]: row[1:] for row in table(reported(*logs), "Parts of the way")}
    assert list(rows) == ["credit wait", "gather", "wire", "scatter"]
    assert [row[1] for row in rows.values()] == ["13.3%", "26.7%", "53.3%", "6.7%"]  # 2, 4, 8 and 1 of 15 parts
    spent = [line.spent_s[Stage.WIRE] for line in lines.transfers if line.landed and Stage.WIRE in line.spent_s]
    assert rows["wire"][0] == str(len(spent))
    assert rows["wire"][2:] == [seconds_in_words(quantile(spent, share)) for share in (0.5, 0.9, 0.99, 1.0)]
    bare = [msgspec.structs.replace(line, spent_s={}) for line in lines.transfers]
    assert "Parts of the way" not in printed(*bare)


def test_what_a_request_is_named_is_text_that_no_terminal_obeys(tmp_path: Path) -> None:
    name = "\x1b[2J[bold]r\n"
    lines = [Moved(1000.0, 1.0, "e", 0, "receive", name, Cause.FAULT, f"no {name}")]
    (row,) = table(printed(*lines), "Failed requests")
    assert (row[0], row[-1]) == (r"\x1b[2J[bold]r\n", r"no \x1b[2J[bold]r\n")


def test_a_narrow_terminal_cuts_no_cell(logs: list[Path]) -> None:
    words = Counter(reported(*logs, width=60).split())
    missing = Counter(reported(*logs).split()) - words
    assert not {word for word in missing if word.startswith("request-")}


def test_a_log_of_accounts_alone_has_no_table_of_transfers(lines: Lines) -> None:
    text = printed(*lines.accounts)
    assert [title for title in TITLES if f"\n\n{title}" in text] == ["Prompt tokens"]
    assert "0 transfers landed, 0 failed; 0 B received, p50 0 s, p99 0 s" in text


def test_a_log_in_which_nothing_ended_is_refused(tmp_path: Path) -> None:
    RunLog(tmp_path / "run.jsonl", "e", 0).close()
    with pytest.raises(KvmoverError, match="nothing to report"):
        reported(tmp_path / "run.jsonl")


def test_unfinished_lines_are_counted(tmp_path: Path) -> None:
    rundata.write(tmp_path / "run.jsonl", 10)
    whole = (tmp_path / "run.jsonl").read_bytes()
    (tmp_path / "run.jsonl").write_bytes(whole[:-5])
    assert reported(tmp_path / "run.jsonl").splitlines()[0].endswith("1 rank logged; 1 unfinished lines left out")


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 5.0])
def test_one_transfer_that_took_any_time_has_a_summary(seconds: float) -> None:
    line = Moved(1000.0, seconds, "decode", 0, "receive", "r", nbytes=1000, runs=10, routes=(Route.PACKED,))
    (row,) = table(printed(line), "Slowest requests")
    assert row[:3] == ["r", "decode 0", "packed"]


def test_a_prompt_counts_once_however_often_it_was_retracted() -> None:
    def attempt(number: int) -> Accounted:
        tokens = (100, 60, 40, 0, 0, 0, 10, 50)
        account = Account("r", AccountGroup(), number, AttemptPhase.RETRACTED, 0, 1, *tokens, {Loss.LATE: 20})
        return Accounted(1.0, account)

    (row,) = table(printed(attempt(1), attempt(2), attempt(3)), "Prompt tokens")
    assert row == ["100", "40", "0", "0", "0", "40.0%", "20", "late 20"]


def test_hits_and_losses_are_told_by_tenant_and_model_and_predictions_by_who_made_them(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run.jsonl", "e", 0) as log:
        ledger = Ledger(sink=log.account)
        for name, group, device, told in (("a", AccountGroup("[gold]", "llama"), 60, 80), ("b", AccountGroup(), 10, 0)):
            ledger.matched(name, 1000, 90, 0.0, group)
            ledger.predicted(name, Prediction(told, Predictor.ROUTER))
            ledger.admitted(name, Credit(device), {Loss.LATE: 90 - device})
            ledger.computed(name, 1000 - device)
            ledger.finished(name, 0.0)
    text = reported(tmp_path / "run.jsonl")
    rows = table(text, "Prompt tokens")
    assert ["[gold]", "llama", "1,000", "60", "0", "0", "0", "6.0%", "30", "late 30"] in rows
    (row,) = table(text, "Hits that were predicted")
    assert row == ["router", "2", "80", "70", "60", "20", "10"]


@pytest.mark.parametrize(
    ("routes", "named"),
    [((), "none"), ((Route.DIRECT,), "direct"), ((Route.PACKED,) * 2, "packed"), (tuple(Route), "both")],
)
def test_a_transfer_of_many_sources_has_one_route_or_both(routes: tuple[Route, ...], named: str) -> None:
    assert route_of(Moved(1.0, 1.0, "e", 0, "receive", "r", routes=routes)) == named


def test_the_json_has_the_numbers_of_the_tables(
    logs: list[Path], lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["report", *map(str, logs), "--json", "--most", "3"])
    data = json.loads(capsys.readouterr().out)
    assert not end.value.code
    landed = [line for line in lines.transfers if line.landed]
    received = [line for line in landed if line.verb == "receive"]
    assert (data["landed"], data["failed"]) == (len(landed), len(lines.transfers) - len(landed))
    assert data["received_bytes"] == sum(line.nbytes for line in received)
    assert data["receive_seconds"]["p99"] == quantile([line.seconds for line in received], 0.99)
    slow = sorted(received, key=lambda line: -line.seconds)[:3]
    assert [each["seconds"] for each in data["slowest"]] == [line.seconds for line in slow]
    assert sum(data["causes"].values()) == data["failed"]
    assert len(data["failures"]) <= 3
    assert all(each["reason"] and each["cause"] for each in data["failures"])
    accounts = [line.account for line in lines.accounts if line.account.attempt == 1]
    assert sum(each["prompt"] for each in data["tokens"]) == sum(each.prompt_tokens for each in accounts)
