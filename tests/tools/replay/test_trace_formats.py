"""Each trace format is read as what it says: equal prompts are equal as far as it says, and come when it says."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmover.tools.replay import ReplayConfig, ReplayTraceError, TraceOptions, read_trace, replay
from kvmover.tools.replay.trace import in_order
from kvmover.tools.replay.trace_reader import TraceSession, TraceTurn
from tests.tools.replay.made import common

#: Hypothesis writes a file over and over in one folder.
_FOLDER = [HealthCheck.function_scoped_fixture]
#: A folder that may hold `weka_traces.jsonl`: sessions of a public Weka trace, one a line.
TRACES = Path(os.environ.get("KVMOVER_TRACES", "traces"))


def written(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(path: Path, options: TraceOptions | None = None) -> str:
    with pytest.raises(ReplayTraceError) as refusal:
        read_trace(path, options)
    return str(refusal.value)


def compared(prompts: Sequence[list[int]], meant: Sequence[list[object]]) -> None:
    """Any two prompts begin with as many equal tokens as what they were meant to hold."""
    assert [len(prompt) for prompt in prompts] == [len(each) for each in meant]
    for (left, said), (right, also) in combinations(zip(prompts, meant, strict=True), 2):
        assert common(left, right) == common(said, also)


# Mooncake, with whole prompts


def row(tokens: int, ids: list[int], output: int = 1, **more: object) -> dict[str, object]:
    return {"input_length": tokens, "output_length": output, "hash_ids": ids, **more}


@pytest.mark.parametrize("large", [0, 2**22, 2**64 - 5])
def test_hash_ids_of_any_size_are_blocks_that_are_equal_where_the_ids_are(tmp_path: Path, large: int) -> None:
    ids = [[large, large + 1], [large, large + 2], [large + 1, large + 2]]
    path = written(tmp_path, *(row(600, each, timestamp=0) for each in ids))
    compared(
        [request.tokens().tolist() for request in read_trace(path)],
        [[(block, at) for block in each for at in range(512)][:600] for each in ids],
    )


def test_a_session_may_say_delays_instead_of_times_and_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        row(4, [1], session_id="a", timestamp=1000),
        row(4, [2], session_id="a", delay=500.5),
        row(4, [3], session_id="b", timestamp=1200),
        row(4, [4], session_id="a", delay_ms=10),
        row(4, [5], session_id="b", timestamp=1300, delay=7),
    )
    trace = read_trace(path, TraceOptions("mooncake", block_tokens=4))
    assert [(request.timestamp, request.hash_ids) for request in trace] == [
        (1000, (1,)),
        (1200, (3,)),
        (1300, (5,)),
        (1500.5, (2,)),
        (1510.5, (4,)),
    ]
    assert [request.hash_ids for request in trace] == [(1,), (3,), (5,), (2,), (4,)], "as often as asked"
    assert (len(trace), trace.distinct_blocks, trace.block_tokens) == (5, 5, 4)


def test_rows_with_sessions_could_be_whole_prompts_or_deltas_and_the_reader_does_not_guess(tmp_path: Path) -> None:
    path = written(tmp_path, row(4, [1], session_id="a", timestamp=0))
    assert refused(path) == "trace.jsonl line 1: mooncake and mooncake-delta look alike: name one by --format"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(4, [1])], "line 1: a row without session_id needs a timestamp"),
        ([row(4, [1], session_id="a", timestamp=0, delay=3)], "line 1: delay 3.0 in the first row of session 'a'"),
        (
            [row(4, [1], session_id="a", timestamp=9), row(4, [1], session_id="a", timestamp=8)],
            "line 2: timestamp 8.0 is before 9.0, of the row before in its session",
        ),
        (
            [row(4, [1], session_id="a", timestamp=9), row(4, [1], session_id="a", delay=8, delay_ms=8)],
            "line 2: delay 8.0 and delay_ms 8.0 in one row",
        ),
        ([row(4, [1], timestamp=0, wait_for=["x"])], "line 1: a row with wait_for is agentic"),
        ([row(5, [1], timestamp=0)], "line 1: 1 hash_ids for input_length 5, so 2 blocks of 4 tokens"),
        ([row(2**25, [1], timestamp=0)], "line 1: Expected `int` <= 16777216"),
        ([row(4, [1], session_id="a")], "line 1: nothing says when this session begins: --sessions N"),
    ],
)
def test_a_row_of_mooncake_that_cannot_be_is_named(tmp_path: Path, rows: list[dict[str, object]], message: str) -> None:
    assert f"trace.jsonl: {message}".replace(".jsonl: line", ".jsonl line") in refused(
        written(tmp_path, *rows), TraceOptions("mooncake", 4)
    ).replace(".jsonl: line", ".jsonl line")


# Mooncake, with deltas


def test_a_delta_comes_after_all_before_it_and_the_output_of_the_turn_before(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        row(4, [1], output=2, session_id="s0", timestamp=0),
        row(2, [2], output=1, session_id="s0", delay=5),
        row(3, [9], output=5, session_id="s0", delay=5),
    )
    trace = read_trace(path, TraceOptions("mooncake-delta", 4))
    first, second, third = trace
    assert [request.input_length for request in (first, second, third)] == [4, 8, 12]
    assert [request.timestamp for request in (first, second, third)] == [0, 5, 10]
    assert second.tokens()[:4].tolist() == first.tokens().tolist()
    assert third.tokens()[:8].tolist() == second.tokens().tolist()


@given(st.data())
@settings(max_examples=60, suppress_health_check=_FOLDER)
def test_deltas_are_equal_as_far_as_all_before_them_is(tmp_path: Path, data: st.DataObject) -> None:
    """Sessions interleave, share blocks at any place, and cut them anywhere. An output is equal to itself alone."""
    histories, rows, meant = dict[str, list[object]](), list[dict[str, object]](), list[list[object]]()
    for number in range(data.draw(st.integers(1, 12))):
        session = data.draw(st.sampled_from("abc"))
        ids = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        tokens = 4 * len(ids) - data.draw(st.integers(0, 3))
        output = data.draw(st.integers(0, 9))
        time = {"delay": 1} if session in histories else {"timestamp": number}
        rows.append(row(tokens, ids, output, session_id=session, **time))
        history = histories.setdefault(session, [])
        history += [(block, at) for block in ids for at in range(4)][:tokens]
        meant.append(list(history))
        history += [(number, "output", at) for at in range(output)]
    path = written(tmp_path, *rows)
    trace = read_trace(path, TraceOptions("mooncake-delta", 4))
    order = sorted(range(len(rows)), key=lambda at: _arrival(rows, at))
    compared([request.tokens().tolist() for request in trace], [meant[at] for at in order])
    report = replay(trace, ReplayConfig(1))
    assert report.totals.device_tokens == sum(
        max((common(meant[at][:-1], meant[before]) for before in order[:place]), default=0)
        for place, at in enumerate(order)
    )


def _arrival(rows: list[dict[str, Any]], at: int) -> tuple[float, int, int]:
    """As the trace says; equal ones in order of their sessions' first rows."""
    names = [each["session_id"] for each in rows]
    before = names[:at].count(names[at])
    first = names.index(names[at])
    return rows[first]["timestamp"] + before, list(dict.fromkeys(names)).index(names[at]), before


def test_a_delta_prompt_without_end_is_refused(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        row(4, [1], output=2**24, session_id="a", timestamp=0),
        row(4, [1], session_id="a", delay=1),
    )
    message = refused(path, TraceOptions("mooncake-delta", 4))
    assert message == "trace.jsonl line 2: the prompt of session 'a' has come to 16,777,224 tokens"


# Agentic Mooncake, version 2

HEADER: dict[str, Any] = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 4,
    "hash_id_scope": "local",
    "source": {"format": "made up", "digest": "0"},
}


def node(name: str, at_ms: float = 0, play: str = "p", api_ms: float | None = None, **after: float) -> dict[str, Any]:
    """`after` has delays by request and trigger, as in root_completion=5."""
    edges = [key.rsplit("_", 1) for key in after]
    return {
        **row(6, [2**63, 7]),
        "request_id": name,
        "play_id": play,
        "session_id": "s",
        "model": "m",
        "not_before_ms": at_ms,
        "recorded_api_time_ms": api_ms,
        "dependencies": [
            {"request_id": request, "trigger": trigger, "delay_ms": delay, "relation": "sequence"}
            for (request, trigger), delay in zip(edges, after.values(), strict=True)
        ],
    }


def arrivals(path: Path, options: TraceOptions | None = None) -> list[float]:
    return [request.timestamp for request in read_trace(path, options)]


def test_a_request_of_a_play_comes_after_all_that_it_waits_for(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        HEADER,
        node("z", root_completion=30, child_completion=7),
        node("root", 1000, api_ms=100),
        node("child", root_dispatch=40, api_ms=200),
        node("late", 1500, root_completion=1),
    )
    assert arrivals(path) == [1000, 1040, 1247, 1500]


def test_plays_begin_when_they_say_or_one_after_another_in_the_order_of_their_ordinals(tmp_path: Path) -> None:
    def play(name: str, ordinal: int) -> list[dict[str, Any]]:
        return [
            {**each, "source_play_ordinal": ordinal}
            for each in (
                node(f"{name}0", 0, name, api_ms=10),
                node(f"{name}1", 0, name, 5, **{f"{name}0_completion": 20 * (ordinal + 1)}),
            )
        ]

    path = written(tmp_path, HEADER, *play("b", 1), *play("a", 0))
    assert arrivals(path) == [0, 0, 30, 50]
    assert arrivals(path, TraceOptions(sessions=1)) == [0, 30, 35, 85]
    assert arrivals(path, TraceOptions(sessions=2)) == [0, 0, 30, 50]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**HEADER, "version": 3}], "line 1: version 3 of dynamo.agentic_mooncake; read is version 2"),
        ([{**HEADER, "hash_id_scope": "global"}], "line 1: Invalid enum value 'global'"),
        ([HEADER], "holds no request"),
        ([HEADER, node("a"), node("a")], "line 3: request_id 'a' a second time"),
        ([HEADER, node("a", x_completion=1)], "line 2: 'a' waits for 'x', which is no request"),
        (
            [HEADER, node("a", play="p"), node("b", play="q", a_completion=1)],
            "line 3: 'b' waits for 'a', which is a request of play 'p'",
        ),
        ([HEADER, node("a", b_completion=1), node("b", a_dispatch=1)], "requests wait in a circle: "),
        ([HEADER, node("a", a_completion=1)], "line 2: requests wait in a circle: 'a' before 'a'"),
        ([HEADER, node("a", b_ended=1)], "line 2: Invalid enum value 'ended'"),
        ([HEADER, node("a", b_completion=-1)], "line 2: Expected `float` >= 0"),
        ([HEADER, {**node("a"), "hash_ids": [1]}], "line 2: 1 hash_ids for input_length 6, so 2 blocks of 4 tokens"),
        (
            [HEADER, {**node("a"), "source_play_ordinal": 0}, node("b", play="q")],
            "source_play_ordinal is given 1 times, not once for each of 2 plays",
        ),
        (
            [HEADER, {**node("a"), "source_play_ordinal": 0}, node("b")],
            "line 3: source_play_ordinal None in play 'p', which is 0",
        ),
    ],
)
def test_a_play_that_cannot_be_is_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    assert message in refused(written(tmp_path, *rows))


# Weka


def asked(t: float, tokens: int, ids: list[int], out: int = 1, **more: object) -> dict[str, Any]:
    return {"t": t, "type": "s", "model": "m", "in": tokens, "out": out, "hash_ids": ids, **more}


def subagent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "x", "status": "completed", "requests": list(requests)}


def coding(*requests: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"id": "w", "models": ["m"], "block_size": 4, "hash_id_scope": "local", "requests": list(requests), **more}


ONE = TraceOptions(sessions=1)


@pytest.mark.parametrize(
    ("inner", "outer", "meant"),
    [
        ((2.0, 2.5), 2.0, [0, 1000, 1500, 3000]),
        ((0.0, 2.5), 2.0, [0, 1000, 3500, 3000]),
    ],
    ids=["from the session's beginning", "from the subagent's"],
)
def test_a_subagent_counts_from_its_own_beginning_where_a_time_would_be_before_it(
    tmp_path: Path, inner: tuple[float, float], outer: float, meant: list[float]
) -> None:
    session = coding(
        asked(1.0, 4, [1]), subagent(outer, *(asked(t, 4, [2 + at]) for at, t in enumerate(inner))), asked(4.0, 4, [9])
    )
    requests = list(read_trace(written(tmp_path, session), ONE))
    assert [request.timestamp for request in requests] == sorted(meant)
    assert {request.timestamp for request in requests} == set(meant)


def test_the_ids_of_a_session_are_its_own_and_so_is_what_has_no_id(tmp_path: Path) -> None:
    rows = [
        coding(asked(0, 8, [1, 2]), asked(1, 10, [1, 2]), asked(2, 10, [1, 2, 5]), asked(3, 12, [1, 2, 5])),
        coding(asked(0, 8, [1, 2]), asked(1, 8, []), asked(2, 8, [])),
    ]
    first = [(0, block, at) for block in (1, 2) for at in range(4)]
    meant: list[list[object]] = [
        [*first],
        [*first, "b0", "b1"],
        [*first, "c0", "c1"],
        [*first, *((0, 5, at) for at in range(4))],
        [(1, block, at) for block in (1, 2) for at in range(4)],
        [("private", 1, at) for at in range(8)],
        [("private", 2, at) for at in range(8)],
    ]
    trace = read_trace(written(tmp_path, *rows), ONE)
    compared([request.tokens().tolist() for request in trace], meant)
    assert trace.distinct_blocks == 2 + 1 + 2 + 2 + 2 + 2


@given(st.data())
@settings(max_examples=40, suppress_health_check=_FOLDER)
def test_a_coding_session_hits_what_its_ids_say(tmp_path: Path, data: st.DataObject) -> None:
    """Counted from the ids alone, whole blocks of 4, with sessions one after another."""
    sessions = data.draw(
        st.lists(
            st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 2), min_size=1, max_size=5), min_size=1),
            min_size=1,
            max_size=3,
        ).filter(lambda found: any(len(each) > 1 for each in found))
    )
    rows = [coding(*(asked(at, 4 * len(ids), ids) for at, ids in enumerate(each))) for each in sessions]
    report = replay(read_trace(written(tmp_path, *rows), ONE), ReplayConfig(4))
    assert report.totals.device_tokens == naive_hits(rows)
    assert report.totals.prompt_tokens == sum(4 * len(ids) for each in sessions for ids in each)


def naive_hits(rows: list[dict[str, Any]]) -> int:
    """Tokens of whole blocks that a request and an earlier one of its session begin with, the last token left out."""
    hits = 0
    for session in rows:
        seen = set[tuple[int, ...]]()
        size = session["block_size"]
        flat = [(request["t"], request) for request in session["requests"] if request["type"] != "subagent"]
        for entry in session["requests"]:
            if entry["type"] == "subagent":
                early = any(request["t"] < entry["t"] for request in entry["requests"])
                flat += [(request["t"] + (entry["t"] if early else 0), request) for request in entry["requests"]]
        for _, request in sorted(flat, key=lambda pair: pair[0]):
            whole = request["hash_ids"][: request["in"] // size]
            prefixes = [tuple(whole[: end + 1]) for end in range(len(whole))]
            usable = prefixes[: (request["in"] - 1) // size]
            hits += size * next((at for at, prefix in enumerate(usable) if prefix not in seen), len(usable))
            seen.update(prefixes)
    return hits


@pytest.mark.parametrize(
    ("session", "options", "message"),
    [
        (coding(), ONE, "line 1: session 'w' has no request"),
        (coding(asked(0, 4, [1])), None, "line 1: nothing says when this session begins: --sessions N"),
        (
            coding(asked(0, 9, [1])),
            ONE,
            "line 1: session 'w' request 0: 1 hash_ids for 9 tokens, so 2 whole blocks of 4",
        ),
        (coding(asked(0, 0, [])), ONE, "line 1: Expected `int` >= 1"),
        (coding(asked(-1, 4, [1])), ONE, "line 1: Expected `float` >= 0"),
        (coding(asked(0, 4, [1]), hash_id_scope="global"), ONE, "line 1: Invalid enum value 'global'"),
        (coding({**asked(0, 4, [1]), "type": "x"}), ONE, "line 1: Invalid value 'x' - at `$.requests[0].type`"),
        (
            coding(asked(0, 4, [1])),
            TraceOptions(None, 8, 1),
            "line 1: a block is 4 tokens in this trace, and 8 were given",
        ),
    ],
)
def test_a_coding_session_that_cannot_be_is_named(
    tmp_path: Path, session: dict[str, Any], options: TraceOptions | None, message: str
) -> None:
    found = refused(written(tmp_path, session), options)
    assert message in found
    assert found.startswith("trace.jsonl")


def test_of_sessions_that_do_not_run_nothing_is_held(tmp_path: Path) -> None:
    sessions = 40
    requests = [asked(at, 4 * 300, list(range(1000 * at, 1000 * at + 300))) for at in range(20)]
    trace = read_trace(written(tmp_path, *(coding(*requests) for _ in range(sessions))), ONE)

    def peak_bytes(holding: list[object] | None) -> int:
        tracemalloc.start()
        for request in trace:
            if holding is not None:
                holding.append(request)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    assert peak_bytes(None) * 8 < peak_bytes([])


def test_the_public_weka_sessions_hit_what_their_ids_say() -> None:
    path = TRACES / "weka_traces.jsonl"
    if not path.exists():
        pytest.skip(f"no sessions of Weka's public trace are at {path}: KVMOVER_TRACES names its folder")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    report = replay(read_trace(path, ONE), ReplayConfig(rows[0]["block_size"]))
    assert report.totals.device_tokens == naive_hits(rows) > 0
    assert report.ideal_hit_rate == pytest.approx(report.totals.hit_rate)


# Which format, and when sessions run


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("[1]", "line 1: Expected `object`, got `array`"),
        ("{", "line 1: Input data was truncated"),
        (
            '{"messages": []}',
            "line 1: a line of none of mooncake, mooncake-delta, agentic-mooncake, weka, with messages",
        ),
        ("{}", "with nothing"),
        ("", "holds no request"),
    ],
)
def test_a_first_line_of_no_format_is_named(tmp_path: Path, first: str, message: str) -> None:
    (tmp_path / "trace.jsonl").write_text(first + "\n")
    assert message in refused(tmp_path / "trace.jsonl")


def test_a_trace_with_more_tokens_than_numbers_is_refused(tmp_path: Path) -> None:
    rows = [row(2**24, [number], timestamp=0) for number in range(129)]
    message = refused(written(tmp_path, *rows), TraceOptions(block_tokens=2**24))
    assert message.startswith("trace.jsonl has 129 distinct blocks of 16777216 tokens")


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayTraceError, match="no trace format csv: there are mooncake, mooncake-delta"):
        TraceOptions("csv")
    with pytest.raises(ReplayTraceError, match="0 of sessions at a time: at least 1"):
        TraceOptions(sessions=0)
    path = written(tmp_path, row(4, [1], timestamp=0))
    assert "every session is one request" in refused(path, TraceOptions(sessions=2))


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=1, max_size=8), st.integers(1, 9))
def test_no_more_sessions_run_at_a_time_than_was_said_and_none_waits_longer(
    lengths: list[list[int]], at_a_time: int
) -> None:
    sessions = []
    for gaps in [*lengths, [1, 1]]:
        ends = [float(sum(gaps[: at + 1])) for at in range(len(gaps))]
        sessions.append(TraceSession(None, tuple(TraceTurn(end, end, 1) for end in [0.0, *ends])))
    order = in_order(sessions, at_a_time)
    assert order == sorted(order)
    assert len(order) == sum(len(session.turns) for session in sessions)
    begins = {number: at_ms for at_ms, number, turn in order if turn == 0}
    spans = [(begins[at], begins[at] + session.turns[-1].end_ms) for at, session in enumerate(sessions)]
    for at, (begin, _) in enumerate(spans):
        assert sum(other <= begin < end for other, end in spans) <= at_a_time
        assert begin == 0 or begin in [end for _, end in spans[:at]]
