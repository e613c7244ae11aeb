"""The scheduler's half of the vLLM connector, with requests that are not vLLM's: what comes of what happens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvmover.engines.common import FirstToken, Remote, answer, content_of
from kvmover.engines.vllm.connector_metadata import (
    AbortSpec,
    AttachSpec,
    GrowSpec,
    KvmoverConnectorMetadata,
    LoadSpec,
    ReceiveSpec,
    RefuseSpec,
    ReleaseSpec,
    SaveSpec,
    SendSpec,
)
from kvmover.engines.vllm.scheduler import ConnectorScheduler, Home, QuarantinedBlocks, RequestOutcome, Role
from kvmover.transfer import Content
from kvmover.transfer.result import Service

TOKENS = 16
REMOTE = Remote("prefill", "p-1", "10.0.0.1", 5600)


@dataclass
class Request:
    """What the scheduler reads of a request."""

    request_id: str = "r"
    num_prompt_tokens: int = 100
    kv_transfer_params: dict[str, Any] | None = None
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    over: bool = False
    generated: int = 0
    max_tokens: int = 9
    sampling_params: Any = None
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    prompt_token_ids: list[int] = field(init=False)
    _all_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(range(self.num_prompt_tokens))
        self._all_token_ids = list(range(self.num_prompt_tokens))

    @property
    def all_token_ids(self) -> list[int]:
        return (self._all_token_ids + self.output_token_ids)[: self.num_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return list(range(700, 700 + self.generated))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.generated

    @property
    def block_hashes(self) -> list[bytes]:
        return [hash_of(block) for block in range(self.num_tokens // TOKENS)]

    def is_finished(self) -> bool:
        return self.over


def content(tokens: int = 100) -> Content:
    """What the first tokens of these requests are of, unless they were changed."""
    return content_of((list(range(100)) + list(range(700, 800)))[:tokens])


def growing(prompt: int, tokens: int) -> Content:
    return content_of([*range(prompt), *range(700, 800)][:tokens])


def hash_of(block: int) -> bytes:
    return block.to_bytes(32, "little")


def tables(blocks: int = 7) -> tuple[list[int], ...]:
    return (list(range(10, 10 + blocks)),)


def step(scheduler: ConnectorScheduler, *scheduled: tuple[Request, int]) -> KvmoverConnectorMetadata:
    """A step that computes so many tokens of some requests."""
    blocks = {request.request_id: -(-(request.num_computed_tokens + count) // TOKENS) for request, count in scheduled}
    state = SimpleNamespace(get_block_ids=lambda name: tables(blocks[name]))
    counts = {request.request_id: count for request, count in scheduled}
    metadata = scheduler.build(SimpleNamespace(num_scheduled_tokens=counts, kv_connector_block_state=state))
    for request, count in scheduled:
        request.num_computed_tokens += count
    return metadata


def received(scheduler: ConnectorScheduler, *names: str) -> None:
    scheduler.output(SimpleNamespace(finished_recving=set(names)))


def served(scheduler: ConnectorScheduler | None = None) -> tuple[ConnectorScheduler, Request]:
    """A prefill engine with a request for another."""
    scheduler = scheduler or ConnectorScheduler(TOKENS, home=Home("prefill", "10.0.0.1", 5600))
    request = Request("p-1", kv_transfer_params={"do_remote_decode": True})
    scheduler.new(request)
    assert scheduler.matched(request, 0) == 0
    scheduler.allocated(request, tables(), 0)
    return scheduler, request


def fetched(scheduler: ConnectorScheduler | None = None) -> tuple[ConnectorScheduler, Request]:
    scheduler, request = (
        scheduler or ConnectorScheduler(TOKENS),
        Request("d-1", kv_transfer_params=answer(REMOTE, content())),
    )
    scheduler.new(request)
    return scheduler, request


def test_a_prefill_is_offered_with_its_first_step_and_each_step_names_the_blocks_that_it_fills() -> None:
    """Chunks of 40, 40 and 20 tokens in blocks of 16: the second begins in a block that the first named."""
    scheduler, request = served()
    first, second, last = (step(scheduler, (request, count)) for count in (40, 40, 20))
    assert first == KvmoverConnectorMetadata(sends=[SendSpec("p-1", "p-1", tables(3), 0, 40, content=content())])
    assert second == KvmoverConnectorMetadata(growths=[GrowSpec("p-1", ([13, 14],), 80)])
    assert last == KvmoverConnectorMetadata(growths=[GrowSpec("p-1", ([15, 16],), None)])
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED) == (True, answer(REMOTE, content()))
    assert step(scheduler) == KvmoverConnectorMetadata(delayed={"p-1"})
    assert (step(scheduler), scheduler.live) == (KvmoverConnectorMetadata(), {})


def test_a_prefill_that_has_ended_hands_over_its_first_token() -> None:
    """To whoever asks for it: a vLLM decode does not, and computes the last position of the prompt once more."""
    scheduler, request = served()
    step(scheduler, (request, 100))
    request.generated = 2
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED)[0]
    assert step(scheduler).attaches == [AttachSpec("p-1", FirstToken(700).encode())]
    scheduler, request = served()
    step(scheduler, (request, 100))
    request.generated = 1
    scheduler.finished(request, tables(), RequestOutcome.ABORTED)
    assert not step(scheduler).attaches


def test_a_prefill_that_generates_more_is_offered_once() -> None:
    scheduler, request = served()
    assert len(step(scheduler, (request, 100)).sends) == 1
    assert step(scheduler, (request, 1)) == KvmoverConnectorMetadata()


def test_an_aborted_prefill_is_refused_or_withdrawn() -> None:
    scheduler, request = served()
    assert scheduler.finished(request, tables(), RequestOutcome.ABORTED) == (False, None)
    assert step(scheduler).refusals == [RefuseSpec("p-1", "the prefill was aborted")]
    scheduler, request = served()
    step(scheduler, (request, 64))
    assert scheduler.finished(request, tables(), RequestOutcome.ABORTED) == (True, None)
    assert step(scheduler) == KvmoverConnectorMetadata(
        aborts=[AbortSpec("p-1", "the prefill was aborted")], delayed={"p-1"}
    )


def test_a_preempted_prefill_is_withdrawn_and_offered_again_when_it_is_computed_again() -> None:
    scheduler, request = served()
    step(scheduler, (request, 64))
    request.num_preemptions, request.num_computed_tokens = 1, 0
    metadata = step(scheduler, (request, 48))
    assert metadata == KvmoverConnectorMetadata(
        sends=[SendSpec("p-1", "p-1", tables(3), 0, 48, content=content())],
        aborts=[AbortSpec("p-1", "the prefill was preempted")],
        preempted={"p-1"},
    )
    assert step(scheduler, (request, 52)).growths == [GrowSpec("p-1", ([13, 14, 15, 16],), None)]


def test_a_prompt_is_fetched_behind_what_the_engine_has() -> None:
    scheduler, request = fetched()
    assert scheduler.matched(request, 32) == 68
    scheduler.allocated(request, tables(), 68)
    assert step(scheduler).receives == [ReceiveSpec("d-1", REMOTE, 32, 100, tables(), content())]
    scheduler.allocated(request, tables(), 0)
    received(scheduler, "d-1")
    assert step(scheduler, (request, 1)) == KvmoverConnectorMetadata()
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED) == (False, None)
    assert scheduler.live == {}


def test_a_prompt_that_the_engine_has_is_released() -> None:
    scheduler, request = fetched()
    scheduler.allocated(request, tables(), 0)
    assert step(scheduler).releases == [ReleaseSpec(REMOTE, 100, content())]


def test_a_request_that_ends_before_it_has_pages_is_released() -> None:
    scheduler, request = fetched()
    assert scheduler.finished(request, (), RequestOutcome.ABORTED) == (False, None)
    assert step(scheduler).releases == [ReleaseSpec(REMOTE, 100, content())]


def test_a_request_that_ends_while_it_is_fetched_is_the_workers_to_report() -> None:
    scheduler, request = fetched()
    scheduler.matched(request, 0)
    scheduler.allocated(request, tables(), 100)
    step(scheduler)
    request.over = True
    assert scheduler.finished(request, tables(), RequestOutcome.ABORTED) == (False, None)
    assert step(scheduler).aborts == [AbortSpec("d-1", "aborted by the scheduler")]
    received(scheduler, "d-1")
    assert scheduler.live == {}


def test_what_could_not_be_fetched_is_not_fetched_again() -> None:
    scheduler, request = fetched()
    scheduler.allocated(request, tables(), 100)
    received(scheduler, "d-1")
    assert scheduler.matched(request, 0) == 0


@pytest.mark.parametrize(
    ("role", "params"), [(Role.GIVES, answer(REMOTE, content())), (Role.TAKES, {"do_remote_decode": True})], ids=str
)
def test_an_engine_of_another_role_computes_for_itself(role: Role, params: dict[str, Any]) -> None:
    scheduler, request = ConnectorScheduler(TOKENS, role), Request(kv_transfer_params=params)
    assert scheduler.matched(request, 0) == 0
    scheduler.allocated(request, tables(), 0)
    assert step(scheduler, (request, 100)) == KvmoverConnectorMetadata()
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED) == (False, None)


def test_bad_parameters_are_logged_and_the_prompt_computed(caplog: pytest.LogCaptureFixture) -> None:
    request = Request(kv_transfer_params={"do_remote_prefill": True})
    assert ConnectorScheduler(TOKENS).matched(request, 0) == 0
    assert "kv_transfer_params of r have no remote_engine_id" in caplog.text


def test_where_pages_are_given_back_the_last_token_is_left_to_decode() -> None:
    """A window of 17 at 64 tokens: the prefill keeps 48 to 63 where decode would look at 47."""
    scheduler, request = served(
        ConnectorScheduler(TOKENS, late=True, left_tokens=1, home=Home("prefill", "10.0.0.1", 5600))
    )
    assert (request.num_prompt_tokens, len(request.prompt_token_ids), request.max_tokens) == (99, 99, 1)
    assert step(scheduler, (request, 99)) == KvmoverConnectorMetadata()
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED)[0]
    assert step(scheduler).sends == [SendSpec("p-1", "p-1", tables(), None, content=content())]
    scheduler, request = fetched(ConnectorScheduler(TOKENS, late=True, left_tokens=1))
    assert scheduler.matched(request, 0) == 99
    scheduler.allocated(request, tables(), 99)
    assert step(scheduler).receives == [ReceiveSpec("d-1", REMOTE, 0, 99, tables(), content())]


def test_a_prompt_whose_log_probabilities_are_asked_for_is_whole_and_not_served() -> None:
    """vLLM's front end pairs each token of the prompt with one of them."""
    scheduler = ConnectorScheduler(TOKENS, late=True, left_tokens=1, home=Home("prefill", "10.0.0.1", 5600))
    asking = SimpleNamespace(prompt_logprobs=0)
    request = Request("p-1", kv_transfer_params={"do_remote_decode": True}, sampling_params=asking)
    scheduler.new(request)
    assert (request.num_prompt_tokens, len(request.all_token_ids), len(request.prompt_token_ids)) == (100, 100, 100)
    assert scheduler.matched(request, 0) == 0
    scheduler.allocated(request, tables(), 0)
    (refused,) = step(scheduler, (request, 100)).refusals
    assert refused.transfer == "p-1"
    assert "log probabilities of the prompt" in refused.reason
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED) == (False, None)
    assert step(scheduler) == KvmoverConnectorMetadata()


def test_where_nothing_is_left_to_decode_such_a_prompt_is_served() -> None:
    scheduler = ConnectorScheduler(TOKENS, home=Home("prefill", "10.0.0.1", 5600))
    asking = SimpleNamespace(prompt_logprobs=0)
    request = Request("p-1", kv_transfer_params={"do_remote_decode": True}, sampling_params=asking)
    scheduler.new(request)
    assert scheduler.matched(request, 0) == 0
    scheduler.allocated(request, tables(), 0)
    assert step(scheduler, (request, 100)).sends
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED)[0]


def kept(**how: Any) -> tuple[ConnectorScheduler, dict[str, Any] | None, bool]:
    """A decode engine that has ended a request of 100 tokens and 8 more, of the last of which it has nothing."""
    decode = ConnectorScheduler(TOKENS, home=Home("decode", "10.0.0.2", 5700), **how)
    scheduler, request = fetched(decode)
    scheduler.matched(request, 0)
    scheduler.allocated(request, tables(), 100)
    scheduler.output(Received({"d-1"}))
    request.num_computed_tokens, request.generated = 107, 8
    request._all_token_ids += range(500, 508)
    keeps, told = scheduler.finished(request, tables(), RequestOutcome.DELIVERED)
    return scheduler, told, keeps


@dataclass
class Received:
    """What all ranks told."""

    finished_recving: set[str] | None


def test_a_decode_keeps_what_it_has_for_the_next_turn_where_it_is_told_to() -> None:
    scheduler, told, keeps = kept(keep_s=480.0)
    assert keeps
    assert told is not None
    assert (told["do_remote_decode"], told["remote_request_id"], told["remote_num_tokens"]) == (True, "d-1", 107)
    turn = content_of([*range(100), *range(500, 507)])
    assert told["kvmover_content"] == f"107:{turn.digest.hex()}"
    metadata = step(scheduler)
    assert metadata.sends == [SendSpec("d-1", "d-1", tables(), None, keep_s=480.0, content=turn)]
    assert metadata.delayed == {"d-1"}
    for how in ({}, {"keep_s": 480.0, "late": True}, {"keep_s": 480.0, "role": Role.TAKES}):
        scheduler, told, keeps = kept(**how)
        assert (told, keeps, step(scheduler).sends) == (None, False, [])


def running(**how: Any) -> tuple[ConnectorScheduler, Request]:
    """A request of 30 tokens that may move, and whose prompt was computed."""
    scheduler = ConnectorScheduler(TOKENS, home=Home("decode", "10.0.0.2", 5700), **{"move_s": 5.0, **how})
    request = Request("d-1", num_prompt_tokens=30, kv_transfer_params={"kvmover_movable": "r"})
    scheduler.new(request)
    scheduler.matched(request, 0)
    scheduler.allocated(request, tables(2), 0)
    return scheduler, request


def test_a_request_that_may_move_is_offered_as_it_grows_and_its_blocks_are_named_once() -> None:
    scheduler, request = running()
    sends = [SendSpec("d-1", "r", tables(2), 0, 30, 5.0, Service.REPEATED, "moved", growing(30, 30))]
    assert step(scheduler, (request, 30)) == KvmoverConnectorMetadata(sends=sends)
    grown = list[GrowSpec]()
    for _ in range(4):
        request.generated += 1
        grown += step(scheduler, (request, 1)).growths
    assert grown == [
        GrowSpec("d-1", ([12] if stop == 33 else [],), stop, (growing(30, stop),)) for stop in (31, 32, 33, 34)
    ]
    request.generated += 1
    assert step(scheduler, (request, 4)).growths == [
        GrowSpec("d-1", ([],), 35, (growing(30, 35),))
    ]  # three tokens of them are guesses


def test_its_blocks_are_kept_when_its_client_leaves_and_given_back_when_it_is_answered() -> None:
    for outcome, aborts in (
        (RequestOutcome.ABORTED, []),
        (RequestOutcome.DELIVERED, [AbortSpec("d-1", "it was answered where it was")]),
    ):
        scheduler, request = running()
        step(scheduler, (request, 30))
        assert scheduler.finished(request, tables(2), outcome) == (True, None)
        assert step(scheduler) == KvmoverConnectorMetadata(aborts=aborts, delayed={"d-1"})


def test_of_steps_that_are_ordered_ahead_what_is_said_is_offered_and_all_of_it_when_the_client_leaves() -> None:
    """Asynchronous scheduling: a step is ordered before the token is known that the one before it makes."""
    scheduler, request = running()
    step(scheduler, (request, 30))
    assert step(scheduler, (request, 1)).growths == [GrowSpec("d-1", ([],), 30)]
    request.generated = 1
    assert step(scheduler, (request, 1)).growths == [GrowSpec("d-1", ([],), 31, (growing(30, 31),))]
    request.generated = 2
    assert scheduler.finished(request, tables(2), RequestOutcome.ABORTED) == (True, None)
    assert step(scheduler) == KvmoverConnectorMetadata(
        growths=[GrowSpec("d-1", ([],), 32, (growing(30, 32),))], delayed={"d-1"}
    )


@pytest.mark.parametrize("how", [{"move_s": None}, {"late": True}, {"role": Role.TAKES}])
def test_where_none_may_move_none_is_offered(how: dict[str, Any]) -> None:
    scheduler, request = running(**how)
    assert step(scheduler, (request, 30)) == KvmoverConnectorMetadata()
    assert scheduler.finished(request, tables(2), RequestOutcome.ABORTED) == (False, None)


def test_one_that_is_preempted_is_offered_anew() -> None:
    scheduler, request = running()
    step(scheduler, (request, 30))
    request.num_preemptions, request.num_computed_tokens = 1, 0
    metadata = step(scheduler, (request, 30))
    assert metadata.aborts == [AbortSpec("d-1", "it was preempted")]
    assert metadata.preempted == {"d-1"}
    assert [(send.transfer, send.stop) for send in metadata.sends] == [("r", 30)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_is_taken_over_is_fetched_and_let_go_and_a_copy_is_not_let_go(goes_on: bool) -> None:
    where = {**answer(REMOTE, content()), "remote_num_tokens": 99, "kvmover_copy": goes_on}
    scheduler, request = ConnectorScheduler(TOKENS), Request("d-2", kv_transfer_params=where)
    scheduler.new(request)
    assert scheduler.matched(request, 32) == 67
    assert scheduler.is_of_peer(request)
    scheduler.allocated(request, tables(), 67)
    assert step(scheduler) == KvmoverConnectorMetadata(
        receives=[ReceiveSpec("d-2", REMOTE, 32, 99, tables(), content(99))]
    )
    received(scheduler, "d-2")
    assert step(scheduler).releases == ([] if goes_on else [ReleaseSpec(REMOTE, 99, content(99))])


def test_who_leaves_before_it_was_taken_over_leaves_it_where_it_is() -> None:
    """A router may ask another engine for it."""
    where = {**answer(REMOTE, content()), "remote_num_tokens": 99}
    scheduler, request = ConnectorScheduler(TOKENS), Request("d-2", kv_transfer_params=where)
    scheduler.new(request)
    assert scheduler.finished(request, tables(0), RequestOutcome.ABORTED) == (False, None)
    assert step(scheduler) == KvmoverConnectorMetadata()


@pytest.mark.parametrize(("fewest", "changed"), [(64, None), (64, 3), (128, None)], ids=["goes-on", "other", "few"])
def test_a_prefill_fetches_the_turns_before_where_they_are_worth_it(fewest: int, changed: int | None) -> None:
    """In every other case decode is told to let go, and the prompt is computed."""
    _, told, _ = kept(keep_s=480.0)
    scheduler = ConnectorScheduler(TOKENS, home=Home("prefill", "10.0.0.1", 5600), fewest=fewest)
    request = Request("p-2", num_prompt_tokens=140, kv_transfer_params=told)
    request._all_token_ids[100:108] = range(500, 508)
    if changed is not None:
        request._all_token_ids[changed] = 999
    scheduler.new(request)
    found = scheduler.matched(request, 16)
    scheduler.allocated(request, tables(9), found)
    metadata = step(scheduler)
    decode, turn = Remote("decode", "d-1", "10.0.0.2", 5700), content_of([*range(100), *range(500, 507)])
    if changed is None and fewest == 64:
        assert metadata.receives == [ReceiveSpec("p-2", decode, 16, 107, tables(9), turn)]
    else:
        assert (found, metadata.receives, metadata.releases) == (0, [], [ReleaseSpec(decode, 107, turn)])


class Stock:
    """A store that has the first blocks of every prompt."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.asked = blocks, list[int]()

    def __call__(self, hashes: Sequence[bytes]) -> int:
        self.asked.append(len(hashes))
        return sum(int.from_bytes(each, "little") < self.blocks for each in hashes)


def test_stored_blocks_are_loaded_once_behind_those_that_the_engine_has() -> None:
    stock = Stock(5)
    scheduler, request = ConnectorScheduler(TOKENS, leading=stock), Request()
    assert (scheduler.matched(request, 32), stock.asked) == (48, [4])
    scheduler.allocated(request, tables(), 48)
    wanted = LoadSpec("r", (hash_of(2), hash_of(3), hash_of(4)), (12, 13, 14))
    assert step(scheduler).loads == [wanted]
    received(scheduler, "r")
    assert scheduler.matched(request, 0) == 0
    request.num_preemptions = 1
    assert scheduler.matched(request, 0) == 80


def test_whole_blocks_are_saved_as_they_are_computed_and_keep_the_request() -> None:
    scheduler, request = ConnectorScheduler(TOKENS, leading=Stock(0)), Request()
    assert step(scheduler) == KvmoverConnectorMetadata()
    scheduler.matched(request, 0)
    scheduler.allocated(request, tables(), 0)
    assert step(scheduler, (request, 40)).saves == [SaveSpec("r", (hash_of(0), hash_of(1)), (10, 11))]
    assert step(scheduler, (request, 1)).saves == []
    assert step(scheduler, (request, 59)).saves == [SaveSpec("r", tuple(map(hash_of, range(2, 6))), (12, 13, 14, 15))]
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED) == (True, None)
    assert step(scheduler).delayed == {"r"}


def test_a_preempted_request_has_its_saves_settled_and_is_not_kept_for_them() -> None:
    scheduler, request = ConnectorScheduler(TOKENS, leading=Stock(0)), Request()
    scheduler.matched(request, 0)
    step(scheduler, (request, 40))
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert scheduler.finished(request, (), RequestOutcome.ABORTED) == (False, None)
    assert step(scheduler).preempted == {"r"}


@pytest.mark.parametrize("role", [Role.GIVES, Role.TAKES])
def test_a_producer_only_writes_the_store_and_a_consumer_only_reads_it(role: Role) -> None:
    scheduler, request = ConnectorScheduler(TOKENS, role, leading=Stock(5)), Request()
    assert scheduler.matched(request, 0) == (80 if role is Role.TAKES else 0)
    scheduler.allocated(request, tables(), 0)
    assert bool(step(scheduler, (request, 100)).saves) == (role is Role.GIVES)


def test_a_prefill_for_others_that_is_aborted_while_it_loads_is_refused_too() -> None:
    scheduler = ConnectorScheduler(TOKENS, leading=Stock(5), home=Home("prefill", "10.0.0.1", 5600))
    request = Request("p-1", kv_transfer_params={"do_remote_decode": True})
    assert scheduler.matched(request, 0) == 80
    scheduler.allocated(request, tables(), 80)
    step(scheduler)
    request.over = True
    assert scheduler.finished(request, tables(), RequestOutcome.ABORTED) == (False, None)
    metadata = step(scheduler)
    assert (metadata.refusals, len(metadata.aborts)) == ([RefuseSpec("p-1", "the prefill was aborted")], 1)


class Pool:
    """Blocks of requests, and how often somebody refers to each."""

    def __init__(self, **requests: str) -> None:
        self.requests = requests
        self.references = dict.fromkeys("".join(requests.values()), 1)

    def of(self, request: str) -> str:
        return self.requests[request]

    def touch(self, blocks: Sequence[str]) -> None:
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, blocks: Iterable[str]) -> None:
        for block in blocks:
            self.references[block] -= 1


def test_blocks_that_may_be_written_are_referred_to_until_the_last_rank_lets_go_of_them() -> None:
    """Of two ranks one fails at first, while the other goes on: vLLM takes the blocks when both have ended."""
    pool = Pool(a="xy", b="z")
    held = QuarantinedBlocks(pool)
    held.heard({"a": 1}, [])
    assert (len(held), pool.references) == (0, {"x": 1, "y": 1, "z": 1})
    held.heard({"a": 1}, ["a", "b"])
    assert (len(held), pool.references) == (1, {"x": 2, "y": 2, "z": 1})
    held.heard({"a": -1}, [])
    assert (len(held), pool.references) == (1, {"x": 2, "y": 2, "z": 1})
    held.heard({"a": -1}, [])
    assert (len(held), pool.references) == (0, {"x": 1, "y": 1, "z": 1})


def test_blocks_that_nobody_may_write_by_the_time_vllm_takes_them_are_left_alone() -> None:
    pool = Pool(a="x")
    held = QuarantinedBlocks(pool)
    held.heard({"a": 1}, [])
    held.heard({"a": -1}, [])
    held.heard({}, ["a"])
    assert (len(held), pool.references) == (0, {"x": 1})


def test_an_engine_that_parts_from_others_gives_nothing_more_of_requests_that_have_blocks() -> None:
    """The weights have changed: what is computed from now on is neither of the old ones nor of the new."""
    scheduler, request = served()
    step(scheduler, (request, 40))
    scheduler.part("the weights have changed")
    withdrawn = step(scheduler, (request, 60))
    assert withdrawn == KvmoverConnectorMetadata(
        aborts=[AbortSpec("p-1", "the weights have changed")], preempted={"p-1"}
    )
    assert scheduler.finished(request, tables(), RequestOutcome.DELIVERED) == (False, None)
    assert step(scheduler) == KvmoverConnectorMetadata()


def test_an_engine_that_has_parted_computes_and_stores_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = ConnectorScheduler(TOKENS, home=Home("prefill", "10.0.0.1", 5600), leading=len)
    scheduler.part("the weights have changed")
    _, asked = fetched(scheduler)
    assert scheduler.matched(asked, 0) == 0
    assert "d-1 is computed here: the weights have changed" in caplog.text
    scheduler.allocated(asked, tables(), 0)
    _, request = served(scheduler)
    assert step(scheduler, (asked, 100), (request, 100)) == KvmoverConnectorMetadata()
    for each in (asked, request):
        assert scheduler.finished(each, tables(), RequestOutcome.DELIVERED) == (False, None)


def test_requests_without_blocks_are_served_and_fetched_once_an_engine_meets_others_again() -> None:
    scheduler, asked = fetched(ConnectorScheduler(TOKENS, home=Home("prefill", "10.0.0.1", 5600)))
    other = Request("p-1", kv_transfer_params={"do_remote_decode": True})
    scheduler.new(other)
    scheduler.part("the weights have changed")
    scheduler.join()
    assert scheduler.matched(asked, 0) == 100
    assert scheduler.matched(other, 0) == 0
    scheduler.allocated(other, tables(), 0)
    (send,) = step(scheduler, (other, 100)).sends
    assert send.transfer == "p-1"
