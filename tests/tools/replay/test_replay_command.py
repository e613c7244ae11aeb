"""`kvmover replay` answers in tables, JSON and pictures, and says no before it does any work."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import pytest

from kvmover import cli
from tests.tools.replay.made import brute_force, generated

PROMISED = {
    "requests",
    "prompt_tokens",
    "device_hit_tokens",
    "host_hit_tokens",
    "storage_hit_tokens",
    "computed_tokens",
    "hit_rate",
    "losses",
    "seconds",
    "tokens_per_second",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in generated(2, count=40)))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["replay", *map(str, arguments)])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


def test_json_has_what_was_promised(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, trace, "--page-size", 64, "--json")
    data = json.loads(out)
    assert status == 0
    assert data.keys() >= PROMISED
    requests = generated(2, count=40)
    assert (data["requests"], data["device_hit_tokens"]) == (40, brute_force(requests, 64))
    assert data["hit_rate"] == pytest.approx(data["device_hit_tokens"] / data["prompt_tokens"], abs=1e-6)


def test_the_table_says_every_tier_and_every_loss(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--capacity-tokens", 8192, "--host-tokens", 16384, "--storage-tokens", 8192, "--policy", "slru")
    status, out, _ = run(capsys, trace, *options)
    assert status == 0
    for words in ("40 requests", "device of 8,192 tokens, pages of 64, policy slru", "device hits", "host hits"):
        assert words in out
    for words in ("storage hits", "computed", "lost: capacity_evicted", "of an ideal", "requests/s"):
        assert words in out


def test_a_host_that_is_not_much_larger_than_the_device_is_said_to_bring_little(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    through = "--write-policy", "write_through"
    _, small, _ = run(capsys, trace, "--capacity-tokens", 16384, "--host-tokens", 8192, *through)
    assert "a host of 8,192 tokens is fewer than twice the device's" in small
    _, near, _ = run(capsys, trace, "--capacity-tokens", 8192, "--host-tokens", 8192, *through)
    assert "fewer than twice the device's" in near
    for fits in (("--host-tokens", 16384, *through), ("--host-tokens", 4096)):
        _, large, _ = run(capsys, trace, "--capacity-tokens", 8192, *fits)
        assert "fewer than twice the device's" not in large


def test_a_picture_is_drawn(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    status, _, _ = run(capsys, trace, "--capacity-tokens", 16384, "--plot", tmp_path / "hits.svg")
    assert status == 0
    assert "<!-- hits up to the device -->" in (tmp_path / "hits.svg").read_text()


def test_policies_and_capacities_are_compared_in_one_call(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    options = ("--policy", "lru,fifo,lru", "--capacity-tokens", "8192,16.384k")
    _, out, _ = run(capsys, trace, *options, "--plot", tmp_path / "hits.svg")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:2] == ["40", "requests,"]
    assert rows[1] == ["device", "tokens", "lru", "fifo"]
    drawn = (tmp_path / "hits.svg").read_text()
    assert "<!-- lru -->" in drawn
    assert "<!-- fifo -->" in drawn
    for row, tokens in zip(rows[2:4], (8192, 16384), strict=True):
        assert row[0] == f"{tokens:,}"
        for policy, shown in zip(("lru", "fifo"), row[1:], strict=True):
            _, alone, _ = run(capsys, trace, "--policy", policy, "--capacity-tokens", tokens, "--json")
            assert shown == f"{json.loads(alone)['hit_rate']:.4f}"


def test_each_request_of_each_replay_has_a_row(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of JSON a replay has the sums of its rows."""
    options = ("--policy", "lru,hazard", "--capacity-tokens", "8192,65536", "--host-tokens", 16384)
    _, out, _ = run(capsys, trace, *options, "--requests", tmp_path / "hits.csv", "--json")
    with (tmp_path / "hits.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    replays = [json.loads(line) for line in out.splitlines()]
    assert [(each["policy"], each["capacity_tokens"]) for each in replays] == [
        *(("lru", 8192), ("hazard", 8192), ("lru", 65536), ("hazard", 65536))
    ]
    for each in replays:
        cache = each["policy"], str(each["capacity_tokens"])
        mine = [row for row in rows if (row["policy"], row["capacity_tokens"]) == cache]
        assert [int(row["request"]) for row in mine] == list(range(40))
        for tier in ("device", "host", "storage"):
            assert sum(int(row[f"{tier}_tokens"]) for row in mine) == each[f"{tier}_hit_tokens"]
        assert sum(int(row["computed_tokens"]) for row in mine) == each["computed_tokens"]
        assert sum(int(row["prompt_tokens"]) for row in mine) == each["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "clock"], "no policy clock: there are lru"),
        (["--policy", "lru,"], "no policy : there are lru"),
        (["--capacity-tokens", "1M,many"], "many is not a number of tokens, as 300000 or 3M"),
        (["--requests", "absent/hits.csv"], "cannot write absent/hits.csv: No such file"),
        (["--write-policy", "never"], "no write policy never: there are write_back"),
        (["--capacity-tokens", "0"], "0 is not a number"),
        (["--page-size", "0"], "Invalid value"),
        (["--storage-tokens", "4096"], "storage of 4096 tokens is reached through a host tier"),
        (["--capacity-tokens", "128"], "a device of 128 tokens cannot hold the prompt"),
        (["--plot", "hits.docx"], "cannot draw hits.docx: its suffix is none of"),
        (["--plot", "absent/hits.svg"], "there is no folder absent"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    status, out, err = run(capsys, trace, *options)
    assert (status, out, len(err.strip().splitlines())) == (2, "", 1)
    assert message in err


def test_what_a_trace_is_short_of_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times that run backwards, and pages that no prompt fills."""
    path = tmp_path / "back.jsonl"
    rows = [
        {"timestamp": at, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]} for at in (5000, 1000, 2000, 0)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words, told in (
        ((), "back.jsonl: 2 times run backwards; requests were replayed in order of time"),
        (("--page-size", "10000"), "no two prompts are equal for a whole page of 10,000 tokens: take smaller pages"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["replay", str(path), *words])
        assert told in capsys.readouterr().out
