"""Whatever the width of a terminal, tables say all of it: every number whole, and the verdict."""

from __future__ import annotations

import io
import json
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_top import Engine

from kvmover import cli
from kvmover.cache.ledger import Credit, Loss
from kvmover.layout import Component
from kvmover.observe.formats import bytes_in_words
from kvmover.store import Namespace, PagePart, PageStore, memory_of_buffer
from kvmover.tools import tables
from kvmover.tools.conformance import page_hash
from kvmover.tools.demo.demo_report import RequestReport, RunReport, ScenarioReport, Wire, show
from kvmover.tools.plan_views import plan_table
from kvmover.tools.tables import Column, Sheet, bands
from kvmover.tools.top import View, screen
from kvmover.transfer.meter import Gauge

WIDTHS = [40, 60, 80, 100, 120, 200]


def printed(thing: object, width: int, encoding: str = "utf-8") -> str:
    page = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    Console(file=page, width=width, highlight=False, markup=False, force_terminal=False).print(thing)
    page.flush()
    page.seek(0)
    return page.read()


@given(widths=st.lists(st.integers(1, 60), min_size=1, max_size=12), keys=st.integers(0, 3), most=st.integers(10, 200))
def test_bands_hold_every_column_once_in_order_behind_the_keys_and_fit_where_they_can(
    widths: list[int], keys: int, most: int
):
    keys = min(keys, len(widths))
    found = bands(widths, keys, most)
    assert all(band[:keys] == list(range(keys)) for band in found)
    assert [number for band in found for number in band[keys:]] == list(range(keys, len(widths)))
    for band in found:
        fits = sum(widths[number] + 2 for number in band) - 2 <= most
        assert fits or len(band) <= keys + 1
    if sum(width + 2 for width in widths) - 2 <= most:
        assert len(found) == 1


cells = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


@given(rows=st.lists(st.lists(cells, min_size=9, max_size=9), min_size=1, max_size=4), width=st.sampled_from(WIDTHS))
def test_no_cell_is_cut_at_any_width(rows: list[list[str]], width: int):
    sheet = Sheet([Column("name", "left"), *(Column(f"column {n}") for n in range(8))])
    for row in rows:
        sheet.add(*row)
    text = printed(sheet, width)
    words = text.split()
    for row in rows:
        assert set(row) <= set(words)
        assert words.count(row[0]) >= 1
    assert "…" not in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())


def test_a_long_text_takes_lines_and_not_letters():
    sheet = Sheet([Column("name", "left"), Column("model", "left", folds_at=20), Column("pages")])
    sheet.add("one", "a-model-with-a-name-of-fifty-letters-or-a-few-more", "1,234,567")
    text = printed(sheet, 40)
    assert "1,234,567" in text
    assert all(part in text for part in ("a-model-with", "fifty-letters", "a-few", "more"))


def test_nothing_but_ascii_is_printed_to_a_terminal_that_has_no_more():
    sheet = Sheet([Column("name", "left"), *(Column(f"column {n}") for n in range(8))])
    sheet.add(*["1,234,567"] * 9)
    assert printed(sheet, 40, "ascii").isascii()


# What the commands print


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints at a width, in plain text."""

    def run(width: int, *arguments: object) -> str:
        for module in (plan_table, tables):
            monkeypatch.setattr(module, "console", lambda: Console(width=width, highlight=False, markup=False))
        with pytest.raises(SystemExit):
            cli.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


PLAN = ("--kv-heads", 8, "--head-dim", 128, "--layers", 80, "--tokens", 8192)
LLAMA = ("plan", *PLAN, "--src", "tp=4,page=16", "--dst", "tp=2,cp=2,page=64,order=HND")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_names_every_number_of_its_json(at: Callable[..., str], width: int):
    text = at(width, *LLAMA)
    words = text.replace(",\n", ", ").split()
    for leg in json.loads(at(width, *LLAMA, "--json"))["legs"]:
        for number in (leg["src_rank"], leg["dst_rank"], leg["descriptors_direct"], leg["descriptors_packed"]):
            assert f"{number:,}" in words
        assert bytes_in_words(leg["bytes"]) in " ".join(words)
        assert leg["route"] in words
    assert "…" not in text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    part = PagePart.whole(Component.attention(2, 2, 8, "uint8"), 16)
    space = Namespace("meta-llama/Llama-3.3-70B-Instruct-with-fifty-letters", "rev-1", 16)
    with PageStore.open(tmp_path, space) as store:
        buffer = mmap.mmap(-1, 4096)
        memory = memory_of_buffer(buffer)
        store.register(memory)
        store.view(space, part).put([page_hash(number) for number in range(3)], [memory.address] * 3)
    return tmp_path


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("verb", ["stat", "verify", "gc"])
def test_a_page_store_is_shown_with_every_number_and_the_verdict(
    at: Callable[..., str], root: Path, width: int, verb: str
):
    text = at(width, "store", verb, root)
    (row,) = json.loads(at(width, "store", verb, root, "--json"))
    words = text.split()
    for name in ("page_tokens", "pages", "objects", "segments"):
        assert f"{row[name]:,}" in words, name
    assert f"{row['payload_bytes'] / (1 << 20):,.1f} MiB" in " ".join(words)
    assert row["namespace"][:12] in words
    assert (f"all {row['objects']:,} objects are whole" in text) == (verb == "verify")
    assert "…" not in text


def engine() -> Engine:
    found = Engine(8)
    for rank in range(8):
        found.gauges[rank] |= {Gauge.OPEN_SENDS: 1234 + rank, Gauge.PEERS: 64}
        found.gauges[rank][Gauge.INCOMING_QUARANTINED_BYTES] = 5 << 20
        for _ in range(3):
            found.receive((1 << 33) + rank * 123456789, 0.5 + rank, rank=rank)
        found.receive(0, 30.0, "deadline", rank=rank)
    found.serve("request", Credit(100, 2000, 30000), 400000, {Loss.DEVICE_CAPACITY: 1234})
    return found


@pytest.mark.parametrize("width", [60, 80, 120])
def test_top_shows_every_number_whole(width: int):
    counted = engine()
    before = counted.scrape(0.0)
    for rank in range(8):
        counted.receive(1 << 31, 1.5, rank=rank)
    view = View.of("http://decode-0:24400/metrics", before, counted.scrape(2.0))
    numbers = re.findall(r"[\d,.]+(?:/s| [KMGT]iB(?:/s)?| m?s\b|%)?", printed(screen(view), 400))
    text = " ".join(printed(screen(view), width).split())
    assert not [number for number in numbers if number not in text]
    assert "…" not in text


def demo() -> RunReport:
    wire = Wire(876_543_210, 16, 123_456, 5_031, ["direct", "packed"], 12.3456, [1, 2])
    requests = [RequestReport(f"gqa-{n}", 1234 + n, 567, [1, 2], [1, 2], True, True, wire) for n in range(12)]
    return RunReport([ScenarioReport("gqa", "a title", requests)], 1.0, "1.5.1")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_demo_shows_every_number_whole(width: int):
    page = io.StringIO()
    report = demo()
    show(report, Console(file=page, width=width, highlight=False))
    words = page.getvalue().split()
    for number, request in enumerate(report.requests):
        for value in (number, request.prompt_tokens, request.hit_tokens, request.wire.nbytes, request.wire.legs):
            assert f"{value:,}" in words or str(value) in words
        assert {"123,456", "5,031", "direct+packed", "12345.6", "0.071"} <= set(words)
    assert words.count("same") == len(report.requests)
    assert "…" not in page.getvalue()
