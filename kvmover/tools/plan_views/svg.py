"""Pictures are made of these few SVG elements, with colours that hold on light and on dark backgrounds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from xml.sax.saxutils import escape

#: Colours distinct to colour-blind readers: those of Okabe and Ito, and a dark red.
_PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#882255")

#: Styles. The paper is painted, so that ink and paper agree on any page.
_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-size:11px}
.title{font-size:16px;font-weight:600}.strong{font-size:12px;font-weight:600}
.paper{fill:#ffffff}.card{fill:#f6f8fa;stroke:#d0d7de}.hole{fill:#e4e8ed}.ink{fill:#1f2328}.soft{fill:#656d76}
.label{fill:#1f2328;stroke:#ffffff;stroke-width:3px;stroke-linejoin:round;paint-order:stroke;font-size:10.5px}
@media (prefers-color-scheme:dark){
.paper{fill:#0d1117}.card{fill:#161b22;stroke:#30363d}.hole{fill:#2a313a}.ink{fill:#e6edf3}.soft{fill:#8d96a0}
.label{fill:#e6edf3;stroke:#0d1117}}
"""


def colour(rank: int) -> str:
    """Returns a colour for each source rank: the palette, then hues by the golden angle, which stay apart."""
    if rank < len(_PALETTE):
        return _PALETTE[rank]
    return f"hsl({rank * 137.508 % 360:.0f},60%,52%)"


def document(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """Returns a standalone file: no fonts, scripts or links."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" role="img">'
    )
    paper = rect(0, 0, width, height, style="paper", radius=8)
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", paper, *body, "</svg>", ""])


_SIZE = re.compile(r'<svg [^>]*?width="([0-9.]+)" height="([0-9.]+)"')


def below(documents: Sequence[str]) -> str:
    """Stack documents, each below the one before, into one as wide as the widest."""
    sizes = [tuple(map(float, found.groups())) for each in documents if (found := _SIZE.match(each))]
    tops = list(accumulate((height for _, height in sizes), initial=0))
    parts = [each.replace("<svg ", f'<svg y="{top:g}" ', 1) for each, top in zip(documents, tops, strict=False)]
    width = max(width for width, _ in sizes)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{tops[-1]:g}"'
    return "".join([head, f' viewBox="0 0 {width:g} {tops[-1]:g}" role="img">\n', *parts, "</svg>\n"])


def text(x: float, y: float, words: str, style: str = "ink", anchor: str = "start") -> str:
    """Write a text element. `anchor`: start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, *, style: str, radius: float = 0) -> str:
    """Draw a box of a class of the style sheet."""
    return _rect(x, y, width, height, f'class="{style}"', radius)


def fill(x: float, y: float, width: float, height: float, paint: str, opacity: float = 1, radius: float = 0) -> str:
    """Draw a box of a rank's colour."""
    faded = f' opacity="{opacity:g}"' if opacity < 1 else ""
    return _rect(x, y, width, height, f'fill="{paint}"{faded}', radius)


def _rect(x: float, y: float, width: float, height: float, paint: str, radius: float) -> str:
    corner = f' rx="{radius:g}"' if radius else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"{corner} {paint}/>'


def ribbon(start: tuple[float, float], end: tuple[float, float], thickness: float, paint: str, threads: int) -> str:
    """Draw a band from `start` to `end`, level at both; several threads leave gaps of their own width."""
    part = thickness / (2 * threads - 1)
    (x0, y0), (x1, y1) = start, end
    middle = (x0 + x1) / 2
    bands: list[str] = []
    for thread in range(threads):
        low = 2 * thread * part - thickness / 2
        high = low + part
        bands.append(
            f"M{x0:.1f} {y0 + low:.2f}C{middle:.1f} {y0 + low:.2f} {middle:.1f} {y1 + low:.2f} {x1:.1f} {y1 + low:.2f}"
            f"V{y1 + high:.2f}C{middle:.1f} {y1 + high:.2f} {middle:.1f} {y0 + high:.2f} {x0:.1f} {y0 + high:.2f}Z"
        )
    return f'<path d="{"".join(bands)}" fill="{paint}" opacity=".5"/>'


def group(hint: str, parts: Sequence[str]) -> str:
    """Group parts under a hint that a browser shows at the pointer."""
    return f"<g><title>{escape(hint)}</title>{''.join(parts)}</g>"
