"""The scan of a release's wheel: names that left are told by plug-in, and nothing of the wheel is imported."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from kvmover.engines.common import Contract, Need
from tests.engines import scan
from tests.engines.sources import Sources

_FILES = {
    "toy_engine/__init__.py": "raise RuntimeError('an engine was imported')",
    "toy_engine/pools/__init__.py": "from .host import *\nfrom toy_engine.pools.device import Pool as DevicePool\n",
    "toy_engine/pools/host.py": """
import sys
if sys.platform == "win32":
    LIMIT = 3
else:
    LIMIT = 7

class Base:
    size: int
    def give(self): ...

class Pool(Base):
    def __init__(self, pages):
        self.pages = pages
        self.free = list(range(pages))
    def take(self, count, near=None): ...

def place(rank, size): ...
""",
    "toy_engine/pools/device.py": "from toy_engine.pools.host import Pool\nfrom torch import float16\n",
    "toy_engine/native.so": "machine code",
}

_CONTRACT = Contract(
    "Toy",
    "toy_engine",
    "kvmover.engines.toy",
    {"store": ("1.5",), "radix": ("1.5",), "linker": ("1.5",)},
    (
        Need("toy_engine.pools", ("store",), ("LIMIT", "DevicePool", "Pool.take.near", "place.size", "device.float16")),
        Need("toy_engine.pools:Pool", ("store", "radix"), ("take", "give", "size", "pages", "free")),
        Need("toy_engine.pools:SOURCES", ("store",), (), list),
        Need("toy_engine.pools:Pool.take", ("radix",), ("far",)),
        Need("toy_engine.trees:Tree", ("radix",)),
        Need("another_package:Name", ("store",)),
    ),
    (
        Need("toy_engine.pools.host:Pool.__init__", ("linker",)),
        Need("toy_engine.pools.host:Pool.evict", ("linker",)),
        Need("toy_engine.pools.host:Pool.evict_all", ("linker",), (), list),
    ),
)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Release 1.6.0 of an engine that cannot be imported."""
    made = tmp_path / "toy_engine-1.6.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as content:
        for name, text in _FILES.items():
            content.writestr(name, text)
    return made


def test_names_that_left_are_told_by_plug_in_and_those_with_a_stand_in_are_not(wheel: Path) -> None:
    release, sources = scan.unpack(wheel, "toy_engine")
    assert release == "1.6.0"
    assert {row["plugin"]: row["lacking"] for row in scan.rows(_CONTRACT, release, sources)} == {
        "store": "",
        "radix": "toy_engine.pools:Pool.take.far toy_engine.trees:Tree",
        "linker": "toy_engine.pools.host:Pool.evict",
    }


def test_python_alone_is_unpacked(wheel: Path) -> None:
    _, sources = scan.unpack(wheel, "toy_engine")
    assert {path.suffix for path in sources.root.rglob("*") if path.is_file()} == {".py"}


@pytest.mark.parametrize(("tested", "code"), [(("store",), 0), (("store", "radix"), 1)])
def test_the_scan_ends_with_1_if_a_plug_in_lacks_a_name(
    wheel: Path, tested: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = Contract("Toy", "toy_engine", "", dict.fromkeys(tested, ("1.5",)), _CONTRACT.needs)
    monkeypatch.setitem(scan.CONTRACTS, "vllm", some)
    assert scan.main(["vllm", "--wheel", str(wheel)]) == code
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "vllm 1.6.0, store: 12 names, lacks none"
    lacking = "toy_engine.pools:Pool.take.far toy_engine.trees:Tree"
    assert said[1:] == [f"vllm 1.6.0, radix: 7 names, lacks {lacking}"][:code]


def test_a_module_that_imports_from_itself_in_a_circle_ends(tmp_path: Path) -> None:
    (tmp_path / "toy_engine").mkdir()
    (tmp_path / "toy_engine" / "one.py").write_text("from toy_engine.two import *")
    (tmp_path / "toy_engine" / "two.py").write_text("from toy_engine.one import *\nNAME = 1")
    sources = Sources(tmp_path, "toy_engine")
    assert sources.has("toy_engine.one:NAME")
    assert not sources.has("toy_engine.one:OTHER")
