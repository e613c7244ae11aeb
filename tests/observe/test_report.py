"""The report of a run: what was logged is what is drawn, on a page that needs nothing and runs nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from math import floor
from pathlib import Path

import msgspec
import pytest
import rundata
from hypothesis import example, given
from hypothesis import strategies as st

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
from kvmover.observe import report_sums
from kvmover.observe.charts import Bar, timeline
from kvmover.observe.report import POLICY, page, write_report
from kvmover.observe.report_sums import MOST_BARS, Bins, bytes_by_bin, lanes_of, route_of, tokens_of
from kvmover.observe.runlog import Accounted, Lines, Moved, RunLog, read_lines
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Stage
from kvmover.transfer.result import Cause

SECTIONS = [
    *("Hit rate by tier", "Where lost hits went", "Tenants and models", "Bandwidth", "Latency", "Slowest requests"),
    *("Where the time went", "Parts of the way", "Transfers", "Route choices", "Failures", "Failed requests"),
]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    folder = tmp_path_factory.mktemp("run")
    for rank, requests in ((0, 120), (1, 40)):
        rundata.write(folder / f"{rank}.jsonl", requests, rank, seed=rank)
    return read_lines(sorted(folder.iterdir()))


class Outline(HTMLParser):
    """Tags that were opened and not closed, all tags, texts of headings and cells, and attributes that fetch."""

    VOID = ("meta", "link", "img", "br", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.fetches: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetches += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.fetches += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        elif self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_has_every_plot_and_is_whole(lines: Lines) -> None:
    outline = Outline(page(lines))
    assert not outline.open
    assert outline.headings == SECTIONS
    assert outline.tags["svg"] == 7


def test_the_parts_of_a_requests_way_are_summed_over_both_sides_and_its_share_is_of_all_parts(lines: Lines) -> None:
    parts = {each.part: each.seconds for each in report_sums.times_by_part(lines.transfers)}
    assert list(parts) == [Stage.CREDIT_WAIT, Stage.GATHER, Stage.WIRE, Stage.SCATTER]
    landed = {line.request for line in lines.transfers if line.landed}
    assert {len(seconds) for seconds in parts.values()} == {len(landed)}
    assert sum(parts[Stage.WIRE]) == pytest.approx(2 * sum(parts[Stage.GATHER]))
    cells = Outline(page(lines)).cells
    at = cells.index("credit wait")
    assert cells[at + 1 : at + 3] == [str(len(landed)), "13.3%"]  # 2 of 15 parts
    assert cells[cells.index("wire") + 2] == "53.3%"


def test_a_run_log_without_parts_is_drawn_without_them(lines: Lines) -> None:
    bare = replace(lines, transfers=tuple(msgspec.structs.replace(line, spent_s={}) for line in lines.transfers))
    assert "Parts of the way" not in Outline(page(bare)).headings


def test_the_page_fetches_nothing_and_runs_nothing(lines: Lines) -> None:
    text = page(lines)
    outline = Outline(text)
    assert not outline.fetches
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & outline.tags.keys()
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert POLICY in text


def test_what_a_request_is_named_is_text(lines: Lines) -> None:
    text = page(lines)
    assert "<script" not in text
    assert "&lt;script&gt;document.title=" in text


def test_every_chart_is_well_formed_and_inside_of_its_frame(lines: Lines) -> None:
    for chart in re.findall(r"<svg.*?</svg>", page(lines), re.DOTALL):
        root = ET.fromstring(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "", chart))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        assert root.attrib["aria-label"] in SECTIONS
        for box in root.iter("rect"):
            x, y, wide, high = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x >= 0
            assert y >= 0
            assert wide >= 0
            assert high >= 0
            assert x + wide <= width + 1.5
            assert y + high <= height + 0.01


def test_the_numbers_of_the_page_are_those_of_the_accounts(lines: Lines) -> None:
    outline = Outline(page(lines))
    total = tokens_of(lines.accounts)
    assert f"{total.lost[Loss.LATE]:,}" in outline.cells
    hits = [line.account for line in lines.accounts]
    assert total.prompt == sum(account.prompt_tokens for account in hits)
    assert total.hits["host"] == sum(account.host_tokens for account in hits)
    assert "aborted" in outline.cells
    failed = [line for line in lines.transfers if not line.landed]
    assert str(len(failed)) in outline.cells


def test_a_log_of_accounts_alone_says_that_nothing_was_moved(lines: Lines) -> None:
    text = page(Lines(accounts=lines.accounts))
    assert text.count("Nothing of this was logged.") == 5
    assert Outline(text).tags["svg"] == 2


def test_a_log_of_transfers_alone_says_that_no_request_was_accounted_for(lines: Lines) -> None:
    text = page(Lines(transfers=lines.transfers))
    assert text.count("Nothing of this was logged.") == 2


def test_a_log_in_which_nothing_ended_is_refused() -> None:
    with pytest.raises(KvmoverError, match="nothing to report"):
        page(Lines())


@pytest.mark.parametrize(("seconds", "charts"), [(0.0, 3), (1e-6, 5), (5.0, 5)])
def test_one_transfer_that_took_any_time_is_a_page(seconds: float, charts: int) -> None:
    line = Moved(1000.0, seconds, "decode", 0, "receive", "r", nbytes=1000, runs=10, routes=(Route.PACKED,))
    assert Outline(page(Lines(transfers=(line,)))).tags["svg"] == charts


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, html = tmp_path / "run.jsonl", tmp_path / "out.html"
    rundata.write(log, 10)
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(log), "--html", str(html)])
    assert not end.value.code
    assert capsys.readouterr().out == f"wrote {html}: 20 transfers and 10 requests\n"
    assert html.read_text() == page(read_lines([log]))


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    rundata.write(tmp_path / "run.jsonl", 3)
    with pytest.raises(KvmoverError, match="cannot write .*missing/out.html"):
        write_report([tmp_path / "run.jsonl"], tmp_path / "missing" / "out.html")


def test_names_of_many_lanes_do_not_lie_upon_each_other() -> None:
    lanes = [(f"decode {rank}", [Bar(0.0, 1.0, "direct", "r")]) for rank in range(100)]
    chart = ET.fromstring(timeline("Transfers", lanes, ["0 s", "1 s"]))
    names = [(float(each.attrib["y"]), each.text) for each in chart.iter("text") if each.attrib["text-anchor"] == "end"]
    heights = [y for y, text in names if text and text.startswith("decode")]
    assert len(heights) == 50
    assert all(after - before >= 12 for before, after in pairwise(heights))


# Sums


@given(st.floats(0, 2e9), st.floats(0, 1e7))
@example(0.35, 0.5)
def test_bins_hold_the_whole_time_and_are_few(first_s: float, span_s: float) -> None:
    bins = Bins.over(first_s, first_s + span_s)
    assert 1 <= bins.count <= 61
    assert bins.first_s <= first_s < bins.first_s + bins.width_s * 1.01
    assert bins.last_s >= first_s + span_s
    assert bins.of(first_s) == floor((first_s - bins.first_s) / bins.width_s)


moved = st.builds(
    lambda end_s, seconds, nbytes, landed: Moved(
        end_s, seconds, "e", 0, "receive", "r", None if landed else Cause.DEADLINE, None if landed else "late", nbytes
    ),
    st.floats(100, 200),
    st.just(0.0) | st.floats(1e-6, 100),
    st.integers(0, 1 << 40),
    st.booleans(),
)


@given(st.lists(moved, max_size=20))
def test_spread_over_the_bins_are_the_bytes_that_landed(transfers: list[Moved]) -> None:
    bins = Bins.over(0.0, 200.0)
    landed = sum(line.nbytes for line in transfers if line.landed)
    assert sum(bytes_by_bin(transfers, "receive", bins)) == pytest.approx(landed)
    assert not any(bytes_by_bin(transfers, "send", bins))


@given(st.lists(moved, max_size=60))
def test_bars_of_a_lane_do_not_overlap_and_none_is_left_out(transfers: list[Moved]) -> None:
    lanes, left_out = lanes_of(transfers)
    assert left_out == 0
    assert Counter(id(bar) for lane in lanes for bar in lane.bars) == Counter(id(line) for line in transfers)
    for lane in lanes:
        for before, after in pairwise(lane.bars):
            assert before.time_s <= after.began_s


def test_failures_and_long_transfers_are_drawn_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_sums, "MOST_BARS", 3)
    short, long = (Moved(100.0 * i, i / 10, "e", 0, "send", f"r{i}", nbytes=1) for i in (1, 2))
    failed = [Moved(1000.0 + i, 0.001, "e", 0, "send", f"f{i}", Cause.DEADLINE, "late") for i in range(2)]
    lanes, left_out = lanes_of([short, long, *failed])
    assert (len(lanes), left_out, MOST_BARS) == (1, 1, 1200)
    assert lanes[0].bars == (long, *failed)


def test_a_prompt_counts_once_however_often_it_was_retracted() -> None:
    def attempt(number: int) -> Accounted:
        account = Account(
            "r", AccountGroup(), number, AttemptPhase.RETRACTED, 0, 1, 100, 60, 40, 0, 0, 0, 10, 50, {Loss.LATE: 20}
        )
        return Accounted(1.0, account)

    total = tokens_of([attempt(1), attempt(2), attempt(3)])
    assert (total.prompt, total.hits["device"], total.lost[Loss.LATE]) == (100, 40, 20)


def test_hits_and_losses_are_told_by_tenant_and_model_and_predictions_by_who_made_them(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run.jsonl", "e", 0) as log:
        ledger = Ledger(sink=log.account)
        for name, group, device, told in (("a", AccountGroup("<gold>", "llama"), 60, 80), ("b", AccountGroup(), 10, 0)):
            ledger.matched(name, 1000, 90, 0.0, group)
            ledger.predicted(name, Prediction(told, Predictor.ROUTER))
            ledger.admitted(name, Credit(device), {Loss.LATE: 90 - device})
            ledger.computed(name, 1000 - device)
            ledger.finished(name, 0.0)
    text = page(read_lines([tmp_path / "run.jsonl"]))
    groups = text.split("<h2>Tenants and models</h2>")[1].split("</section>")[0]
    cells = ("&lt;gold&gt;", "llama", "1,000", "60", "0", "0", "0", "6.0%")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in groups
    assert "<td>30</td><td>late 30</td>" in groups
    predictions = text.split("<h2>Predicted and delivered hits</h2>")[1].split("</section>")[0]
    cells = "".join(f"<td>{count}</td>" for count in ("router", 2, 80, 70, 60, 20, 10))
    assert f"<tr>{cells}</tr>" in predictions


@pytest.mark.parametrize(
    ("routes", "named"),
    [((), "none"), ((Route.DIRECT,), "direct"), ((Route.PACKED,) * 2, "packed"), (tuple(Route), "both")],
)
def test_a_transfer_of_many_sources_has_one_route_or_both(routes: tuple[Route, ...], named: str) -> None:
    assert route_of(Moved(1.0, 1.0, "e", 0, "receive", "r", routes=routes)) == named


def test_the_slowest_and_the_failed_requests_are_named_one_by_one(tmp_path: Path):
    rundata.write(tmp_path / "run.jsonl", requests=120)
    lines = read_lines([tmp_path / "run.jsonl"])
    text = page(lines)
    received = [line for line in lines.transfers if line.verb == "receive" and line.landed]
    slow = max(received, key=lambda line: line.seconds)
    part = text.split("Slowest requests")[1].split("</section>")[0]
    assert f"<td>{slow.request}</td><td>{slow.engine} {slow.rank}</td>" in part
    assert part.count("<tr>") == 21
    failed = max((line for line in lines.transfers if not line.landed), key=lambda line: line.time_s)
    assert failed.request.isascii()
    part = text.split("Failed requests</h2>")[1].split("</section>")[0]
    assert f"<td>{failed.request}</td>" in part
    assert "aborted" in part


def test_the_latency_is_drawn_over_time_and_the_time_by_the_way_it_went(tmp_path: Path):
    rundata.write(tmp_path / "run.jsonl", requests=120)
    text = page(read_lines([tmp_path / "run.jsonl"]))
    latency = text.split("<h2>Latency</h2>")[1].split("</section>")[0]
    assert 'class="line p50"' in latency
    assert 'class="line p99"' in latency
    went = text.split("<h2>Where the time went</h2>")[1].split("</section>")[0]
    assert all(way in went for way in ("direct", "packed", "failed: aborted"))
