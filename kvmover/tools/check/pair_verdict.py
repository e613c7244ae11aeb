"""`verdict` says of a PairSeen that the KV came, or which half, setting or port is at fault. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from kvmover.engines.common import EngineMake
from kvmover.observe.formats import bytes_in_words
from kvmover.tools.check.pair_seen import KVMOVER, Half, PairSeen, PromptAsked, ServerSeen, first_difference

#: Distance of the two best log probabilities below which other kernels may choose the other token. Logits in bfloat16
#: between 16 and 32 have steps of 0.125.
NEAR_TIE = 0.125


#: Beginnings of the sentences with which ranks turn a peer, or its KV, away.
_REFUSALS = (
    "peer holds ",
    "peer speaks protocol versions ",
    "the peer's card ",
    "card cannot be read",
    "the KV is of ",
)


class CheckOutcome(StrEnum):
    """The outcome of a check, as a word for scripts."""

    MOVED = "moved"
    SERVER_DOWN = "server_down"
    NO_ENGINE = "no_engine"
    NO_CONNECTOR = "no_connector"
    WRONG_ROLE = "wrong_role"
    OTHER_TOKENIZER = "other_tokenizer"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    REQUEST_FAILED = "request_failed"
    TRANSFER_FAILED = "transfer_failed"
    RECOMPUTED = "recomputed"
    OTHER_TOKENS = "other_tokens"
    METRICS_OFF = "metrics_off"

    @property
    def status(self) -> int:
        """Returns the exit status: 0 moved, 3 other tokens, 4 metrics off, 1 for the others."""
        return {CheckOutcome.MOVED: 0, CheckOutcome.OTHER_TOKENS: 3, CheckOutcome.METRICS_OFF: 4}.get(self, 1)


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The outcome in a sentence. `half` is at fault, None for none. `route` is "" where no endpoint tells it.

    `equal_tokens`: equal tokens of the answer from its beginning, of `compared_tokens` that were compared.
    """

    outcome: CheckOutcome
    sentence: str
    half: Half | None = None
    received_bytes: int = 0
    route: str = ""
    equal_tokens: int = 0
    compared_tokens: int = 0

    def as_data(self) -> dict[str, object]:
        """Returns the JSON of `kvmover check --json`."""
        return {**asdict(self), "status": self.outcome.status}


def verdict(seen: PairSeen) -> CheckVerdict:
    """Returns the first fault that explains what was seen, or the bytes, route and tokens of KV that came. Pure."""
    if (found := fault_of_servers(seen)) is not None:
        return found
    assert seen.asked is not None, "two servers without a fault were asked nothing"
    direct = _of_request(seen, seen.asked)
    if seen.routed is None or direct.outcome is not CheckOutcome.MOVED:
        return direct
    routed = _of_request(seen, seen.routed)
    if routed.outcome in (CheckOutcome.MOVED, CheckOutcome.OTHER_TOKENS):
        return routed
    told = seen.routed.second.error or "decode computed the prompt itself"
    return CheckVerdict(
        routed.outcome,
        f"asked directly the pair moves its KV, and through the router {told}: look at the router's"
        " --prefill and --decode, and whether it passes kv_transfer_params or bootstrap rooms on",
        Half.ROUTER,
    )


def fault_of_servers(seen: PairSeen) -> CheckVerdict | None:
    """Returns a fault that shows before anything is asked; None for two servers that look like a pair. Pure."""
    return next(_of_servers(seen), None)


def _of_servers(seen: PairSeen) -> Iterator[CheckVerdict]:
    halves = ((Half.PREFILL, seen.prefill), (Half.DECODE, seen.decode))
    for half, server in halves:
        if server.error:
            yield CheckVerdict(CheckOutcome.SERVER_DOWN, f"{half} does not answer: {server.error}", half)
        elif server.make is None:
            words = f"{server.url} answers, and is neither a vLLM nor an SGLang server; a router is the third URL"
            yield CheckVerdict(CheckOutcome.NO_ENGINE, words, half)
    for half, server in halves:
        yield from _of_settings(half, server)
    one, other = seen.prefill.prompt, seen.decode.prompt
    if one and other and one != other:
        at = first_difference(one, other)
        where = f"from token {at} on" if at is not None else "in their number"
        words = f"the tokenizers differ: {len(one)} and {len(other)} token ids of one prompt, unequal {where}"
        yield CheckVerdict(CheckOutcome.OTHER_TOKENIZER, f"{words}; serve one model with one tokenizer", Half.BOTH)


def _of_settings(half: Half, server: ServerSeen) -> Iterator[CheckVerdict]:
    """Yields a plug-in that is not chosen, or a role of the other half."""
    if server.make is EngineMake.SGLANG:
        if server.mode != half:
            was = f"with --disaggregation-mode {server.mode}" if server.mode else "without --disaggregation-mode"
            words = f"{half} {server.url} was started {was}; it needs --disaggregation-mode {half}"
            yield CheckVerdict(CheckOutcome.WRONG_ROLE, words, half)
        elif server.mover != KVMOVER:
            words = (
                f"{half} {server.url} moves KV by {server.mover}; it needs --disaggregation-transfer-backend kvmover"
            )
            yield CheckVerdict(CheckOutcome.NO_CONNECTOR, words, half)
    elif server.mover == "":
        words = f"{half} {server.url} has no connector of kvmover; it needs KvmoverConnector in --kv-transfer-config"
        yield CheckVerdict(CheckOutcome.NO_CONNECTOR, words, half)


def _of_request(seen: PairSeen, asked: PromptAsked) -> CheckVerdict:
    """Returns the verdict on one prompt between two servers that look right."""
    counted = asked.counted
    if counted.received_bytes and not counted.failures and not asked.second.error:
        return _of_tokens(asked)
    for found in (*_unoffered(seen, asked), *_refused(seen, asked), *_unreached(seen, asked)):
        return found
    if asked.second.error or asked.first.error:
        half, error = (Half.DECODE, asked.second.error) if asked.second.error else (Half.PREFILL, asked.first.error)
        return CheckVerdict(CheckOutcome.REQUEST_FAILED, f"{half} answered with an error: {error}", half)
    if counted.failures:
        ends = ", ".join(sorted(counted.ends)) or "the reason is in its log: `was not received`"
        words = f"decode met the prefill's ranks, and the KV did not come ({ends}); between hosts see UCX_NET_DEVICES"
        return CheckVerdict(CheckOutcome.TRANSFER_FAILED, f"{words} and UCX_TCP_PORT_RANGE", Half.BOTH)
    if not counted.is_known:
        came = (
            "decode answered, and SGLang's decode computes no prompt" if _is_sglang(seen.decode) else "decode answered"
        )
        errors = f" ({'; '.join(counted.errors)})" if counted.errors else ""
        words = f"{came}, but nothing counts the bytes{errors}: set KVMOVER_METRICS_PORT on the servers, and name its"
        return CheckVerdict(CheckOutcome.METRICS_OFF, f"{words} ports by --metrics HOST:PORT", Half.DECODE)
    words = "decode computed the prompt itself and asked nobody for its KV: its kv_role takes none (kv_producer)"
    return CheckVerdict(CheckOutcome.RECOMPUTED, words, Half.DECODE)


def _is_sglang(server: ServerSeen) -> bool:
    return server.make is EngineMake.SGLANG


def _unoffered(seen: PairSeen, asked: PromptAsked) -> Iterator[CheckVerdict]:
    """Yields a vLLM prefill that offers its KV to nobody, or by another connector."""
    if _is_sglang(seen.prefill) or asked.first.error:
        return
    if asked.first.params is None:
        unknown = "" if seen.prefill.mover else ", or it has no KvmoverConnector"
        words = (
            f"prefill computed the prompt and offers its KV to nobody: its kv_role gives none (kv_consumer){unknown}"
        )
        yield CheckVerdict(CheckOutcome.WRONG_ROLE, words, Half.PREFILL)
    elif "kvmover_content" not in asked.first.params:
        words = "prefill offers its KV by another connector; it needs KvmoverConnector in --kv-transfer-config"
        yield CheckVerdict(CheckOutcome.NO_CONNECTOR, words, Half.PREFILL)


def _refused(seen: PairSeen, asked: PromptAsked) -> Iterator[CheckVerdict]:
    """Yields a refusal: the sentence of the cards, else that of the answer, else the words of the counters."""
    counted = asked.counted
    if seen.unlike:
        yield CheckVerdict(CheckOutcome.REFUSED, f"the halves refuse each other: {seen.unlike}", Half.BOTH)
    if counted.mistaken:
        words = "decode refused the KV as that of another prompt: tokenizer, chat template, adapter or salt differ"
        yield CheckVerdict(CheckOutcome.REFUSED, words, Half.BOTH)
    error = asked.second.error or asked.first.error
    if counted.refused or any(begin in error for begin in _REFUSALS):
        why = f" ({', '.join(sorted(counted.refused))})" if counted.refused else ""
        told = error or "the sentence is in a log of theirs; if both have a shared key, compare the keys"
        yield CheckVerdict(CheckOutcome.REFUSED, f"the halves refuse each other{why}: {told}", Half.BOTH)


def _unreached(seen: PairSeen, asked: PromptAsked) -> Iterator[CheckVerdict]:
    """Yields ranks of the prefill that cannot be found, by decode alone or from here as well."""
    failed = bool(asked.second.error or asked.counted.failures)
    if failed and seen.ranks.error:
        words = (
            f"the prefill's ranks cannot be found at {seen.ranks.address}, from here as from decode: {seen.ranks.error}"
        )
        yield CheckVerdict(CheckOutcome.UNREACHABLE, words, Half.PREFILL)
    elif failed and asked.counted.never_met:
        words = f"decode does not reach the prefill's ranks at {seen.ranks.address}, which this machine does"
        yield CheckVerdict(CheckOutcome.UNREACHABLE, f"{words}: look at firewalls and exchange.allow", Half.DECODE)


def _of_tokens(asked: PromptAsked) -> CheckVerdict:
    """Returns the verdict on KV that came, by the tokens that were answered from it."""
    counted, alone = asked.counted, asked.alone
    came = f"KV came over kvmover, {bytes_in_words(counted.received_bytes)}, "
    came += f"route {counted.route}" if counted.route else "by a route that --metrics of the prefill tells"
    found = CheckVerdict(CheckOutcome.MOVED, came, None, counted.received_bytes, counted.route)
    if alone is None or not alone.tokens:
        told = f": {alone.error}" if alone and alone.error else ""
        return replace(found, sentence=f"{came}; tokens were not compared, for no server answered alone{told}")
    compared = min(len(alone.tokens), len(asked.second.tokens))
    at = first_difference(alone.tokens[:compared], asked.second.tokens[:compared])
    if at is None:
        words = f"{came}, tokens equal: {compared} of {compared} are those of {asked.by}"
        return replace(found, sentence=words, equal_tokens=compared, compared_tokens=compared)
    lead = alone.leads[at] if at < len(alone.leads) else None
    is_tie = lead is not None and lead < NEAR_TIE
    words = f"{came}; token {at + 1} of {compared} is not that of {asked.by}"
    words += f", whose two best were {lead:.3f} apart: a near tie" if is_tie else ""
    outcome, half = (CheckOutcome.MOVED, None) if is_tie else (CheckOutcome.OTHER_TOKENS, Half.BOTH)
    told = replace(found, outcome=outcome, half=half, equal_tokens=at, compared_tokens=compared)
    return replace(told, sentence=words)
