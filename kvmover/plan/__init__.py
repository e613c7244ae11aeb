"""Who sends what to whom, as boxes, runs and descriptors, and by which route. Pure: integers in, integers out."""

from kvmover.plan.cost import HOST, RDMA, Choice, Costs, Route
from kvmover.plan.legs import Leg, Plan, Replicas
from kvmover.plan.lower import Box, Held, Place, Runs, Strided
from kvmover.plan.units import Units

__all__ = [
    "HOST",
    "RDMA",
    "Box",
    "Choice",
    "Costs",
    "Held",
    "Leg",
    "Place",
    "Plan",
    "Replicas",
    "Route",
    "Runs",
    "Strided",
    "Units",
]
