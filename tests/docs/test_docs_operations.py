"""docs/operations.md, the dashboard and the alerts: every reason has its remedy, every metric and setting exists."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from kvmover.cache.ledger import Loss
from kvmover.errors import RefusedFor
from kvmover.store import Got, Put
from kvmover.transfer.meter import UNBEGUN
from kvmover.transfer.protocol.auth import Refusal
from kvmover.transfer.result import Cause

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "operations.md").read_text()


def _metrics() -> dict[str, tuple[str, set[str]]]:
    """(type, labels) of every metric of docs/metrics.md."""
    rows = re.findall(r"^\| `(kvmover_\w+)` \| (\w+) \| ([^|]*) \|", (DOCS / "metrics.md").read_text(), flags=re.M)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


METRICS = _metrics()


def _labels(series: str) -> set[str]:
    """The labels of a series that is scraped. Raises KeyError for one that is not."""
    if series in METRICS:
        kind, labels = METRICS[series]
        assert kind != "histogram", f"{series} is scraped as _bucket, _sum and _count"
        return labels
    base, _, suffix = series.rpartition("_")
    kind, labels = METRICS[base]
    assert (kind, suffix in ("bucket", "sum", "count")) == ("histogram", True), series
    return labels | ({"le"} if suffix == "bucket" else set())


def _check(expression: str) -> set[str]:
    """Series and labels of an expression exist; the labels that its result can have."""
    assert expression.count("(") == expression.count(")"), expression
    series = re.findall(r"\b(kvmover_\w+)(?:\{([^}]*)\})?", expression)
    assert series, expression
    known = set[str]()
    for name, selectors in series:
        labels = _labels(name)
        assert set(re.findall(r"(\w+) *(?:=~|!~|!=|=)", selectors)) <= labels, (name, selectors)
        known |= labels
    kept = [set(re.split(r", *", labels)) for labels in re.findall(r"\bby \(([^)]*)\)", expression)]
    assert all(labels <= known for labels in kept), expression
    return set().union(*kept) if kept else known


def _table(heading: str) -> list[str]:
    """First cells of the table below a heading, as code."""
    (text,) = re.findall(rf"^#+ {heading}$(.*?)(?=^#+ |\Z)", PAGE, flags=re.M | re.S)
    return re.findall(r"^\| `([a-z_]+)` \|", text, flags=re.M)


def _values(*enums: type[StrEnum]) -> list[str]:
    return list(dict.fromkeys(member.value for enum in enums for member in enum))


REASONS: list[tuple[str, list[str]]] = [
    ("When transfers fail", [*_values(Cause), UNBEGUN]),
    ("Refusals", _values(RefusedFor)),
    ("Seals", _values(Refusal)),
    ("When pages fail", _values(Put, Got)),
    ("When hits are lost", _values(Loss)),
]


@pytest.mark.parametrize(("heading", "reasons"), REASONS, ids=[heading for heading, _ in REASONS])
def test_every_reason_that_the_code_gives_has_its_row(heading: str, reasons: list[str]) -> None:
    assert sorted(_table(heading)) == sorted(reasons)


def test_the_metrics_that_the_page_names_exist() -> None:
    for name in set(re.findall(r"`(kvmover_\w+)`", PAGE)):
        assert name in METRICS, name


def test_the_settings_that_the_page_turns_exist_and_take_the_values() -> None:
    from kvmover.config import keys, load

    known = {key.name: key for key in keys()}
    settings = re.findall(r"`(\w+(?:\.\w+)+) = ([^`]+)`", PAGE)
    assert len(settings) > 5
    for name, value in settings:
        assert name in known, name
        load(environ={known[name].variable: value.strip('"')})


def _panels() -> list[dict[str, Any]]:
    return json.loads((DOCS / "dashboard.json").read_text())["panels"]


def test_every_panel_of_the_dashboard_asks_for_series_that_exist() -> None:
    panels = [panel for panel in _panels() if panel["type"] != "row"]
    assert len(panels) > 15
    for panel in panels:
        for target in panel["targets"]:
            known = _check(target["expr"])
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    assert len({panel["id"] for panel in _panels()}) == len(_panels())
    taken = [set(_cells(panel["gridPos"])) for panel in _panels()]
    assert all(not one & other for one, other in itertools.combinations(taken, 2))


def _cells(at: dict[str, int]) -> Iterator[tuple[int, int]]:
    assert at["x"] + at["w"] <= 24
    return itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))


def test_the_dashboards_variables_are_those_that_its_panels_use() -> None:
    text = (DOCS / "dashboard.json").read_text()
    made = {variable["name"] for variable in json.loads(text)["templating"]["list"]}
    assert made == set(re.findall(r"\$\{?([a-z]+)\}?", text))
    asked = re.findall(r'label_values\(\{__name__=~\\"([\w|]+)\\"\}, (\w+)\)', text)
    assert len(asked) == 2 * 2, "the query of two variables, and its copy"
    for names, label in asked:
        assert all(label in _labels(name) for name in names.split("|"))


def test_the_dashboard_and_the_alerts_leave_no_failure_unseen() -> None:
    shown = (DOCS / "dashboard.json").read_text() + (DOCS / "alerts.yml").read_text()
    for name in METRICS:
        if re.search(r"lost|mismatch|malformed|refused|fault|quarantin|unopened|resent|dialled|limbo", name):
            assert name in shown, name


#: By metric that no panel shows: why it is not worth one.
UNSHOWN = {
    "kvmover_sent_chunks_total": "chunks by route say it, and failures by end",
    "kvmover_received_chunks_total": "the peers' chunks by route say it",
    "kvmover_notes_total": "a divisor of messages, for who works on the protocol",
    "kvmover_polls_total": "how often a loop went round says nothing without its work",
    "kvmover_never_admitted_total": "clients that left early, which the engine's own metrics count",
    "kvmover_never_resumed_total": "the same, between a retraction and the next attempt",
}


def test_every_metric_is_in_a_panel_or_has_its_reason_why_not() -> None:
    shown = " ".join(target["expr"] for panel in _panels() for target in panel.get("targets", ()))
    missing = {name for name in METRICS if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", shown)}
    assert missing == UNSHOWN.keys()


def _rules() -> Iterable[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [rule for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def test_every_alert_asks_for_series_that_exist_and_names_its_section() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE, flags=re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    names = list[str]()
    for rule in _rules():
        names.append(rule["alert"])
        known = _check(rule["expr"]) | {"instance"}  # Prometheus's own
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= known, rule["alert"]
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operations.md"
        assert anchor in anchors, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert len(names) == len(set(names)) > 5


def _parsed(expression: str) -> object:
    """An expression by Prometheus' grammar, types of arguments included. Grafana's own words stand for durations."""
    parser: Any = pytest.importorskip("promql_parser", reason="needs promql-parser: `make setup`")
    return parser.parse(re.sub(r"\$__(rate_interval|interval|range)\b", "5m", expression))


def test_every_expression_of_an_alert_is_promql_and_its_wait_a_duration() -> None:
    for rule in _rules():
        assert _parsed(rule["expr"]), rule["alert"]
        assert re.fullmatch(r"[1-9]\d*[smhd]", rule.get("for", "1m")), rule["alert"]


def test_every_expression_of_the_dashboard_is_promql() -> None:
    expressions = [target["expr"] for panel in _panels() for target in panel.get("targets", ())]
    assert all(map(_parsed, expressions))
    assert len(expressions) > 30


@pytest.mark.parametrize(
    "broken",
    [
        "sum by (engine (rate(kvmover_transfers_total[5m]))",
        "rate(kvmover_transfers_total)",
        "histogram_quantile(kvmover_wait_seconds_bucket)",
        "sum(rate(kvmover_transfers_total[5m])) >",
        'kvmover_transfers_total{end=~"("}',
        "ratio(kvmover_transfers_total[5m])",
    ],
)
def test_a_malformed_expression_of_an_alert_fails(broken: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        _parsed(broken)


def test_without_a_yaml_library_the_series_of_the_alerts_are_still_checked() -> None:
    expressions = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*)\n)", (DOCS / "alerts.yml").read_text())
    assert len(expressions) == (DOCS / "alerts.yml").read_text().count("- alert:")
    for block, line in expressions:
        _check(block or line)
