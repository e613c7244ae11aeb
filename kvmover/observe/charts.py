"""The charts of a report are inline SVG: columns, lines, bars and a timeline, of values that are computed elsewhere.

Colours and fonts are the page's classes, so that a chart follows light and dark. Every mark has a hint for the pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from kvmover.observe import svg

WIDTH = 900
_LEFT, _RIGHT, _TOP, _FOOT = 70, 14, 14, 26
_INNER = WIDTH - _LEFT - _RIGHT
_HEIGHT = 220
_BAR, _LABEL = 22, 190
_PER_CHARACTER = 6.2
_MOST_TICKS = 9


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one name, a number a column. `paint` is a class of the page: `device`."""

    name: str
    paint: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0 to `top` in steps that people count in. `words` writes a value."""

    top: float
    step: float
    words: Callable[[float], str]

    @classmethod
    def of(cls, most: float, words: Callable[[float], str]) -> Axis:
        """Four or five steps to the first at or above `most`.

        >>> Axis.of(37.0, str).step, Axis.of(37.0, str).top
        (10.0, 40.0)
        """
        if most <= 0:
            return cls(1.0, 1.0, words)
        power = 10.0 ** floor(log10(most / 4))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= most / 5)
        return cls(step * -(-most // step), step, words)

    def ticks(self) -> list[float]:
        """The labelled values, from 0 to the top: 0, 20, 40 for a top of 40."""
        return [i * self.step for i in range(round(self.top / self.step) + 1)]


@dataclass(frozen=True, slots=True)
class Ground:
    """What columns and lines stand on: a label and a hint for each place, from left to right."""

    labels: Sequence[str]
    hints: Sequence[str]
    scale: Axis

    @property
    def pitch(self) -> float:
        """Width of a column in units of the picture."""
        return _INNER / len(self.labels)

    def y(self, value: float) -> float:
        """Where a value lies: larger values have smaller coordinates."""
        return _TOP + _HEIGHT * (1 - value / self.scale.top)

    def draw(self) -> Iterator[str]:
        """Grid lines with their values, and as many labels below as stand side by side."""
        for tick in self.scale.ticks():
            yield _line(_LEFT, self.y(tick), WIDTH - _RIGHT, self.y(tick), "grid")
            yield svg.text(_LEFT - 8, self.y(tick) + 4, self.scale.words(tick), "soft", "end")
        widest = max(len(label) for label in self.labels) * _PER_CHARACTER + 12
        every = max(-(-len(self.labels) // _MOST_TICKS), -(-int(widest) // max(1, int(self.pitch))))
        for index in range(0, len(self.labels), every):
            x = _LEFT + self.pitch * (index + 0.5)
            half = len(self.labels[index]) * _PER_CHARACTER / 2
            x = min(max(x, half), WIDTH - half)
            yield svg.text(x, _TOP + _HEIGHT + 18, self.labels[index], "soft", "middle")


def columns(title: str, ground: Ground, series: Sequence[Series], marks: Sequence[float] = ()) -> str:
    """Stacked columns. `marks`: a short dash over each column, for what it could have been."""
    body = list(ground.draw())
    gap = min(3.0, ground.pitch / 6)
    for index, hint in enumerate(ground.hints):
        x, below = _LEFT + ground.pitch * index + gap / 2, 0.0
        parts = [svg.rect(x, _TOP, ground.pitch - gap, _HEIGHT, style="hover")]
        for each in series:
            value = each.values[index]
            if value > 0:
                top = ground.y(below + value)
                parts.append(svg.rect(x, top, ground.pitch - gap, ground.y(below) - top, style=each.paint))
                below += value
        if marks and marks[index] > 0:
            y = ground.y(marks[index])
            parts.append(_line(x, y, x + ground.pitch - gap, y, "mark"))
        body.append(svg.group(hint, parts))
    return _picture(title, _TOP + _HEIGHT + _FOOT, body)


def lines(title: str, ground: Ground, series: Sequence[Series]) -> str:
    """A stepped line a series."""
    body = list(ground.draw())
    for each in series:
        steps = [
            f"{_LEFT + ground.pitch * i:.1f} {ground.y(value):.1f}H{_LEFT + ground.pitch * (i + 1):.1f}"
            for i, value in enumerate(each.values)
        ]
        path = "M" + "L".join(steps)
        body.append(f'<path d="{path}" class="line {each.paint}"/>')
    for index, hint in enumerate(ground.hints):
        box = svg.rect(_LEFT + ground.pitch * index, _TOP, ground.pitch, _HEIGHT, style="hover")
        body.append(svg.group(hint, [box]))
    return _picture(title, _TOP + _HEIGHT + _FOOT, body)


def bars(title: str, rows: Sequence[tuple[str, float, str]], paint: str) -> str:
    """A row for each (name, value, value in words), longest as wide as there is room."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    room = WIDTH - _LABEL - _RIGHT - max((len(words) for *_, words in rows), default=0) * _PER_CHARACTER - 12
    body: list[str] = []
    for index, (name, value, words) in enumerate(rows):
        y, long = _BAR * index, room * value / most
        body.append(svg.text(_LABEL - 8, y + 15, name, "ink", "end"))
        bar = svg.rect(_LABEL, y + 3, max(long, 1), _BAR - 6, style=paint, radius=2)
        body.append(svg.group(f"{name}: {words}", [bar]))
        body.append(svg.text(_LABEL + long + 6, y + 15, words, "soft"))
    return _picture(title, max(_BAR * len(rows), _BAR), body)


@dataclass(frozen=True, slots=True)
class Bar:
    """Something from `start` to `stop`, both of 0 to 1 of the time."""

    start: float
    stop: float
    paint: str
    hint: str


def timeline(title: str, lanes: Sequence[tuple[str, Sequence[Bar]]], labels: Sequence[str]) -> str:
    """Lanes from top to bottom, one without a name belonging to the one above. `labels` are spread below, evenly."""
    high = 12 if len(lanes) <= 60 else 6
    inner, tall = WIDTH - _LABEL - _RIGHT, high * len(lanes)
    body: list[str] = []
    written = 0.0
    for index, (name, held) in enumerate(lanes):
        y = _TOP + high * index
        if name:
            body.append(_line(0, y, WIDTH - _RIGHT, y, "grid"))
        if name and y >= written:  # names of low lanes would lie upon each other
            body.append(svg.text(_LABEL - 8, y + 10, shortened(name), "ink", "end"))
            written = y + 12
        for bar in held:
            box = svg.rect(
                _LABEL + inner * bar.start, y + 1.5, max(inner * (bar.stop - bar.start), 1.5), high - 3, style=bar.paint
            )
            body.append(svg.group(bar.hint, [box]))
    for index, label in enumerate(labels):
        anchor = "start" if not index else "end" if index == len(labels) - 1 else "middle"
        x = _LABEL + inner * index / max(1, len(labels) - 1)
        body.append(svg.text(x, _TOP + tall + 18, label, "soft", anchor))
    return _picture(title, _TOP + tall + _FOOT, body)


def shortened(name: str) -> str:
    """What fits beside a bar: the beginning of a name and its end.

    >>> shortened("an-engine-of-a-very-long-name 12 receive")
    'an-engine-of... 12 receive'
    """
    return name if len(name) <= 26 else f"{name[:12]}...{name[-11:]}"


def _line(x0: float, y0: float, x1: float, y1: float, style: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{style}"/>'


def _picture(title: str, height: float, body: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *body, "</svg>"])


STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--soft:#59636e;--grid:#e4e8ed;--card:#f6f8fa;
--device:#0072b2;--host:#e69f00;--storage:#009e73;--peer:#56b4e9;--lost:#cc79a7;--send:#e69f00;--receive:#0072b2;
--direct:#56b4e9;--packed:#e69f00;--mapped:#009e73;--both:#7a4ea3;--none:#9aa4af;--failed:#b3261e;--p50:#0072b2;--p99:#e69f00}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--soft:#9aa4af;--grid:#2a313a;--card:#161b22}}
body{margin:2rem auto;max-width:60rem;padding:0 1rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .2rem}p{margin:.2rem 0 .6rem;color:var(--soft)}
.tiles{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.tiles div{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:.6rem 1rem}
.tiles b,.tiles span{display:block}.tiles b{font-size:1.15rem}
.tiles span,.legend,details{color:var(--soft);font-size:.85rem}
.legend span{margin-right:1rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
svg{width:100%;height:auto;display:block}svg text{font-size:11px}.ink{fill:var(--ink)}.soft{fill:var(--soft)}
.grid{stroke:var(--grid)}.mark{stroke:var(--ink);stroke-width:1.5}.line{fill:none!important;stroke-width:2}
path.send{stroke-width:6;opacity:.7}.hover{fill:transparent}g:hover>.hover{fill:var(--grid);opacity:.5}
table{border-collapse:collapse;margin:.4rem 0;font-variant-numeric:tabular-nums}
rect.failed{stroke:var(--ink);stroke-width:1.5}i.failed{outline:1.5px solid var(--ink)}
th,td{text-align:left;padding:.15rem 1rem .15rem 0;border-bottom:1px solid var(--grid);overflow-wrap:anywhere}
""" + "".join(
    f".{name}{{fill:var(--{name})}}i.{name}{{background:var(--{name})}}path.{name}{{stroke:var(--{name})}}\n"
    for name in (
        "device",
        "host",
        "storage",
        "peer",
        "lost",
        "send",
        "receive",
        "direct",
        "packed",
        "mapped",
        "both",
        "none",
        "failed",
        "p50",
        "p99",
    )
)
