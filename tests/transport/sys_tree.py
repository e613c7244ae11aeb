"""A made-up machine's /sys and /dev: two GPUs, and a NIC below the switch of each."""

from __future__ import annotations

from pathlib import Path


def laid(root: Path, device: str, files: dict[str, str]) -> Path:
    folder = root / "sys/devices" / device
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def sys_tree(root: Path) -> Path:
    """Two GPUs and three NICs: one below each switch, one that no cable is in; and a NIC in software."""
    for bus in ("15", "9d"):
        above = f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus[0]}7:00.0"
        numa = str(int(bus == "9d"))
        found = {
            f"{above}/0000:{bus[0]}8:00.0/0000:{bus[0]}a:00.0": {"vendor": "0x10de\n", "class": "0x030200\n"},
            f"{above}/0000:{bus[0]}8:01.0/0000:{bus[0]}b:00.0": {"vendor": "0x15b3\n", "class": "0x020700\n"},
            f"{above}/0000:{bus[0]}8:01.0/0000:{bus[0]}b:00.1": {"vendor": "0x15b3\n", "class": "0x020700\n"},
        }
        for device, files in found.items():
            folder = laid(root, device, {**files, "numa_node": numa})
            link = root / "sys/bus/pci/devices" / folder.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder)
        ends = list(found)[1:]
        for n, (device, state) in enumerate(zip(ends, ("4: ACTIVE\n", "1: DOWN\n"), strict=True)):
            number = 2 * int(bus == "9d") + n
            nic = laid(root, device, {f"infiniband/mlx5_{number}/ports/1/state": state}) / f"infiniband/mlx5_{number}"
            (nic / "device").symlink_to(root / "sys/devices" / device)
            laid(root, device, {f"infiniband_verbs/uverbs{number}/dev": "231:192\n"})
            (root / "sys/class/infiniband").mkdir(parents=True, exist_ok=True)
            (root / "sys/class/infiniband" / nic.name).symlink_to(nic)
            (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
            (root / f"dev/infiniband/uverbs{number}").touch()
    soft = laid(root, "virtual/infiniband/rxe0", {"ports/1/state": "4: ACTIVE\n"})
    (root / "sys/class/infiniband/rxe0").symlink_to(soft)
    return root
