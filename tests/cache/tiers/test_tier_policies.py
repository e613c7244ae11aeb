"""What is written, what is read and how long a request waits for it."""

from __future__ import annotations

import pytest
from rig import Rank

from kvmover.cache.ledger import Ledger, Loss
from kvmover.cache.prefix import PrefixError, restorable
from kvmover.cache.tiers import (
    BestEffort,
    ControllerConfig,
    CostAware,
    Rule,
    Speed,
    Store,
    TierError,
    TierPolicy,
    Timeout,
    Wait,
    worth,
)
from kvmover.cache.tiers.agreement import CollectiveOps
from kvmover.cache.tiers.tier_policy import ThroughputEstimator, patience_s, pays

PROMPT = list(range(33))
LINK = Speed(0.0, 20e9)
TOKEN_BYTES = 81920


@pytest.mark.parametrize(("rate", "tokens", "gains"), [(2e9, 4096, True), (0.5e9, 4096, False), (2e9, 16, False)])
def test_a_read_pays_if_it_is_faster_than_the_prefill_that_it_spares(rate, tokens, gains):
    way = (Speed(0.002, rate), LINK)
    assert (worth(tokens, TOKEN_BYTES, 8000, *way) > 0) == gains
    assert pays(CostAware(8000), tokens, TOKEN_BYTES, way) == gains
    assert pays(Wait(), tokens, TOKEN_BYTES, way)


def test_a_read_is_begun_where_nothing_was_measured():
    assert pays(CostAware(1e9), 16, TOKEN_BYTES, ())


def test_patience_is_what_the_policy_says():
    waits = [patience_s(policy, 2048) for policy in (BestEffort(), Wait(), Timeout(1.0, 0.25), CostAware(8192.0))]
    assert waits == [None, None, 1.5, 0.25]


def test_batches_of_one_size_have_a_rate_and_no_latency():
    pace = ThroughputEstimator()
    for _ in range(5):
        pace.add(1 << 20, 0.001)
    speed = pace.speed()
    assert speed is not None
    assert (speed.latency_s, round(speed.bytes_per_s)) == (0.0, (1 << 20) * 1000)


@pytest.mark.parametrize("seed", range(20))
def test_a_prefix_is_restorable_if_every_component_has_all_that_it_needs(seed):
    import random

    draw = random.Random(seed)
    pages, first = draw.randint(0, 9), draw.randint(0, 3)
    rules = {"full": Rule(), "swa": Rule(draw.randint(1, 40)), "state": Rule(1)}
    present = {name: [draw.random() < 0.8 for _ in range(pages)] for name in rules}
    legal = restorable(rules, present, 16, first)
    for count in range(pages + 1):
        expected = all(
            present[name][page] or (name == "full" and page < first)
            for name, rule in rules.items()
            for page in rule.needs(count, 16)
        )
        assert legal[count] == expected, (count, rules, present)


def serve_stored(tmp_path, policy, clock=lambda: 0.0):
    rank = Rank(tmp_path, setup=ControllerConfig(policy, clock=clock))
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.forget()
    return rank


def test_fewer_tokens_than_the_threshold_are_not_looked_for(tmp_path):
    rank = serve_stored(tmp_path, TierPolicy(prefetch=Wait(), least_tokens=64))
    looked = rank.controller.meter.counts["looked_up_pages"]
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.lost) == (0, {})
    assert rank.controller.meter.counts["looked_up_pages"] == looked
    rank.close()


def test_a_read_that_does_not_pay_is_not_begun_and_the_ledger_says_why(tmp_path):
    rank = serve_stored(tmp_path, TierPolicy(prefetch=CostAware(1e12), least_tokens=1))
    storage = rank.controller._restores.parts.storage
    assert storage is not None
    storage.reads.add(1 << 20, 1.0)
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.lost) == (0, {Loss.THRESHOLD: 32})
    ledger = Ledger()
    ledger.matched("r", len(PROMPT), restore.reusable_tokens, 0.0)
    ledger.admitted("r", restore.credit, restore.lost)
    rank.close()


@pytest.mark.parametrize("policy", [Timeout(0.5, 0.0), BestEffort()])
def test_a_read_ends_when_its_time_is_over_and_what_was_not_read_is_late(tmp_path, policy, monkeypatch):
    from kvmover.cache.tiers import tier_storage

    monkeypatch.setattr(tier_storage, "BATCH_PAGES", 2)
    now = [0.0]
    rank = serve_stored(tmp_path, TierPolicy(prefetch=policy, least_tokens=1, least_load_tokens=1), lambda: now[0])
    begin, held = rank.controller.worker.begin, []
    rank.controller.worker.begin = lambda job, urgency, ended: held.append((job, ended))
    restore = rank.controller.restore(PROMPT)
    (look, looked) = held.pop()
    look.step()
    looked(None)
    rank.controller.poll()
    (read, ended) = held.pop()
    assert not read.step(), "two of eight pages"
    now[0] = 1.0
    rank.controller.want(restore)
    rank.controller.poll()
    assert read.step()
    ended(None)
    rank.controller.worker.begin = begin
    rank.controller.wait(restore)
    rank.look_at(PROMPT, restore)
    assert restore.tokens == 8
    assert restore.lost == {Loss.LATE: 24}
    rank.controller.release(restore)
    rank.controller.wait()
    rank.conserved()
    rank.close()


@pytest.mark.parametrize(("nbytes", "pages"), [(1 << 30, 256), (80 << 10, 10), (1, 4)])
def test_a_batch_is_what_a_disk_moves_in_some_milliseconds(tmp_path, monkeypatch, nbytes, pages):
    from kvmover.cache.tiers import tier_storage

    monkeypatch.setattr(tier_storage, "_BATCH_BYTES", nbytes)
    rank = Rank(tmp_path)
    assert rank.tiered_pools[0].part.nbytes == 8 << 10
    made = rank.controller._restores.parts.storage
    assert made is not None
    assert made.batch_pages == pages
    rank.close()


def test_storage_gets_nothing_where_it_is_not_to(tmp_path):
    rank = serve_stored(tmp_path, TierPolicy(Store.NEVER, Wait(), 1))
    assert rank.controller.meter.counts["stored_pages"] == 0
    assert rank.serve(PROMPT).tokens == 0
    rank.close()


def test_storage_gets_what_proved_useful_on_the_host(tmp_path):
    rank = Rank(tmp_path, setup=ControllerConfig(TierPolicy(Store.REUSED, Wait(), 1, 1)))
    rank.serve(PROMPT)
    rank.controller.wait()
    assert rank.controller.meter.counts["stored_pages"] == 0
    rank.evict(100)
    rank.serve(PROMPT)
    rank.controller.wait()
    assert rank.controller.meter.counts["stored_pages"] == 8
    rank.close()


def test_pages_beyond_what_may_wait_to_be_written_are_dropped_and_counted(tmp_path):
    rank = Rank(tmp_path, setup=ControllerConfig(TierPolicy(prefetch=Wait(), writing_pages=7)))
    rank.serve(PROMPT)
    rank.controller.wait()
    assert rank.controller.meter.dropped["store", "too many pages wait to be written"] == 8
    rank.conserved()
    rank.close()


def test_an_aborted_read_lets_go_of_everything(tmp_path):
    rank = serve_stored(tmp_path, TierPolicy(prefetch=Wait(), least_tokens=1))
    for polls in range(6):
        restore = rank.controller.restore(PROMPT)
        for _ in range(polls):
            rank.controller.poll()
            rank.controller.worker.wait(0.002)
        if restore.done:
            rank.controller.release(restore)
        rank.controller.abort(restore)
        rank.controller.wait()
        rank.conserved()
        rank.forget()
    rank.close()


def test_layers_can_be_used_before_the_last_has_landed(tmp_path):
    rank = Rank(tmp_path, setup=ControllerConfig(TierPolicy(least_load_tokens=1), group_layers=1))
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.evict(100)
    restore = rank.controller.restore(PROMPT)
    assert restore.gate is not None
    assert not restore.gate.open(0)
    restore.gate.wait(1)
    assert [restore.gate.open(layer) for layer in range(4)] == [True, True, False, False]
    rank.controller.wait(restore)
    rank.look_at(PROMPT, restore)
    rank.controller.release(restore)
    rank.close()


def test_storage_is_announced(tmp_path):
    heard = []
    rank = Rank(tmp_path, sink=heard.append)
    rank.serve(PROMPT)
    rank.controller.wait()
    (stored,) = heard
    assert (stored.medium, len(stored.block_hashes), stored.parent_block_hash) == ("DISK", 8, None)
    rank.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Timeout(-1.0), "timeout of -1"),
        (lambda: CostAware(0), "prefill of 0"),
        (lambda: TierPolicy(reading_share=1.5), "reading_share=1.5"),
    ],
)
def test_policies_that_make_no_sense_are_refused(make, says):
    with pytest.raises(TierError, match=says):
        make()


def test_an_answer_waits_for_all_ranks():
    import numpy as np

    ranks = [CollectiveOps(), CollectiveOps()]
    collectives = [collectives.begin(lambda agreed: None, 2) for collectives in ranks]
    collectives[0].done(5, 7)
    collectives[1].stop = True
    for number in range(2):
        agreed = np.min([each.votes() for each in ranks], axis=0)
        over = [each.settle(agreed) for each in ranks]
        if not number:
            assert over == [[], []]
            assert all(collective.stopping for collective in collectives)
            collectives[1].done(6, 2)
    assert [answer.tolist() for row in over for _, answer in row] == [[5, 2]] * 2


def test_a_component_that_reaches_nothing_is_refused():
    with pytest.raises(PrefixError, match="reaches 0 tokens"):
        Rule(0)
