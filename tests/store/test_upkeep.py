"""`kvmover store`: what it shows, what it finds, and what it leaves alone."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover import cli
from kvmover.store import HostBoot, Namespace, PagePart, PageStore

WHOLE = PagePart.whole(GQA, PAGE)
OTHER = Namespace("mistral", "7", PAGE, salt="secret")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["store", *map(str, arguments)])
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for space, count in ((SPACE, 5), (OTHER, 3)):
        with PageStore.open(tmp_path, space) as store:
            Rank(store, WHOLE, namespace=space).put(pages_of(count))
    return tmp_path


def test_stat_counts_every_namespace(command: Command, root: Path) -> None:
    status, out, _ = command("stat", root, "--json")
    rows = {row["model"]: row for row in json.loads(out)}
    assert status == 0
    assert {model: (row["pages"], row["payload_bytes"], row["salted"]) for model, row in rows.items()} == {
        "llama": (5, 5 * WHOLE.nbytes, False),
        "mistral": (3, 3 * WHOLE.nbytes, True),
    }
    table = command("stat", root)[1]
    assert "llama" in table
    assert "mistral (salted)" in table
    assert "secret" not in table + out


def test_verify_reports_and_deletes_what_is_bad(command: Command, root: Path) -> None:
    status, out, err = command("verify", root)
    assert status == 0
    assert "all 5 objects are whole" in out
    assert SPACE.folder[:12] in err, "no progress was shown"
    (data,) = (root / SPACE.folder).glob("*.data")
    with data.open("r+b") as file:
        file.seek(WHOLE.nbytes + 3)
        file.write(b"????")
    status, out, _ = command("verify", root, "--json")
    assert status == 1
    assert [row["bad"] for row in json.loads(out)] == [{"digest": 1}, {}]
    status, out, _ = command("verify", root, "--json")
    assert (status, [row["pages"] for row in json.loads(out)]) == (0, [4, 3])


def test_gc_keeps_to_a_quota(command: Command, root: Path) -> None:
    status, out, _ = command("gc", root, "--namespace", SPACE.folder[:6], "--quota", 2 * WHOLE.nbytes, "--json")
    (row,) = json.loads(out)
    assert (status, row["pages"], row["deleted_pages"]) == (0, 2, 3)
    assert [each["pages"] for each in json.loads(command("stat", root, "--json")[1])] == [2, 3]


def test_commands_look_where_the_configuration_says_unless_they_are_told(
    command: Command, root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = command("stat")
    assert (status, err) == (
        2,
        "kvmover: no directory of page stores is given, here or as store.root (KVMOVER_STORE_ROOT)\n",
    )
    monkeypatch.setenv("KVMOVER_STORE_ROOT", str(root))
    assert [row["pages"] for row in json.loads(command("stat", "--json")[1])] == [5, 3]
    assert [row["objects"] for row in json.loads(command("verify", "--json")[1])] == [5, 3]
    assert json.loads(command("stat", tmp_path_factory.mktemp("elsewhere"), "--json")[1]) == []
    assert command("clear", "--namespace", OTHER.folder, "--yes", "--json")[0] == 0
    assert [row["pages"] for row in json.loads(command("gc", "--json")[1])] == [5, 0]


def test_gc_keeps_to_the_configured_quota_and_age_unless_it_is_told_others(
    command: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMOVER_STORE_QUOTA_BYTES", str(3 * WHOLE.nbytes))
    mine = ("gc", root, "--namespace", SPACE.folder, "--json")
    (row,) = json.loads(command(*mine, "--quota", 4 * WHOLE.nbytes)[1])
    assert (row["pages"], row["deleted_pages"]) == (4, 1)
    (row,) = json.loads(command(*mine)[1])
    assert (row["pages"], row["deleted_pages"]) == (3, 1)
    monkeypatch.setattr(HostBoot, "now", staticmethod(lambda: int(time.time()) + 100))
    monkeypatch.setenv("KVMOVER_STORE_TTL_S", "60")
    (row,) = json.loads(command(*mine, "--ttl", 3600)[1])
    assert (row["pages"], row["deleted_pages"]) == (3, 0)
    (row,) = json.loads(command(*mine)[1])
    assert (row["pages"], row["deleted_pages"]) == (0, 3)


def test_clear_deletes_the_namespace_it_is_told_and_nothing_else(command: Command, root: Path) -> None:
    assert command("clear", root)[0] == 2, "clear must be told what"
    status, out, _ = command("clear", root, "--namespace", OTHER.folder, "--yes", "--json")
    assert (status, [row["deleted_pages"] for row in json.loads(out)]) == (0, [3])
    assert [each["pages"] for each in json.loads(command("stat", root, "--json")[1])] == [5, 0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["stat", "/nowhere/at/all"], "/nowhere/at/all"),
        (["stat", "{root}", "--namespace", "zzz"], "'zzz'"),
        (["gc", "{root}", "--quota", "much"], "much"),
    ],
)
def test_input_that_cannot_be_is_one_line_that_names_it(
    command: Command, root: Path, arguments: list[str], word: str
) -> None:
    status, out, err = command(*(argument.format(root=root) for argument in arguments))
    assert (status, out) == (2, "")
    assert word in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("left", [b"", b"{}", b"{", bytes(300)])
def test_a_damaged_manifest_stops_no_command_and_is_written_again(command: Command, root: Path, left: bytes) -> None:
    """As 81 of 201 power cuts on ext4 left it. The heads say whose the pages are."""
    manifest = root / SPACE.folder / "namespace.json"
    manifest.write_bytes(left)
    for verb in ("stat", "verify", "gc"):
        status, out, _ = command(verb, root, "--json")
        rows = {row["model"]: row["pages"] for row in json.loads(out)}
        assert (status, rows) == (0, {"(unknown)": 5, "mistral": 3})
    with PageStore.open(root, SPACE) as store:
        assert store.stat().pages == 5
    assert {row["model"]: row["pages"] for row in json.loads(command("stat", root, "--json")[1])} == {
        "llama": 5,
        "mistral": 3,
    }


def test_a_manifest_of_a_later_format_stays_and_one_with_a_new_field_is_read(command: Command, root: Path) -> None:
    manifest = root / SPACE.folder / "namespace.json"
    known = json.loads(manifest.read_text())
    for more, model in (({"format": "kvmover.store/2", "codec": "new"}, "(unknown)"), ({"codec": "new"}, "llama")):
        later = json.dumps(known | more)
        manifest.write_text(later)
        with PageStore.open(root, SPACE) as store:
            assert store.stat().pages == 5
        assert manifest.read_text() == later
        assert {row["model"] for row in json.loads(command("stat", root, "--json")[1])} == {model, "mistral"}


def test_an_empty_directory_holds_no_store(command: Command, tmp_path: Path) -> None:
    assert command("stat", tmp_path) == (0, "no page store here\n", "")


def test_clear_asks_and_deletes_nothing_unless_it_is_told_to(
    command: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = command("clear", root, "--namespace", "")
    assert status == 2
    assert "would delete 8 pages of 2 namespaces" in err
    assert all(name in err for name in ("llama", "mistral", "--yes"))
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})("n\n"))
    assert command("clear", root, "--namespace", "")[0] == 1
    assert [each["pages"] for each in json.loads(command("stat", root, "--json")[1])] == [5, 3]


def test_a_namespace_that_cannot_be_read_is_not_taken_for_none(
    command: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for verb in ("stat", "verify", "gc"):
        status, out, err = command(verb, root)
        assert (status, out) == (2, "")
        assert re.search(r"cannot read .*/namespace.json: Permission denied", err)


def test_nothing_is_not_verified(command: Command, tmp_path: Path) -> None:
    status, _, err = command("verify", tmp_path)
    assert (status, err) == (2, f"kvmover: no page store in {tmp_path}: nothing was verified\n")


def test_a_quota_may_have_a_unit(command: Command, root: Path) -> None:
    assert command("gc", root, "--quota", "10GB")[0] == 0
    status, _, err = command("gc", root, "--quota", "10 gigs")
    assert status == 2
    assert "10 gigs: expected a whole number of bytes" in err


def test_without_a_verb_there_is_help_in_lines(command: Command) -> None:
    status, out, _ = command()
    assert status == 0
    assert all(verb in out for verb in ("stat", "verify", "gc", "clear"))
    assert out.count("\n") > 5
