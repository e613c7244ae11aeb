"""Colours of pictures are told apart by readers who do not see red, green or blue as others do."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from kvmover.observe import svg
from kvmover.observe.charts import STYLE

#: Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as such a reader sees it.
SIGHTS = {
    "as most": np.eye(3),
    "without red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "without green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "without blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}

#: sRGB to XYZ over the white of D65.
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])

#: In CIELAB a distance of 2.3 is just seen side by side; colours of a legend are compared across a page.
LEAST = 12.0


def lab(colour: str, sight: npt.ArrayLike) -> npt.NDArray[np.float64]:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = XYZ @ np.clip(np.asarray(sight) @ linear, 0, 1) / WHITE
    part = np.where(seen > 216 / 24389, np.cbrt(seen), (24389 / 27 * seen + 16) / 116)
    return np.array([116 * part[1] - 16, 500 * (part[0] - part[1]), 200 * (part[1] - part[2])])


def of_report(*names: str) -> list[str]:
    found = dict(re.findall(r"--(\w+):(#[0-9a-f]{6})", STYLE))
    return [found[name] for name in names]


GROUPS = {
    "ranks of a plan": [svg.colour(rank) for rank in range(8)],
    "tiers and losses": of_report("device", "host", "storage", "lost"),
    "routes and failures": of_report("direct", "packed", "mapped", "both", "none", "failed"),
    "directions": of_report("send", "receive"),
    "quantiles": of_report("p50", "p99"),
}


@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)
@pytest.mark.parametrize("colours", GROUPS.values(), ids=GROUPS)
def test_colours_that_stand_together_are_told_apart(colours: list[str], sight: npt.ArrayLike):
    for one, other in combinations(colours, 2):
        distance = float(np.linalg.norm(lab(one, sight) - lab(other, sight)))
        assert distance >= LEAST, f"{one} and {other} are {distance:.1f} apart"
