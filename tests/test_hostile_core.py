"""The C core under sanitisers, told what no caller of ours would tell it: it refuses with an error of Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proofs import tries
from tests.sanitised import told

#: Each call takes values of any kind. Functions that are given addresses, which nobody can check, are left out.
STORY = """
import random
import numpy as np

ADDRESSED = {"copy_rows", "digest_rows", "gather"}
VALUES = [
    None, True, 0, 1, 2, 7, -1, -2**31, 2**40, 2**62, 2**63 - 1, -2**63, 2**63, 2**100, 1.5, "x", b"", b"abcd",
    b"abcdefg", b"abcd" * 16, [], [0], [1, 2, 3], [2**40, -1], (), (1,), (True, False), {}, {b"abcd": 7}, object(),
    np.zeros(0, np.int32), np.arange(8, dtype=np.int32), np.arange(5, dtype=np.int64), np.array([-1]), np.zeros(3),
    np.arange(8, dtype=">i4"), np.arange(16, dtype=np.int32)[::2], np.zeros((2, 2), np.int32),
]
OBJECTS = [value for value in VALUES if not isinstance(value, int)]


def tried(call, *given):
    try:
        return call(*given)
    except Exception:
        return None


def columns(rng):
    "A tree of two nodes, some of whose fields are then anything."
    made_of = made.Columns()
    made_of.page_bytes, made_of.device = 4, made_of.set_of(None, 0)
    root = made_of.node(0, None, b"", 0, 0)
    leaf = tried(made_of.grow, root, b"abcdefgh", 2, bytes(8))
    return [each for each in (made_of, root, leaf, made_of.device) if each is not None]


def names(held):
    return [name for name in dir(held) if not name.startswith("__")]


def others(rng):
    for kind in (made.Recency, made.HazardOrder, made.ReuseHistory, made.Ideal, made.SimulatedStorage, made.PageTable,
                 made.PagesInUse, made.Children, made.ComponentPages, made.EvictableSet):
        found = tried(kind, *rng.choices(VALUES, k=rng.randrange(3)))
        yield found if found is not None else tried(kind.__new__, kind)


for seed in range(SEEDS):
    rng = random.Random(seed)
    print("seed", seed, flush=True)
    held = [*columns(rng), *(each for each in others(rng) if each is not None)]
    for _ in range(60):
        one = rng.choice(held)
        name = rng.choice(names(one))
        if rng.random() < 0.2:
            # A node that is its own ancestor has a path without an end.
            tried(setattr, one, name, rng.choice(OBJECTS if name == "parent" else [*OBJECTS, *held]))
            continue
        call = tried(getattr, one, name)
        if callable(call):
            tried(call, *rng.choices([*VALUES, *held], k=rng.randrange(5)))
    for name in names(made):
        if callable(getattr(made, name)) and name not in ADDRESSED:
            tried(getattr(made, name), *rng.choices([*VALUES, *held], k=rng.randrange(6)))
print("refused")
"""


@pytest.mark.searched
def test_no_call_with_any_values_crashes_the_core(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also objects that are made and never initialised, and nodes whose fields are anything."""
    story = STORY.replace("SEEDS", str(tries(40, 1200, 1200)))
    assert told(story, Path(__file__).parent, tmp_path_factory).endswith("refused\n")
