"""`kvmover top` says what a metrics endpoint says: sums, and what changed between two scrapes."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from kvmover import cli
from kvmover.cache.ledger import EVERYBODY, AccountGroup, Credit, Ledger, Loss, Prediction, Predictor
from kvmover.cache.ledger.ledger_collector import LedgerCollector
from kvmover.cache.tiers import tier_metrics as tiers
from kvmover.cache.tiers.tier_metrics import TierCollector
from kvmover.errors import KvmoverError
from kvmover.observe.metrics import MoverCollector
from kvmover.tools import top
from kvmover.tools.scrape import Change, Scrape, endpoints, fetch, quantile_s
from kvmover.tools.top import MOST_GROUPS, MOST_RANKS, View, screen
from kvmover.tools.top_keys import USUAL, Fold, TopState, pressed
from kvmover.transfer.meter import Count, Gauge, Meter, Snapshot, Stage
from kvmover.transfer.protocol.auth import Refusal


class Engine:
    """What a process would count: a mover of each rank, a ledger and a controller."""

    def __init__(self, ranks: int = 1) -> None:
        self.meters = [Meter() for _ in range(ranks)]
        self.gauges = [dict.fromkeys(Gauge, 0) for _ in range(ranks)]
        self.ledger, self.tiers = Ledger(), tiers.TierMeter()
        self.registry = CollectorRegistry()
        self.registry.register(MoverCollector([Rank(self, rank) for rank in range(ranks)]))
        self.registry.register(LedgerCollector(self.ledger))
        gauges = dict.fromkeys(tiers.TierGauge, 0)
        self.registry.register(TierCollector(lambda: tiers.TierSnapshot("decode", 0, self.tiers, gauges)))

    def text(self, _: str = "") -> str:
        return generate_latest(self.registry).decode()

    def scrape(self, time_s: float) -> Scrape:
        return Scrape.of(self.text(), time_s)

    def receive(self, nbytes: int, seconds: float, end: str = "landed", rank: int = 0) -> None:
        meter = self.meters[rank]
        meter.ended["receive", end] += 1
        meter.add(Count.RECEIVED_BYTES, nbytes)
        meter.took(Stage.RECEIVE, seconds)

    def serve(
        self,
        request: str,
        credit: Credit,
        computed: int,
        lost: dict[Loss, int],
        group: AccountGroup = EVERYBODY,
        predicted: Prediction | None = None,
    ) -> None:
        hits = credit.device_tokens + credit.host_tokens + credit.storage_tokens
        self.ledger.matched(request, hits + computed, hits + sum(lost.values()), 0.0, group)
        if predicted:
            self.ledger.predicted(request, predicted)
        self.ledger.admitted(request, credit, lost)
        self.ledger.computed(request, computed)
        self.ledger.finished(request, 1.0)


class Rank:
    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine, self._rank = engine, rank

    def snapshot(self) -> Snapshot:
        return Snapshot("decode", self._rank, self._engine.meters[self._rank], self._engine.gauges[self._rank])


def shown(view: View, width: int = 160, state: TopState = USUAL, height: int | None = None) -> dict[str, list[str]]:
    """Cells by the first one of each line, which is the name of a row."""
    out = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    out.print(screen(view, state, height))
    assert isinstance(out.file, io.StringIO)
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.file.getvalue().splitlines()]
    return {line[0]: line[1:] for line in lines if line}


def between(engine: Engine, before: Scrape, seconds: float) -> View:
    return View.of("here", before, engine.scrape(before.time_s + seconds))


def test_bandwidth_and_landings_are_a_second_of_what_is_new():
    engine = Engine()
    engine.receive(1 << 40, 80.0)
    before = engine.scrape(100.0)
    for _ in range(6):
        engine.receive(1 << 20, 0.015)
    rows = shown(between(engine, before, 2.0))
    names, values = rows["transfers"], rows["decode 0"]
    row = dict(zip(names, values, strict=True))
    assert (row["landed"], row["failed"], row["received"], row["sent"]) == ("3.0/s", "0", "3 MiB/s", "0 B/s")
    assert (row["receive p50"], row["p99"]) == ("<=20.5 ms", "<=20.5 ms")


def test_the_first_frame_is_of_all_since_the_start():
    engine = Engine()
    engine.receive(3 << 30, 0.5)
    engine.receive(0, 30.0, "deadline")
    view = View.of("here", None, engine.scrape(5.0))
    row = dict(zip(shown(view)["transfers"], shown(view)["decode 0"], strict=True))
    assert (row["landed"], row["failed"], row["received"], row["p99"]) == ("1", "1", "3 GiB", "<=41.9 s")
    assert shown(view)["transfers: deadline"] == ["1", "1"]


def test_arenas_show_how_full_they_are_and_what_is_held():
    engine = Engine()
    engine.gauges[0] |= {
        Gauge.OPEN_SENDS: 2, Gauge.OPEN_RECEIVES: 3, Gauge.PEERS: 8,
        Gauge.OUTGOING_ARENA_BYTES: 1000, Gauge.OUTGOING_RESERVED_BYTES: 250,
        Gauge.INCOMING_ARENA_BYTES: 1000, Gauge.INCOMING_RESERVED_BYTES: 950, Gauge.INCOMING_QUARANTINED_BYTES: 512,
    }  # fmt: skip
    rows = shown(View.of("here", None, engine.scrape(0.0)))
    row = dict(zip(rows["transfers"], rows["decode 0"], strict=True))
    assert [row[name] for name in ("open", "arena out", "in", "quarantine", "peers")] == [
        "5",
        "25%",
        "95%",
        "512 B",
        "8",
    ]


def test_hits_are_shown_by_tier_and_losses_by_reason():
    engine = Engine()
    engine.serve("r1", Credit(30, 20, 10), 40, {Loss.LATE: 25})
    before = engine.scrape(0.0)
    engine.serve("r2", Credit(0, 50, 0), 50, {Loss.CAPACITY_EVICTED: 5})
    rows = shown(between(engine, before, 1.0))
    assert rows["prompt tokens"] == ["now", "share", "in all", "share"]
    assert rows["device"] == ["0", "0.0%", "30", "15.0%"]
    assert rows["host"] == ["50", "50.0%", "70", "35.0%"]
    assert rows["storage"] == ["0", "0.0%", "10", "5.0%"]
    assert rows["computed"] == ["50", "50.0%", "90", "45.0%"]
    assert rows["lost: late"] == ["0", "25"]
    assert rows["lost: capacity_evicted"] == ["5", "5"]


def test_hits_and_losses_are_shown_by_tenant_and_model_those_with_the_most_first():
    engine = Engine()
    engine.serve("r1", Credit(10), 90, {}, AccountGroup("gold", "llama"))
    engine.serve("r2", Credit(30, 20, 10), 140, {Loss.LATE: 5, Loss.BUSY: 25}, AccountGroup("", "qwen"))
    rows = shown(View.of("here", None, engine.scrape(0.0)))
    assert list(rows["tenant, model"]) == [
        *("prompt tokens", "hits", "device", "host", "storage", "peer"),
        *("computed", "abandoned", "lost", "most of it to"),
    ]
    assert rows["no tenant, qwen"] == ["200", "30.0%", "30", "20", "10", "0", "140", "0", "30", "busy"]
    assert rows["gold, llama"] == ["100", "10.0%", "10", "0", "0", "0", "90", "0", "0"]
    assert list(rows).index("no tenant, qwen") < list(rows).index("gold, llama")


def test_of_many_tenants_the_ones_with_the_longest_prompts_are_shown():
    engine = Engine()
    for number in range(MOST_GROUPS + 3):
        engine.serve(f"r{number}", Credit(), number + 1, {}, AccountGroup(f"tenant-{number:02}"))
    rows = shown(View.of("here", None, engine.scrape(0.0)))
    assert [name for name in rows if name.startswith("tenant-")] == [
        f"tenant-{number:02}, no model" for number in reversed(range(3, MOST_GROUPS + 3))
    ]
    assert "and 3 more" in rows


def test_predicted_hits_stand_beside_those_that_were_delivered():
    engine = Engine()
    engine.serve("r0", Credit(10), 90, {})
    assert "hits predicted by" not in shown(View.of("here", None, engine.scrape(0.0)))
    engine.serve("r1", Credit(10), 90, {}, predicted=Prediction(60, Predictor.ROUTER))
    engine.serve("r2", Credit(10, 20), 70, {}, predicted=Prediction(5, Predictor.ROUTER))
    rows = shown(View.of("here", None, engine.scrape(0.0)))
    assert rows["hits predicted by"] == ["requests", "predicted", "delivered", "foreseen", "missed", "unforeseen"]
    assert rows["router"] == ["2", "65", "40", "15", "50", "25"]


def test_copies_between_tiers_show_their_pages_and_bandwidth():
    engine = Engine()
    before = engine.scrape(0.0)
    engine.tiers.counts[tiers.TierCount.LOADED_BYTES] += 8 << 20
    engine.tiers.counts[tiers.TierCount.LOADED_PAGES] += 16
    rows = shown(between(engine, before, 4.0))
    assert rows["host to device"] == ["16", "2 MiB/s", "8 MiB"]
    assert "storage to host" not in rows


def test_what_ever_went_wrong_stays_on_the_screen():
    engine = Engine()
    engine.meters[0].add(Count.LOST_PEERS, 2)
    engine.receive(0, 1.0, "peer_lost")
    before = engine.scrape(0.0)
    engine.meters[0].left_unopened(Refusal.FORGED)
    rows = shown(between(engine, before, 1.0))
    assert rows["failures"] == ["now", "in all"]
    assert rows["peers lost"] == ["0", "2"]
    assert rows["transfers: peer_lost"] == ["0", "1"]
    assert rows["messages without a good seal"] == ["1", "1"]
    assert "transfers: deadline" not in rows


def test_an_engine_that_restarted_counts_from_nothing_and_not_backwards():
    engine = Engine()
    engine.receive(1 << 30, 1.0)
    before, engine = engine.scrape(0.0), Engine()
    engine.receive(1 << 20, 1.0)
    rows = shown(between(engine, before, 1.0))
    assert dict(zip(rows["transfers"], rows["decode 0"], strict=True))["received"] == "1 MiB/s"


def test_the_ranks_of_an_engine_are_one_row_where_there_are_many():
    engine = Engine(MOST_RANKS + 8)
    for rank in range(MOST_RANKS + 8):
        engine.receive(1 << 20, 1.0, rank=rank)
    view = View.of("here", None, engine.scrape(0.0))
    rows = shown(view)
    assert dict(zip(rows["transfers"], rows["all"], strict=True))["received"] == "24 MiB"
    assert [name for name in rows if name.startswith("decode")] == [f"decode, {MOST_RANKS + 8} ranks"]
    assert rows["all"] == rows[f"decode, {MOST_RANKS + 8} ranks"]
    every = shown(view, state=TopState(Fold.RANKS))
    assert [name for name in every if name.startswith("decode")] == [f"decode {n}" for n in range(MOST_RANKS + 8)]


def of_64_ranks() -> View:
    engine = Engine(64)
    for rank in range(64):
        engine.receive((rank * 37 % 64) << 20, 0.01 * (rank + 1), rank=rank)
    engine.receive(0, 1.0, "deadline", rank=7)
    engine.serve("r1", Credit(30, 20, 10), 40, {Loss.LATE: 25})
    return View.of("here", None, engine.scrape(0.0))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 45), (200, 60)])
def test_64_ranks_fit_the_screen_with_what_stands_below_them(width: int, height: int):
    view = of_64_ranks()
    for fold in (Fold.RANKS, Fold.ENGINES):
        out = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
        out.print(screen(view, TopState(fold), height))
        assert isinstance(out.file, io.StringIO)
        lines = out.file.getvalue().splitlines()
        assert len(lines) <= height, lines
        assert any(line.startswith("prompt tokens") for line in lines)
        assert any(line.startswith("transfers: deadline") for line in lines)
        assert ("columns 1 of" in out.file.getvalue()) == (width == 80)


def test_ranks_are_sorted_filtered_and_scrolled():
    view = of_64_ranks()

    def names(state: TopState, height: int | None = None) -> list[str]:
        return [name for name in shown(view, state=state, height=height) if name.startswith("decode ")]

    assert names(TopState(Fold.RANKS, "failed"))[0] == "decode 7"
    assert names(TopState(Fold.RANKS, "received"))[:2] == ["decode 19", "decode 38"]
    assert names(TopState(Fold.RANKS, "p99"))[0] == "decode 7"
    assert names(TopState(Fold.RANKS, text="DECODE 6")) == ["decode 6", *(f"decode {n}" for n in range(60, 64))]
    first = names(TopState(Fold.RANKS), 40)
    assert first[0] == "decode 0"
    assert names(TopState(Fold.RANKS, first=3), 40)[0] == "decode 3"
    assert names(TopState(Fold.RANKS, first=1000), 40)[-1] == "decode 63"
    assert shown(view, state=TopState(Fold.RANKS), height=40).get(f"and {64 - len(first)} more") == []
    with pytest.raises(KvmoverError, match="--sort speed is none of name, open"):
        TopState(sort="speed")


def test_a_key_is_one_step_of_what_is_chosen():
    def after(keys: list[str], state: TopState = USUAL) -> TopState:
        for key in keys:
            state = pressed(state, key)
        return state

    assert after(["f"]).fold == Fold.ENGINES
    assert after(["f", "f"]).fold == Fold.RANKS
    assert (after(["s", "s"]).sort, after(["S"]).sort) == ("landed", "peers")
    assert (after(["j", "down", "k"]).first, after(["page down", "up"]).first, after(["up"]).first) == (1, 9, 0)
    assert (after(["right", "l", "left"]).band, after(["left"]).band) == (1, 0)
    typed = after(["/", "q", "f", "x", "backspace"])
    assert (typed.text, typed.typing, typed.is_over) == ("qf", True, False)
    assert "filter: qf_" in typed.line()
    assert (after(["enter"], typed).text, after(["enter"], typed).typing) == ("qf", False)
    assert after(["escape"], typed) == after(["escape"], after(["enter"], typed)) == USUAL
    assert after(["q"]).is_over
    assert after(["?", "home"]) == USUAL


def test_keys_change_the_frame_at_once_and_end_the_view():
    view, frames = Engine(2), io.StringIO()
    keys = iter(["f", None, "/", "1", "enter", "q"])
    out = Console(file=frames, width=160, force_terminal=True, highlight=False, markup=False, color_system=None)
    scrapes: list[str] = []

    def get(address: str) -> str:
        scrapes.append(address)
        return view.text()

    top.watch(["here"], 2.0, out, USUAL, get, iter(range(9)).__next__, lambda _: next(keys))
    text = frames.getvalue()
    assert len(scrapes) == 2
    places = [text.index(words) for words in ("decode 1", "decode, 2 ranks", "filter: 1_", "/ filter: 1")]
    assert places == sorted(places)


def test_the_json_has_every_rank_engine_and_sum(endpoint: tuple[str, Engine], capsys: pytest.CaptureFixture[str]):
    address, engine = endpoint
    engine.receive(5 << 20, 0.1)
    engine.receive(0, 30.0, "deadline")
    engine.serve("r1", Credit(30, 20, 10), 40, {Loss.LATE: 25})
    with pytest.raises(SystemExit) as end:
        cli.main(["top", address, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert not end.value.code
    assert (data["endpoints"], data["silent"]) == (1, {})
    (rank,), (whole,) = data["ranks"], data["engines"]
    assert (rank["engine"], rank["rank"], rank["received_bytes"], rank["landed"]) == ("decode", "0", 5 << 20, 1)
    assert {**whole, "rank": "0"} == rank
    assert data["failed_transfers"] == {"deadline": 1}
    assert data["prompt_tokens"]["storage"] == 10
    assert data["lost_tokens"] == {"late": 25}


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=8), st.lists(st.integers(0, 1 << 50), max_size=8))
def test_no_change_is_negative(before: list[int], now: list[int]):
    def scrape(values: list[int]) -> Scrape:
        return Scrape(0.0, {"x": {frozenset({("n", str(i))}): float(value) for i, value in enumerate(values)}})

    assert all(value >= 0 for value in Change(scrape(before), scrape(now)).since().samples["x"].values())


def test_quantiles_are_upper_bounds_of_buckets():
    assert quantile_s({"+Inf": 0, "1.0": 0}, 0.5) is None
    assert quantile_s({"1.0": 1, "2.0": 2, "+Inf": 2}, 0.5) == 1.0
    assert quantile_s({"1.0": 1, "2.0": 2, "+Inf": 2}, 0.51) == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no metric of kvmover"),
        ("go_threads 7\n", "no metric of kvmover"),
        ("<html>\n", "no exposition of metrics"),
    ],
)
def test_what_is_no_endpoint_of_ours_is_said_so(text: str, said: str):
    with pytest.raises(KvmoverError, match=said):
        Scrape.of(text, 0.0)


# The endpoint


@pytest.fixture
def endpoint() -> Iterator[tuple[str, Engine]]:
    """A real one, on a port of its own."""
    engine = Engine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(engine.text().encode())

        def log_message(self, format: str, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}/metrics", engine
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_command_prints_one_frame(endpoint: tuple[str, Engine], capsys: pytest.CaptureFixture[str]):
    address, engine = endpoint
    engine.receive(5 << 20, 0.1)
    with pytest.raises(SystemExit) as end:
        cli.main(["top", address, "--once"])
    out = capsys.readouterr().out
    assert not end.value.code
    assert out.startswith(f"kvmover top  {address}  since the start")
    assert "5 MiB" in out


@pytest.mark.parametrize("path", ["nothing", None])
def test_an_endpoint_that_is_not_there_is_one_line(
    endpoint: tuple[str, Engine], capsys: pytest.CaptureFixture[str], path: str | None
):
    address = endpoint[0].replace("metrics", path) if path else "http://127.0.0.1:1/"
    with pytest.raises(SystemExit) as end:
        cli.main(["top", address])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert err.count("\n") == 1
    assert address in err


def test_an_address_that_is_none_is_refused():
    for address in ("http://[", "http://127.0.0.1:port/", "file:///etc/hostname"):
        with pytest.raises(KvmoverError, match="cannot read"):
            fetch(address)


class Enough(Exception):
    """The operator has seen enough."""


def test_the_view_goes_on_after_the_endpoint_was_away():
    """Frames: the first, one after bytes came, the error, and one that spans the time away."""
    engine, frames = Engine(), io.StringIO()
    clock = iter([0.0, 2.0, 6.0])
    script = iter(["come", "away", "back", "end"])

    def sleep(_: float) -> None:
        nonlocal step
        step = next(script)
        if step == "end":
            raise Enough
        engine.receive(8 << 20, 0.1)

    def get(_: str) -> str:
        if step == "away":
            raise KvmoverError("cannot read here: refused")
        return engine.text()

    step = "begin"
    out = Console(file=frames, width=160, force_terminal=True, highlight=False, markup=False, color_system=None)
    with pytest.raises(Enough):
        top.watch(["here"], 2.0, out, USUAL, get, lambda: next(clock), sleep)
    text = frames.getvalue()
    away = "kvmover top: cannot read here: refused"
    in_order = ["since the start", "over the last 2.0 s", "4 MiB/s", away, "over the last 4.0 s"]
    places = [text.index(words) for words in in_order]
    assert places == sorted(places)
    assert "4 MiB/s" in text[places[-1] :]


def test_a_range_of_ports_is_an_endpoint_a_rank():
    assert endpoints("decode-0:24400-24402") == [f"http://decode-0:{port}/metrics" for port in (24400, 24401, 24402)]
    assert endpoints("https://decode-0:24400-24400/other") == ["https://decode-0:24400/other"]
    assert endpoints("http://decode-0:24400/metrics") == ["http://decode-0:24400/metrics"]
    for bad in ("decode-0:24402-24400", "decode-0:0-3", "decode-0:24400-70000"):
        with pytest.raises(KvmoverError, match="a range goes from a port up to another"):
            endpoints(bad)


def test_ranks_of_several_endpoints_stand_together_and_a_silent_one_is_named():
    ranks = {f"http://{name}/metrics": Engine() for name in ("one", "two")}
    for engine in ranks.values():
        engine.receive(1 << 30, 0.5)

    def get(address: str) -> str:
        if address not in ranks:
            raise KvmoverError(f"cannot read {address}: Connection refused")
        return ranks[address].text()

    out = Console(file=io.StringIO(), width=160, highlight=False, markup=False)
    top.show([*ranks, "http://three/metrics"], out, get=get)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert "http://one/metrics and 2 more" in text
    assert "2 GiB" in text
    assert "kvmover top: cannot read http://three/metrics: Connection refused" in text
    dead = [f"http://gone:{port}/metrics" for port in range(24400, 24464)]
    with pytest.raises(KvmoverError) as refused:
        top.show(dead, out, get=get)
    assert str(refused.value) == "cannot read http://gone:24400/metrics and 63 more: Connection refused"
    with pytest.raises(KvmoverError, match="cannot read http://three/metrics"):
        top.show(["http://three/metrics"], out, get=get)
