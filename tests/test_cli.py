"""The command line keeps its contract: the JSON of a plan, one line for bad input, and its exit statuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvmover import cli
from kvmover.errors import DeadlineExceeded, TransferFailed
from kvmover.layout import Component, CpOrder, Fleet
from kvmover.plan.fleet_text import FleetText
from kvmover.store import Namespace, PageStore
from kvmover.tools.cli import command_options

GQA = {"component": "attention", "kv-heads": 8, "head-dim": 128, "layers": 80, "dtype": "bfloat16", "tokens": 8192}
MLA = {"component": "mla", "latent-dim": 576, "layers": 61, "dtype": "bfloat16", "tokens": 1000}
TP4_TP2 = {"src": "tp=4,page=16,order=NHD", "dst": "tp=2,page=64,order=HND"}


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        assert self.status == 0, self.err
        return json.loads(self.out)


class Command:
    """`kvmover plan` with options from a dictionary; None leaves one out."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, *arguments: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        printed = self.capsys.readouterr()
        return Answer(int(end.value.code or 0), printed.out, printed.err)

    def plan(self, options: dict[str, Any], *more: str) -> Answer:
        words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        return self.run("plan", *words, *more)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def span(triple: list[int]) -> set[int]:
    start, count, step = triple
    return {start + i * step for i in range(count)}


def positions(quads: list[list[int]]) -> list[int]:
    return [
        start + run * step + token
        for start, count, step, width in quads
        for run in range(count)
        for token in range(width)
    ]


def cells(box: dict[str, Any]) -> list[tuple[int, int, int]]:
    return list(product(span(box["layers"]), span(box["heads"]), positions(box["positions"])))


def held(fleet: Fleet, component: Component, rank: int, tokens: int) -> set[tuple[int, int, int]]:
    """What a rank holds, position by position, without the algebra."""
    tp, rest = rank % fleet.tp, rank // fleet.tp
    cp, pp = rest % fleet.cp, rest // fleet.cp
    pages = -(-tokens // fleet.page_tokens)

    def is_mine(position: int) -> bool:
        page = position // fleet.page_tokens
        if fleet.cp_order is CpOrder.TOKEN:
            return position % fleet.cp == cp
        if fleet.cp_order is CpOrder.PAGE:
            return page % fleet.cp == cp
        return cp * pages // fleet.cp <= page < (cp + 1) * pages // fleet.cp

    layers = range(pp * component.layers // fleet.pp, (pp + 1) * component.layers // fleet.pp)
    first = tp * component.heads // fleet.tp
    heads = range(first, max(first + 1, (tp + 1) * component.heads // fleet.tp))
    return set(product(layers, heads, filter(is_mine, range(tokens))))


@pytest.mark.parametrize("replicas", ["stripe", "elect"])
@pytest.mark.parametrize(
    ("src", "dst", "heads"),
    [
        ("tp=4,page=16,order=NHD", "tp=2,page=64,order=HND", 8),
        ("tp=4,page=16", "tp=8,page=24,order=HND", 2),
        ("tp=3,page=16", "tp=2,page=3", 6),
        ("tp=2,pp=2,page=16", "tp=2", 4),
        ("tp=2,cp=2,page=16,cp_order=page", "tp=1,cp=4,cp_order=token,page=64", 4),
        ("cp=3,cp_order=block,page=24", "tp=4,pp=3,page=1,order=page-head-layer-kv-token-dim", 2),
        ("tp=4,page=16", "tp=2,page=64", None),
    ],
)
def test_every_cell_of_the_destination_is_written_once_by_a_rank_that_holds_it(
    command: Command, src: str, dst: str, heads: int | None, replicas: str
) -> None:
    tokens = 100
    kind = {"component": "mla", "latent-dim": 24} if heads is None else {"kv-heads": heads, "head-dim": 4}
    component = Component.mla(5, 24, "float16") if heads is None else Component.attention(5, heads, 4, "float16")
    options = {**kind, "layers": 5, "dtype": "float16", "tokens": tokens, "src": src, "dst": dst, "replicas": replicas}
    data = command.plan(options, "--json").data

    for side, text in (("src", src), ("dst", dst)):
        fleet = FleetText.parse(text).fleet
        ranks = data[side]["ranks"]
        assert [rank["rank"] for rank in ranks] == list(range(fleet.size))
        for rank in ranks:
            assert rank["rank"] == (rank["pp"] * fleet.cp + rank["cp"]) * fleet.tp + rank["tp"]
            assert set(cells(rank)) == held(fleet, component, rank["rank"], tokens)

    written: dict[int, list[tuple[int, int, int]]] = {rank["rank"]: [] for rank in data["dst"]["ranks"]}
    for leg in data["legs"]:
        assert set(cells(leg)) <= set(cells(data["src"]["ranks"][leg["src_rank"]]))
        assert leg["bytes"] == len(cells(leg)) * component.kv * component.row_bytes > 0
        assert leg["route"] in ("direct", "packed")
        assert leg["descriptors_direct"] >= leg["descriptors_packed"] >= 1
        written[leg["dst_rank"]] += cells(leg)
    for rank in data["dst"]["ranks"]:
        assert sorted(written[rank["rank"]]) == sorted(cells(rank))
    assert data["total_bytes"] == sum(leg["bytes"] for leg in data["legs"])


def test_the_json_of_a_plan_has_these_keys(command: Command) -> None:
    data = command.plan(GQA | {"src": TP4_TP2["src"], "dst": "tp=2,pp=2,page=64,order=HND"}, "--json").data
    assert set(data) == {"component", "src", "dst", "legs", "total_bytes"}
    assert data["dst"]["ranks"][3] == {
        "rank": 3, "tp": 1, "pp": 1, "cp": 0,
        "layers": [40, 40, 1], "heads": [4, 4, 1], "positions": [[0, 1, 8192, 8192]],
    }  # fmt: skip
    assert data["legs"][0] == {
        "src_rank": 0, "dst_rank": 0, "layers": [0, 40, 1], "heads": [0, 2, 1], "positions": [[0, 1, 8192, 8192]],
        "bytes": 40 * 2 * 2 * 8192 * 256, "route": "packed", "descriptors_direct": 40 * 2 * 2 * 8192,
        "descriptors_packed": 40, "stored_as": "128 bfloat16", "error": 0.0,
    }  # fmt: skip
    assert data["total_bytes"] == 80 * 2 * 8 * 8192 * 256


def test_a_head_slice_in_nhd_costs_a_descriptor_a_token_and_layer_and_in_hnd_one_a_page(command: Command) -> None:
    options = GQA | {"layers": 64}
    nhd = command.plan(options | {"src": "tp=4,page=64,order=NHD", "dst": "tp=2,page=64,order=NHD"}, "--json").data
    hnd = command.plan(options | {"src": "tp=4,page=64,order=HND", "dst": "tp=2,page=64,order=HND"}, "--json").data
    assert {leg["descriptors_direct"] for leg in nhd["legs"]} == {1_048_576}
    assert {leg["descriptors_direct"] for leg in hnd["legs"]} == {2 * 64 * 128}


def test_replicas_stripe_their_pages_unless_one_is_elected(command: Command) -> None:
    fleets = {"src": "tp=4,page=16", "dst": "tp=1,page=64"}
    striped = command.plan(MLA | fleets, "--json").data
    elected = command.plan(MLA | fleets | {"replicas": "elect"}, "--json").data
    sent = [leg["bytes"] for leg in striped["legs"]]
    assert [leg["src_rank"] for leg in striped["legs"]] == [0, 1, 2, 3]
    assert max(sent) - min(sent) <= 16 * 61 * 1152
    assert [leg["src_rank"] for leg in elected["legs"]] == [0]
    assert striped["total_bytes"] == elected["total_bytes"] == 1000 * 61 * 1152


def test_a_rank_that_holds_nothing_of_a_short_request_is_fine(command: Command) -> None:
    data = command.plan(MLA | {"tokens": 10, "src": "cp=4,page=64", "dst": "tp=1,page=16"}, "--json").data
    assert [rank["positions"] for rank in data["src"]["ranks"]] == [[[0, 1, 10, 10]], [], [], []]
    assert [leg["src_rank"] for leg in data["legs"]] == [0]


BAD = [
    ({"kv-heads": 0}, "--kv-heads.* 0 "),
    ({"kv-heads": -8}, "-8"),
    ({"kv-heads": "many"}, "many"),
    ({"kv-heads": None}, "attention needs --kv-heads"),
    ({"head-dim": 0}, "--head-dim.* 0 "),
    ({"head-dim": None}, "attention needs --head-dim"),
    ({"latent-dim": 576}, "--latent-dim 576 .* attention"),
    ({"tokens": 0}, "--tokens.* 0 "),
    ({"tokens": -1}, "-1"),
    ({"layers": 0}, "--layers.* 0 "),
    ({"layers": None}, "--layers"),
    ({"dtype": "bf16"}, "'bf16'"),
    ({"component": "ssm"}, "'ssm'"),
    ({"replicas": "none"}, "'none'"),
    ({"src": "tp=0"}, "--src tp=0: .*tp = 0"),
    ({"dst": "tp=-2,page=16"}, "--dst tp=-2,page=16: .*tp = -2"),
    ({"src": "tp=4,page=0"}, "page_tokens = 0"),
    ({"src": "tp=4,page=-16"}, "page_tokens = -16"),
    ({"src": "tp=4,pp=0"}, "pp = 0"),
    ({"src": "tp=4,cp=0"}, "cp = 0"),
    ({"src": "tp=four"}, "'four'"),
    ({"src": "tp"}, "tp = ''"),
    ({"src": ""}, "unknown word ''"),
    ({"src": "tp=4,order=DHN"}, "unknown order 'DHN'"),
    ({"src": "tp=4,order=layer kv page head token"}, "'layer kv page head token'"),
    ({"src": "cp=2,cp_order=zigzag"}, "'zigzag'"),
    ({"src": "tp=4,ep=2"}, "'ep=2'"),
    ({"src": "tp=4,tp=2"}, "tp is given twice"),
    ({"src": "pp=81"}, "81 pipeline stages for 80 layers"),
    ({"dst": "pp=81"}, "81 pipeline stages for 80 layers"),
    ({"dst": None}, "--dst"),
    ({"svg": "/nowhere/plan.svg"}, "/nowhere/plan.svg"),
    ({"svg": "plan.png"}, "--svg plan.png: the picture is SVG"),
    ({"batch": 4}, "--batch"),
]


@pytest.mark.parametrize("mode", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize(("change", "named"), BAD, ids=[str(change) for change, _ in BAD])
def test_bad_input_is_one_line_that_names_the_value(
    command: Command, change: dict[str, Any], named: str, mode: tuple[str, ...]
) -> None:
    answer = command.plan(GQA | TP4_TP2 | change, *mode)
    assert answer.status == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("kvmover: ")
    assert re.search(named, answer.err), answer.err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv-heads": 8}, "--kv-heads 8 has no meaning for component mla"),
        ({"head-dim": 128}, "--head-dim 128 has no meaning for component mla"),
        ({"latent-dim": None}, "component mla needs --latent-dim"),
        ({"latent-dim": 0}, "0"),
    ],
)
def test_a_latent_has_neither_heads_nor_their_size(command: Command, change: dict[str, Any], named: str) -> None:
    answer = command.plan(MLA | TP4_TP2 | change)
    assert answer.status == 2
    assert answer.err.count("\n") == 1
    assert named in answer.err


ROWS = {"component": "name=c4,layers=30,dim=584,dtype=uint8,row_tokens=4", "tokens": 8195}
OWN_PAGES = {"src": "tp=4,page=256", "dst": "tp=1,page=64,page.c4=8"}


def test_a_component_by_its_fields_is_planned_in_its_own_rows_and_pages(command: Command) -> None:
    lines = command.plan(ROWS | OWN_PAGES).out.splitlines()
    assert lines[0] == "c4: 30 layers, one row of 584 uint8, 2,048 rows of 4 tokens, 34.2 MiB in 4 legs"
    assert lines[2] == "to    one rank, pages of 64 and 8 of c4, NHD"
    found = json.loads(command.plan(ROWS | OWN_PAGES, "--json").out)
    assert found["total_bytes"] == 2048 * 30 * 584
    assert found["dst"]["ranks"][0]["positions"] == [[0, 1, 2048, 2048]]
    assert [leg["descriptors_direct"] for leg in found["legs"]] == [64 * 30] * 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 3}, "--tokens 3: c4 has a row every 4 tokens"),
        ({"layers": 30}, "--layers 30 beside --component name=c4"),
        ({"src": "page=2"}, "c4 has a row every 4 tokens, and pages of 2 tokens end within one"),
        ({"component": "name=c4,dim=8"}, "--component 'name=c4,dim=8' gives no layers"),
    ],
)
def test_rows_that_cannot_be_planned_are_refused_with_the_reason(
    command: Command, change: dict[str, Any], named: str
) -> None:
    answer = command.plan(ROWS | OWN_PAGES | change)
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert named in answer.err


def test_the_table_shows_every_leg_and_each_reason_once(command: Command) -> None:
    lines = command.plan(GQA | TP4_TP2).out.splitlines()
    assert lines[0] == "attention: 80 layers, 8 heads of 128 bfloat16, 8,192 tokens, 2.5 GiB in 4 legs"
    assert lines[1:3] == ["from  tp 4, pages of 16, NHD", "to    tp 2, pages of 64, HND"]
    rows = [line.split() for line in lines[4:8]]
    assert [row[:4] for row in rows] == [
        ["0", "0", "0-79", "0-1"],
        ["1", "0", "0-79", "2-3"],
        ["2", "1", "0-79", "4-5"],
        ["3", "1", "0-79", "6-7"],
    ]
    assert len(lines) == 9
    assert lines[8].startswith("4 x packed: 2621440 runs of 256 B would take ")


def test_the_table_names_the_sources_that_send_nothing(command: Command) -> None:
    out = command.plan(MLA | {"src": "tp=4", "dst": "tp=2", "replicas": "elect"}).out
    assert out.splitlines()[-1] == "source ranks that send nothing: 2, 3"


def test_a_picture_is_written_beside_the_answer(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    data = command.plan(GQA | TP4_TP2 | {"svg": file}, "--json").data
    assert len(data["legs"]) == 4
    assert file.read_text().startswith("<svg ")


def test_without_a_command_there_is_help_and_the_version_is_kvmovers(command: Command) -> None:
    help_text = command.run().out
    assert all(name in help_text for name in ("plan", "doctor", "demo"))
    assert command.run("--version").out == "kvmover 0.1.0\n"


def test_an_unknown_command_is_one_line(command: Command) -> None:
    answer = command.run("plans")
    assert answer.status == 2
    assert answer.err.count("\n") == 1
    assert "plans" in answer.err


@pytest.mark.parametrize("error", [DeadlineExceeded("no answer in 5 s"), TransferFailed("peer lost")])
def test_what_happened_to_a_transfer_is_a_failure_and_not_bad_input(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    answer = command.run("demo")
    assert (answer.status, answer.err) == (1, f"kvmover: {error}\n")


def test_the_demo_gets_its_options_and_gives_its_exit_status(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip("kvmover.tools.demo.run", reason="needs torch and NIXL")
    asked: list[Any] = []

    def run_demo(options: object) -> int:
        asked.append(options)
        return 1

    monkeypatch.setattr(run, "run_demo", run_demo)
    words = (
        "demo --json --trace t.jsonl --scale 0.5 --scenario gqa --scenario mla --requests 3 --seed 7 --store /srv/kv"
    )
    assert command.run(*words.split()).status == 1
    assert command.run("demo").status == 1
    assert asked == [
        run.DemoOptions(
            scenarios=("gqa", "mla"),
            requests=3,
            trace=Path("t.jsonl"),
            scale=0.5,
            seed=7,
            as_json=True,
            store="/srv/kv",
        ),
        run.DemoOptions(),
    ]


def test_h_is_help_and_version_a_command(command: Command) -> None:
    assert command.run("version").out == "kvmover 0.1.0\n"
    assert command.run("-h").out == command.run("--help").out
    assert "--kv-heads" in command.run("plan", "-h").out
    assert "--quota" in command.run("store", "gc", "-h").out


def test_the_help_says_of_every_command_what_it_does_to_the_end(command: Command) -> None:
    text = command.run("--help").out
    assert not [line for line in text.splitlines()[1:] if line.endswith("...")]
    assert "by which route, and why." in " ".join(text.split())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 10**26}, "the most that there may be of anything"),
        ({"tokens": 10**11}, "6,250,000,000 pages of 16; at most 10,000,000"),
        ({"src": f"tp=4,page={10**21}"}, f"page = {10**21} in"),
        ({"src": "tp=1000000"}, "a fleet of 1,000,000 ranks; at most 131,072"),
        ({"layers": 10**30}, "the most that there may be"),
    ],
)
def test_numbers_that_nothing_has_get_a_sentence(command: Command, change: dict[str, Any], named: str) -> None:
    answer = command.plan(GQA | TP4_TP2 | change)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    assert named in answer.err


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    options = [word for name, value in (MLA | TP4_TP2).items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "kvmover", "plan", *options]
    for more in ([], ["--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([*command, *more], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_word_that_is_none_of_a_choice_is_told_the_choice_and_no_python(command: Command) -> None:
    answer = command.plan(GQA | TP4_TP2 | {"component": "foo"})
    assert (
        answer.err
        == "kvmover: --component 'foo' is not one of attention, mla, nor fields of one, as name=c4,layers=30\n"
    )


def test_the_words_that_the_help_shows_are_those_that_are_taken() -> None:
    from kvmover.cache.prefix.eviction_policy import POLICIES
    from kvmover.tools.demo.scenarios import SCENARIOS
    from kvmover.tools.replay.replay_config import WRITE_POLICIES

    assert tuple(scenario.name for scenario in SCENARIOS) == command_options.SCENARIOS
    assert tuple(POLICIES) == command_options.POLICIES
    assert tuple(WRITE_POLICIES) == command_options.WRITE_POLICIES


def test_the_command_names_every_trace_format_without_importing_a_reader() -> None:
    from kvmover.tools.replay.trace import TRACE_FORMATS

    assert tuple(TRACE_FORMATS) == command_options.TRACE_FORMATS


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kvmover pl", {"plan"}),
        ("kvmover plan --component ", {"attention", "mla"}),
        ("kvmover demo --scenario replicated-", {"replicated-dst", "replicated-both"}),
        ("kvmover replay --policy s", {"slru"}),
    ],
)
def test_a_shell_is_told_how_a_line_may_go_on(line: str, words: set[str]) -> None:
    asked = {"_KVMOVER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    call = [sys.executable, "-c", "from kvmover.cli import main; main()"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, env=os.environ | asked)
    assert set(done.stdout.split()) == words


def test_what_a_terminal_has_no_letters_for_is_escaped(tmp_path: Path) -> None:
    PageStore.open(tmp_path, Namespace("modèle", "", 16)).close()
    call = [sys.executable, "-c", "from kvmover.cli import main; main()", "store", "stat", str(tmp_path)]
    told = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, env=told)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mod\\xe8le" in done.stdout
