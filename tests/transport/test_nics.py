"""A rank's NICs are those of its GPU, by the machine's tree, and UCX is kept from the others as its agent is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.transport import nics
from kvmover.transport.nics import Distance, PciDevice, Topology, nics_near, only, read_topology
from tests.transport.sys_tree import sys_tree


def gpu(address: str, *above: str, numa: int = 0) -> PciDevice:
    return PciDevice(address, address, above, numa)


def port(number: int, address: str, *above: str, numa: int = 0) -> PciDevice:
    return PciDevice(f"mlx5_{number}:1", address, above, numa)


def below_a_switch(group: int, gpus: int, ports: int, numa: int) -> tuple[list[PciDevice], list[PciDevice]]:
    """A host bridge, its root port, a switch, and a device behind each port of it: a DGX is four or eight of these."""
    bus = 0x10 * group
    root = (f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0")
    places = [(f"0000:{bus + 3 + n:02x}:00.0", *root, f"0000:{bus + 2:02x}:{n:02x}.0") for n in range(gpus + ports)]
    own = [gpu(*place, numa=numa) for place in places[:gpus]]
    return own, [port(group * ports + n, *place, numa=numa) for n, place in enumerate(places[gpus:])]


def machine(groups: int, gpus: int, ports: int) -> Topology:
    parts = [below_a_switch(group, gpus, ports, numa=group * 2 // groups) for group in range(groups)]
    return Topology(
        tuple(each for part in parts for each in part[0]), tuple(each for part in parts for each in part[1])
    )


def chosen(topology: Topology) -> list[str]:
    near = topology.near()
    return [",".join(near[each.name][1]) for each in topology.gpus]


def test_a_gpu_with_a_nic_below_its_switch_has_that() -> None:
    """Eight switches with a GPU and a NIC each, as in a DGX H100, whose NICs of storage are elsewhere."""
    dgx = machine(groups=8, gpus=1, ports=1)
    storage = [
        port(20, "0000:f1:00.0", "pci0000:f0", "0000:f0:01.0"),
        port(21, "0000:f1:00.1", "pci0000:f0", "0000:f0:01.0"),
    ]
    whole = Topology(dgx.gpus, (*storage, *dgx.ports))
    assert chosen(whole) == [f"mlx5_{n}:1" for n in range(8)]
    assert {distance for distance, _ in whole.near().values()} == {Distance.PIX}


def test_two_gpus_and_two_nics_below_one_switch_are_paired() -> None:
    assert chosen(machine(groups=4, gpus=2, ports=2)) == [f"mlx5_{n}:1" for n in range(8)]


def test_four_nics_serve_two_gpus_each_and_eight_nics_of_two_gpus_are_shared_out() -> None:
    assert chosen(machine(groups=4, gpus=2, ports=1)) == [f"mlx5_{n // 2}:1" for n in range(8)]
    assert chosen(machine(groups=2, gpus=1, ports=4)) == [
        "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1",
        "mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1",
    ]


def test_a_machine_that_shows_no_tree_has_its_nics_dealt_within_each_numa_node() -> None:
    """A virtual machine, each device behind a bridge of its own."""
    gpus = tuple(gpu(f"000{n}:00:00.0", f"pci000{n}:00", numa=n // 2) for n in range(4))
    ports = tuple(port(n, f"010{n}:00:00.0", f"pci010{n}:00", numa=1 - n // 2) for n in range(4))
    assert chosen(Topology(gpus, ports)) == ["mlx5_2:1", "mlx5_3:1", "mlx5_0:1", "mlx5_1:1"]
    assert {distance for distance, _ in Topology(gpus, ports).near().values()} == {Distance.NODE}


def test_a_gpu_that_is_near_one_nic_only_takes_it_before_a_gpu_that_has_a_choice() -> None:
    bridge = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    far, near = gpu("0000:00:09.0", "pci0000:00"), gpu("0000:05:00.0", *bridge, "0000:02:00.0")
    ports = (port(0, "0000:06:00.0", *bridge, "0000:02:01.0"), port(1, "0000:07:00.0", "pci0000:00", "0000:00:03.0"))
    assert Topology((far, near), ports).near() == {
        near.name: (Distance.PIX, ("mlx5_0:1",)),
        far.name: (Distance.PHB, ("mlx5_1:1",)),
    }


def test_without_a_nic_or_a_gpu_nothing_is_chosen() -> None:
    some = machine(groups=1, gpus=1, ports=1)
    assert Topology(some.gpus, ()).near() == Topology((), some.ports).near() == {}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_below_equal_switches_ports_are_dealt_evenly_and_none_is_far(groups: int, gpus: int, ports: int) -> None:
    near = machine(groups, gpus, ports).near()
    used = [name for _, names in near.values() for name in names]
    counts = [used.count(f"mlx5_{n}:1") for n in range(groups * ports)]
    assert max(counts) - min(counts) <= 1
    assert {distance for distance, _ in near.values()} == {Distance.PIX}


def test_the_tree_of_a_machine_is_read_from_sys(tmp_path: Path) -> None:
    read = read_topology(sys_tree(tmp_path))
    above = ("pci0000:15", "0000:15:01.0", "0000:17:00.0")
    assert read.gpus[0] == PciDevice("0000:1a:00.0", "0000:1a:00.0", (*above, "0000:18:00.0"), 0)
    assert [each.name for each in read.ports] == ["mlx5_0:1", "mlx5_2:1"]
    assert chosen(read) == ["mlx5_0:1", "mlx5_2:1"]


def test_a_nic_that_a_container_was_not_given_is_none_of_its(tmp_path: Path) -> None:
    root = sys_tree(tmp_path)
    (root / "dev/infiniband/uverbs2").unlink()
    assert chosen(read_topology(root)) == ["mlx5_0:1", "mlx5_0:1"]


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_topology(sys_tree(tmp_path))
    monkeypatch.setattr(nics, "read_topology", lambda: found)
    monkeypatch.setattr(nics, "address_of_gpu", lambda ordinal: ("0000:9a:00.0", "0000:1a:00.0")[ordinal])
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_ranks_have_unlike_nics_whatever_the_order_in_which_cuda_counts_them() -> None:
    assert (nics_near(0), nics_near(1)) == (("mlx5_2:1",), ("mlx5_0:1",))


@pytest.mark.usefixtures("two_gpus")
def test_ucx_is_kept_from_the_other_ranks_nics_and_children_inherit_nothing() -> None:
    with only(nics_near(0)):
        assert os.environ["UCX_NET_DEVICES"] == "^mlx5_0:1"
    assert "UCX_NET_DEVICES" not in os.environ


@pytest.mark.usefixtures("two_gpus")
def test_what_a_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_7:1")
    assert nics_near(0) == ()
    with only(nics_near(0)):
        assert os.environ["UCX_NET_DEVICES"] == "mlx5_7:1"
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_7:1"


_AGENT = """
from types import SimpleNamespace
from kvmover.transport import NixlTransport, nics
from kvmover.transport.nics import PciDevice, Topology
above = ("pci0000:00", "0000:00:01.0")
gpu, own, other = PciDevice("g", "g", above), PciDevice("own:1", "o", above), PciDevice("other:1", "p", ("pci0001:00",))
nics.read_topology = lambda: Topology((gpu,), (own, other))
nics.address_of_gpu = lambda ordinal: "g" if ordinal == 3 else None
with_gpu = NixlTransport("rank", device=SimpleNamespace(type="cuda", index=3))
print(with_gpu.nics, NixlTransport("rank", device=SimpleNamespace(type="cpu", index=None)).nics)
with_gpu.close()
"""


def test_ucx_itself_leaves_the_other_gpus_nic_out() -> None:
    """UCX's log names the variables that it has read, when the first agent is made: of a NIC that is not here."""
    environ = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"}
    ran = subprocess.run(
        [sys.executable, "-c", _AGENT],
        env={**environ, "UCX_LOG_LEVEL": "info"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "('own:1',) ()" in ran.stdout
    assert "UCX_NET_DEVICES=^other:1" in ran.stdout + ran.stderr
    assert "network device 'other:1' is not available" in ran.stdout + ran.stderr
