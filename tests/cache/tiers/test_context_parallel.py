"""One source of coordinates: a component whose tensor, pipeline or context rank is forgotten is found out at once.

sglang#22782: one path of a hybrid stack went by the tensor and pipeline rank alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from rig import HYBRID, SPARSE, Rank

from kvmover.cache.tiers import TierError, tiered_pool
from kvmover.layout import Fleet
from kvmover.layout.fleet import CpOrder

FLEETS = {
    "tp": Fleet(tp=2, page_tokens=8),
    "pp": Fleet(pp=2, page_tokens=8),
    "cp": Fleet(cp=2, page_tokens=4),
    "tp and cp": Fleet(tp=2, cp=2, page_tokens=4, cp_order=CpOrder.TOKEN),
}
STACKS = {"sparse": SPARSE, "hybrid": HYBRID}
NAMES = [(stack, component.name) for stack, model in STACKS.items() for row in model.values() for component in row]


@pytest.mark.parametrize(("stack", "name"), NAMES)
@pytest.mark.parametrize("forgotten", FLEETS)
def test_a_component_that_forgets_a_coordinate_is_refused(monkeypatch, stack, name, forgotten):
    fleet, part_of = FLEETS[forgotten], tiered_pool.part_of

    def careless(component, fleet, rank):
        """The path that forgets: all other components go by the fleet."""
        if component.name != name:
            return part_of(component, fleet, rank)
        axis = forgotten.split()[-1]
        less = replace(fleet, **{axis: 1}, page_tokens=fleet.page_tokens * (fleet.cp if axis == "cp" else 1))
        return part_of(component, less, rank % less.size)

    right = [Rank(None, fleet=fleet, rank=rank, model=STACKS[stack]) for rank in range(fleet.size)]
    parts = {(h.part.component.name, rank.rank): h.part for rank in right for h in rank.tiered_pools}
    monkeypatch.setattr(tiered_pool, "part_of", careless)
    for rank in range(fleet.size):
        component = next(c for row in STACKS[stack].values() for c in row if c.name == name)
        if careless(component, fleet, rank) == parts[name, rank]:
            continue  # it holds the same, wherever it stands: an MLA latent on every rank of TP, a state on those of CP
        with pytest.raises(TierError, match=f"pool of {name} holds"):
            Rank(None, fleet=fleet, rank=rank, model=STACKS[stack])


def test_some_of_every_stack_differ_by_each_coordinate():
    """The test above has something to refuse. A latent is the same on every rank of TP."""
    for axis, fleet in FLEETS.items():
        for model in [STACKS["hybrid"], *([STACKS["sparse"]] if "tp" not in axis else [])]:
            held = {
                (component.name, tiered_pool.part_of(component, fleet, rank).box)
                for row in model.values()
                for component in row
                for rank in range(fleet.size)
            }
            assert len(held) > sum(map(len, model.values())), axis
