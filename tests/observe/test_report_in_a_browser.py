"""The report in a real browser without a window: it lays out what was written, and no words stand upon others."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import rundata

from kvmover.observe.report import POLICY, page
from kvmover.observe.runlog import read_lines

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

#: Measures the page as it was laid out. It runs only where the page's own policy was taken out.
PROBE = """
<script>addEventListener("load", () => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const charts = [...document.querySelectorAll("svg")].map(svg => ({
    name: svg.getAttribute("aria-label"),
    box: box(svg),
    texts: [...svg.querySelectorAll("text")].map(e => [e.textContent, ...box(e)]),
    marks: [...svg.querySelectorAll("rect,path,line")].map(e => [e.getAttribute("class"), getComputedStyle(e).fill,
      getComputedStyle(e).stroke, ...box(e)]),
  }));
  document.querySelectorAll("details").forEach(e => e.open = true);
  const found = {
    charts, title: document.title, wide: document.documentElement.scrollWidth, window: innerWidth,
    fetched: performance.getEntriesByType("resource").length, rows: document.querySelectorAll("tr").length,
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  };
  const out = document.createElement("pre"); out.id = "probe"; out.textContent = JSON.stringify(found);
  document.body.append(out);
});</script>
"""


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    return found or pytest.skip(f"none of these browsers is installed: {', '.join(BROWSERS)}")


def dom(text: str, folder: Path, *flags: str) -> str:
    """The document as the browser has it after everything was loaded."""
    folder.mkdir(exist_ok=True)
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage")
    command = [browser(), *fixed, f"--user-data-dir={folder / 'profile'}", "--window-size=1000,900", *flags]
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    log = tmp_path_factory.mktemp("run") / "run.jsonl"
    rundata.write(log)
    return page(read_lines([log]))


@pytest.fixture(scope="module")
def found(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    probed = text.replace(POLICY, "").replace("</head>", PROBE + "</head>")
    assert POLICY not in probed
    answer = dom(probed, tmp_path_factory.mktemp("browser"))
    measured = re.search(r'<pre id="probe">(.*?)</pre>', answer, re.DOTALL)
    assert measured, "the page did not come to its end"
    return json.loads(html.unescape(measured[1]))


def overlap(one: list[float], other: list[float]) -> bool:
    """Of boxes (left, top, right, bottom), by more than the rounding of a pixel."""
    return min(one[2], other[2]) - max(one[0], other[0]) > 1.5 and min(one[3], other[3]) - max(one[1], other[1]) > 1.5


def test_every_chart_is_laid_out_with_all_its_words_readable(found: dict[str, Any]) -> None:
    assert len(found["charts"]) == 5
    for chart in found["charts"]:
        left, top, right, bottom = chart["box"]
        assert right - left > 600, chart["name"]
        assert bottom - top > 30, chart["name"]
        words = [(each[0], each[1:]) for each in chart["texts"]]
        assert words
        for at, (word, box) in enumerate(words):
            assert box[0] >= left - 1, (chart["name"], word)
            assert box[2] <= right + 1, (chart["name"], word)
            assert box[3] <= bottom + 1, (chart["name"], word)
            for other, another in words[at + 1 :]:
                assert not overlap(box, another), (chart["name"], word, other)


def test_every_mark_has_a_colour_and_a_place_inside(found: dict[str, Any]) -> None:
    for chart in found["charts"]:
        left, top, right, bottom = chart["box"]
        for style, fill, stroke, *box in chart["marks"]:
            assert box[0] >= left - 4, (chart["name"], style)
            assert box[1] >= top - 4, (chart["name"], style)
            assert box[2] <= right + 4, (chart["name"], style)
            assert box[3] <= bottom + 4, (chart["name"], style)
            if style != "hover":
                assert (fill, stroke) != ("rgb(0, 0, 0)", "none"), f"{style} has no colour in {chart['name']}"
    drawn = {style for chart in found["charts"] for style, *_ in chart["marks"]}
    assert {"device", "host", "storage", "lost", "direct", "packed", "failed", "mark"} <= drawn


def test_the_page_fits_its_window_fetches_nothing_and_is_readable(found: dict[str, Any]) -> None:
    assert found["wide"] <= found["window"]
    assert found["fetched"] == 0
    assert found["title"].startswith("kvmover run of 2026-11-2")
    assert found["paper"] != found["ink"]
    assert found["rows"] > 60


def test_a_script_in_a_name_does_not_run(text: str, tmp_path: Path) -> None:
    """The page as it is; and one into which a script got all the same, which its policy stops."""
    assert "pwned</title>" not in dom(text, tmp_path / "as it is")
    forced = text.replace("</body>", "<script>document.title = 'pwned'</script></body>")
    assert "<title>pwned</title>" not in dom(forced, tmp_path / "forced")
    assert "<title>pwned</title>" in dom(forced.replace(POLICY, ""), tmp_path / "without the policy")
