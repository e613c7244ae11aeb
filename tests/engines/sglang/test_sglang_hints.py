"""What an orchestrator says with SGLang's requests, on a tree, without SGLang: when it is done, and what counts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvmover.cache.hints import PinLimits
from kvmover.cache.prefix import FULL, PrefixTree
from kvmover.cache.tiers import LocalConsensus
from kvmover.cache.tiers.agreement import VoteRow
from kvmover.config.settings import HintSettings
from kvmover.engines.common import ParallelRank
from kvmover.engines.sglang.radix_hints import HintTerms, RadixHints
from kvmover.engines.sglang.radix_keys import RadixKeys


class Told:
    """In place of the ledger."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def hinted(self, kind: str, outcome: str, params: object) -> None:
        self.counts[kind, outcome] += 1


class Slow:
    """Another rank, whose pins are not over yet."""

    def minimum(self, values: VoteRow) -> VoteRow:
        return np.zeros_like(values)


class Place:
    def __init__(self, terms: HintTerms | None = None) -> None:
        self.tree, self.told, self.now_s, self.next = PrefixTree(4), Told(), 100.0, 0
        keys = RadixKeys(self.tree, None)
        made = terms or HintTerms()
        self.hints = RadixHints(self.tree, keys, {FULL: 64}, made, self.told, lambda: self.now_s)  # type: ignore[arg-type]

    def keep(self, tokens: list[int]) -> None:
        pages = len(tokens) // 4
        self.tree.insert(tokens, range(self.next, self.next + pages))  # type: ignore[arg-type]
        self.next += pages

    def cached(self, tokens: list[int]) -> int:
        return self.tree.look(tokens).tokens


def request(name: str, prompt: list[int], *actions: tuple[str, dict[str, Any]], **more: Any) -> Any:
    said = [
        {"action_id": f"{name} {number}", "action_type": kind, "action_version": "1.0", "payload": payload}
        for number, (kind, payload) in enumerate(actions)
    ]
    envelope = {"protocol_version": "0.1", "message_id": name, "actions": said} if said else None
    params = {"max_new_tokens": 4, "custom_params": None, **more}
    return SimpleNamespace(
        rid=name,
        origin_input_ids=prompt,
        full_untruncated_fill_ids=prompt,
        extra_key=None,
        cache_salt=None,
        kv_hints=envelope,
        sampling_params=SimpleNamespace(**params),
    )


PROMPT = list(range(12))


def test_a_pin_of_a_requests_own_prefix_waits_for_its_end_and_has_its_answer() -> None:
    place = Place()
    req = request("r", PROMPT, ("kv.pin", {"ttl_seconds": 30}))
    for _ in range(3):  # a request that waits is looked up at every step
        place.hints.came(req)
    assert len(place.hints.pins) == 0
    req.full_untruncated_fill_ids = [*PROMPT, 90, 91, 92, 93]
    place.keep(req.full_untruncated_fill_ids)
    place.hints.answered(req)
    assert (len(place.hints.pins), place.hints.pins.pages) == (1, 4)
    assert place.told.counts == {("pin", "met"): 1}


def test_what_names_another_prefix_is_done_when_its_request_comes() -> None:
    place = Place()
    place.keep(PROMPT)
    place.hints.came(request("r", [50, 51], ("kv.pin", {"ttl_seconds": 30, "token_ids": PROMPT})))
    assert place.hints.pins.pages == 3


def test_time_passes_when_a_request_comes_and_on_all_ranks() -> None:
    for terms, left in ((HintTerms(), 0), (HintTerms(PinLimits(), Slow()), 1)):
        place = Place(terms)
        place.keep(PROMPT)
        place.hints.came(request("r", [50], ("kv.pin", {"ttl_seconds": 30, "token_ids": PROMPT})))
        place.now_s += 29
        place.hints.came(request("second", [51]))
        assert len(place.hints.pins) == 1
        place.now_s += 1
        place.hints.came(request("third", [52]))
        assert len(place.hints.pins) == left


def test_a_request_that_could_not_run_beside_the_pins_ends_them() -> None:
    place = Place()
    place.keep(PROMPT)
    place.hints.came(request("r", [50], ("kv.pin", {"ttl_seconds": 30, "token_ids": PROMPT})))
    place.hints.came(request("fits", [51], max_new_tokens=60 * 4 - 1))
    assert len(place.hints.pins) == 1
    place.hints.came(request("large", [51], max_new_tokens=61 * 4 - 1))
    assert len(place.hints.pins) == 0


def test_nothing_is_pinned_that_a_request_which_runs_could_not_end_beside() -> None:
    place = Place()
    place.keep(PROMPT)
    running = request("running", [51], max_new_tokens=62 * 4 - 2)
    place.hints.came(running)
    place.hints.came(request("r", [50], ("kv.pin", {"ttl_seconds": 30, "token_ids": PROMPT})))
    assert place.told.counts == {("pin", "busy"): 1}
    place.hints.answered(running)
    place.hints.came(request("s", [50], ("kv.pin", {"ttl_seconds": 30, "token_ids": PROMPT})))
    assert place.hints.pins.pages == 3


def test_a_request_that_is_aborted_pins_nothing_and_its_hints_are_counted() -> None:
    place = Place()
    place.keep(PROMPT)
    place.hints.came(request("r", PROMPT, ("kv.pin", {"ttl_seconds": 30}), ("kv.lease", {})))
    place.hints.aborted("r")
    place.hints.aborted("nobody")
    assert len(place.hints.pins) == 0
    assert place.told.counts == {("pin", "aborted"): 1, ("other", "unknown"): 1}


def test_custom_params_carry_the_same_envelope_and_nonsense_is_counted() -> None:
    place = Place()
    place.keep(PROMPT)
    inside = request("r", PROMPT, ("kv.pin", {"ttl_seconds": 30}))
    for number, said in enumerate((inside.kv_hints, 7, {"actions": []})):
        req = request(f"r{number}", PROMPT, custom_params={"kvmover_hints": said})
        place.hints.came(req)
        place.hints.answered(req)
    assert place.hints.pins.pages == 3
    assert place.told.counts == {("pin", "met"): 1, ("envelope", "malformed"): 2}


def test_stages_that_run_apart_pin_nothing() -> None:
    settings = HintSettings(pin_share=0.5, longest_pin_s=60.0)
    assert HintTerms.of(settings, ParallelRank(0, 1, 0, 2), None).consensus is None
    terms = HintTerms.of(settings, ParallelRank(0, 1), None)
    assert isinstance(terms.consensus, LocalConsensus)
    assert terms.limits == PinLimits(0.5, 60.0)
    place = Place(HintTerms(terms.limits, None))
    place.keep(PROMPT)
    place.hints.came(request("r", [50], ("kv.pin", {"ttl_seconds": 30, "token_ids": PROMPT})))
    assert place.told.counts == {("pin", "share_taken"): 1}
    assert place.cached(PROMPT) == 12
