"""What a request's KV is of: who means another prompt is refused before a byte moves, and nobody else suffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mover_fleets import CONFIG, Bench, Engine, Pair, truth_of
from test_repeated_service import Growing, Passed

from kvmover.errors import PlanError, RefusedFor
from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.content import MAX_UNKNOWN_CHARACTERS, Content, IdentityCheck, disagreement
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Gate, Result, Service, Transfer
from kvmover.transfer.source.source_attempts import MAX_CONTENTS, Request

A, B = Content(60, b"a" * 16), Content(60, b"b" * 16)
LONGER = Content(80, b"c" * 16)
UNKNOWN = Content(60, unknown="adapter of another make")
KNOWN_NOTHING = [None, UNKNOWN]


def offered(pair: Pair, content: Content | None, request: str = "request") -> list[Transfer]:
    tables = pair.src_tables
    return [m.send(request, table, content=content) for m, table in zip(pair.src.movers, tables, strict=True)]


def asked(pair: Pair, content: Content | None, stop: int | None = None, request: str = "request") -> list[Transfer]:
    of, tables = range(stop or pair.tokens), pair.dst_tables
    dst = zip(pair.dst.movers, tables, strict=True)
    return [m.receive(request, pair.src.name, of, table, content=content) for m, table in dst]


def pair_of(
    identity: IdentityCheck = IdentityCheck.CHECKED, verb: Verb = Verb.PUSH, route: Route = Route.PACKED
) -> Pair:
    config = replace(CONFIG, identity=identity, verb=verb, route=route)
    return Pair.of(Fleet(tp=2, page_tokens=4), Fleet(page_tokens=8), 60, config)


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("route", [Route.PACKED, Route.DIRECT])
@pytest.mark.parametrize("asks_first", [True, False])
def test_kv_of_another_prompt_is_refused_before_a_byte_moves(verb: Verb, route: Route, asks_first: bool) -> None:
    pair = pair_of(verb=verb, route=route)
    begin = [lambda: offered(pair, A), lambda: asked(pair, B)]
    done = [call() for call in (reversed(begin) if asks_first else begin)]
    sent, wanted = reversed(done) if asks_first else done
    pair.bench.ended(wanted)
    pair.dst.assert_holds(pair.before)  # poison, all of it
    for transfer in wanted:
        assert transfer.result is not None
        assert transfer.result.reason == f"the KV is of {A}, and {B} were asked for"
        assert transfer.result.cause is Cause.PEER_ABORTED
    assert not any(transfer.ended for transfer in sent)  # it is for others
    assert [mover.meter.refused[RefusedFor.IDENTITY] for mover in pair.src.movers] == [1, 1]
    right = asked(pair, A)
    pair.bench.ended([*right, *sent])
    assert [transfer.landed().reason for transfer in (*right, *sent)] == [None] * 3
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("mistaken", [B, LONGER, *KNOWN_NOTHING])
def test_a_release_of_another_prompt_ends_no_request(mistaken: Content | None) -> None:
    pair = pair_of()
    sent = offered(pair, A)
    releases = [
        mover.receive("request", pair.src.name, range(60, 60), table, content=mistaken)
        for mover, table in zip(pair.dst.movers, pair.dst_tables, strict=True)
    ]
    pair.bench.ended(releases)
    assert not any(transfer.ended for transfer in sent)
    pair.bench.ended([*asked(pair, A), *sent])
    pair.assert_landed()


@pytest.mark.parametrize("held", KNOWN_NOTHING)
def test_a_prompt_that_one_side_cannot_name_is_refused_unless_it_is_trusted(held: Content | None) -> None:
    for identity, landed in ((IdentityCheck.CHECKED, False), (IdentityCheck.TRUST, True)):
        pair = pair_of(identity)
        offered(pair, held)
        wanted = asked(pair, A)
        pair.bench.ended(wanted)
        assert [transfer.result and transfer.result.landed for transfer in wanted] == [landed]
        if not landed:
            assert 'only identity = "trust" takes what is not known' in str(wanted[0].result)
            pair.dst.assert_holds(pair.before)


def test_trust_takes_no_digest_that_differs() -> None:
    pair = pair_of(IdentityCheck.TRUST)
    offered(pair, A)
    wanted = asked(pair, B)
    pair.bench.ended(wanted)
    assert str(A) in str(wanted[0].result)
    assert str(B) in str(wanted[0].result)


def test_two_sides_that_name_no_prompt_meet() -> None:
    pair = pair_of()
    sent, wanted = offered(pair, None), asked(pair, None)
    pair.bench.ended([*sent, *wanted])
    pair.assert_landed()


def test_more_tokens_than_the_source_will_ever_have_are_refused_at_once() -> None:
    pair = pair_of(IdentityCheck.TRUST)
    tables = [[table[:4] for table in tables] for tables in pair.src_tables]
    for mover, table in zip(pair.src.movers, tables, strict=True):
        mover.send("request", table, [Gate(None)], content=Content(16, unknown="images"))
    wanted = asked(pair, UNKNOWN)
    pair.bench.turn()  # no time passes
    assert wanted[0].ended
    assert "the KV is of 16 tokens" in str(wanted[0].result)
    assert "tokens below 60 were asked for" in str(wanted[0].result)


def test_of_two_engines_the_one_that_means_the_prompt_is_served() -> None:
    bench = Bench((Component.attention(2, 4, 16, "bfloat16"),), CONFIG)
    source = bench.engine("source", Fleet(tp=2, page_tokens=4))
    engines: list[Engine] = [bench.engine(name, Fleet(page_tokens=8)) for name in ("wrong", "right")]
    for engine in engines:
        engine.connect(source)
    bench.turn()
    tables, truth = source.tables(60), truth_of(bench.components, 60)
    source.fill(tables, truth)
    into = [engine.tables(60, 1) for engine in engines]
    before = [engine.snapshot() for engine in engines]
    wanted = [
        engine.movers[0].receive("request", "source", range(60), table[0], content=content)
        for engine, table, content in zip(engines, into, (B, A), strict=True)
    ]
    bench.turn()
    sent = [m.send("request", table, content=A) for m, table in zip(source.movers, tables, strict=True)]
    bench.ended([*wanted, *sent])
    assert [bool(transfer.result and transfer.result.landed) for transfer in wanted] == [False, True]
    engines[0].assert_holds(before[0])
    engines[1].assert_holds(engines[1].landed(before[1], into[1], truth))
    assert all(transfer.landed() for transfer in sent)


def named(tokens: int) -> Content:
    return Content(tokens, tokens.to_bytes(16))


class GrowingNamed(Growing):
    """Each token of a growing request is named with it."""

    def compute(self, tokens: int) -> None:
        for token in range(self.computed, tokens):
            for mover, sent, (table,) in zip(self.source.movers, self.sent, self.tables, strict=True):
                page = [table[token // 4 : token // 4 + 1]] if token % 4 == 0 else None
                mover.produced(sent, Gate(Passed(), tokens=token + 1), page, [named(token + 1)])
        self.computed = tokens

    def ask_named(self, stop: int, content: Content) -> Transfer:
        engine = self.engines["A"]
        table = [each[: -(-stop // 8)] for each in self.wanted["A"][0]]
        return engine.movers[0].receive("request", "running", range(stop), table, content=content)


def test_a_request_that_decodes_is_asked_for_by_what_it_was_a_few_tokens_ago() -> None:
    growing = GrowingNamed()
    growing.compute(20)
    for stop in (20, 17):
        asked = growing.ask_named(stop, named(stop))
        growing.pass_time(0.5)
        assert asked.landed().reason is None
    wrong = growing.ask_named(17, Content(17, b"another sequence"))
    growing.pass_time(0.5)
    assert "were asked for" in str(wrong.result)


def test_who_asks_for_a_token_that_is_not_there_yet_waits_for_it() -> None:
    growing = GrowingNamed()
    growing.compute(20)
    right, wrong = growing.ask_named(22, named(22)), None
    growing.pass_time(1.0)
    assert not right.ended
    growing.compute(22)
    growing.pass_time(0.5)
    assert right.landed().reason is None
    wrong = growing.ask_named(23, Content(23, b"another sequence"))
    growing.pass_time(1.0)
    assert not wrong.ended
    growing.compute(23)
    growing.pass_time(0.5)
    assert "were asked for" in str(wrong.result)


def test_who_waits_for_a_token_hears_how_the_request_ended() -> None:
    growing = GrowingNamed()
    growing.compute(20)
    asked = growing.ask_named(25, named(25))
    growing.pass_time(1.0)
    for mover, sent in zip(growing.source.movers, growing.sent, strict=True):
        mover.abort(sent, "it was answered where it was")
    growing.pass_time(0.5)
    assert "it was answered where it was" in str(asked.result)


def test_a_content_says_its_length_and_digest() -> None:
    assert str(A) == "60 tokens 61616161616161616161616161616161"
    assert str(UNKNOWN) == "60 tokens without a digest (adapter of another make)"
    with pytest.raises(PlanError, match="a digest of 32 bytes; it has at most 16"):
        Content(60, bytes(32))


def test_the_reason_why_a_prompt_has_no_digest_is_cut() -> None:
    for characters in (0, MAX_UNKNOWN_CHARACTERS, MAX_UNKNOWN_CHARACTERS + 1, 1000):
        assert len(Content(1, unknown="x" * characters).unknown) == min(characters, MAX_UNKNOWN_CHARACTERS)


def test_a_prompt_that_nobody_named_is_called_so() -> None:
    named = Content(300, bytes(16))
    said = f"the KV is of {named}, and a prompt that nobody named were asked for: "
    assert str(disagreement(named, None, IdentityCheck.CHECKED)).startswith(said)
    said = f"the KV is of a prompt that nobody named, and {named} were asked for: "
    assert str(disagreement(None, named, IdentityCheck.CHECKED)).startswith(said)


def test_a_disagreement_names_both_prompts_and_is_the_same_rule_everywhere() -> None:
    for held in (None, A, B, LONGER, UNKNOWN):
        for wanted in (None, A, B, LONGER, UNKNOWN):
            said = {identity: disagreement(held, wanted, identity) for identity in IdentityCheck}
            known = held is not None and wanted is not None and held.digest and wanted.digest
            if held is wanted and held is not UNKNOWN:
                assert set(said.values()) == {None}
            elif known:
                assert all(text and str(held) in text and str(wanted) in text for text in said.values())
            else:
                assert said[IdentityCheck.CHECKED]
                assert said[IdentityCheck.TRUST] is None


@pytest.mark.parametrize("identity", IdentityCheck)
def test_who_asks_for_whole_pages_of_rows_of_several_tokens_is_not_refused_for_those_behind_the_prompt(
    identity: IdentityCheck,
) -> None:
    """What is compressed lies in pages as only its engine knows: all of the last one is asked for."""
    compressed = Component("c4", 2, 1, 1, 64, "uint8", row_tokens=4)
    bench = Bench((compressed,), replace(CONFIG, identity=identity))
    source, target = bench.engine("prefill", Fleet(page_tokens=8)), bench.engine("decode", Fleet(page_tokens=16))
    target.connect(source)
    pair, longer = Pair.request(bench, source, target, 64), Pair.request(bench, source, target, 80, seed=5)
    pair.before = target.snapshot()
    held = Content(59, b"a" * 16) if identity is IdentityCheck.CHECKED else UNKNOWN
    sent = offered(pair, held)
    (beyond,) = asked(longer, held)
    bench.ended([beyond])
    assert beyond.result is not None
    assert beyond.result.reason == f"the KV is of {held}, and tokens below 80 were asked for"
    bench.ended([*asked(pair, held, stop=64), *sent])
    pair.assert_landed()


def repeated(*contents: Content) -> Request:
    """A request that may grow, by its prefixes."""
    request = Request(Transfer("request", 0.0), [], None, 1.0, service=Service.REPEATED)
    request.name_contents(contents)
    return request


def test_of_many_prefixes_the_longest_are_remembered() -> None:
    request = repeated(*(Content(tokens, b"a" * 16) for tokens in range(MAX_CONTENTS + 3)))
    assert sorted(request.contents) == list(range(3, MAX_CONTENTS + 3))


def test_a_want_of_no_prompt_is_held_to_the_longest_prefix() -> None:
    want = wire.Want("request", 1, 0, 75, Route.PACKED, Replicas.STRIPE, 4096)
    assert repeated(A, LONGER).disagrees(want, IdentityCheck.TRUST, 0) is None
    assert repeated(A).disagrees(want, IdentityCheck.TRUST, 0) == (
        f"the KV is of {A}, and tokens below 75 were asked for"
    )


def test_a_request_waits_to_grow_to_a_prompt_unless_it_fails_or_has_ended() -> None:
    assert repeated(A).is_behind(LONGER)
    assert not repeated(A).is_behind(None)
    failing, ended = repeated(A), repeated(A)
    failing.reason = "the user left"
    ended.transfer.end(Result(None, 0.0))
    assert not failing.is_behind(LONGER)
    assert not ended.is_behind(LONGER)
