"""Whatever happens to requests, in any order, the ledger's sums are those of a naive recount of all events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmover.cache.ledger import AccountGroup, Credit, Ledger, LedgerError, Loss, Prediction, Predictor, Totals

GROUPS = [AccountGroup(), AccountGroup("a"), AccountGroup("a", "m"), AccountGroup("b", "m")]
REASONS = list(Loss)


class LedgerModel(RuleBasedStateMachine):
    """Keeps for each request what it is owed, by itself, and adds it up only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(window_s=10.0, keep_windows=3)
        self.now = 0.0
        self.serial = 0
        self.matched: dict[int, tuple[int, int]] = {}
        self.running: dict[int, Counter[str]] = {}
        self.predicted: dict[int, Prediction] = {}
        self.groups: dict[int, AccountGroup] = {}
        self.attempts: Counter[int] = Counter()
        self.over: list[tuple[AccountGroup, int, Counter[str]]] = []

    @rule(prompt=st.integers(0, 500), share=st.floats(0, 1), group=st.sampled_from(GROUPS))
    def a_new_request_is_matched(self, prompt: int, share: float, group: AccountGroup) -> None:
        self.serial += 1
        self.groups[self.serial] = group
        self._match(self.serial, prompt, int(prompt * share))

    @precondition(lambda self: self.matched)
    @rule(data=st.data(), prompt=st.integers(0, 500), share=st.floats(0, 1))
    def it_is_matched_again(self, data: st.DataObject, prompt: int, share: float) -> None:
        self._match(data.draw(st.sampled_from(sorted(self.matched))), prompt, int(prompt * share))

    def _match(self, request: int, prompt: int, reusable: int) -> None:
        self.ledger.matched(request, prompt, reusable, self.now, self.groups[request])
        self.matched[request] = (prompt, reusable)

    @precondition(lambda self: self.matched)
    @rule(data=st.data(), share=st.floats(0, 1), by=st.sampled_from(Predictor))
    def one_is_predicted(self, data: st.DataObject, share: float, by: Predictor) -> None:
        request = data.draw(st.sampled_from(sorted(self.matched)))
        prediction = Prediction(int(self.matched[request][0] * share), by)
        if self.attempts[request] or request in self.predicted:
            with pytest.raises(LedgerError):
                self.ledger.predicted(request, prediction)
        else:
            self.ledger.predicted(request, prediction)
            self.predicted[request] = prediction

    @precondition(lambda self: self.matched)
    @rule(data=st.data())
    def one_is_admitted(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.matched)))
        prompt, reusable = self.matched.pop(request)
        parts = _parts(data, reusable, 6)
        reasons = data.draw(st.lists(st.sampled_from(REASONS), min_size=3, max_size=3, unique=True))
        lost = dict(zip(reasons, parts[3:], strict=True))
        self.ledger.admitted(request, Credit(*parts[:3]), lost)
        self.attempts[request] += 1
        self.running[request] = Counter(
            {"prompt": prompt, "reusable": reusable, "device": parts[0], "host": parts[1], "storage": parts[2]}
        )
        self.running[request].update({str(reason): tokens for reason, tokens in lost.items()})

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_chunk_is_computed(self, data: st.DataObject) -> None:
        request, account = self._running(data)
        tokens = data.draw(st.integers(0, _rest(account)))
        self.ledger.computed(request, tokens)
        account["computed"] += tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=st.sampled_from(REASONS), tier=st.sampled_from(["device", "host", "storage"]))
    def a_load_fails(self, data: st.DataObject, reason: Loss, tier: str) -> None:
        request, account = self._running(data)
        tokens = data.draw(st.integers(0, account[tier]))
        self.ledger.withdrawn(request, Credit(**{f"{tier}_tokens": tokens}), reason)
        account[tier] -= tokens
        account[str(reason)] += tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def one_finishes(self, data: st.DataObject) -> None:
        request, account = self._running(data)
        rest = _rest(account)
        self.ledger.computed(request, rest)
        account["computed"] += rest
        concurrent = data.draw(st.integers(0, account["prompt"] - account["reusable"]))
        account["reusable"] += concurrent
        account[str(Loss.CONCURRENT)] += concurrent
        self.ledger.finished(request, self.now, concurrent)
        self._close(request, "finished")

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def one_is_retracted(self, data: st.DataObject) -> None:
        request, _ = self._running(data)
        self.ledger.retracted(request, self.now)
        self._close(request, "retracted")
        self._match(request, 7, 3)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def one_is_aborted(self, data: st.DataObject) -> None:
        request, _ = self._running(data)
        self.ledger.aborted(request, self.now)
        self._close(request, "aborted")

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def _running(self, data: st.DataObject) -> tuple[int, Counter[str]]:
        request = data.draw(st.sampled_from(sorted(self.running)))
        return request, self.running[request]

    def _close(self, request: int, end: str) -> None:
        account = self.running.pop(request)
        account["abandoned"] = _rest(account)
        account[end] = account["attempts"] = 1
        prediction = self.predicted.get(request)
        if prediction and self.attempts[request] == 1:
            delivered = account["device"] + account["host"] + account["storage"]
            account[f"{prediction.by} requests"] = 1
            account[f"{prediction.by} predicted"] = prediction.tokens
            account[f"{prediction.by} delivered"] = delivered
            account[f"{prediction.by} foreseen"] = min(delivered, prediction.tokens)
        self.over.append((self.groups[request], self.attempts[request], account))

    @invariant()
    def sums_are_those_of_a_recount(self) -> None:
        for group in (None, *GROUPS):
            book = self.ledger.total(group)
            chosen = [(attempt, account) for name, attempt, account in self.over if group in (None, name)]
            assert _seen(book.first) == sum((account for attempt, account in chosen if attempt == 1), Counter())
            assert _seen(book.again) == sum((account for attempt, account in chosen if attempt > 1), Counter())

    @invariant()
    def both_laws_hold(self) -> None:
        windows = [book for window in self.ledger.windows() for book in window.books.values()]
        for book in (self.ledger.total(), *windows):
            for total in (book.first, book.again):
                assert total.reusable_tokens == total.credited_tokens + sum(total.lost.values())
                assert total.prompt_tokens == total.credited_tokens + total.computed_tokens + total.abandoned_tokens
                assert total.attempts == total.finished + total.retracted + total.aborted

    @invariant()
    def no_more_is_open_than_was_opened(self) -> None:
        assert len(self.ledger) == len(self.matched) + len(self.running)


def _rest(account: Counter[str]) -> int:
    return account["prompt"] - account["device"] - account["host"] - account["storage"] - account["computed"]


def _parts(data: st.DataObject, whole: int, count: int) -> list[int]:
    cuts = sorted(data.draw(st.lists(st.integers(0, whole), min_size=count - 1, max_size=count - 1)))
    return [high - low for low, high in zip([0, *cuts], [*cuts, whole], strict=True)]


def _seen(totals: Totals) -> Counter[str]:
    counted = [name for name in Totals.__dataclass_fields__ if name not in ("lost", "predictions")]
    sums = {name.removesuffix("_tokens"): getattr(totals, name) for name in counted}
    for by, each in totals.predictions.items():
        sums[f"{by} requests"] = each.requests
        sums[f"{by} predicted"] = each.foreseen_tokens + each.missed_tokens
        sums[f"{by} delivered"] = each.foreseen_tokens + each.unforeseen_tokens
        sums[f"{by} foreseen"] = each.foreseen_tokens
    return +Counter({**sums, **{str(reason): tokens for reason, tokens in totals.lost.items()}})


LedgerModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestLedgerModel = LedgerModel.TestCase
