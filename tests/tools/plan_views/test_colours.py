"""Colours of pictures are told apart by readers who do not see red, green or blue as others do."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from kvmover.tools.plan_views import svg

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


@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)
def test_colours_of_ranks_that_stand_together_are_told_apart(sight: npt.ArrayLike):
    for one, other in combinations((svg.colour(rank) for rank in range(8)), 2):
        distance = float(np.linalg.norm(lab(one, sight) - lab(other, sight)))
        assert distance >= LEAST, f"{one} and {other} are {distance:.1f} apart"
