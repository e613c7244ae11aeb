"""Hints on a tree: what is pinned stays, in its share and for its time; what cannot be met changes nothing."""

from __future__ import annotations

import pytest

from kvmover.cache.hints import (
    DemoteHint,
    Hint,
    HintAction,
    HintAnswer,
    HintDesk,
    HintError,
    HintMet,
    HintRefusal,
    HintRefused,
    PinHint,
    PinLimits,
    Pins,
    PrefetchHint,
    Prefix,
    RetainHint,
    ShareHint,
)
from kvmover.cache.prefix import FULL, LRU, PRIORITY, EvictionPolicy, PrefixTree, RadixKey, SlidingWindow, State


class Tiers:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self, stores: bool = True, willing: bool = True) -> None:
        self.stores, self.willing = stores, willing
        self.asked: list[tuple[str, object]] = []

    def publish(self, node: int) -> bool:
        return self._said("publish", node)

    def demote(self, node: int) -> bool:
        return self._said("demote", node)

    def bring(self, key: RadixKey) -> bool:
        return self._said("bring", key.tokens)

    def _said(self, verb: str, of: object) -> bool:
        self.asked.append((verb, of))
        return self.willing


class Place:
    """A tree of pages of 2 tokens and 16 pages of each component, and a desk over it."""

    def __init__(self, policy: EvictionPolicy = LRU, tiers: Tiers | None = None, **limits: float) -> None:
        self.tree, self.tiers, self.next = PrefixTree(2, policy=policy), tiers, 0
        self.pins = Pins(self.tree, {FULL: 16}, PinLimits(**limits))
        self.desk = HintDesk(self.tree, self.pins, tiers)

    def keep(self, tokens: list[int], **more: int) -> int:
        pages = len(tokens) // 2
        self.next += pages
        return self.tree.insert(tokens, list(range(self.next - pages, self.next)), **more).node

    def ask(self, hint: Hint, tokens: list[int], name: str = "session", now_s: float = 0.0) -> HintAnswer:
        answer = self.desk.carry_out(HintAction(name, hint), self.tree.key(tokens), now_s)
        self.pins.check()
        self.tree.check()
        return answer

    def cached(self, tokens: list[int]) -> int:
        return self.tree.look(tokens).tokens


def why(answer: HintAnswer) -> HintRefusal:
    assert isinstance(answer, HintRefused), answer
    return answer.why


SESSION, OTHER = [1, 2, 3, 4, 5], [6, 7, 8, 9]


def test_a_pinned_prefix_outlives_a_crowd_until_its_time_is_over() -> None:
    place = Place()
    place.keep(SESSION)
    assert place.ask(PinHint(30.0), SESSION, now_s=100.0) == HintMet(4)
    place.keep(OTHER)
    place.tree.evict(100)
    assert (place.cached(SESSION), place.cached(OTHER), place.pins.pages) == (4, 0, 2)
    assert place.pins.end(place.pins.over(129.9)) == ()
    assert place.pins.end(place.pins.over(130.0)) == ("session",)
    place.tree.evict(100)
    assert (place.cached(SESSION), place.pins.pages) == (0, 0)


def test_a_pin_of_the_same_name_takes_the_place_of_the_one_before() -> None:
    place = Place()
    place.keep(SESSION)
    place.keep(OTHER)
    place.ask(PinHint(30.0), SESSION)
    place.ask(PinHint(30.0), OTHER)
    place.tree.evict(100)
    assert (len(place.pins), place.cached(SESSION), place.cached(OTHER)) == (1, 0, 4)


def test_no_time_ends_a_pin() -> None:
    place = Place()
    place.keep(SESSION)
    place.ask(PinHint(30.0), SESSION)
    assert place.ask(PinHint(0.0), SESSION) == HintMet(4)
    assert why(place.ask(PinHint(0.0), SESSION)) is HintRefusal.ABSENT
    place.tree.evict(100)
    assert place.cached(SESSION) == 0


def test_pins_have_a_share_of_the_pool_and_shared_prefixes_count_once() -> None:
    place = Place(share=0.25)
    common = [1, 2, 3, 4]
    for turn in range(10, 14):
        place.keep([*common, turn, turn])
    assert place.ask(PinHint(9.0), [*common, 10, 10], "first") == HintMet(6)
    assert place.ask(PinHint(9.0), [*common, 11, 11], "second") == HintMet(6)
    third = place.ask(PinHint(9.0), [*common, 12, 12], "third")
    assert third == HintRefused(
        HintRefusal.SHARE_TAKEN, "third: 5 pages of full with the other pins; they may have 4 of 16"
    )
    assert place.pins.pages == 4
    # A pin that is refused leaves the older one of its name.
    place.keep([*range(20, 28)])
    assert why(place.ask(PinHint(9.0), [*range(20, 28)], "second")) is HintRefusal.SHARE_TAKEN
    place.tree.evict(100)
    assert place.cached([*common, 11, 11]) == 6
    assert place.ask(PinHint(9.0), common, "second") == HintMet(4)


def test_a_flood_of_pins_is_refused_and_leaves_the_rest_of_the_pool_to_others() -> None:
    place = Place(share=0.5, most=3)
    for number in range(8):
        place.keep([number + 10] * 2)
    answers = [place.ask(PinHint(600.0), [number + 10] * 2, f"pin {number}") for number in range(8)]
    assert [isinstance(answer, HintMet) for answer in answers] == [True] * 3 + [False] * 5
    assert place.tree.sizes().protected == 3
    assert len(place.tree.evict(100).page_ids()) == 5


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_share_of_less_than_a_page_pins_nothing(share: float) -> None:
    place = Place(share=share)
    place.keep(SESSION)
    assert why(place.ask(PinHint(9.0), SESSION)) is HintRefusal.SHARE_TAKEN
    assert place.tree.sizes().protected == 0


def test_a_pin_for_longer_than_may_be_and_one_of_nothing_are_refused() -> None:
    place = Place(longest_s=60.0)
    place.keep(SESSION)
    assert why(place.ask(PinHint(60.1), SESSION)) is HintRefusal.TOO_LONG
    assert why(place.ask(PinHint(9.0), [99, 99])) is HintRefusal.ABSENT
    assert len(place.pins) == 0


def test_pins_give_way_to_a_request_that_could_not_run_beside_them_oldest_first() -> None:
    place = Place(share=0.5)
    for number in range(3):
        place.keep([number + 10] * 4)
        place.ask(PinHint(600.0), [number + 10] * 4, f"pin {number}")
    assert place.pins.give_way(10) == ()
    assert place.pins.give_way(11) == ("pin 0",)
    # What is larger than the pool is cut to it by the engine.
    assert place.pins.give_way(17) == ("pin 1", "pin 2")
    place.pins.check()


def test_nothing_is_pinned_that_a_request_which_has_come_could_not_run_beside() -> None:
    place = Place(share=0.5)
    place.keep([1] * 8)
    prefix = Prefix(place.tree.look([1] * 8).device_node, 8)
    assert why(place.pins.pin("late", prefix, 9.0, 0.0, largest=13)) is HintRefusal.BUSY
    assert place.pins.pin("late", prefix, 9.0, 0.0, largest=12) == HintMet(8)
    place.pins.check()


def test_each_component_has_its_share() -> None:
    tree = PrefixTree(1, components=(SlidingWindow(4), State()))
    pins = Pins(tree, {FULL: 100, "swa": 16, "state": 4}, PinLimits(share=0.5))
    desk = HintDesk(tree, pins)
    for number in range(3):
        first = number * 4
        tokens = [number + 10] * 4
        tree.insert(tokens, [*range(first, first + 4)], held={"swa": [*range(first, first + 4)], "state": [number]})
        answer = desk.carry_out(HintAction(f"pin {number}", PinHint(9.0)), tree.key(tokens), 0.0)
        pins.check()
        assert isinstance(answer, HintMet) == (number < 2), answer
    assert (tree.sizes("swa").protected, tree.sizes("state").protected) == (8, 2)


def test_a_tree_can_be_reset_once_its_pins_are_forgotten() -> None:
    place = Place()
    place.keep(SESSION)
    place.ask(PinHint(9.0), SESSION)
    place.pins.forget()
    assert len(place.tree.reset().page_ids()) == 2
    place.pins.check()


def test_ranks_that_answer_for_other_pins_are_found_out() -> None:
    place = Place()
    with pytest.raises(HintError, match="2 answers for 0 pins"):
        place.pins.end([1, 1])


@pytest.mark.parametrize("limits", [{"share": 1.5}, {"share": -0.1}, {"longest_s": -1.0}, {"most": -1}])
def test_limits_that_cannot_be_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(HintError):
        PinLimits(**limits)


def test_what_is_retained_goes_after_what_is_not() -> None:
    place = Place(PRIORITY)
    place.keep(SESSION)
    place.keep(OTHER)
    assert place.ask(RetainHint(5), SESSION) == HintMet(4)
    place.tree.match(OTHER)
    place.tree.evict(2)
    assert (place.cached(SESSION), place.cached(OTHER)) == (4, 0)
    assert why(place.ask(RetainHint(5), OTHER)) is HintRefusal.ABSENT


def test_a_part_of_a_node_is_retained_alone() -> None:
    place = Place(PRIORITY)
    place.keep([1, 2, 3, 4, 5, 6])
    assert place.ask(RetainHint(5), [1, 2, 3, 4]) == HintMet(4)
    place.keep(OTHER, priority=1)
    place.tree.evict(3)
    assert (place.cached([1, 2, 3, 4, 5, 6]), place.cached(OTHER)) == (4, 0)


def test_a_policy_without_priorities_retains_nothing() -> None:
    place = Place(LRU)
    place.keep(SESSION)
    answer = place.ask(RetainHint(5), SESSION)
    assert answer == HintRefused(HintRefusal.NO_PRIORITIES, "session: pages go by lru here, which has no priorities")


@pytest.mark.parametrize(
    ("hint", "refusal"),
    [(DemoteHint(), HintRefusal.NO_HOST), (PrefetchHint(), HintRefusal.NO_HOST), (ShareHint(), HintRefusal.NO_STORE)],
)
def test_one_tier_moves_nothing(hint: Hint, refusal: HintRefusal) -> None:
    place = Place()
    place.keep(SESSION)
    assert why(place.ask(hint, SESSION)) is refusal


@pytest.mark.parametrize(
    ("hint", "verb", "refusal"),
    [
        (DemoteHint(), "demote", HintRefusal.IN_USE),
        (PrefetchHint(), "bring", HintRefusal.BUSY),
        (ShareHint(), "publish", HintRefusal.NO_STORE),
    ],
)
def test_tiers_are_asked_and_their_no_has_a_reason(hint: Hint, verb: str, refusal: HintRefusal) -> None:
    tiers = Tiers()
    place = Place(tiers=tiers)
    node = place.keep(SESSION)
    assert isinstance(place.ask(hint, SESSION), HintMet)
    assert tiers.asked == [(verb, 5 if verb == "bring" else node)]
    tiers.willing = False
    assert why(place.ask(hint, SESSION)) is refusal
    if verb != "bring":
        assert why(place.ask(hint, OTHER)) is HintRefusal.ABSENT


def test_tiers_without_storage_share_nothing() -> None:
    place = Place(tiers=Tiers(stores=False))
    place.keep(SESSION)
    assert why(place.ask(ShareHint(), SESSION)) is HintRefusal.NO_STORE
