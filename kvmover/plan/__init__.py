"""A plan lists the legs between two fleets' ranks as boxes, runs and descriptors, each with its route."""

from kvmover.plan.calibration import Calibration, Measurements, Probe, Sample, probes
from kvmover.plan.cost import HOST, RDMA, Choice, Costs, Posting, Route
from kvmover.plan.legs import Leg, Plan, Replicas
from kvmover.plan.lower import Box, BoxSide, Held, Runs, Strided, page_box
from kvmover.plan.units import Units

__all__ = [
    "HOST",
    "RDMA",
    "Box",
    "BoxSide",
    "Calibration",
    "Choice",
    "Costs",
    "Held",
    "Leg",
    "Measurements",
    "Plan",
    "Posting",
    "Probe",
    "Replicas",
    "Route",
    "Runs",
    "Sample",
    "Strided",
    "Units",
    "page_box",
    "probes",
]
