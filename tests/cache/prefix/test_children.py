"""The children of a node are a mapping in either core, also where they are many and come and go."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import pytest

from kvmover.c_core import NATIVE
from kvmover.cache.prefix import FULL, PrefixTree


@pytest.mark.skipif(NATIVE is None, reason="the C core was not built")
def test_many_children_come_and_go_as_in_a_dict() -> None:
    parent = cast(Any, NATIVE).Columns().node(1, None, b"", 0, 1)
    mine, theirs, chance = parent.children, dict[bytes, int](), random.Random(4)
    names = [number.to_bytes(4, "little") for number in range(9_000)]
    for share in (0.2, 1.0, 0.5, 0.0, 0.4):  # 2,048 are still in one dict
        for name in chance.sample(names, len(names)):
            if chance.random() < share:
                mine[name] = theirs[name] = chance.randrange(99)
            elif name in theirs:
                del mine[name], theirs[name]
        assert (len(mine), dict(mine.items()), set(mine)) == (len(theirs), theirs, set(theirs))
        assert sorted(mine.values()) == sorted(theirs.values())
        assert all(mine.get(name) == theirs.get(name) and (name in mine) == (name in theirs) for name in names)
    for name in (b"none", b""):
        with pytest.raises(KeyError):
            del mine[name]
        with pytest.raises(KeyError):
            mine[name]
    with pytest.raises(TypeError):
        mine[[]] = 1


def test_a_root_of_many_prompts_gives_them_all_back() -> None:
    tree, prompts = PrefixTree(1), 5_000
    for first in range(prompts):
        tree.insert([first, 7], [2 * first, 2 * first + 1])
    assert tree.match([4_321, 7, 7]).page_ids.tolist() == [8_642, 8_643]
    tree.check()
    steps = list(tree.evict_in_steps({FULL: prompts}))
    assert max(len(step.page_ids()) for step in steps) <= 256
    steps += tree.evict_in_steps({FULL: 2 * prompts})
    freed = np.concatenate([step.page_ids() for step in steps])
    assert sorted(freed.tolist()) == list(range(2 * prompts))
    assert len(tree) == 0
    tree.check()
