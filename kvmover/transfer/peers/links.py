"""The links to other hosts: measured times of this side's writes and reads, and the costs by which routes are chosen.

Measured by probes when a peer is connected, into its sandbox, and by each write, read, copy and poll since. For a push
the way back is assumed to cost the same: the destination chooses the route, the source writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmover.errors import TransportError
from kvmover.plan.calibration import LEAST_REGION_BYTES, Bursts, Calibration, Measurements, Probe, Sample, probes
from kvmover.plan.cost import Costs
from kvmover.transfer.memory.descriptors import InFlight
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transport.base import Completed, Descriptors, Failed, Memory, Transport

#: Least seconds between fits, which take 1 to 5 ms; only new measurements cause one.
REFIT_S = 5.0

#: Deadline of a probe.
PROBE_DEADLINE_S = 5.0


@dataclass(slots=True, eq=False)
class _Link:
    """One host's measurements, with the operations under way together, and the costs last fitted to them. `costs`: of
    the base and the fit.
    """

    measured: Measurements = field(default_factory=Measurements)
    bursts: Bursts = field(default_factory=Bursts)
    fitted: Calibration | None = None
    fresh: int = 0
    fitted_at: float = float("-inf")
    costs: tuple[Costs, Calibration, Costs] | None = None


@dataclass(slots=True, eq=False)
class Links:
    """The links by host. `sandbox`: memory from which probes are written; None: no probes.

    `_packed`: the host of each packed chunk copied since the last poll.
    """

    transport: Transport
    kind: str
    sandbox: Memory | None
    flights: InFlight[tuple[Probe, Peer]]
    _links: dict[str, _Link] = field(default_factory=dict[str, _Link])
    _probes: dict[str, deque[Probe]] = field(default_factory=dict[str, "deque[Probe]"])
    _packed: list[str] = field(default_factory=list[str])

    def connected(self, peer: Peer, now: float) -> None:
        """Start probing a peer's host, unless it has been measured."""
        theirs = peer.card.sandbox
        if self.sandbox is None or theirs is None or peer.card.host in self._links:
            return
        if theirs.nbytes < LEAST_REGION_BYTES:
            return
        self._links[peer.card.host] = _Link()
        self._probes[peer.name] = deque(probes(min(self.sandbox.nbytes, theirs.nbytes)))
        self._next(peer, now)

    def _next(self, peer: Peer, now: float) -> None:
        waiting, ours, theirs = self._probes.get(peer.name), self.sandbox, peer.card.sandbox
        if not waiting or ours is None or theirs is None:
            self._probes.pop(peer.name, None)
            return
        probe = waiting.popleft()
        try:
            ticket = self.transport.write(peer.name, _runs(ours, probe), _runs(theirs, probe), b"", PROBE_DEADLINE_S)
        except TransportError:  # the loss of a peer is handled elsewhere
            del self._probes[peer.name]
            return
        self.flights.add(ticket, (probe, peer), now)

    def handle(self, event: Completed | Failed, now: float) -> bool:
        """Handle the end of a probe. Returns False for an operation that is not a probe."""
        landing = self.flights.end(event, now)
        if landing is None:
            return False
        if isinstance(event, Completed):
            probe, peer = landing.what
            self.moved(peer.card.host, event, probe.runs * probe.run_bytes, probe.runs, now - landing.seconds)
            self._next(peer, now)
        else:
            self._probes.pop(landing.what[1].name, None)
        return True

    def _link(self, host: str) -> _Link:
        link = self._links.get(host)
        if link is None:
            link = self._links[host] = _Link()
        return link

    def moved(
        self, host: str, event: Completed, nbytes: int, runs: int, posted_s: float, hidden_s: float = 0.0
    ) -> None:
        """Record a successful write or read of `nbytes` bytes in `runs` runs, whose post was over at `posted_s`.

        `hidden_s`: of copies and posts by this thread since, during which it saw no end. Where that is half of the time
        and more, as beside conversions on a CPU, the time is not the wire's, and is dropped.
        """
        if event.timing is not None and 2e6 * hidden_s < event.timing.total_us:
            began_us, total_us, link = posted_s * 1e6 - event.timing.post_us, event.timing.total_us, self._link(host)
            _measure(link, link.bursts.wrote(began_us, Sample(nbytes, runs, total_us)))

    def gathered(self, host: str, nbytes: int, seconds: float) -> None:
        """Record the gather of a packed chunk for a host."""
        link = self._link(host)
        link.measured.gathered(nbytes, seconds * 1e6)
        link.fresh += 1
        self._packed.append(host)

    def scattered(self, host: str, nbytes: int, seconds: float) -> None:
        """Record the scatter of a packed chunk of a host."""
        link = self._link(host)
        link.measured.scattered(nbytes, seconds * 1e6)
        link.fresh += 1
        self._packed.append(host)

    def copied(self, host: str, nbytes: int, seconds: float) -> None:
        """Record a copy from pool to pool: it reads like a gather and writes like a scatter."""
        link = self._link(host)
        link.measured.gathered(nbytes, seconds * 1e6)
        link.measured.scattered(nbytes, seconds * 1e6)
        link.fresh += 1

    def polled(self, seconds: float) -> None:
        """Record a poll's time without its copies and posts, shared equally among its packed chunks."""
        for host in self._packed:
            self._link(host).measured.waited(seconds / len(self._packed) * 1e6)
        self._packed.clear()

    def costs(self, host: str, base: Costs, now: float) -> Costs:
        """Returns `base` with the measured costs of the path to `host`."""
        fitted = self._calibration(host, base, now)
        if fitted is None:
            return base
        link = self._links[host]
        if link.costs is None or link.costs[0] is not base or link.costs[1] is not fitted:
            link.costs = base, fitted, fitted.costs(base)
        return link.costs[2]

    def calibrations(self, base: Costs, now: float) -> Sequence[Calibration]:
        """Returns the calibration of each measured host, to store or inspect."""
        found = (self._calibration(host, base, now) for host in self._links)
        return tuple(calibration for calibration in found if calibration is not None)

    def _calibration(self, host: str, base: Costs, now: float) -> Calibration | None:
        link = self._links.get(host)
        if link is None:
            return None
        if now >= link.fitted_at + REFIT_S:  # else each question during a burst would cut it
            _measure(link, link.bursts.over(now * 1e6))
            if link.fresh:
                link.fitted, link.fresh, link.fitted_at = link.measured.calibrate(host, self.kind, base), 0, now
        return link.fitted


def _measure(link: _Link, sample: Sample | None) -> None:
    if sample is not None:
        link.measured.wrote(sample)
        link.fresh += 1


def _runs(memory: Memory, probe: Probe) -> Descriptors:
    table = [[memory.address, probe.run_bytes, memory.device, probe.stride_bytes, probe.runs]]
    return Descriptors(memory.kind, np.array(table, np.int64))
