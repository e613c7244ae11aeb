"""A prefill engine and a decode engine of vLLM's own parts, with kvmover's transfer between them."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import Engine, Rank, RequestStatus, Shape, caches_of, caching, config_of, layer_name, truth
from prometheus_client import REGISTRY

from kvmover.engines.vllm import KvmoverConnector
from kvmover.engines.vllm import vllm_api as names
from kvmover.errors import KvmoverError

backends: Any = import_module("vllm.v1.attention.backends.registry")
platforms: Any = import_module("vllm.platforms")
metrics: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.metrics")

INDEXER = (("cache_role", caching.SparseCacheRole.INDEXER),)

PROMPT = [7 * n % 900 + 1 for n in range(100)]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines, and close them."""
    made: list[Engine] = []

    def make(folder: Path = tmp_path / "model", **shape: Any) -> Engine:
        made.append(Engine(Shape(**shape), folder))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def hand_over(src: Engine, dst: Engine, prompt: list[int] = PROMPT, tokens: int = 5) -> None:
    """What a proxy does: a prefill of one token, then the whole request with the prefill's answer."""
    src.ask("p-1", prompt, params={"do_remote_decode": True})
    src.finish("p-1")
    dst.ask("d-1", prompt, tokens, src.answers["p-1"])
    dst.finish("d-1")
    assert dst.said["d-1"] == [1] * tokens
    assert not dst.stats.get("received_failures")


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({}, {}),
        ({"tp": 2, "layout": "LBNHC"}, {"layout": "LBHNC"}),
        ({"block_tokens": 32}, {"tp": 2, "block_tokens": 16, "layout": "BLHNC"}),
        ({"tp": 2, "latent": True}, {"latent": True, "block_tokens": 48}),
        ({"kernel_tokens": 8, "layout": "LBHNC"}, {"layout": "BHLNC"}),
        ({"tp": 2, "pp": 2}, {"pp": 4}),
        ({"layout": "BLHNC"}, {"layout": "BLHNC", "options": (("verb", "push"), ("route", "direct"))}),
    ],
    ids=["equal", "tp2-to-1", "blocks-32-to-16", "latent", "kernel-blocks", "stages", "written"],
)
def test_a_prompt_computed_by_one_engine_is_decoded_by_another(
    engines: Callable[..., Engine], src: dict[str, Any], dst: dict[str, Any]
) -> None:
    a, b = engines(**src), engines(**dst)
    hand_over(a, b)
    assert [span for span in b.computed if span[1] < 99] == []
    a.drain()
    b.drain()


def test_settings_of_kvmover_reach_the_connector(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shared key seals what both say, and refuses who has none; the run log has both ends of the request."""
    (tmp_path / "key").write_text("0123456789abcdef")
    monkeypatch.setenv("KVMOVER_RECORD_RUN_LOG", str(tmp_path / "run.jsonl"))
    stranger = engines()
    monkeypatch.setenv("KVMOVER_SECURITY_SHARED_KEY_FILE", str(tmp_path / "key"))
    a, b = engines(), engines()
    hand_over(a, b)
    a.drain()
    b.drain()
    a.ask("p-2", PROMPT, params={"do_remote_decode": True})
    a.finish("p-2")
    stranger.ask("d-2", PROMPT, 5, a.answers["p-2"])
    stranger.finish("d-2")
    assert stranger.stats["received_failures"] == 1
    for engine in (a, b):
        engine.close()
    lines = (tmp_path / "run.jsonl").read_text()
    assert all(f'"{verb}"' in lines for verb in ("send", "receive"))


def test_an_engine_whose_metrics_port_is_taken_serves_and_names_it(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVMOVER_LOGGING_LEVEL", "warning")
    monkeypatch.setenv("KVMOVER_LOGGING_FILE", str(tmp_path / "log"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("KVMOVER_METRICS_PORT", str(port))
        a, b = engines(), engines()
        hand_over(a, b)
    assert f"no metrics are served at 127.0.0.1:{port} " in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("layout", "said", "variable"),
    [("LBHNC", {"layer_wise": 1}, "0"), ("BLNHC", {"layer_wise": 1}, "0"), ("LBHNC", {}, "1")],
    ids=["LBHNC", "BLNHC", "configured"],
)
def test_layers_are_offered_while_a_prompt_is_computed(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, layout: str, said: dict[str, int], variable: str
) -> None:
    """Both halves start at once: the decode engine has layer 0 before the prefill has begun with the last one."""
    monkeypatch.setenv("KVMOVER_MOVER_CHUNK_LAYERS", variable)
    assert KvmoverConnector.requires_piecewise_for_cudagraph(said)
    assert not KvmoverConnector.requires_piecewise_for_cudagraph({"layer_wise": 0})
    a = engines(layout=layout, tp=2, options=tuple(said.items()))
    b = engines(options=tuple(said.items()))
    seen: list[bool] = []

    def look(rank: Rank, number: int) -> None:
        """Wait, in the middle of the prefill, until the first layer has landed at the decode engine."""
        if number == 3 and rank.rank == 1 and not seen:
            held = b.ranks[0].rows(layer_name(0), b.tables("d-1"), range(100))
            wanted = truth(PROMPT, range(100), 0, range(4), held.shape[2])[:, 2:]
            deadline = time.monotonic() + 30
            while not (landed := torch.equal(_rows(b)[:, 2:], wanted)) and time.monotonic() < deadline:
                time.sleep(0.002)
            seen.append(landed)

    a.before_layer = look
    b.ask("d-1", PROMPT, 3, {"do_remote_prefill": True, "transfer_id": "both", **_address(a)})
    b.step()
    a.ask("p-1", PROMPT, params={"do_remote_decode": True, "transfer_id": "both"})
    a.finish("p-1")
    b.finish("d-1")
    assert seen == [True]
    assert b.said["d-1"] == [1, 1, 1]


def _rows(engine: Engine) -> torch.Tensor:
    return engine.ranks[0].rows(layer_name(0), engine.tables("d-1"), range(100))


def test_a_prompt_computed_in_chunks_is_whole_at_the_other_end(engines: Callable[..., Engine]) -> None:
    a, b = engines(batch_tokens=24), engines(tp=2)
    hand_over(a, b)
    assert [span[1:] for span in a.computed] == [(0, 24), (24, 48), (48, 72), (72, 96), (96, 100)]


def test_what_the_decode_engine_has_already_is_not_sent(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines()
    b.ask("before", PROMPT[:48])
    b.finish("before")
    hand_over(a, b)
    assert b.stats["received_bytes"] == 52 * 4 * 4 * 64


def test_a_prefix_that_is_whole_at_the_decode_engine_lets_the_prefill_go(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines()
    prompt = PROMPT[:96]
    b.ask("before", [*prompt, 5])
    b.finish("before")
    hand_over(a, b, prompt)
    assert b.stats.get("received_bytes", 0) <= 16 * 4 * 4 * 64
    a.drain()
    assert a.stats["sent_requests"] == 1


@pytest.mark.parametrize("length", [64, 65, 90, 97])
def test_hybrid_models_hand_over_the_window_that_decode_needs(engines: Callable[..., Engine], length: int) -> None:
    """At 64 and 65 tokens the window of the last token begins at the last one of a block that was given back."""
    a, b = engines(window=17), engines(window=17, tp=2, layout="BLHNC")
    hand_over(a, b, PROMPT[:length])
    a.drain()
    b.drain()


@pytest.mark.parametrize("length", [64, 65, 90, 97])
def test_hybrids_with_states_hand_over_the_state_before_the_last_token(
    engines: Callable[..., Engine], length: int
) -> None:
    """vLLM keeps a state a block: the last one is of all tokens but that which decode computes."""
    a, b = engines(mamba=True), engines(mamba=True, tp=2, layout="BLHNC")
    hand_over(a, b, PROMPT[:length])
    assert not a.lost | b.lost
    assert b.computed[0] == ("d-1", length - 1, length)
    a.drain()
    b.drain()


@pytest.mark.parametrize("shape", [{}, {"window": 17}], ids=["full", "window"])
def test_engines_that_guess_tokens_hand_over(engines: Callable[..., Engine], shape: dict[str, Any]) -> None:
    """Decode's rows of guesses that were wrong are written over; the prompt's come from the prefill alone."""
    a, b = engines(drafts=3, **shape), engines(drafts=3, tp=2, block_tokens=32, **shape)
    hand_over(a, b, tokens=24)
    assert [span for span in b.computed if span[1] < 99] == []
    assert len(b.computed) < 24
    a.drain()
    b.drain()


KEEPS = (("bidirectional_kv_xfer", True), ("kv_recompute_threshold", 16))


def test_the_next_turns_prefill_fetches_what_decode_has(engines: Callable[..., Engine]) -> None:
    """As with vLLM's own connector: the proxy hands decode's answer to the prefill of the next turn, another one."""
    a, b, c = engines(options=KEEPS), engines(tp=2, block_tokens=32, options=KEEPS), engines(options=KEEPS)
    hand_over(a, b, tokens=21)
    told = b.answers["d-1"]
    assert (told["do_remote_decode"], told["do_remote_prefill"], told["remote_num_tokens"]) == (True, False, 120)
    turn = [*PROMPT, *b.said["d-1"], *range(2, 32)]
    c.ask("p-2", turn, params=told)
    c.finish("p-2")
    assert c.computed == [("p-2", 120, 151)]
    assert c.said["p-2"] == [1]
    b.ask("d-2", turn, 5, c.answers["p-2"])
    b.finish("d-2")
    assert b.said["d-2"] == [1] * 5
    a.drain()


@pytest.mark.parametrize("changed", [range(1), range(110, 130)], ids=["another", "shorter"])
def test_a_turn_that_goes_on_in_another_way_is_computed_and_decode_lets_go(
    engines: Callable[..., Engine], changed: range
) -> None:
    a, b, c = engines(options=KEEPS), engines(options=KEEPS), engines(tp=2, options=KEEPS)
    hand_over(a, b, tokens=21)
    turn = [*PROMPT, *b.said["d-1"]]
    turn[changed.start : changed.stop] = [9] if changed.start == 0 else []
    c.ask("p-2", turn, params=b.answers["d-1"])
    c.finish("p-2")
    assert (c.computed[0][1], c.said["p-2"]) == (0, [1])
    b.drain()


def test_what_nobody_asks_for_is_free_when_its_time_is_over(engines: Callable[..., Engine]) -> None:
    a, b = engines(options=KEEPS), engines(options=(*KEEPS, ("decoder_kv_blocks_ttl", 0.3)))
    hand_over(a, b)
    assert b.answers["d-1"]["remote_num_tokens"] == 104
    b.drain()


def test_a_request_that_decode_gives_up_before_it_has_pages_lets_the_prefill_go(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines()
    a.ask("p-1", PROMPT, params={"do_remote_decode": True})
    a.finish("p-1")
    b.ask("d-1", PROMPT, 5, a.answers["p-1"])
    b.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    b.step()
    a.drain()
    assert a.stats["sent_requests"] == 1


def test_an_abort_while_kv_is_on_its_way_gives_the_pages_back_on_both_sides(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines(tp=2)
    b.ask("d-1", PROMPT, 5, {"do_remote_prefill": True, "remote_request_id": "p-1", **_address(a)})
    b.step()
    assert b.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < b.shape.blocks - 1
    b.scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    b.drain()
    a.ask("p-1", PROMPT, params={"do_remote_decode": True})
    a.finish("p-1")


def test_a_prefill_that_is_aborted_has_the_request_computed_by_decode(engines: Callable[..., Engine]) -> None:
    a, b = engines(batch_tokens=32), engines()
    a.ask("p-1", PROMPT, params={"do_remote_decode": True})
    a.step()
    b.ask("d-1", PROMPT, 5, {"do_remote_prefill": True, "remote_request_id": "p-1", **_address(a)})
    b.step()
    a.scheduler.finish_requests("p-1", RequestStatus.FINISHED_ABORTED)
    a.step()
    b.finish("d-1")
    assert b.said["d-1"] == [1] * 5
    assert b.computed[0] == ("d-1", 0, 100)
    assert b.stats["received_failures"] == 1
    a.drain()
    b.drain()


def test_under_the_policy_to_fail_a_lost_prefill_ends_the_request_in_an_error(engines: Callable[..., Engine]) -> None:
    b = engines(policy="fail")
    nobody = {"remote_engine_id": "gone", "remote_host": "127.0.0.1", "remote_port": 1}
    b.ask("d-1", PROMPT, 5, {"do_remote_prefill": True, "remote_request_id": "p-1", **nobody})
    b.finish("d-1")
    assert "error" in str(b.ended["d-1"]).lower()
    b.drain()


def test_hybrid_models_fail_as_a_whole_and_are_computed(engines: Callable[..., Engine]) -> None:
    b = engines(window=17)
    nobody = {"remote_engine_id": "gone", "remote_host": "127.0.0.1", "remote_port": 1}
    b.ask("d-1", PROMPT, 5, {"do_remote_prefill": True, "remote_request_id": "p-1", **nobody})
    b.finish("d-1")
    assert b.said["d-1"] == [1] * 5
    b.drain()


def test_an_engine_of_another_model_is_refused_and_the_prompt_computed(engines: Callable[..., Engine]) -> None:
    a, b = engines(), engines(latent=True)
    a.ask("p-1", PROMPT, params={"do_remote_decode": True})
    a.finish("p-1")
    b.ask("d-1", PROMPT, 5, a.answers["p-1"])
    b.finish("d-1")
    assert b.said["d-1"] == [1] * 5
    assert b.computed[0] == ("d-1", 0, 100)
    assert b.stats["received_failures"] == 1


def test_other_weights_at_the_same_path_are_refused_with_both_digests_and_the_prompt_computed(
    engines: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint was replaced, and one half started again."""
    a, b = engines(), engines(weights=2)
    a.ask("p-1", PROMPT, params={"do_remote_decode": True})
    a.finish("p-1")
    b.ask("d-1", PROMPT, 5, a.answers["p-1"])
    b.finish("d-1")
    assert b.said["d-1"] == [1] * 5
    assert b.computed[0] == ("d-1", 0, 100)
    assert b.stats["received_failures"] == 1
    said = re.search(r"peer holds weights (\w{12}) of (\S+) .* this side holds weights (\w{12}) of (\S+) ", caplog.text)
    assert said is not None
    assert said[1] != said[3]
    assert said[2] == said[4] == b.config.model_config.model


def test_the_same_weights_at_another_path_meet_and_so_do_those_that_the_operator_names_alike(
    engines: Callable[..., Engine], tmp_path: Path
) -> None:
    named = {"options": (("weights", "ours"),)}
    pairs = [(engines(), engines(folder=tmp_path / "elsewhere")), (engines(**named), engines(weights=2, **named))]
    for number, (a, b) in enumerate(pairs):
        a.ask(f"p-{number}", PROMPT, params={"do_remote_decode": True})
        a.finish(f"p-{number}")
        b.ask(f"d-{number}", PROMPT, 5, a.answers[f"p-{number}"])
        b.finish(f"d-{number}")
        assert b.said[f"d-{number}"] == [1] * 5
        assert b.stats["received_requests"] == 1


def test_blocks_that_came_are_kept_when_the_prefill_dies_and_only_the_others_computed(
    engines: Callable[..., Engine],
) -> None:
    written = (("chunk_bytes", 4096), ("verb", "push"), ("route", "packed"))
    a, b = engines(batch_tokens=64), engines(options=written)
    a.before_layer = lambda rank, number: _die_once_blocks_landed(a, b)
    b.ask("d-1", PROMPT, 5, {"do_remote_prefill": True, "transfer_id": "both", **_address(a)})
    b.step()
    a.ask("p-1", PROMPT, params={"do_remote_decode": True, "transfer_id": "both"})
    with pytest.raises(Died):
        a.finish("p-1")
    b.finish("d-1")
    assert b.said["d-1"] == [1] * 5
    assert b.computed[0] == ("d-1", 64, 100)
    b.drain()


class Died(Exception):
    """The prefill engine is gone."""


def _die_once_blocks_landed(a: Engine, b: Engine) -> None:
    """In the prefill's second step: its first 64 tokens were computed in the one before."""
    if len(a.computed) < 2:
        return
    deadline = time.monotonic() + 30
    wanted = [truth(PROMPT, range(64), number, range(4), 64) for number in range(4)]
    while time.monotonic() < deadline:
        tables = b.tables("d-1")
        if all(torch.equal(b.ranks[0].rows(layer_name(n), tables, range(64)), rows) for n, rows in enumerate(wanted)):
            a.ranks[0].connector.shutdown()
            raise Died
        time.sleep(0.002)


def _address(engine: Engine) -> dict[str, Any]:
    """What a proxy that starts both halves at once has to know of a prefill engine."""
    home = engine.scheduler.get_kv_connector()._scheduler.home
    return {"remote_engine_id": home.engine, "remote_host": home.host, "remote_port": home.port}


def test_a_prefill_that_is_preempted_takes_its_pages_back_and_decode_computes(engines: Callable[..., Engine]) -> None:
    """A prefill that generates more than a token can lose its pages to an older request after they were offered."""
    a, b = engines(blocks=13), engines()
    a.ask("older", PROMPT[:47], 40)
    a.step()
    a.ask("p-1", PROMPT, 40, {"do_remote_decode": True})
    a.step()
    b.ask("d-1", PROMPT, 5, {"do_remote_prefill": True, "remote_request_id": "p-1", **_address(a)})
    first = a.scheduler.requests["p-1"]
    a.until(lambda: first.num_preemptions or "p-1" in a.ended, "a preemption")
    assert first.num_preemptions
    b.finish("d-1")
    assert b.said["d-1"] == [1] * 5
    assert b.stats["received_failures"] == 1
    a.finish("older", "p-1")
    assert (a.said["older"], a.said["p-1"]) == ([1] * 40, [1] * 40)
    b.drain()


def test_vllm_logs_and_exports_what_was_moved(engines: Callable[..., Engine]) -> None:
    a, b = engines(tp=2), engines()
    hand_over(a, b)
    a.drain()
    assert a.stats["sent_requests"] == 1
    logged = metrics.KVConnectorLogging(a.config.kv_transfer_config)
    logged.observe(b.stats)
    lines: list[str] = []
    logged.log(lambda form, line: lines.append(line))
    assert lines[0].startswith("received requests=1, received MB=0.102, received ms a request=")
    exported = metrics.KVConnectorProm(a.config, ["engine"], {0: ["0"]})
    exported.observe(a.stats)
    exported.observe(a.stats)
    value = REGISTRY.get_sample_value
    assert value("vllm:kvmover_sent_requests_total", {"engine": "0"}) == 2
    assert value("vllm:kvmover_sent_bytes_total", {"engine": "0"}) == 2 * 100 * 4 * 4 * 64
    assert value("vllm:kvmover_received_requests_total", {"engine": "0"}) == 0


def test_kvmover_speaks_in_vllms_log_and_says_why_a_prefill_was_not_fetched(engines: Callable[..., Engine]) -> None:
    """Once, with time, level and rank; and what the scheduler's half has to say."""
    import_module("vllm.logger").configure_logging(import_module("vllm.config.logging").LoggingConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])  # pytest's own, which it takes back by itself
        (own,) = logging.getLogger("vllm").handlers
        patch.setattr(own, "stream", StringIO())
        a = engines(options=(("deadline_s", 1.2),))
        a.ask("p-1", PROMPT, params={"do_remote_decode": True})
        a.finish("p-1")
        a.drain()
        a.ask("p-2", PROMPT, params={"do_remote_prefill": True})
        a.finish("p-2")
        a.close()
        lines = [line for line in own.stream.getvalue().splitlines() if "kvmover" in line]
    for line, (level, file, said) in zip(
        lines,
        [
            ("INFO", "cards.py", "requests may have cards fetched from any host, since exchange.allow is empty"),
            ("INFO", "connector.py", "the weights of "),
            ("INFO", "connector.py", "serves 40 blocks of full_attention"),
            ("WARNING", "worker.py", "p-1 was not sent: deadline passed before every destination asked"),
            ("WARNING", "scheduler.py", "kv_transfer_params of p-2 have no remote_engine_id"),
        ],
        strict=True,
    ):
        time_and_place = rf"\(.* pid=\d+\) {level} \d\d-\d\d \d\d:\d\d:\d\d \[{file}:\d+\]"
        assert re.match(f"{time_and_place} kvmover rank 0 of TP1: {said}", line)
    assert logging.getLogger("kvmover").propagate


def test_a_failure_is_told_once_where_kvmovers_own_log_is_configured(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVMOVER_LOGGING_LEVEL", "warning")
    monkeypatch.setenv("KVMOVER_LOGGING_FILE", str(tmp_path / "log"))
    a = engines(options=(("deadline_s", 1.2),))
    a.ask("p-1", PROMPT, params={"do_remote_decode": True})
    a.finish("p-1")
    a.drain()
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "p-1" in line]
    assert "deadline passed before every destination asked" in line


def test_the_backend_that_keeps_k_and_v_of_a_block_apart_is_refused_and_not_its_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On vLLM's CPU platform: its own backend is named; one in its place, and those of latents, keep tokens in rows."""
    monkeypatch.setattr(platforms, "_current_platform", import_module("vllm.platforms.cpu").CpuPlatform())
    config = config_of(Shape(), tmp_path / "model")
    assert len(names.groups_of(caches_of(Shape(latent=True)), config)) == 1
    with pytest.raises(KvmoverError, match="CPU_ATTN, which keeps K and V of a block apart"):
        names.groups_of(caches_of(Shape(window=17)), config)
    backends.register_backend(backends.AttentionBackendEnum.CPU_ATTN, "somebody.Else")
    try:
        assert len(names.groups_of(caches_of(Shape(window=17)), config)) == 2
    finally:
        backends.AttentionBackendEnum.CPU_ATTN.clear_override()


def test_what_the_connector_cannot_serve_is_refused_in_a_sentence(engines: Callable[..., Engine]) -> None:
    for shape, said in (
        ({"options": (("rooot", "/tmp"),)}, "rooot"),
        ({"options": (("verb", "shove"),)}, "shove"),
        ({"packing": (("num_head_slots", 2), ("state_content_bytes", 128))}, "as NONE, with 2 slots for 4 heads"),
        ({"packing": (("kv_quant_mode", caching.KVQuantMode.NVFP4),)}, "as NVFP4, with 4 slots for 4 heads"),
        ({"latent": True, "packing": (("dtype", torch.uint8), *INDEXER)}, "24 B a row, indexer role"),
    ):
        with pytest.raises(KvmoverError, match=said):
            engines(**shape)


def test_a_port_for_cards_that_is_taken_is_refused_by_its_option(engines: Callable[..., Engine]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        said = (
            rf"port = {port} in the options of kvmover's vLLM connector: replica 0 cannot listen at .*:{port}: .*in use"
        )
        with pytest.raises(KvmoverError, match=said):
            engines(options=(("port", port),))
